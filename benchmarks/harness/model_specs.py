"""Which models are measured, by their sizes. Importing this takes no time: torch is not needed."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """One model, by its sizes. Nothing is computed with it."""

    name: str  # on the command line and in the results
    width: int = 0  # features per layer
    blocks: int = 0  # of a transformer, 12 tensors each; 0: an MLP with two hidden layers
    vocab: int = 0  # rows of the transformer's embedding at either end
    rounds: int = 0  # turns per contender where the command line names none
    turn: int = 1  # sends in one turn: several where a send takes less time than a wake-up
    mib: int = 0  # of this many MiB, in 64 equal tensors, instead of all that


MODELS = {
    "tiny": ModelSpec("tiny", width=128, rounds=40, turn=10),  # 20 k parameters, 6 tensors
    "medium": ModelSpec("medium", width=704, blocks=4, vocab=850, rounds=40),  # 25 M, 52 tensors
    "large": ModelSpec("large", width=1344, blocks=12, vocab=3000, rounds=12),  # 256 Mi = 1 GiB, 148
}
TORN_MODELS = (
    ModelSpec("16MB", width=288, blocks=4, vocab=32),
    ModelSpec("150MB", width=720, blocks=6, vocab=64),
)
