"""A module's tensors, found again."""

from __future__ import annotations

import sys
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor, nn

from aiosync.sender.extraction import module_tensors


def test_what_is_changed_is_found() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    before = module_tensors(model)
    assert module_tensors(model) is before
    model[0].weight = nn.Parameter(torch.ones(2, 2))
    assert module_tensors(model)["0.weight"] is model[0].weight
    model[0], model[1] = model[1], model[0]
    assert module_tensors(model)["1.weight"] is model[1].weight
    model[0].register_buffer("scale", torch.ones(1))
    assert "0.scale" in module_tensors(model)
    del model[0].scale
    assert "0.scale" not in module_tensors(model)


class _Spread(nn.Module):
    """What FSDP2 makes of a module: between its passes the parameter is another one."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = {"own": nn.Parameter(torch.ones(2)), "whole": nn.Parameter(torch.zeros(2))}
        self.failed = False
        self.reshard()

    def reshard(self) -> None:
        if not self.failed:  # as after a pass that has raised
            self._parameters["weight"] = self.parts["own"]

    def forward(self, seen: Tensor) -> Tensor:
        self._parameters["weight"] = self.parts["whole"]
        return seen


def test_what_fsdp_has_left_whole_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.distributed.fsdp", Mock(FSDPModule=_Spread))
    spread = _Spread()
    model = nn.Sequential(spread)
    for failed in (False, True, False, False):
        model(torch.ones(1))
        spread.failed = failed
        assert module_tensors(model)["0.weight"] is spread.parts["whole" if failed else "own"]
