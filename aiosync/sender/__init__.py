"""The trainer's side of a scheme."""
