"""Weights as named tensors: extract them, apply them, and lay them out in one buffer."""
