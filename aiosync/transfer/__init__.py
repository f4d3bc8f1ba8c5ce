"""How a version's bytes get from the sender to a worker: one file for each way, with both sides in it."""
