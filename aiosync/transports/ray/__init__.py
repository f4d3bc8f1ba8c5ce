"""Connections that are found, and weights that are moved, through Ray."""
