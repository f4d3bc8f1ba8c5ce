"""Blocking twins inside one process: what they share with the asyncio schemes, and where they differ."""

from __future__ import annotations

import copy
import inspect
import pickle
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import pytest
import torch

import aiosync
from aiosync import sync
from aiosync.receiver import give_way
from aiosync.receiver.commit_gate import CommitGate, submit
from aiosync.receiver.commit_wait import CommitWait
from aiosync.receiver.update_handler import UpdateHandler
from aiosync.sync import collectors as sync_collectors
from aiosync.sync._portal import portal

TIMEOUT = 20.0
KINDS = [
    sync.MemoryWeightSyncScheme,
    sync.SharedMemWeightSyncScheme,
    sync.MultiProcessWeightSyncScheme,
]


class Pair:
    """A sender and one receiver in this process."""

    def __init__(self, kind: type[sync.WeightSyncScheme], size: int = 3) -> None:
        self.model = torch.nn.Linear(size, 2)
        self.mirror = torch.nn.Linear(size, 2)
        self.sender = kind(timeout=TIMEOUT)
        self.sender.init_on_sender(model_id="policy", model=self.model, num_workers=1)
        self.receiver = copy.copy(self.sender)
        self.receiver.init_on_receiver(model_id="policy", model=self.mirror, worker_idx=0)

    def __enter__(self) -> Pair:
        other = threading.Thread(target=self.receiver.connect)
        other.start()
        self.sender.connect()
        other.join()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.receiver.close()
        self.sender.close()


@pytest.mark.parametrize("kind", KINDS)
def test_send_and_receive(kind: type[sync.WeightSyncScheme]) -> None:
    with Pair(kind) as pair:
        assert torch.equal(pair.mirror.weight, pair.model.weight)
        torch.nn.init.constant_(pair.model.weight, 3.0)
        assert pair.sender.send().version == 1
        assert torch.equal(pair.mirror.weight, pair.model.weight)
        pair.sender.send_async({"weight": torch.ones(2, 3), "bias": torch.ones(2)})
        assert pair.sender.wait_async().ok
        assert (pair.mirror.bias == 1).all()
        with pair.receiver.pinned() as version, pair.receiver.pinned() as again:
            assert version == again == 2
        weights: Any = pair.receiver.receive(timeout=0)
        assert (weights["bias"] == 1).all()
        assert pair.receiver.receive(timeout=0) is None
        with pair.receiver.receiving():
            assert pair.receiver.version == 2


@pytest.mark.parametrize(
    "make",
    [
        lambda: aiosync.RPCWeightSyncScheme(reconnect_for=-1.0),
        lambda: aiosync.RayWeightSyncScheme(reconnect_for=float("nan")),
        lambda: aiosync.DistributedWeightSyncScheme(reconnect_for="x"),  # type: ignore[arg-type]
    ],
)
def test_seconds_that_are_none(make: Callable[[], object]) -> None:
    with pytest.raises(aiosync.InvalidArgumentError, match="reconnect_for: expected seconds >= 0"):
        make()


def test_the_docstring_of_a_twin_has_the_arguments() -> None:
    for kind in (sync.TCPWeightSyncScheme, sync.WeightSyncScheme, sync_collectors.MultiCollector):
        found = inspect.getdoc(kind) or ""
        assert found.startswith("The blocking twin of")
        assert "Args:" in found

    class Own(sync.TCPWeightSyncScheme):
        """A user's own."""

    assert Own.__doc__ == "A user's own."


def test_entering_a_connected_scheme_leaves_it_connected() -> None:
    with Pair(sync.SharedMemWeightSyncScheme) as pair:
        for scheme in (pair.sender, pair.receiver):
            with pytest.raises(aiosync.AlreadyConnectedError), scheme:
                raise AssertionError("it was entered")
        assert pair.sender.send().ok


def test_a_pinned_body_closes_its_own_receiver(caplog: pytest.LogCaptureFixture) -> None:
    """A large model, which views the sender's memory: nothing but the body itself reads it there."""
    with Pair(sync.SharedMemWeightSyncScheme, size=600) as pair:
        lost: list[Any] = []
        pair.sender.on_event(lambda event: lost.append(event) if event.kind == "lost" else None)
        with pair.receiver.pinned(), pair.receiver.pinned():
            pair.receiver.close()
        assert "although its model is in use" not in caplog.text
        pair.sender.close()
        assert [event.message for event in lost] in ([], ["the worker has closed"])


@pytest.mark.parametrize("kind", KINDS)
def test_pinned_holds_commits_up(kind: type[sync.WeightSyncScheme]) -> None:
    with Pair(kind) as pair:
        with pair.receiver.pinned() as version:
            with pytest.raises(aiosync.SyncTimeoutError) as caught:
                pair.sender.send(timeout=0.2)
            assert caught.value.phase == "commit"
            assert pair.receiver.version == version == 0
        assert pair.sender.wait_async().workers[0].version == 1
        assert pair.receiver.version == 1


@pytest.mark.parametrize("rebound", [False, True])
def test_a_commit_while_weights_are_applied_by_hand(rebound: bool) -> None:
    """It points the model at the sender's memory, which must not be written."""
    with Pair(sync.SharedMemWeightSyncScheme) as pair:
        if rebound:  # this model views no version of the sender's yet
            pair.receiver.rebind(model=torch.nn.Linear(3, 2))
        by_hand = {"weight": torch.full((2, 3), 8.0), "bias": torch.full((2,), 8.0)}
        sent = {name: value - 3 for name, value in by_hand.items()}

        class During(aiosync.WeightStrategy):
            def apply_weights(self, *args: Any, **kwargs: Any) -> None:
                pair.sender.send_async(sent)
                until = time.monotonic() + 0.5
                while pair.receiver.version < 1 and time.monotonic() < until:
                    time.sleep(0.001)
                super().apply_weights(*args, **kwargs)

        pair.receiver.apply_weights(by_hand)  # the model has memory of its own from here on
        pair.receiver.asyncio_scheme.strategy = During()
        pair.receiver.apply_weights(by_hand)
        assert pair.sender.wait_async().ok
        weights: Any = pair.sender.weights
        assert all(torch.equal(weights[name], value) for name, value in sent.items())


@pytest.mark.parametrize("fails", [True, False])
def test_a_thread_that_commits_at_the_end_of_a_pinned_body_gives_way(
    fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    monkeypatch.setattr(give_way, "yield_processor", lambda: events.append("yielded"))
    with Pair(sync.SharedMemWeightSyncScheme) as pair:
        gate = pair.receiver._async.get_receiver().model_applier.gate
        with suppress(ZeroDivisionError), pair.receiver.pinned():
            submit([gate], lambda: events.append("committed"))
            if fails:
                raise ZeroDivisionError
        assert events == ["committed", "yielded"]


def test_an_interrupt_at_the_end_of_a_pinned_body_leaves_no_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    leave = CommitGate.leave

    def interrupted(gate: CommitGate, ticket: object) -> bool:
        monkeypatch.setattr(CommitGate, "leave", leave)
        raise KeyboardInterrupt

    with Pair(sync.SharedMemWeightSyncScheme) as pair:
        gate = pair.receiver._async.get_receiver().model_applier.gate
        monkeypatch.setattr(CommitGate, "leave", interrupted)
        with pytest.raises(KeyboardInterrupt), pair.receiver.pinned():
            assert gate.inside
        assert not gate.inside
        assert pair.sender.send().ok


def test_the_pass_that_holds_an_update_up_ends_without_a_turn_of_the_receiver(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    inside, waited = threading.Event(), threading.Event()
    commit_soon, advance = CommitGate.commit_soon, UpdateHandler.advance
    advanced: list[object] = []

    def wait(gate: CommitGate, commit: Callable[[], None], seconds: float) -> bool:
        waited.set()
        return commit_soon(gate, commit, TIMEOUT)

    async def advancing(handler: UpdateHandler) -> Exception | None:
        advanced.append(handler)
        return await advance(handler)

    def forward(module: torch.nn.Module, given: object) -> None:
        inside.set()
        assert waited.wait(TIMEOUT)

    with Pair(sync.SharedMemWeightSyncScheme) as pair:
        pair.sender.send()
        gate = pair.receiver._async.get_receiver().model_applier.gate
        monkeypatch.setattr(CommitGate, "commit_soon", wait)
        monkeypatch.setattr(UpdateHandler, "advance", advancing)
        pair.mirror.register_forward_pre_hook(forward)
        acting = threading.Thread(target=lambda: pair.mirror(torch.ones(3)))
        acting.start()
        assert inside.wait(TIMEOUT)
        assert pair.sender.send().ok
        acting.join()
        assert pair.receiver.version == 2
        assert not advanced
        assert gate in CommitGate.blocking
    assert gate not in CommitGate.blocking  # a closed receiver keeps no other one from blocking


def test_a_commit_that_has_run_counts_although_an_interrupt_kept_it_from_being_noted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    inside, go_on = threading.Event(), threading.Event()

    def block(wait: CommitWait, commit: Callable[[], None]) -> None:
        commit()

    def forward(module: torch.nn.Module, given: object) -> None:
        inside.set()
        assert go_on.wait(TIMEOUT)

    with Pair(sync.MultiProcessWeightSyncScheme) as pair, ThreadPoolExecutor(1) as acting:
        pair.sender.send()
        hook = pair.mirror.register_forward_pre_hook(forward)
        acted = acting.submit(pair.mirror, torch.ones(3))
        assert inside.wait(TIMEOUT)
        monkeypatch.setattr(CommitWait, "block", block)
        assert pair.sender.send().ok
        monkeypatch.undo()
        go_on.set()
        acted.result()
        hook.remove()
        before = pair.mirror.weight.data_ptr()
        assert pair.sender.send().ok
        assert pair.mirror.weight.data_ptr() != before  # the next version was not written over the one in use


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("fails", [True, False])
def test_workers_are_asked_to_yield_as_long_as_a_send_is_in_progress(
    kind: type[sync.WeightSyncScheme], fails: bool
) -> None:
    inside, go_on = threading.Event(), threading.Event()

    with Pair(kind) as pair:
        pair.sender.send()
        gate = pair.receiver._async.get_receiver().model_applier.gate

        def is_asked() -> bool:
            return bool(gate.yield_request.byte[0])

        def forward(module: torch.nn.Module, given: object) -> None:
            inside.set()
            until = time.monotonic() + TIMEOUT
            while not is_asked() and time.monotonic() < until:
                time.sleep(0.001)
            assert is_asked()
            assert not fails or go_on.wait(TIMEOUT)

        assert not is_asked()
        pair.mirror.register_forward_pre_hook(forward)
        with ThreadPoolExecutor(1) as acting:
            acted = acting.submit(pair.mirror, torch.ones(3))
            assert inside.wait(TIMEOUT)
            try:
                if fails:
                    with pytest.raises(aiosync.SyncTimeoutError):
                        pair.sender.send(timeout=0.2)
                else:
                    pair.sender.send()
                assert not is_asked()
            finally:
                go_on.set()
            acted.result()


def test_joint_update() -> None:
    with Pair(sync.SharedMemWeightSyncScheme) as a, Pair(sync.SharedMemWeightSyncScheme) as b:
        torch.nn.init.constant_(a.model.weight, 1.0)
        torch.nn.init.constant_(b.model.weight, 2.0)
        with sync.atomic(a.sender, b.sender) as tx:
            tx.send(a.sender)
        assert tx.reports[a.sender].version == tx.reports[b.sender].version == 1
        assert (a.mirror.weight == 1).all() and (b.mirror.weight == 2).all()


def test_a_call_from_the_loop_that_would_serve_it_raises() -> None:
    with Pair(sync.MemoryWeightSyncScheme) as pair:
        caught: list[BaseException] = []

        def hook(event: aiosync.SyncEvent) -> None:
            try:
                pair.sender.send()
            except aiosync.BlockingCallError as exc:
                caught.append(exc)

        stop = pair.sender.on_event(hook)
        pair.sender.send()
        stop()
        assert caught and "another thread" in str(caught[0])
        assert pair.sender.send().ok


def test_an_interrupted_send_leaves_the_scheme_usable(monkeypatch: pytest.MonkeyPatch) -> None:
    with Pair(sync.SharedMemWeightSyncScheme) as pair:
        with pair.receiver.pinned():
            from aiosync.sync import _portal

            wait = _portal._Call.wait

            def interrupted(call: _portal._Call[object]) -> None:
                monkeypatch.setattr(_portal._Call, "wait", wait)
                raise KeyboardInterrupt

            monkeypatch.setattr(_portal._Call, "wait", interrupted)
            with pytest.raises(KeyboardInterrupt):
                pair.sender.send()
        torch.nn.init.constant_(pair.model.weight, 9.0)
        assert pair.sender.send().ok
        assert (pair.mirror.weight == 9).all()


def test_a_twin_is_pickled_as_a_recipe() -> None:
    scheme = sync.SharedMemWeightSyncScheme(timeout=7)
    scheme.init_on_sender(model_id="policy", model=torch.nn.Linear(3, 2), num_workers=1)
    again = pickle.loads(pickle.dumps(scheme))
    assert type(again) is type(scheme)
    assert not again.initialized_on_sender
    assert again.timeout == 7
    with pytest.raises(aiosync.NotConnectedError, match="init_on_sender"):
        again.send()
    scheme.close()


def test_from_backend_makes_twins() -> None:
    assert type(sync.WeightSyncScheme.from_backend("shared")) is sync.SharedMemWeightSyncScheme
    assert type(sync.WeightSyncScheme.from_backend("thread")) is sync.SharedMemWeightSyncScheme
    assert type(sync.WeightSyncScheme.from_backend("none")) is sync.NoWeightSyncScheme
    with pytest.raises(aiosync.InvalidArgumentError, match="shared"):
        sync.WeightSyncScheme.from_backend("carrier pigeon")


def test_no_weight_sync() -> None:
    scheme = sync.NoWeightSyncScheme()
    scheme.init_on_receiver(model_id="policy", worker_idx=0)
    with scheme, scheme.pinned() as version, scheme.receiving():
        assert version == 0
        assert scheme.receive(timeout=1) is None


@pytest.mark.parametrize("name", sorted(set(sync.__all__) - {"JointUpdate", "atomic"}))
def test_signatures_are_the_asyncio_schemes_own(name: str) -> None:
    twin, original = getattr(sync, name), getattr(aiosync, name)
    for member, function in inspect.getmembers(original, inspect.isfunction):
        if member.startswith("_") or member in ("aclose", "shutdown", "create_sender", "create_receiver"):
            continue
        ours = inspect.signature(getattr(twin, member)).parameters
        assert list(ours) == list(inspect.signature(function).parameters), member
    made = inspect.signature(twin.__init__).parameters
    assert list(made) == list(inspect.signature(original.__init__).parameters)


def test_the_portal_is_one_thread_and_outlives_schemes() -> None:
    first = portal()
    with Pair(sync.MemoryWeightSyncScheme):
        assert portal() is first
    names = [thread.name for thread in threading.enumerate()]
    assert names.count("aiosync-portal") == 1


def test_a_process_that_closes_nothing_ends_all_the_same() -> None:
    script = (
        "import copy, threading, torch\n"
        "from aiosync import sync\n"
        "s = sync.SharedMemWeightSyncScheme(timeout=20)\n"
        "s.init_on_sender(model_id='p', model=torch.nn.Linear(2, 2), num_workers=1)\n"
        "r = copy.copy(s)\n"
        "r.init_on_receiver(model_id='p', model=torch.nn.Linear(2, 2), worker_idx=0)\n"
        "t = threading.Thread(target=r.connect)\n"
        "t.start(); s.connect(); t.join(); s.send()\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", script], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
