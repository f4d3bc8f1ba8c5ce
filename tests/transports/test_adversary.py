"""Trainer, relay and workers as a state machine, with peers that know the token and keep to no rule.

A step is one thing that happens: a version is published, a worker comes, goes or loses its link, the trainer
is started again, an adversary says something. At rest every good worker runs on the newest version, none has
gone back without saying so, and nothing has grown.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import tempfile
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any, TypeVar

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from aiosync import (
    AiosyncError,
    LayoutMismatchError,
    RemoteApplyError,
    SyncEvent,
    TCPWeightSyncScheme,
    WeightRelay,
    WorkerLostError,
)
from aiosync.protocol import frames as f
from aiosync.protocol import framing
from aiosync.protocol.receiver_session import ReceiverSession
from tests.kit.clock import PATIENCE, eventually, within
from tests.kit.local import LocalWorker
from tests.kit.models import Uniform, fill, value_of
from tests.kit.raw_peer import RawWorker, hello
from tests.kit.seams import registry_of
from tests.kit.strategies import nacks

T = TypeVar("T")

STEPS = int(os.environ.get("AIOSYNC_TEST_STEPS", "200000"))
"""Of the soak."""

TOKEN = "a token of the tests"
MOST = 3
"""Good workers at the trainer, and at the relay; and adversaries."""

number = st.integers(-1, 12)
text = st.text(max_size=30)
said = st.one_of(
    st.builds(f.Fetch, have=number, maps=st.booleans()),
    st.builds(f.Staged, round=number, copied=st.booleans()),
    st.builds(
        f.Ack,
        round=number,
        version=number,
        seconds=st.dictionaries(st.sampled_from(["stage", "commit", "x"]), st.floats(), max_size=2),
        fetch=st.none() | st.builds(f.Fetch),
    ),
    nacks(number, text),
    st.builds(f.Bye, reason=text, dropped=st.booleans(), replaced=st.booleans()),
    st.builds(hello, worker=number),
    st.just(f.Join()),
    st.builds(f.Proof, proof=st.binary(max_size=32)),
    st.builds(f.Notify, round=number),
    st.builds(f.Abort, joint=text),
)


class Good(LocalWorker):
    """A worker that keeps to the rules, and notes where its versions go back unsaid."""

    def __init__(self, address: str) -> None:
        options: dict[str, Any] = {"on_sender_close": "wait", "reconnect_for": 2 * PATIENCE}
        scheme = TCPWeightSyncScheme(address, token=TOKEN, timeout=PATIENCE, **options)
        super().__init__(scheme, 0, Uniform(-1.0), {})
        self.init(worker_idx=None)
        self.address = address
        self.newest = -1
        self.wrong: list[SyncEvent] = []
        self.events: list[str] = []
        scheme.on_event(self._note)

    def _note(self, event: SyncEvent) -> None:
        self.events.append(f"{event.kind} {event.version} {event.message}")
        if event.kind == "followed":
            self.newest = -1
        elif event.kind == "committed":
            if event.version <= self.newest:
                self.wrong.append(event)
            self.newest = event.version


class Network(RuleBasedStateMachine):
    """A trainer, a relay below it, workers at both, and adversaries at both."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.folder = tempfile.mkdtemp(prefix="aiosync-test-")
        self.value = 0.0
        self.model = Uniform()
        self.workers: list[Good] = []
        self.adversaries: list[RawWorker] = []
        self.run(self._start())

    def run(self, what: Coroutine[Any, Any, T]) -> T:
        """One step, and what follows from it at once."""

        async def bounded() -> T:
            result = await within(what, 2 * PATIENCE)
            await asyncio.sleep(0)
            return result

        return self.loop.run_until_complete(bounded())

    async def _start(self) -> None:
        self.trainer = await self._new_trainer(0)
        self.above = self._scheme("trainer", on_sender_close="wait", reconnect_for=2 * PATIENCE)
        self.below = self._scheme("relay", reconnect_for=0.0)
        self.relay = WeightRelay(self.above, self.below, model_id="policy")
        await self.relay.connect()

    def _scheme(self, name: str, **options: Any) -> TCPWeightSyncScheme:
        given = {"timeout": PATIENCE, "on_failure": "drop", **options}
        return TCPWeightSyncScheme(f"unix://{self.folder}/{name}", token=TOKEN, **given)

    async def _new_trainer(self, first: int) -> TCPWeightSyncScheme:
        scheme = self._scheme("trainer", min_workers=0, first_version=first)
        scheme.init_on_sender(model_id="policy", model=self.model)
        await scheme.connect()
        return scheme

    def _new_value(self) -> None:
        self.value += 1
        fill(self.model, self.value)

    # -- the trainer -------------------------------------------------------------------------------

    @rule()
    def publish(self) -> None:
        self._new_value()
        # Of an adversary, or of the relay because of an adversary that it had.
        with suppress(RemoteApplyError, LayoutMismatchError):
            self.run(self.trainer.send(wait=False))

    @rule(forgets=st.booleans())
    def restart(self, forgets: bool) -> None:
        first = 0 if forgets else self.trainer.version + 1
        self.run(self.trainer.aclose())
        self._new_value()
        self.trainer = self.run(self._new_trainer(first))

    @rule(which=st.integers(0, 20))
    def cut_one_of_the_trainers(self, which: int) -> None:
        self._cut(list(self.trainer.sender_transports.values()), which)

    def _cut(self, transports: list[Any], which: int) -> None:
        if transports:
            transports[which % len(transports)].abort()

    # -- good workers ------------------------------------------------------------------------------

    @precondition(lambda self: len(self.workers) < 2 * MOST)
    @rule(at_relay=st.booleans())
    def join(self, at_relay: bool) -> None:
        worker = Good(self.below.address if at_relay else self.trainer.address)
        self.run(self._join(worker))

    async def _join(self, worker: Good) -> None:
        try:
            await worker.connect()
        except WorkerLostError:  # the link was cut, or the relay had just turned to another trainer
            await worker.close()
            return
        await worker.serve()
        self.workers.append(worker)

    @precondition(lambda self: self.workers)
    @rule(which=st.integers(0, 20))
    def leave(self, which: int) -> None:
        self.run(self.workers.pop(which % len(self.workers)).close())

    @precondition(lambda self: self.workers)
    @rule(which=st.integers(0, 20))
    def cut(self, which: int) -> None:
        transport: Any = self.workers[which % len(self.workers)].scheme.receiver_transport
        transport.abort()

    # -- adversaries -------------------------------------------------------------------------------

    @precondition(lambda self: len(self.adversaries) < MOST)
    @rule(at_relay=st.booleans(), index=st.integers(-1, 4), joins=st.booleans())
    def intrude(self, at_relay: bool, index: int, joins: bool) -> None:
        self.run(self._intrude(self.below if at_relay else self.trainer, index, joins))

    async def _intrude(self, scheme: TCPWeightSyncScheme, index: int, joins: bool) -> None:
        with suppress(AiosyncError, EOFError, OSError):
            peer = await RawWorker.dial(scheme)
            self.adversaries.append(peer)
            if joins:
                peer.session = ReceiverSession(scheme._token, index, model_id="policy")
                while not isinstance(await peer.step(), f.Welcome):
                    pass

    @precondition(lambda self: self.adversaries)
    @rule(which=st.integers(0, 20), frames=st.lists(said, min_size=1, max_size=4))
    def say(self, which: int, frames: list[f.Frame]) -> None:
        self.run(self._write(which, b"".join(map(framing.encode, frames))))

    @precondition(lambda self: self.adversaries)
    @rule(which=st.integers(0, 20), data=st.binary(max_size=60), times=st.integers(1, 200))
    def babble(self, which: int, data: bytes, times: int) -> None:
        self.run(self._write(which, data * times))

    @precondition(lambda self: self.adversaries)
    @rule(which=st.integers(0, 20), times=st.integers(1, 500))
    def flood(self, which: int, times: int) -> None:
        self.run(self._write(which, framing.encode(f.Fetch()) * times))

    async def _write(self, which: int, data: bytes) -> None:
        peer = self.adversaries[which % len(self.adversaries)]
        if not peer.writer.transport.is_closing():
            peer.writer.write(data)
        await asyncio.sleep(0.001)

    @precondition(lambda self: self.adversaries)
    @rule(which=st.integers(0, 20))
    def withdraw(self, which: int) -> None:
        self.run(self.adversaries.pop(which % len(self.adversaries)).close())

    # -- at rest -----------------------------------------------------------------------------------

    @precondition(lambda self: self.workers)
    @rule()
    def rest(self) -> None:
        self.publish()
        self.run(self._settle())

    async def _settle(self) -> None:
        def settled() -> bool:
            return all(value_of(worker.model) == self.value for worker in self.workers)

        try:
            await eventually(settled, f"everybody has {self.value}", PATIENCE)
        except AssertionError as exc:
            for worker in self.workers:
                exc.add_note(f"{value_of(worker.model)} at {worker.address}: {worker.events[-8:]}")
            exc.add_note(f"relay {self.relay.version} {self.relay.ended} {self.relay.workers}")
            exc.add_note(f"trainer {self.trainer.version} {self.trainer.workers}")
            raise
        for worker in self.workers:
            assert worker.scheme.ended is None
            assert worker.wrong == [], worker.events
        registry = registry_of(self.trainer)
        most = 2 * MOST + len(self.adversaries) + 1
        assert len(registry.connections) <= most
        assert len(registry.records) <= most
        assert len(registry.awaited.tracked) <= most
        assert len(asyncio.all_tasks()) <= 12 * most

    def teardown(self) -> None:
        try:
            if self.workers:
                self.rest()
        finally:
            self.run(self._end())
            self.loop.close()
            shutil.rmtree(self.folder, ignore_errors=True)

    async def _end(self) -> None:
        for peer in self.adversaries:
            await peer.close()
        for worker in self.workers:
            await worker.close()
        await self.relay.aclose()
        await self.trainer.aclose()


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, "aiosync")
    caplog.set_level(logging.CRITICAL, "asyncio")


def _run(examples: int, steps: int, *, derandomize: bool) -> None:
    Network.TestCase.settings = settings(
        max_examples=examples,
        stateful_step_count=steps,
        derandomize=derandomize,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    Network.TestCase("runTest").runTest()


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # of the adversaries' own connections
def test_some_steps() -> None:
    _run(8, 50, derandomize=True)


@pytest.mark.soak
@pytest.mark.timeout(7200)
@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_many_steps() -> None:
    _run(STEPS // 200, 200, derandomize=False)
