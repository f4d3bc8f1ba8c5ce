"""The protocol, sans I/O: bytes in, events out; calls in, bytes out. No sockets, no asyncio, no clock."""
