"""Transports that are used alone, without a scheme."""
