"""Relays: a receiver upstream, a sender downstream."""
