"""Actors in the place of forked processes: each runs one worker of the conformance suite after another."""

from __future__ import annotations

import gc
import secrets
import subprocess
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Client, Connection, Listener
from typing import Any

from torch import nn

from aiosync import WeightSyncScheme
from aiosync.schemes.ray import RayWeightSyncScheme
from aiosync.schemes.ray_modules import RayModuleTransformScheme
from aiosync.sender.worker_plan import model_of
from aiosync.weights.strategy import WeightStrategy
from tests.kit import child
from tests.kit.cases import Recipe
from tests.kit.clock import BRIEF, PATIENCE
from tests.kit.processes import ROOT

__all__ = [
    "cluster", "hosted", "hosted_modules", "keep", "start", "start_in_an_actor", "start_one",
    "start_or_reuse",
]  # fmt: skip

_WARM = 3
"""Hosts that are kept ready: it takes seconds for a process to have imported everything."""


class Host:
    """Runs workers in threads, so that what a scheme has called in its process gets through."""

    def ready(self) -> int:
        """Which process this is."""
        import os

        import tests.kit.scenarios  # noqa: F401

        return os.getpid()

    def run(
        self, scheme: WeightSyncScheme, index: int, arguments: dict[str, Any], address: str, on_uvloop: bool
    ) -> None:
        """Be a worker, to its end."""
        with Client(address, "AF_UNIX") as control:
            child.main(scheme, index, arguments, control, on_uvloop)


class Hosts:
    """Those that nobody uses at the moment."""

    def __init__(self) -> None:
        import ray

        self._kind: Any = ray.remote(num_cpus=0)(Host)
        self._free: list[tuple[Any, Any]] = []
        self.fill()

    def fill(self) -> None:
        """Have as many ready, or on their way, as will be needed soon."""
        while len(self._free) < _WARM:
            self.give_back(self._kind.options(max_concurrency=4).remote())

    def give_back(self, handle: Any) -> None:
        """It has nothing to do any more."""
        self._free.append((handle, handle.ready.remote()))

    def take(self) -> tuple[Any, int]:
        """One, and its process."""
        import ray

        if len(self._free) < 2:
            self.fill()
            # All of them: one that is still being started takes the processors from the test.
            ray.wait([ready for _, ready in self._free], num_returns=len(self._free), timeout=3 * PATIENCE)
        handle, ready = self._free.pop(0)
        return handle, ray.get(ready, timeout=3 * PATIENCE)


_hosts: Hosts | None = None


@contextmanager
def cluster() -> Iterator[None]:
    """Ray on this machine."""
    global _hosts
    import ray

    ray.init(
        num_cpus=2,
        # Ray frees objects about once a second. What tests send within one must be well below 70 % of the
        # store: from there on it has all actors collect garbage, and their loops stand for half a second.
        object_store_memory=640 << 20,
        include_dashboard=False,
        log_to_driver=False,
        _node_ip_address="127.0.0.1",
        runtime_env={"env_vars": {"PYTHONPATH": str(ROOT)}},
    )
    started = _processes()  # now: the garbage collector does not list what is frozen later
    try:
        yield
    finally:
        _hosts = None
        _kept.clear()
        ray.shutdown()
        # Ray kills its processes and does not wait for them, so their objects would warn when they are freed.
        for each in started + _processes():
            each.wait(PATIENCE)


def _processes() -> list[subprocess.Popen[Any]]:
    """Ray's."""
    found = [each for each in gc.get_objects() if issubclass(type(each), subprocess.Popen)]
    return [each for each in found if "ray" in str(each.args)]


_kept: defaultdict[type[Any], list[Any]] = defaultdict(list)
"""Class -> its actors that have finished a test. A new actor takes seconds to import torch."""


def start(kind: type[Any], count: int, *args: Any, max_restarts: int = 0) -> list[Any]:
    """New actors of this class, which have started: beside busy processes that takes longer than a test's
    calls may."""
    import ray

    made = ray.remote(num_cpus=0, max_restarts=max_restarts)(kind)
    actors = [made.remote(*args) for _ in range(count)]
    ray.get([actor.__ray_ready__.remote() for actor in actors], timeout=3 * PATIENCE)
    return actors


def start_one(kind: type[Any], *args: Any) -> Any:
    """A new actor of this class, which has started."""
    return start(kind, 1, *args)[0]


def start_or_reuse(kind: type[Any], count: int, size: int) -> list[Any]:
    """Actors of this class, with the attributes of new ones."""
    import ray

    reused = [_kept[kind].pop() for _ in range(min(count, len(_kept[kind])))]
    ray.get([actor.__ray_call__.remote(_reset, size) for actor in reused], timeout=PATIENCE)
    return reused + start(kind, count - len(reused), size)


def _reset(actor: Any, size: int) -> None:
    actor.__init__(size)


def keep(kind: type[Any], actors: list[Any]) -> None:
    """Have actors used again, those that live and have nothing to do."""
    import ray

    for actor in actors:
        try:
            ray.get(actor.__ray_ready__.remote(), timeout=BRIEF)
        except (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError):
            ray.kill(actor)
        else:
            _kept[kind].append(actor)


class Hosted(RayWeightSyncScheme):
    """Puts small models in the object store too, as large ones are."""

    _inline = 0


def hosted(workers: int, options: dict[str, Any]) -> Recipe:
    """As with all others, lost is lost."""
    return Recipe(Hosted(reconnect_for=0, share_memory=False, **options))


class Transform:
    """Takes weights by its methods, as torchrl's ModuleTransform does."""

    def __init__(self, module: Any, context: Any) -> None:
        self.module = module
        self._context = context

    def update_policy_weights_(self, **arguments: Any) -> Any:
        """What the worker's own context makes of it."""
        return self._context.update_policy_weights_(**arguments) if self._context is not None else None

    def _update_weights_tensordict(self, params: Any) -> None:
        if isinstance(self.module, nn.Module):
            params.to_module(self.module, preserve_module_state=False)
        elif self.module is not None:
            WeightStrategy().apply_weights(self.module, params)


class HostedModules(RayModuleTransformScheme):
    """The workers make their endpoints themselves, each from a model in a :class:`Transform`."""

    _inline = 0

    def init_on_sender(self, *names: Any, **arguments: Any) -> None:
        """See :class:`RayWeightSyncScheme`."""
        self._begins_empty = False
        RayWeightSyncScheme.init_on_sender(self, *names, **arguments)

    def init_on_receiver(self, *, context: Any = None, model: Any = None, **arguments: Any) -> None:
        """See :class:`RayModuleTransformScheme`."""
        if context is not None and model is None:
            model = model_of(context, arguments["model_id"])
        super().init_on_receiver(context=Transform(model, context), model=model, **arguments)

    init_on_worker = init_on_receiver


def hosted_modules(workers: int, options: dict[str, Any]) -> Recipe:
    """The same for models that take weights by a method."""
    return Recipe(HostedModules(reconnect_for=0, share_memory=False, **options))


class InAnActor:
    """See :class:`tests.kit.cases.SenderAddress`."""

    control: Connection[Any, Any]

    def __init__(
        self, scheme: WeightSyncScheme, index: int, arguments: dict[str, Any], on_uvloop: bool
    ) -> None:
        global _hosts
        if _hosts is None:
            _hosts = Hosts()
        self._handle, self.pid = _hosts.take()
        address = f"\0aiosync-test-{secrets.token_hex(8)}"
        with Listener(address, "AF_UNIX") as listener:
            self._running = self._handle.run.remote(scheme, index, arguments, address, on_uvloop)
            self.control = listener.accept()

    def close(self) -> None:
        """It may run another, if it lives."""
        import ray

        try:
            ray.get(self._running, timeout=PATIENCE)
        except ray.exceptions.RayActorError:
            return
        if _hosts is not None:
            _hosts.give_back(self._handle)


start_in_an_actor = InAnActor
