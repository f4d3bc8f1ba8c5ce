"""The twins inside torchrl."""
