"""Processes that meet in a torch store, and weights that a process group moves."""
