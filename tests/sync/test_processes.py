"""Blocking twins across processes: start methods, errors, siblings, torn forward passes."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import pytest
import torch

import aiosync
from aiosync import sync
from tests.sync.workers import Fragile, Layers, hold, run_forwards

TIMEOUT = 60.0
Target = Callable[[sync.WeightSyncScheme, int, "Connection[Any, Any]"], None]


@contextmanager
def workers(
    scheme: sync.WeightSyncScheme, method: str, count: int, target: Target
) -> Iterator[list[tuple[BaseProcess, Connection[Any, Any]]]]:
    """Start worker processes; kill what is left of them."""
    ctx: Any = multiprocessing.get_context(method)
    if method == "forkserver":
        ctx.set_forkserver_preload(["torch", "tensordict", "aiosync.sync"])
    started = []
    try:
        for worker in range(count):
            ours, theirs = ctx.Pipe()
            process = ctx.Process(target=target, args=(scheme, worker, theirs))
            process.start()
            theirs.close()
            started.append((process, ours))
        yield started
    finally:
        for process, pipe in started:
            pipe.close()
            process.join(TIMEOUT)
            if process.is_alive():
                process.kill()
                process.join()


def answer(pipe: Connection[Any, Any], question: str = "") -> Any:
    """Ask a worker something, within the deadline."""
    if question:
        pipe.send(question)
    assert pipe.poll(TIMEOUT), "the worker did not answer"
    return pipe.recv()


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
@pytest.mark.parametrize(
    "kind", [sync.SharedMemWeightSyncScheme, sync.MultiProcessWeightSyncScheme], ids=["shared", "process"]
)
def test_a_twin_travels_by_every_start_method(kind: type[sync.WeightSyncScheme], method: str) -> None:
    model = Fragile(3, 2)
    scheme = kind(timeout=TIMEOUT)
    scheme.init_on_sender(model_id="policy", model=model, num_workers=2)
    with workers(scheme, method, 2, hold) as started:
        scheme.connect()
        for _, pipe in started:
            assert answer(pipe) == "connected"
        torch.nn.init.constant_(model.weight, 5.0)
        assert scheme.send().version == 1
        assert [answer(pipe, "look") for _, pipe in started] == [(1, 5.0), (1, 5.0)]

        # What a worker's model raises comes out of the blocking send, and nothing has changed there.
        broken = {**model.state_dict(), "_extra_state": {"refuse": torch.ones(())}}
        with pytest.raises(aiosync.RemoteApplyError, match="this layer is fragile") as caught:
            scheme.send(broken)
        assert caught.value.remote_type == "ValueError"
        assert answer(started[0][1], "look") == (1, 5.0)

        # One worker's copy closes; the other is updated all the same.
        assert answer(started[0][1], "close") == "closed"
        torch.nn.init.constant_(model.weight, 6.0)
        report = scheme.send(worker_ids=1)
        assert report.workers[1].status == "applied"
        version, weight = answer(started[1][1], "look")
        assert (version, weight) == (report.version, 6.0)
        assert answer(started[1][1], "close") == "closed"
        scheme.close()
    assert [process.exitcode for process, _ in started] == [0, 0]


@pytest.mark.parametrize(
    "kind", [sync.SharedMemWeightSyncScheme, sync.MultiProcessWeightSyncScheme], ids=["shared", "process"]
)
def test_no_forward_pass_in_the_main_thread_is_torn(kind: type[sync.WeightSyncScheme]) -> None:
    model = Layers()
    scheme = kind(timeout=TIMEOUT)
    scheme.init_on_sender(model_id="policy", model=model, num_workers=1)
    with workers(scheme, "forkserver", 1, run_forwards) as [(_, pipe)]:
        scheme.connect()
        assert answer(pipe) == "connected"
        version = 0
        while version < 2000 or not pipe.poll():  # until it has seen enough
            version += 1
            model.fill(float(version))
            scheme.send()
        assert answer(pipe) == "enough"
        torn = answer(pipe, "stop")
        scheme.close()
    assert torn == 0


def test_a_live_twin_in_a_forked_child_says_so() -> None:
    scheme = sync.SharedMemWeightSyncScheme(timeout=TIMEOUT)
    scheme.init_on_sender(model_id="policy", model=Fragile(3, 2), num_workers=1)
    with workers(scheme, "forkserver", 1, hold) as [(_, pipe)]:
        scheme.connect()
        assert answer(pipe) == "connected"
        ctx = multiprocessing.get_context("fork")
        ours, theirs = ctx.Pipe()
        child = ctx.Process(target=_send_in_child, args=(scheme, theirs))
        child.start()
        kind, text = answer(ours)
        child.join(TIMEOUT)
        assert kind == "ForkedEndpointError"
        assert "init_on_receiver" in text
        assert scheme.send().ok
        assert answer(pipe, "close") == "closed"
        scheme.close()


def _send_in_child(scheme: sync.WeightSyncScheme, pipe: Connection[Any, Any]) -> None:
    try:
        scheme.send()
    except aiosync.AiosyncError as exc:
        pipe.send((type(exc).__name__, str(exc)))
