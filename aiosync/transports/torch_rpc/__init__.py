"""Connections found through torch RPC, and calls of remote objects."""
