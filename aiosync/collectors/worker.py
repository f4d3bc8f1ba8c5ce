"""A worker: tasks of one event loop that roll out the policy, receive weights and execute the collector's
commands.

A worker ends when its collector closes the pipe or has died.
"""

from __future__ import annotations

import asyncio
import copy
import math
import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from importlib import import_module
from typing import Any

import numpy as np
import torch
from torch import nn

from aiosync._processors import move_to, yield_processor
from aiosync.collectors.adapters import adapt
from aiosync.collectors.batch_buffers import BatchBuffer, BatchBuffers
from aiosync.collectors.command_pipe import (
    Answer,
    Batch,
    Call,
    Collect,
    CommandPipe,
    CommandPipeClosed,
    Continued,
    EndEarly,
    ErrorReport,
    Payload,
    Ready,
)
from aiosync.collectors.env import Env
from aiosync.collectors.partial_batch import PartialBatch
from aiosync.collectors.policy import Acting, adapt_policy, to_device
from aiosync.collectors.profiling import BatchProfiler, ProfileConfig
from aiosync.collectors.rollout import Rollout
from aiosync.collectors.tensordict_env import load_env_state
from aiosync.collectors.turns import Turns
from aiosync.collectors.worker_spec import POLICY, Schemes, WorkerSpec
from aiosync.errors import NotInitializedError
from aiosync.events import logger
from aiosync.schemes.base import WeightSyncScheme
from aiosync.weights.resolve import call_by_path, resolve_model


async def cancel_all(*tasks: asyncio.Future[Any]) -> None:
    """Cancel tasks and wait for their end."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def policy_schemes(schemes: Schemes) -> list[WeightSyncScheme]:
    """Return the schemes of the policy or of its parts. The highest of their versions is the policy's
    version."""
    return [scheme for name, scheme in schemes.items() if f"{name}.".startswith(f"{POLICY}.")]


async def run_worker(spec: Callable[[], WorkerSpec], schemes: Schemes, pipe: CommandPipe) -> None:
    """Run a worker until the collector closes the pipe. An error is sent to the collector, also that of
    ``spec()``, which returns the worker's spec."""
    reported = False
    try:
        async with AsyncExitStack() as stack:
            try:
                await Worker(spec(), schemes, pipe, stack).run()
            except CommandPipeClosed:
                raise
            except Exception as exc:
                # Before tasks are cancelled and environments closed: that may hang, or end this process.
                reported = True
                await pipe.report(exc)
                raise
    except CommandPipeClosed:
        pass  # the collector closed the pipe
    except Exception as exc:  # noqa: BLE001 - of a scheme that has lost its sender, or of a close()
        if not reported:
            await pipe.report(exc)
    finally:
        pipe.close()


class Worker:
    """One worker. The collector calls the methods behind :meth:`run` through
    :class:`~aiosync.collectors.command_pipe.Call`. Schemes find their models through :meth:`get_model`.
    ``stack`` cancels the tasks, then closes the schemes, then the environments.
    """

    def __init__(self, spec: WorkerSpec, schemes: Schemes, pipe: CommandPipe, stack: AsyncExitStack) -> None:
        config = spec.config
        if spec.own_process:
            torch.set_num_threads(config.processes.num_sub_threads)
            torch.set_default_dtype(spec.dtype)
        if config.processes.init_fn is not None:
            config.processes.init_fn()
        self._config = config
        self._spec = spec
        self._schemes = schemes
        self._policy_schemes = policy_schemes(schemes)
        self._pipe = pipe
        self._extra_updates = spec.extra_updates
        self._devices = config.devices.of(spec.index)
        self._stack = stack
        self._closes_envs = True
        self._frames = self._batches = 0  # delivered
        self._profiler: BatchProfiler | None = None
        stack.callback(self._end_profile)
        self.policy: Any = None  # None: random actions
        policy_first = config.policy.auto_register_policy_transforms
        if policy_first and spec.make_policy is not None:
            self.policy = spec.make_policy()
        self._envs = [self._make_env() for _ in range(config.processes.envs_per_worker)]
        self.env = self._envs[0].env  # as create_env returned it
        self._given = [each.env for each in self._envs] if spec.env_given else []
        if not policy_first and spec.make_policy is not None:
            self.policy = spec.make_policy()
        if isinstance(self.policy, nn.Module) and self._devices.policy is not None:
            to_device(self.policy, self._devices.policy)
        env, use_buffers = self._envs[0], config.batch.use_buffers
        fixed = not any(each.dynamic for each in self._envs) if use_buffers is None else use_buffers
        self._shared = spec.use_buffers and fixed  # the collector maps the buffers of the batches
        self._buffers = BatchBuffers(
            pipe.send if self._shared else None, len(env.shape), env.nested, env.device, fixed=fixed
        )
        self._before_batch = config.processes.pre_collect_hook
        self._after_batch = config.processes.post_collect_hook
        self._rollouts: list[Rollout] = []
        self._shape, self._width = env.shape, math.prod(env.shape)  # the environments that step together
        self._partial_batches: list[PartialBatch] = []  # not complete yet, in order of their requests
        self._batch_requested = asyncio.Event()  # wakes the rollouts that have no batch to collect for

    def _make_env(self) -> Env:
        made = self._spec.create_env()
        if self._config.policy.auto_register_policy_transforms and hasattr(made, "append_transform"):
            made = import_module("aiosync.compat.torchrl").with_policy_transforms(made, self.policy)
        env = adapt(made, self._devices.env)
        self._stack.push_async_callback(self._close_env, env)
        return env

    async def _close_env(self, env: Env) -> None:
        if self._closes_envs:
            await env.close()

    async def run(self) -> None:
        """Roll out the policy and execute commands until the collector closes the pipe (CommandPipeClosed).
        Raises what the environment or the policy raises."""
        await self._set_up()
        if self._spec.seed is not None:
            await self.set_seed(self._spec.seed)
        self._pipe.send(Ready(self._shape, dict(self._envs[0].nested), self._envs[0].whole))
        rolling_out = map(self._roll_out, self._rollouts)
        tasks = [asyncio.ensure_future(work) for work in (self._receive_commands(), *rolling_out)]
        self._stack.push_async_callback(cancel_all, *tasks)
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            if task.cancelled():  # not by this worker: it cancels no task before this
                raise RuntimeError("the environment or the policy raised CancelledError")
            task.result()

    async def _set_up(self) -> None:
        for model_id, scheme in self._schemes.items():
            model = self.get_model(model_id)
            scheme.init_on_receiver(model_id=model_id, model=model, worker_idx=self._spec.index)
            self._stack.push_async_callback(scheme.aclose)
        await asyncio.gather(*(scheme.connect() for scheme in self._schemes.values()))
        for scheme in self._schemes.values():
            await self._stack.enter_async_context(scheme.receiving())
        config, policy = self._config, None
        if self.policy is not None:
            sync = config.devices.syncs
            policy = adapt_policy(self.policy, config.policy, self._devices, self._envs[0], sync=sync)
        version = self._version if config.policy.track_policy_version else None
        first, stride = self._spec.first_id, self._spec.stride
        limited = config.batch.step_limit or config.batch.compact_obs
        direct = len(self._envs) == 1 and not limited
        exploring = Acting(config.policy.exploration_type)
        self._rollouts = [
            Rollout(number, env, policy, exploring, config.batch, first + number, stride, version, direct)
            for number, env in enumerate(self._envs)
        ]

    def get_model(self, model_id: str) -> Any:
        """Return this worker's model with this id. AttributeError: there is none."""
        return self.policy if model_id == POLICY else resolve_model(self, model_id)

    def _version(self) -> int:
        return self._extra_updates + max([scheme.version for scheme in self._policy_schemes], default=0)

    async def _receive_commands(self) -> None:
        while True:
            match await self._pipe.receive():
                case Collect() as request:
                    self._buffers.release(request.returned)
                    self._partial_batches.append(PartialBatch(request, self._buffers, self._width))
                    self._batch_requested.set()
                case EndEarly():
                    for batch in self._partial_batches:
                        batch.end_early()
                    self._deliver_complete()
                case Call() as call:
                    self._pipe.send(await self._call_method(call))

    async def _call_method(self, call: Call) -> Answer:
        try:
            arguments = call.arguments.load(f"the arguments of {call.method}()")
            value = Payload(await getattr(self, call.method)(*arguments))
            value.pickled()  # a value that cannot be pickled is an error of this call
        except Exception as exc:  # noqa: BLE001 - sent to the collector
            return Answer(call.number, error=ErrorReport.of(exc))
        return Answer(call.number, value)

    async def _roll_out(self, rollout: Rollout) -> None:
        turns = Turns(own_loop=self._spec.own_loop, each_frame=len(self._rollouts) > 1)
        turn = turns.begin()
        while True:
            batch = next((batch for batch in self._partial_batches if batch.has_room), None)
            if batch is None:
                self._batch_requested.clear()
                await self._batch_requested.wait()
                turn = turns.begin()
                continue
            if not batch.begun:
                batch.begun = True
                if self._spec.processor is not None:
                    move_to(self._spec.processor)
                if self._before_batch is not None:
                    self._before_batch()
            await rollout.collect(batch, turn)
            if self._deliver_complete():
                turn.delivered()
            await self._pipe.drain()
            if turn.is_due():  # updates and commands are handled between two frames
                version = self._version()
                await turns.give()
                turn = turns.begin()
                if version != self._version():
                    yield_processor()

    def _deliver_complete(self) -> bool:
        """Deliver the batches that are complete. Return whether there was one."""
        # In the order of the requests: a rollout may complete the next batch while another one still has a
        # frame of this batch in progress.
        delivered = False
        while self._partial_batches and self._partial_batches[0].complete:
            self._deliver(self._partial_batches.pop(0))
            delivered = True
        return delivered

    def _deliver(self, batch: PartialBatch) -> None:
        truncate = self._envs[0].truncated if self._config.batch.set_truncated else ()
        places = batch.close(truncate=[key for pair in truncate for key in pair])
        order = places if len(self._rollouts) > 1 else None
        number, buffer, steps = batch.request.number, batch.buffer, batch.steps
        continued = Continued(
            batch.lengths, [number for each in self._rollouts for number in each.take_cut()]
        )
        self._frames += steps * self._width
        self._batches += 1
        if self._profiler is not None:
            self._profiler.batch_ended()
        frames, data = self._buffers[buffer], None
        if self._after_batch is not None:
            data = frames.read(steps, self._shape, order)
            self._after_batch(data)
        elif not self._shared:
            usual = order is None and isinstance(frames, BatchBuffer)
            data = frames.part(steps, self._shape).data if usual else frames.read(steps, self._shape, order)
        if self._shared:
            if data is not None and order is not None:  # copies, in order of time
                frames.write_back(data, order)
            self._pipe.send(Batch(number, steps, buffer, order, continued=continued))
            return
        assert data is not None
        self._buffers.release([buffer])
        data = data.clone() if order is None else data
        self._pipe.send(Batch(number, steps, buffer, data=data, continued=continued))

    # -- what the collector calls ---------------------------------------------------------------------

    async def set_seed(self, seed: int) -> None:
        """Seed the random number generators and the environments, and begin new episodes. The first
        environment gets ``seed``, the next one ``seed + 1``, and so on; each of several environments that
        step together counts as one."""
        torch.manual_seed(seed)
        np.random.seed(seed % 2**32)
        random.seed(seed)
        for number, rollout in enumerate(self._rollouts):
            await rollout.reset(seed + number * self._width)

    async def reset(self) -> None:
        """Begin new episodes."""
        for rollout in self._rollouts:
            await rollout.reset()

    async def set_extra_updates(self, updates: int) -> None:
        """Set how many updates of the policy no scheme has counted."""
        self._extra_updates = updates

    async def state(self) -> dict[str, Any]:
        """Return the state of all rollouts and of the random number generators, and ``env_state_dict``, which
        torchrl's environments have."""
        env = self.env.state_dict() if isinstance(self.env, nn.Module) else {}
        return {
            "env_state_dict": copy.deepcopy(env),
            "frames": self._frames,
            "iter": self._batches - 1,
            "rollouts": [await rollout.state() for rollout in self._rollouts],
            "torch": torch.get_rng_state(),
            "numpy": np.random.get_state(),
            "random": random.getstate(),
        }

    async def load_state(self, state: Mapping[str, Any], next_traj_id: int) -> list[str]:
        """Restore a state of :meth:`state`, of the same number of environments, or that of torchrl's worker,
        which has no environment: new episodes begin, and ``next_traj_id`` is the lowest number of the first
        one. Returns what of the state could not be restored."""
        replaced: list[Env | None] = []
        rollouts = state.get("rollouts")
        pickled = rollouts is not None and rollouts[0]["env"] is not None
        unused = [] if pickled else load_env_state(self.env, state.get("env_state_dict"))
        if rollouts is None:
            for rollout in self._rollouts:
                await rollout.restart(next_traj_id)
        else:
            pairs = zip(self._rollouts, rollouts, strict=True)
            replaced = [await rollout.load_state(saved) for rollout, saved in pairs]
            torch.set_rng_state(state["torch"])
            np.random.set_state(state["numpy"])
            random.setstate(state["random"])
        self.env = self._envs[0].env
        self._frames, self._batches = state["frames"], state["iter"] + 1
        for env in replaced:
            if env is not None:
                await self._close_replaced(env)
        return unused

    async def _close_replaced(self, env: Env) -> None:
        """Close an environment that a loaded state has replaced; one that was given, at this worker's end."""
        if any(env.env is each for each in self._given):
            self._stack.push_async_callback(self._close_env, env)
            return
        try:
            await env.close()
        except Exception as exc:  # noqa: BLE001 - the state is restored
            logger.warning("load_state_dict: close() of the replaced environment raised %r", exc)

    async def keep_environments(self) -> None:
        """Do not close the environments when this worker ends."""
        self._closes_envs = False

    async def set_profile(self, config: ProfileConfig | None) -> None:
        """Profile the next batches; None: end the profile."""
        self._end_profile()
        self._profiler = None if config is None else BatchProfiler(config, self._spec.index)

    def _end_profile(self) -> None:
        if self._profiler is not None:
            self._profiler.stop()

    async def set_hook(self, name: str, hook: Any) -> None:
        """Replace ``pre_collect_hook`` or ``post_collect_hook``."""
        if name == "pre_collect_hook":
            self._before_batch = hook
        else:
            self._after_batch = hook

    async def stats(self) -> dict[str, int]:
        """Return how many frames and batches this worker has delivered, and the version that acts."""
        frames = self._config.batch.frames_of(self._spec.index, self._spec.parts)
        found = {"frames": self._frames, "batches": self._batches, "requested_frames_per_batch": frames}
        tracked = self._config.policy.track_policy_version
        return found | ({"policy_version": self.policy_version} if tracked else {})

    @property
    def policy_version(self) -> int:
        """The version that acts."""
        return self._version()

    @property
    def worker_idx(self) -> int:
        """This worker's index."""
        return self._spec.index

    async def get_attribute(self, what: str, name: str) -> Any:
        """Return an attribute of the environment (``what="env"``), of the policy (``"policy"``) or of this
        worker (``""``). Dots in ``name`` go to nested attributes."""
        found = getattr(self, what) if what else self
        if found is None:
            raise NotInitializedError("this collector has no policy: its actions are random")
        return resolve_model(found, name)

    async def execute(self, path: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Call a method of this worker, or of what it has, by its path."""
        return await call_by_path(self, path, args, kwargs)
