"""A relay: a receiver above, a sender below."""
