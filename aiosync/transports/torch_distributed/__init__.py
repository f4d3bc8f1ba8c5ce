"""Connections found through a torch.distributed store, and process groups that send weights."""
