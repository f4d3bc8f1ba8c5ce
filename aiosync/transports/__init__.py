"""Transports: how frames get from one process to another."""
