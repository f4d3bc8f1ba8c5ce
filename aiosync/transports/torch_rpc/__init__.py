"""Connections that are found, and weights that are moved, through torch RPC."""
