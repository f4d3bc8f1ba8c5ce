"""What is staged in memory of the worker's own, by where an update arrives."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from aiosync.protocol.frames import Update
from aiosync.receiver.staging import StagingBuffers
from aiosync.transfer.base import InboundTransfer, MemoryAccess
from aiosync.weights.copying import copy_pairs
from aiosync.weights.layout import Layout
from aiosync.weights.module_binding import ModuleBinding
from tests.kit.surgery import LARGE

CPU = torch.device("cpu")


class _There(InboundTransfer):
    """An update in a piece of memory."""

    def __init__(self, layout: Layout, buffer: Tensor, access: MemoryAccess) -> None:
        self.access = access
        self._buffer = buffer
        self._layout = layout

    def is_here(self, update: Update) -> bool:
        return True

    def is_quick(self, update: Update) -> bool:
        return True

    def find(self, update: Update) -> tuple[Tensor, dict[str, Tensor]]:
        return self._buffer, self._layout.views(self._buffer)

    def close(self) -> None:
        return


class _Tables(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(LARGE))
        self.register_buffer("table", torch.zeros(LARGE))
        self.register_buffer("small", torch.zeros(3))


@pytest.mark.parametrize(
    ("access", "viewed"),
    [
        # The sender's slots, a read-only object in a store, slots of this process.
        (MemoryAccess.VIEWED, {"weight"}),
        (MemoryAccess.IMMUTABLE, {"weight"}),
        (MemoryAccess.PRIVATE, {"weight", "table"}),
    ],
    ids=["mapped", "stored", "own"],
)
def test_buffers_are_never_put_where_others_read(access: MemoryAccess, viewed: set[str]) -> None:
    model = _Tables()
    layout = Layout.of({**dict(model.named_parameters()), **dict(model.named_buffers())})
    there = torch.ones(layout.nbytes, dtype=torch.uint8)
    inbound = _There(layout, there, access)
    binding = ModuleBinding(model, layout, "flip")
    back_buffers = StagingBuffers(binding, inbound, CPU, may_view=True)
    update = Update(round=0, version=0, payload={})
    for _ in range(3):
        staged, pairs = back_buffers.stage(update, None)
        copy_pairs(pairs)
        binding.commit(staged)
        back_buffers.committed(None)
        memory = range(there.data_ptr(), there.data_ptr() + there.numel())
        found = {name: tensor for name, tensor in (*model.named_parameters(), *model.named_buffers())}
        assert {name for name, tensor in found.items() if tensor.data_ptr() in memory} == viewed
        assert all(torch.equal(tensor.view(torch.uint8), torch.ones_like(tensor.view(torch.uint8)))
                   for tensor in found.values())  # fmt: skip
    # A buffer that was replaced since the update was staged is not pointed there either.
    staged, pairs = back_buffers.stage(update, None)
    copy_pairs(pairs)
    model.small = torch.zeros(3)
    model.table = torch.zeros(LARGE)
    binding.commit(staged)
    assert (model.table.data_ptr() in memory) == ("table" in viewed)
