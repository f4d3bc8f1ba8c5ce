"""Connections over sockets that a thread reads and writes beside the caller's event loop."""
