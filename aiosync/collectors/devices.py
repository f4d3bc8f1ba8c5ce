"""Where each worker's environments and policy are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch

from aiosync.errors import InvalidArgumentError

__all__ = ["Device", "DeviceConfig", "WorkerDevices"]

Device: TypeAlias = "torch.device | str | int"


@dataclass(frozen=True, slots=True)
class WorkerDevices:
    """The devices of one worker; None: as things are.

    Attributes:
        env, policy, storing: of each.
    """

    env: torch.device | None = None
    policy: torch.device | None = None
    storing: torch.device | None = None


@dataclass(frozen=True, kw_only=True)
class DeviceConfig:
    """Where things are. Each is a device, or a sequence of one per worker.

    Attributes:
        device: of all that is not said otherwise.
        env_device: of what environments give, and of torchrl's environments themselves.
        policy_device: of the workers' policies.
        storing_device: of the batches that are handed out; one for all workers, if ``sync=True``.
        no_cuda_sync: do not wait for a whole CUDA device after each step, but for each copy.
    """

    device: Device | Sequence[Device] | None = None
    env_device: Device | Sequence[Device] | None = None
    policy_device: Device | Sequence[Device] | None = None
    storing_device: Device | Sequence[Device] | None = None
    no_cuda_sync: bool = False

    @property
    def syncs(self) -> bool:
        """The contrary of ``no_cuda_sync``."""
        return not self.no_cuda_sync

    def of(self, worker: int) -> WorkerDevices:
        """Those of a worker."""
        return WorkerDevices(*(self._of(name, worker) for name in ("env", "policy", "storing")))

    def _of(self, name: str, worker: int) -> torch.device | None:
        given = getattr(self, f"{name}_device")
        if given is None:
            given = self.device
        if isinstance(given, Sequence) and not isinstance(given, str):
            given = given[worker]
        return None if given is None else torch.device(given)

    def check(self, workers: int) -> None:
        """Check what depends on how many workers there are.

        Raises:
            InvalidArgumentError: it does not fit, or there is no such device.
        """
        for name in ("device", "env_device", "policy_device", "storing_device"):
            given = getattr(self, name)
            listed = isinstance(given, Sequence) and not isinstance(given, str)
            if listed and len(given) != workers:
                raise InvalidArgumentError(
                    f"{name}: expected one device, or one per worker, {workers}; got {len(given)}"
                )
            for device in given if listed else [given]:
                _check_available(name, device)


def _check_available(name: str, given: Device | None) -> None:
    try:
        device = torch.device("cpu" if given is None else given)
    except (RuntimeError, TypeError) as exc:
        raise InvalidArgumentError(f"{name}={given!r}: expected a device: {exc}") from exc
    if device.type == "cuda" and not torch.cuda.is_available():
        raise InvalidArgumentError(f"{name}={given!r}: there is no CUDA device here")
