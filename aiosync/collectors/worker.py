"""A worker: one event loop that plays, receives weights and listens to its collector.

It ends when its collector closes the pipe, or is gone.
"""

from __future__ import annotations

import asyncio
import pickle
import random
import signal
import sys
import traceback
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import cloudpickle
import numpy as np
import torch
from torch import nn

from aiosync.collectors.actor import actor_of
from aiosync.collectors.channel import Channel
from aiosync.collectors.config import CollectorConfig
from aiosync.collectors.env import adapt
from aiosync.collectors.fields import Fields, Slot, Specs, specs_of
from aiosync.collectors.messages import Answer, Batch, Call, Collect, Cut, Failed, NewSlot, Ready
from aiosync.collectors.rollout import OpenBatch, Player
from aiosync.errors import InvalidArgumentError, NotInitializedError
from aiosync.schemes.base import WeightSyncScheme
from aiosync.weights.resolve import resolve_model

__all__ = ["WorkerSpec", "run"]

POLICY = "policy"


@dataclass(frozen=True)
class WorkerSpec:
    """What a worker is.

    Attributes:
        index, workers: which, of how many.
        create_env: makes its environment.
        make_policy: makes its policy; None: it acts at random.
        config: the collector's.
        first_id: the number of its first trajectory.
        seed: what it begins with; None: anything.
    """

    index: int
    workers: int
    create_env: Callable[[], Any]
    make_policy: Callable[[], Any] | None
    config: CollectorConfig
    first_id: int
    seed: int | None = None


def run(spec: bytes, schemes: Mapping[str, WeightSyncScheme], connection: Connection[Any, Any]) -> None:
    """The process's main.

    Args:
        spec: a :class:`WorkerSpec`, pickled.
        schemes: model -> the scheme that its weights come by.
        connection: this end of the pipe.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C is for the trainer to act on
    main = partial(_main, spec, schemes, connection)
    if sys.platform == "win32":
        asyncio.run(main())
    else:
        import uvloop

        uvloop.run(main())


async def _main(
    spec: bytes, schemes: Mapping[str, WeightSyncScheme], connection: Connection[Any, Any]
) -> None:
    channel = await Channel.open(connection)
    try:
        async with Worker(cloudpickle.loads(spec), schemes, channel) as worker:
            await worker.serve()
    except EOFError:
        pass  # the collector has closed
    except Exception as exc:  # noqa: BLE001 - travels to the collector
        channel.send(failure(exc))
    finally:
        channel.close()


def failure(error: BaseException) -> Failed:
    """An error as it is sent."""
    try:
        data = cloudpickle.dumps(error)
        pickle.loads(data)  # some can be written and not read
    except Exception:  # noqa: BLE001 - whatever its own methods raise
        data = None
    trace = "".join(traceback.format_exception(error))
    return Failed(data, type(error).__name__, str(error), trace)


class Worker:
    """The worker's own side of things: what :class:`~aiosync.collectors.messages.Call` calls, and what
    schemes find their models on.

    Args:
        spec: what it is.
        schemes: see :func:`run`.
        channel: to the collector.
    """

    def __init__(self, spec: WorkerSpec, schemes: Mapping[str, WeightSyncScheme], channel: Channel) -> None:
        config = spec.config
        torch.set_num_threads(config.processes.num_sub_threads)
        if config.processes.init_fn is not None:
            config.processes.init_fn()
        self._config = config
        self._spec = spec
        self._schemes = schemes
        self._channel = channel
        self._envs = [adapt(spec.create_env()) for _ in range(config.processes.envs_per_worker)]
        self.env = self._envs[0].env
        self.policy = spec.make_policy() if spec.make_policy is not None else None
        if isinstance(self.policy, nn.Module):
            self.policy.eval()
        self._slots: list[Slot] = []
        self._free: set[int] = set()
        self._open: deque[tuple[OpenBatch, list[int]]] = deque()
        self._asked = asyncio.Event()
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Worker:
        await self._stack.__aenter__()
        for env in self._envs:
            self._stack.push_async_callback(env.close)
        for model_id, scheme in self._schemes.items():
            model = self.policy if model_id == POLICY else resolve_model(self, model_id)
            scheme.init_on_receiver(model_id=model_id, model=model, worker_idx=self._spec.index)
        try:
            await asyncio.gather(*(self._connect(scheme) for scheme in self._schemes.values()))
            for scheme in self._schemes.values():
                await self._stack.enter_async_context(scheme.receiving())
        except BaseException:
            await self._stack.aclose()
            raise
        policy = self._config.policy
        actor = None
        if self.policy is not None:
            actor = actor_of(self.policy, policy.exploration_type, trusted=policy.trust_policy)
        players = len(self._envs)
        self._players = [
            Player(
                env,
                actor,
                self._config.batch,
                self._spec.first_id + i,
                self._spec.workers * players,
                self._version if policy.track_policy_version else None,
            )
            for i, env in enumerate(self._envs)
        ]
        return self

    def _version(self) -> int:
        weights = self._schemes.get(POLICY)
        return weights.version if weights is not None else 0

    async def _connect(self, scheme: WeightSyncScheme) -> None:
        self._stack.push_async_callback(scheme.aclose)
        await scheme.connect()

    async def __aexit__(self, *exc: object) -> None:
        await self._stack.aclose()

    async def serve(self) -> None:
        """Play and listen.

        Raises:
            EOFError: the collector has closed.
            Exception: what the environment or the policy raises.
        """
        if self._spec.seed is not None:
            await self.set_seed(self._spec.seed)
        self._channel.send(Ready())
        playing = (self._play(number, player) for number, player in enumerate(self._players))
        tasks = [asyncio.ensure_future(work) for work in (self._listen(), *playing)]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _listen(self) -> None:
        while True:
            match await self._channel.receive():
                case Collect() as request:
                    if request.returned >= 0:
                        self._free.add(request.returned)
                    used: list[int] = []
                    make_slot = partial(self._slot_for, used)
                    self._open.append((OpenBatch(request.frames, request.at_random, make_slot), used))
                    self._asked.set()
                case Cut():
                    for batch, _ in list(self._open):
                        batch.cut()
                        if batch.complete:
                            self._deliver(batch)
                case Call() as call:
                    self._channel.send(await self._answer(call))

    async def _answer(self, call: Call) -> Answer:
        try:
            value = await getattr(self, call.method)(*call.arguments)
            cloudpickle.dumps(value)  # what cannot be sent is this call's error
        except Exception as exc:  # noqa: BLE001 - travels to the collector
            return Answer(call.number, error=failure(exc))
        return Answer(call.number, value)

    async def _play(self, number: int, player: Player) -> None:
        while True:
            batch = next((batch for batch, _ in self._open if batch.has_room), None)
            if batch is None:
                self._asked.clear()
                await self._asked.wait()
                continue
            place = batch.claim()
            batch.write(place, number, await player.frame(batch))
            if batch.complete:
                self._deliver(batch)
                await self._channel.drain()
            await asyncio.sleep(0)  # updates and commands come in between two frames

    def _deliver(self, batch: OpenBatch) -> None:
        entry = next(entry for entry in self._open if entry[0] is batch)
        self._open.remove(entry)
        batch.close(truncate=self._config.batch.set_truncated)
        order = batch.order if len(self._players) > 1 else None
        self._channel.send(Batch(entry[1][0], batch.steps, order))

    def _slot_for(self, used: list[int], frame: Fields, steps: int) -> Slot:
        index = self._free_slot(specs_of(frame), steps)
        used.append(index)
        return self._slots[index]

    def _free_slot(self, specs: Specs, steps: int) -> int:
        for index in sorted(self._free):
            if self._slots[index].holds(specs, steps):
                self._free.remove(index)
                return index
        made = Slot.make(specs, steps)
        self._slots.append(made)
        index = len(self._slots) - 1
        assert made.segment.handle is not None
        self._channel.send(NewSlot(index, made.segment.handle, specs, steps, self._envs[0].shape))
        return index

    # -- what the collector calls ---------------------------------------------------------------------

    async def set_seed(self, seed: int) -> None:
        """Begin anew: the first environment with ``seed``, the next with ``seed + 1``, and so on."""
        torch.manual_seed(seed)
        np.random.seed(seed % 2**32)
        random.seed(seed)
        for number, player in enumerate(self._players):
            await player.reset(seed + number)

    async def reset(self) -> None:
        """Begin new episodes."""
        for player in self._players:
            await player.reset()

    async def state(self) -> dict[str, Any]:
        """Where it stands."""
        return {
            "players": [player.state() for player in self._players],
            "torch": torch.get_rng_state(),
            "numpy": np.random.get_state(),
            "random": random.getstate(),
        }

    async def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on from there.

        Raises:
            InvalidArgumentError: it is that of another number of environments.
        """
        players = state["players"]
        if len(players) != len(self._players):
            raise InvalidArgumentError(
                f"state_dict: it has {len(players)} environments in a worker, expected {len(self._players)}"
            )
        for player, known in zip(self._players, players, strict=True):
            await player.load_state(known)
        self.env = self._envs[0].env
        torch.set_rng_state(state["torch"])
        np.random.set_state(state["numpy"])
        random.setstate(state["random"])

    async def attribute_of(self, what: str, name: str) -> Any:
        """What the environment or the policy has under a name, which may be dotted.

        Raises:
            NotInitializedError: there is no policy.
            AttributeError: there is nothing.
        """
        found = getattr(self, what)
        if found is None:
            raise NotInitializedError("this collector has no policy: it acts at random")
        return resolve_model(found, name)
