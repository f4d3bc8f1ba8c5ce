"""The worker's side of a scheme."""
