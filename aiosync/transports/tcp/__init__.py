"""Sockets that a thread moves beside the caller's event loop."""
