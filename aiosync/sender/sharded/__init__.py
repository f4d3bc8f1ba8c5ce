"""Sharded trainers: the leading rank gathers the weights from all ranks."""
