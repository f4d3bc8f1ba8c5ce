"""Schemes: what users hold. A recipe each, and the live sender and receiver that it makes."""
