"""Queues and pipes of ``multiprocessing``."""
