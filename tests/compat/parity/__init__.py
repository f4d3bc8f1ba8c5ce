"""The same calls on torchrl's classes and on ours, with the same results."""
