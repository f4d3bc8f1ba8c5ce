"""A worker of torchrl's DistributedCollector, as far as weights are concerned."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch._C._distributed_c10d import PrefixStore, TCPStore

__all__ = ["follow"]


def follow(port: int, rank: int, size: int, updates: int) -> None:
    """Take in so many updates; the value of each is then in the store."""
    torch.set_num_threads(1)
    store: Any = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    dist.init_process_group("gloo", store=PrefixStore("group", store), rank=rank, world_size=size)
    weights = TensorDict({"w": torch.zeros(1000), "nested": TensorDict({"b": torch.zeros(3)})})
    for number in range(updates):
        assert store.get(f"NODE_{rank}_in") == b"update_weights"
        store.delete_key(f"NODE_{rank}_in")
        weights.recv(0)
        seen = {*weights["w"].tolist(), *weights["nested", "b"].tolist()}
        store.set(f"seen_{rank}_{number}", str(seen))
        store.set(f"NODE_{rank}_out", "updated")
    dist.destroy_process_group()
