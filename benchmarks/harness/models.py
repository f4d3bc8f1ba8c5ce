"""The models that are measured: real modules of a realistic number of fp32 tensors."""

from __future__ import annotations

import torch
from torch import nn

from benchmarks.harness.model_specs import ModelSpec


def build_model(spec: ModelSpec) -> nn.Module:
    """The model on the CPU, its memory reserved but not yet written (so not yet resident)."""
    width, layers = spec.width, list[nn.Module]()
    with torch.device("meta"):
        if spec.mib:
            layers += [nn.ParameterList(torch.empty((spec.mib << 20) // 4 // 64) for _ in range(64))]
        elif spec.blocks:
            layers += [nn.Embedding(spec.vocab, width), *(_block(width) for _ in range(spec.blocks))]
            layers += [nn.LayerNorm(width), nn.Linear(width, spec.vocab, bias=False)]
        else:
            layers += [nn.Linear(16, width), nn.Tanh(), nn.Linear(width, width), nn.Linear(width, 10)]
        return nn.Sequential(*layers).to_empty(device="cpu")


def _block(width: int) -> nn.Module:
    attention = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
    mlp = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
    return nn.Sequential(*attention, *mlp)


def sizes(spec: ModelSpec) -> dict[str, int]:
    """How large a model is: parameters, tensors, bytes."""
    sizes = [p.numel() for p in build_model(spec).parameters()]
    return {"params": sum(sizes), "tensors": len(sizes), "nbytes": 4 * sum(sizes)}


def fill(model: nn.Module, value: float) -> None:
    """Set every element to ``value``, in place: what a training step does to memory."""
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(value)


class Probe:
    """Reads the first and last element of four tensors, from the first parameter to the last, so that a
    half-applied update shows wherever it stopped. Parameters that a scheme *replaces* later are not seen."""

    def __init__(self, model: nn.Module) -> None:
        params = [p for p in model.parameters() if p.numel()]
        last = len(params) - 1
        self._params = [params[i * last // 3] for i in range(4)]

    def read(self) -> list[float]:
        """The eight elements, in the order of the parameters; one pass, with no await inside."""
        flats = (param.data.view(-1) for param in self._params)
        return [flat[end].item() for flat in flats for end in (0, -1)]
