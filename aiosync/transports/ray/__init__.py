"""Connections found through Ray, and weights in Ray's object store."""
