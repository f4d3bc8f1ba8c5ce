"""Adapters to programs that serve a policy."""
