"""The models that are measured: real modules of a realistic number of fp32 tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

__all__ = ["MODELS", "TORN_MODELS", "ModelSpec", "Probe", "build_model", "fill", "sizes"]


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """One model, by its sizes.

    A model of ``mib`` is 64 equal tensors. Of the others, one without blocks is a policy for a small
    environment (an MLP with two hidden layers); any other is a stack of transformer blocks between two
    embeddings. Nothing is computed with it.

    Attributes:
        name: how the model is called on the command line and in the results.
        width: features per layer.
        blocks: transformer blocks of 12 tensors each; 0 makes the MLP.
        vocab: rows of the embedding at either end (unused by the MLP).
        rounds: turns per contender where the command line names none.
        turn: sends in one turn: several where one takes less time than it takes to get going again
            after another contender had the processor.
    """

    name: str
    width: int
    blocks: int
    vocab: int
    rounds: int
    turn: int = 1
    mib: int = 0

    @classmethod
    def of_mib(cls, mib: int) -> ModelSpec:
        """A model that is ``mib`` MiB of parameters."""
        return cls(f"{mib} MiB", width=0, blocks=0, vocab=0, rounds=0, mib=mib)


MODELS: dict[str, ModelSpec] = {
    spec.name: spec
    for spec in (
        ModelSpec("tiny", width=128, blocks=0, vocab=0, rounds=40, turn=10),  # 20 k parameters, 6 tensors
        ModelSpec("medium", width=704, blocks=4, vocab=850, rounds=40),  # 25 M, 52 tensors
        ModelSpec("large", width=1344, blocks=12, vocab=3000, rounds=12),  # 256 Mi = 1 GiB, 148
    )
}
TORN_MODELS: dict[str, ModelSpec] = {
    spec.name: spec
    for spec in (
        ModelSpec("16MB", width=288, blocks=4, vocab=32, rounds=0),
        ModelSpec("150MB", width=720, blocks=6, vocab=64, rounds=0),
    )
}


class _Mlp(nn.Sequential):
    def __init__(self, width: int) -> None:
        super().__init__(nn.Linear(16, width), nn.Tanh(), nn.Linear(width, width), nn.Linear(width, 10))


class _Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm_in = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm_mid = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)


class _Stack(nn.Module):
    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.embed = nn.Embedding(spec.vocab, spec.width)
        self.blocks = nn.ModuleList(_Block(spec.width) for _ in range(spec.blocks))
        self.norm = nn.LayerNorm(spec.width)
        self.head = nn.Linear(spec.width, spec.vocab, bias=False)


def build_model(spec: ModelSpec) -> nn.Module:
    """The model on the CPU, its memory reserved but not yet written (so not yet resident)."""
    with torch.device("meta"):
        model: nn.Module
        if spec.mib:
            model = nn.ParameterList(torch.empty((spec.mib << 20) // 4 // 64) for _ in range(64))
        else:
            model = _Stack(spec) if spec.blocks else _Mlp(spec.width)
    return model.to_empty(device="cpu")


def sizes(spec: ModelSpec) -> dict[str, int]:
    """How large a model is: parameters, tensors, bytes."""
    params = list(build_model(spec).parameters())
    return {
        "params": sum(p.numel() for p in params),
        "tensors": len(params),
        "nbytes": sum(p.nbytes for p in params),
    }


def fill(model: nn.Module, value: float) -> None:
    """Set every element to ``value``, in place: what a training step does to memory."""
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(value)


class Probe:
    """Reads a few elements of a model whose every element ought to be the same number.

    The first and the last element of four tensors, from the first parameter to the last, so that an
    update that has got half way shows wherever it is.

    Args:
        model: the model to look at; parameters that a scheme *replaces* after this are not seen.
    """

    def __init__(self, model: nn.Module) -> None:
        params = [p for p in model.parameters() if p.numel()]
        last = len(params) - 1
        self._params: Sequence[nn.Parameter] = [params[i * last // 3] for i in range(4)]

    def read(self) -> list[float]:
        """The eight elements, in the order of the parameters; one pass, with no await inside."""
        values: list[float] = []
        for param in self._params:
            flat = param.data.view(-1)
            values.append(flat[0].item())
            values.append(flat[-1].item())
        return values
