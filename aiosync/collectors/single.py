"""A collector without worker processes."""

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
"""The options of :class:`ProcessConfig` that a collector without processes takes."""


class Collector(MultiCollector):
    """Rolls out a policy in this process, on the event loop that iterates the collector.

    Otherwise it behaves as a :class:`MultiCollector` with one worker and ``sync=True``: no step happens
    between one batch and the request for the next. The policy that acts is a copy, with the version that was
    sent last. An environment with a slow ``step`` blocks the event loop, unless ``step`` is a coroutine
    function.

    Args:
        create_env_fn: an environment, or a function that returns one.
        policy: see :class:`MultiCollector`.
        policy_factory: see :class:`MultiCollector`.
        create_env_kwargs: see :class:`MultiCollector`.
        config: see :class:`MultiCollector`. Options about processes are refused.
        options: the same options as keywords.

    Raises:
        InvalidArgumentError: an unknown option, or options that do not fit together.
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
                f"{', '.join(refused)}: a Collector runs in this process; see MultiCollector"
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
        raise InvalidArgumentError("create_env_fn: expected one environment, got several; see MultiCollector")
    return (lambda: given) if steps and not isinstance(given, type) else given
