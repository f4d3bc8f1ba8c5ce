"""Models whose every element tells the version that it belongs to."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

__all__ = ["Norm", "Other", "Uniform", "fill", "occupy", "value_of"]


class Uniform(nn.Module):
    """``tensors`` parameters of ``size`` fp32 elements each, all of one value."""

    def __init__(self, value: float = 0.0, *, tensors: int = 4, size: int = 16) -> None:
        super().__init__()
        self.values = nn.ParameterList(torch.full((size,), value) for _ in range(tensors))

    def forward(self, x: Tensor) -> Tensor:
        for value in self.values:
            x = x + value
        return x


class Norm(nn.Module):
    """A layer with parameters and with statistics of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.norm = nn.BatchNorm1d(3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.norm(self.linear(x))
        return out


class Other(nn.Module):
    """Has nothing in common with :class:`Uniform`."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3, 2))


def fill(model: nn.Module, value: float) -> None:
    """Set every parameter to ``value``."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)


def occupy(device: torch.device | str, seconds: float) -> None:
    """Queue about this much work on a CUDA device, in the current stream."""
    with torch.cuda.device(device):
        torch.cuda._sleep(int(seconds * 1.7e9))  # cycles


def value_of(tensors: nn.Module | Iterable[Tensor]) -> float:
    """The one value that all elements have; fails if they differ (torn)."""
    found = tensors.parameters() if isinstance(tensors, nn.Module) else tensors
    seen: set[float] = set()
    with torch.no_grad():
        for tensor in found:
            low, high = torch.aminmax(tensor)
            seen |= {low.item(), high.item()}
    assert len(seen) == 1, f"torn: several versions in one read: {sorted(seen)}"
    return seen.pop()
