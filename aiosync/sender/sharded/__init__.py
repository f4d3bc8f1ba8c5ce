"""Weights that are spread over the ranks of a trainer: the leading rank gathers them."""
