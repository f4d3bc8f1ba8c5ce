"""A collector without workers' processes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from multiprocessing.context import BaseContext
from typing import Any

from tensordict import TensorDict, TensorDictBase

from aiosync.collectors.config import CollectorConfig
from aiosync.collectors.host import LocalHost, MakeHost
from aiosync.collectors.multi import MultiCollector
from aiosync.collectors.worker import WorkerSpec
from aiosync.errors import InvalidArgumentError
from aiosync.schemes.base import WeightSyncScheme
from aiosync.schemes.memory import MemoryWeightSyncScheme

__all__ = ["Collector"]

_ALLOWED_OPTIONS = {"envs_per_worker", "init_fn", "timeout"}
"""What of :class:`ProcessConfig` says something of this one too."""


class Collector(MultiCollector):
    """Rolls out a policy in this process, on the event loop that iterates it.

    All is as with a :class:`MultiCollector` of one worker with ``sync=True``: no step is made between one
    batch and the call for the next, the policy that acts is a copy, and has the version that was sent last.
    An environment that takes long to step holds up the event loop meanwhile, unless its ``step`` is a
    coroutine.

    Args:
        create_env_fn: an environment, or what makes one.
        policy: see :class:`MultiCollector`.
        policy_factory: see there.
        create_env_kwargs: see there.
        config: see there. What is said of processes is refused here.
        options: the same as keywords.

    Raises:
        InvalidArgumentError: an option that there is not, or that does not go with the others.
    """

    _sync = True

    def __init__(
        self,
        create_env_fn: Any,
        policy: Any = None,
        *,
        policy_factory: Callable[[], Any] | None = None,
        create_env_kwargs: Mapping[str, Any] | None = None,
        config: CollectorConfig | None = None,
        **options: Any,
    ) -> None:
        config = (config or CollectorConfig()).of(**options)
        processes = config.processes
        process_options = [known for known in fields(processes) if known.name not in _ALLOWED_OPTIONS]
        refused = [known.name for known in process_options if getattr(processes, known.name) != known.default]
        if refused:
            raise InvalidArgumentError(
                f"{', '.join(refused)}: a Collector plays in this process; see MultiCollector"
            )
        super().__init__(
            _env_factory(create_env_fn),
            policy,
            policy_factory=policy_factory,
            create_env_kwargs=create_env_kwargs,
            config=config,
        )

    def _default_scheme(self, seconds: float) -> WeightSyncScheme:
        fixed = self.config.policy.needs_fixed_memory
        return MemoryWeightSyncScheme(timeout=seconds, commit="copy" if fixed else "flip")

    def _host_factory(self) -> tuple[MakeHost, BaseContext | None]:
        return LocalHost, None

    def _spec(self, index: int) -> WorkerSpec:
        return replace(super()._spec(index), own_process=False, use_buffers=False)

    def _concatenate(self, parts: Sequence[TensorDict]) -> TensorDictBase:
        return parts[0]


def _env_factory(given: Any) -> Callable[..., Any]:
    steps = callable(getattr(given, "step", None)) and callable(getattr(given, "reset", None))
    if isinstance(given, Sequence):
        raise InvalidArgumentError("create_env_fn: a Collector has one environment; see MultiCollector")
    return (lambda: given) if steps and not isinstance(given, type) else given
