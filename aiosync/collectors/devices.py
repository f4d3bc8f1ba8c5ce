"""The devices of each worker's environments, policy and batches."""

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
    """The devices of one worker; None: tensors stay where they are.

    Attributes:
        env: of what the environments return.
        policy: of the policy.
        storing: of the batches.
    """

    env: torch.device | None = None
    policy: torch.device | None = None
    storing: torch.device | None = None


@dataclass(frozen=True, kw_only=True)
class DeviceConfig:
    """Devices. Each option is one device for all workers, or a sequence with one per worker.

    Attributes:
        device: the default of the three others.
        env_device: what environments return is moved to this device; torchrl's environments are moved
            themselves.
        policy_device: the device of the workers' policies.
        storing_device: the device of the batches that the iterator returns; with ``sync=True`` one for all
            workers.
        no_cuda_sync: synchronize each copy to or from a CUDA device by itself, instead of the whole device
            after each step.
    """

    device: Device | Sequence[Device] | None = None
    env_device: Device | Sequence[Device] | None = None
    policy_device: Device | Sequence[Device] | None = None
    storing_device: Device | Sequence[Device] | None = None
    no_cuda_sync: bool = False

    @property
    def syncs(self) -> bool:
        """Whether to synchronize the CUDA device after each step: ``not no_cuda_sync``."""
        return not self.no_cuda_sync

    def of(self, worker: int) -> WorkerDevices:
        """Return the devices of one worker."""
        return WorkerDevices(*(self._of(name, worker) for name in ("env", "policy", "storing")))

    def _of(self, name: str, worker: int) -> torch.device | None:
        given = getattr(self, f"{name}_device")
        if given is None:
            given = self.device
        if isinstance(given, Sequence) and not isinstance(given, str):
            given = given[worker]
        return None if given is None else torch.device(given)

    def check(self, workers: int) -> None:
        """Check the options that depend on the number of workers.

        Raises:
            InvalidArgumentError: a sequence has another length than there are workers, or a device does not
                exist.
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
        raise InvalidArgumentError(f"{name}={given!r}: this machine has no CUDA device")
