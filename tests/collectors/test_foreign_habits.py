"""What environments do that is not in any protocol: children, event loops and errors of their own."""

from __future__ import annotations

import asyncio
import functools
import io
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import time
from typing import Any

import gymnasium as gym
import numpy as np
import psutil
import pytest
import torch
from tensordict import TensorDict

from aiosync import InvalidArgumentError, WorkerLostError
from tests.collectors.kit import ENVS, collecting, pid_of
from tests.collectors.worlds import Counting, make_policy
from tests.kit.clock import SCALE, within
from tests.kit.processes import ROOT


class _EndOfFile(Counting):
    def step(self, action: Any) -> Any:
        if self.count == 3:
            raise EOFError("the environment's own file has ended")
        return super().step(action)


class _NestedLoop(Counting):
    def step(self, action: Any) -> Any:
        asyncio.run(asyncio.sleep(0))
        return super().step(action)


class _Changing(gym.Env[Any, Any]):
    """Observes something else from the third step on."""

    def __init__(self, how: str) -> None:
        self.observation_space = gym.spaces.Dict({})
        self.action_space = gym.spaces.Discrete(2)
        self.how = how
        self.count = 0

    def _observation(self) -> Any:
        late = self.count >= 3
        found: dict[str, Any] = {"place": np.zeros(2, np.float32)}
        match self.how:
            case "new":
                found |= {"speed": np.zeros(1, np.float32)} if late else {}
            case "gone":
                found |= {} if late else {"speed": np.zeros(1, np.float32)}
            case "dtype":
                found |= {"speed": 0.5 if late else 1}
            case "shape":
                found |= {"speed": np.zeros(2 if late else 1, np.float32)}
        return found

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.count = 0
        return self._observation(), {}

    def step(self, action: Any) -> Any:
        self.count += 1
        return self._observation(), 0.0, False, False, {}


class _WithChild(Counting):
    """Starts a child process that outlives it unless something ends it."""

    def __init__(self, name: int = 0) -> None:
        super().__init__(name)
        context = multiprocessing.get_context("fork")
        self._child = context.Process(target=time.sleep, args=(3600,), daemon=True)
        self._child.start()
        self.observation_space = gym.spaces.Box(-np.inf, np.inf, (1,), np.float32)

    def _observation(self) -> Any:
        return np.array([self._child.pid], np.float64)

    def close(self) -> None:
        self._child.kill()
        self._child.join()


def _vector_env() -> Any:
    return gym.make_vec("CartPole-v1", num_envs=2, vectorization_mode="async")


async def test_an_environments_end_of_file_is_not_the_collectors_goodbye() -> None:
    async with collecting([_EndOfFile], make_policy()) as collector:
        with pytest.raises(EOFError, match="own file has ended") as caught:
            await within(anext(collector))
        assert "in step" in "".join(getattr(caught.value, "__notes__", [])) + str(caught.value.__cause__)


async def test_an_event_loop_in_a_step_is_explained() -> None:
    async with collecting([_NestedLoop], make_policy()) as collector:
        with pytest.raises(InvalidArgumentError, match="make them `async def`"):
            await within(anext(collector))


@pytest.mark.parametrize("how", ["new", "gone", "dtype", "shape"])
async def test_a_field_that_changes_is_named(how: str) -> None:
    async with collecting([functools.partial(_Changing, how)], None) as collector:
        with pytest.raises(InvalidArgumentError, match="speed"):
            await within(anext(collector))


async def test_environments_in_processes_of_their_own() -> None:
    async with collecting([_vector_env, _vector_env], None) as collector:
        batch = await within(anext(collector))
    assert batch["observation"].shape[-1] == 4


async def test_a_killed_worker_with_children_is_noticed() -> None:
    async with collecting([_WithChild, _WithChild], None, cat_results="stack") as collector:
        batch = await within(anext(collector))
        child = int(batch["observation"].flatten()[0])
        del batch
        pid = pid_of(collector, 0)
        assert pid is not None
        try:
            os.kill(pid, signal.SIGKILL)
            killed = time.monotonic()
            with pytest.raises(WorkerLostError, match="worker 0 lost"):
                for _ in range(100):
                    await within(anext(collector))
            assert time.monotonic() - killed < 1.0 * SCALE + 0.5
        finally:
            os.kill(child, signal.SIGKILL)


_TRAINER = """
import asyncio, sys
from tests.collectors.test_foreign_habits import stuck_env
from tests.collectors.kit import pids_of
from tests.collectors.worlds import Counting
from aiosync.collectors import MultiCollector

async def main():
    collector = MultiCollector([stuck_env], None, frames_per_batch=8, start_method="forkserver")
    await collector.__aenter__()
    print(*pids_of(collector), flush=True)
    {end}

if __name__ == "__main__":
    asyncio.run(main())
"""


class _Stuck(Counting):
    def step(self, action: Any) -> Any:
        time.sleep(3600)
        return super().step(action)


def stuck_env() -> Any:
    """An environment whose first step takes an hour."""
    return _Stuck()


@pytest.mark.parametrize("end", ["await asyncio.sleep(3600)", "sys.exit(0)"], ids=["kill -9", "exit"])
def test_workers_end_with_their_trainer(end: str) -> None:
    program = subprocess.Popen(
        [sys.executable, "-c", _TRAINER.format(end=end)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert program.stdout is not None
    pids = [int(pid) for pid in program.stdout.readline().split()]
    assert pids
    if "sleep" in end:
        program.kill()
    program.wait(60 * SCALE)
    program.stdout.close()
    _, alive = psutil.wait_procs([psutil.Process(p) for p in pids if psutil.pid_exists(p)], 20 * SCALE)
    assert not alive


async def test_a_batch_is_saved_and_pickled_at_its_own_size() -> None:
    for sync in (True, False):
        async with collecting(ENVS, make_policy(), sync=sync, frames_per_batch=40) as collector:
            batch = await within(anext(collector))
            nbytes = sum(t.numel() * t.element_size() for t in batch.values(True, True))
            for form in (batch, batch.to_dict()):
                file = io.BytesIO()
                torch.save(form, file)
                assert len(file.getvalue()) < 2 * nbytes + 20_000
            assert len(pickle.dumps(batch)) < 2 * nbytes + 20_000
            for tensor in batch.values(True, True):
                assert tensor.untyped_storage().nbytes() <= tensor.nbytes
            copied = TensorDict(batch.to_dict(), batch.batch_size).share_memory_()
            assert torch.equal(copied["observation"], batch["observation"])


async def test_a_running_normaliser_takes_what_is_sent() -> None:
    policy = Normalising()
    async with collecting(ENVS, policy, sync=True) as collector:
        for value in (0.0, 1000.0, 2000.0):
            with torch.no_grad():
                policy.mean.fill_(value)
            await collector.update_policy_weights_()
            await within(anext(collector))
            means = await collector.getattr_policy_all("mean")
            # Each step of the policy adds one, and there were some dozens of them.
            found = means if isinstance(means, list) else [means]
            assert all(value < float(mean.flatten()[0]) < value + 500 for mean in found)


class Normalising(torch.nn.Module):
    """Replaces its statistics in each forward pass."""

    mean: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 3)
        self.register_buffer("mean", torch.zeros(1))

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        self.mean = self.mean + 1
        return torch.as_tensor(self.linear(observation).argmax(-1))
