"""Models that are awkward to send, shared by the tests of this folder."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from aiosync.weights.flatten import named_tensors
from aiosync.weights.strategy import WeightStrategy
from aiosync.weights.target import receiver_tensors

DTYPES = [
    getattr(torch, name)
    for name in (
        "float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e4m3fnuz",
        "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2", "int64", "int32",
        "int16", "int8", "uint64", "uint32", "uint16", "uint8", "bool", "complex128", "complex64",
        "complex32",
    )
    if hasattr(torch, name)
]  # fmt: skip
FORMATS = ["tensordict", "state_dict"]
APPLY = WeightStrategy().apply_weights


def bits(tensor: Tensor) -> bytes:
    """The raw bytes, so that NaN equals itself and every dtype compares."""
    return bytes(tensor.detach().contiguous().reshape(-1).view(torch.uint8).tolist())


def filled(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> Tensor:
    """A tensor of random bits (of 0s and 1s for bool, where other bits are not values)."""
    generator = torch.Generator().manual_seed(seed)
    numel = torch.Size(shape).numel()
    if dtype is torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    raw = torch.randint(0, 256, (numel * dtype.itemsize,), dtype=torch.uint8, generator=generator)
    return raw.view(dtype).reshape(shape)


class Tied(nn.Module):
    """An embedding whose weight the head shares."""

    def __init__(self, tie: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        if tie:
            self.head.weight = self.embed.weight


class Counting(nn.Module):
    """Extra state with numbers, a tensor and a nested mapping in it."""

    def __init__(self, steps: int = 0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((2,), float(steps)))
        self.state: Any = {
            "steps": steps,
            "rate": steps / 2,
            "on": bool(steps),
            "stats": {"mean": torch.full((3,), float(steps)), "a.b": torch.tensor(steps)},
        }
        self.sets = 0

    def get_extra_state(self) -> Any:
        return self.state

    def set_extra_state(self, state: Any) -> None:
        self.sets += 1
        self.state = state


class LazyNorm(nn.Module):
    """A normaliser that has no statistics until it has seen data."""

    def __init__(self, mean: Tensor | None = None) -> None:
        super().__init__()
        self.mean = mean

    def get_extra_state(self) -> dict[str, Any]:
        return {} if self.mean is None else {"loc": {"obs": self.mean}, "count": torch.tensor(7)}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.mean = state["loc"]["obs"] if state else None


class Refusing(Counting):
    """Takes its own kind of state and no other."""

    def set_extra_state(self, state: Any) -> None:
        if state["steps"] == 13:
            raise RuntimeError("unlucky")
        super().set_extra_state(state)


class Adapter(nn.Module):
    """A frozen linear layer with a low-rank adapter that can be merged into it, in place."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(3, 3)
        self.a = nn.Parameter(torch.ones(1, 3))
        self.b = nn.Parameter(torch.full((3, 1), 2.0))

    def merge_and_unload(self) -> nn.Module:
        self.base.weight.data += self.b @ self.a
        return self.base


class Forwarding(nn.Module):
    """Hands attributes that it lacks on to what it wraps, as TensorDictModule does."""

    def __init__(self, module: nn.Module, name: str = "module") -> None:
        super().__init__()
        self._inner_name = name
        self.add_module(name, module)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            inner = super().__getattr__(self.__dict__["_inner_name"])
            return getattr(inner, name)


def awkward() -> Any:
    """Nested modules, BatchNorm, a tied pair, extra state, 0-d, empty and strided tensors."""
    model: Any = nn.Module()
    model.body = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))
    model.tied = Tied()
    model.counting = Counting(3)
    model.scale = nn.Parameter(torch.tensor(2.0))
    model.nothing = nn.Parameter(torch.empty(0, 4))
    model.turned = nn.Parameter(torch.arange(6.0).reshape(2, 3).t())
    model.register_buffer("wide", torch.ones(1, 3).expand(2, 3))
    model.register_buffer("flags", torch.tensor([True, False]))
    model.register_buffer("mask", torch.arange(4.0), persistent=False)
    model.frozen = nn.Parameter(torch.ones(2, dtype=torch.int32), requires_grad=False)
    return model


def shaken(model: Any) -> Any:
    """The same model with other values in every floating tensor and other counts."""
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor.is_floating_point() and 0 not in tensor.stride():
                tensor.add_(1.5)
    for module in model.modules():
        if isinstance(module, Counting):
            module.state = Counting(9).state
    return model


def snapshot(source: Any) -> dict[str, tuple[tuple[int, ...], bytes]]:
    return {name: (tuple(t.shape), bits(t)) for name, t in named_tensors(source).items()}


def everything(model: nn.Module) -> dict[str, bytes]:
    """Non-persistent buffers too."""
    return {name: bits(t) for name, t in receiver_tensors(model).items()}


def mlp() -> Any:
    return nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
