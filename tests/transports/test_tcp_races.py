"""What once went wrong over sockets: each test is one such case."""

from __future__ import annotations

import asyncio
import errno
import logging
from typing import Any

import pytest
import torch

from aiosync import (
    InvalidArgumentError,
    LayoutMismatchError,
    RemoteApplyError,
    SyncTimeoutError,
    TCPWeightSyncScheme,
    TLSConfig,
    WorkerLostError,
    atomic,
)
from aiosync.protocol import frames as f
from aiosync.protocol.receiver_session import ReceiverSession, ReceiverState
from aiosync.relay import forwarder as relay_intake
from aiosync.sender.connection import PATIENCE as STUCK_AFTER
from aiosync.weights import codec
from aiosync.weights.block_copy import BlockCopy
from tests.kit.certificates import certificates
from tests.kit.clock import BRIEF, PATIENCE, eventually, within
from tests.kit.models import Uniform, fill, value_of
from tests.kit.ports import free_port
from tests.kit.proxy import ChaosProxy
from tests.kit.raw_peer import drain
from tests.kit.relay import connect, relay_below, serve
from tests.kit.seams import binding_of, connections_of, lose_connection
from tests.kit.tcp import TOKEN, break_off, join, make_worker, sender_of

LARGE = 1 << 19


# -- who has which index ---------------------------------------------------------------------------


async def test_an_index_that_was_given_is_no_claim() -> None:
    model = Uniform()
    async with sender_of(model) as scheme, ChaosProxy(scheme.address) as proxy:
        first = make_worker(proxy.address)
        await join(scheme, first)
        proxy.hold.clear()
        proxy.cut()
        await eventually(lambda: not scheme.workers, "the cut is noticed")
        second = make_worker(scheme.address)
        await second.connect()
        await second.serve()
        assert second.scheme.worker_idx == 1  # the first one's is reserved
        proxy.hold.set()
        await eventually(lambda: len(scheme.workers) == 2, "both are there")
        lost = scheme.stats.lost
        for version in range(1, 4):
            fill(model, version)
            assert (await scheme.send()).ok
        assert scheme.stats.lost == lost
        for worker in (first, second):
            assert value_of(worker.model) == 3
            await worker.close()


async def test_two_workers_that_insist_on_one_index() -> None:
    async with sender_of(Uniform()) as scheme:
        first, second = (make_worker(scheme.address) for _ in range(2))
        for worker in (first, second):
            worker.init(worker_idx=0)
        await join(scheme, first)
        with pytest.raises(SyncTimeoutError, match="worker_idx given twice"):
            await second.connect(timeout=BRIEF)
        assert first.scheme.ended is None
        assert scheme.stats.lost == 0
        await first.close()
        await second.connect()  # the index is free
        await second.close()


# -- what is said ------------------------------------------------------------------------------------


@pytest.mark.parametrize("token", [None, "another token of the tests"])
async def test_a_token_that_differs_is_said_on_both_sides(
    token: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    async with sender_of(Uniform()) as scheme:
        connecting = asyncio.create_task(scheme.connect(timeout=2 * BRIEF))
        stranger = TCPWeightSyncScheme(scheme.address, token=token, timeout=PATIENCE)
        stranger.init_on_receiver(model_id="policy", model=Uniform())
        with pytest.raises(Exception, match="give both sides the same token="):
            await stranger.connect()
        with pytest.raises(SyncTimeoutError, match="does not know this scheme's token"):
            await connecting
        warnings = [r for r in caplog.records if r.levelno == logging.WARNING]
        assert len(warnings) == 1
        assert "token" in warnings[0].getMessage()


async def test_a_layout_that_does_not_fit_is_said_to_an_elastic_sender() -> None:
    async with sender_of(Uniform()) as scheme:
        connecting = asyncio.create_task(scheme.connect(timeout=2 * BRIEF))
        worker = make_worker(scheme.address, torch.nn.Linear(3, 4))
        with pytest.raises(LayoutMismatchError):
            await worker.connect()
        with pytest.raises(SyncTimeoutError, match="unexpected"):
            await connecting


async def test_a_worker_may_come_before_its_sender() -> None:
    address = f"tcp://127.0.0.1:{free_port()}"
    early = make_worker(address)
    coming = asyncio.create_task(early.connect())
    await asyncio.sleep(0)
    scheme = TCPWeightSyncScheme(address, token=TOKEN, timeout=PATIENCE)
    scheme.init_on_sender(model_id="policy", model=Uniform())
    await scheme.connect()
    await coming
    await early.close()
    await scheme.aclose()


async def test_nobody_at_the_address() -> None:
    worker = make_worker("tcp://127.0.0.1:1")
    with pytest.raises(SyncTimeoutError, match=r"cannot connect to tcp://127\.0\.0\.1:1: "):
        await worker.connect(timeout=BRIEF)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"token": 12345}, "expected str or bytes"),
        ({"tls": {"certfile": "x"}}, "expected a TLSConfig"),
        ({"max_connections": 0}, "max_connections"),
        ({"max_connections": "10"}, "max_connections"),
        ({"insecure": "no"}, "insecure"),
        ({"reconnect_for": True}, "reconnect_for"),
    ],
)
def test_options_that_are_none(options: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidArgumentError, match=words):
        TCPWeightSyncScheme(**options)


def test_a_cafile_is_all_that_a_worker_trusts() -> None:
    context = TLSConfig(cafile=certificates().config.cafile).for_worker()
    assert len(context.get_ca_certs()) == 1


# -- a listener without descriptors -------------------------------------------------------------------


async def test_no_descriptors_left(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    model = Uniform()
    async with sender_of(model) as scheme:
        worker = make_worker(scheme.address)
        await join(scheme, worker)
        listener: Any = scheme.shared_transport
        accept = listener._socket

        class Full:
            def accept(self) -> Any:
                raise OSError(errno.EMFILE, "Too many open files")

            def __getattr__(self, name: str) -> Any:
                return getattr(accept, name)

        with monkeypatch.context() as patch:
            patch.setattr(listener, "_socket", Full())
            late = make_worker(scheme.address)
            coming = asyncio.create_task(late.connect())
            await eventually(lambda: "Too many open files" in caplog.text, "it is said")
            for version in range(1, 20):
                fill(model, version)
                await scheme.send()
        await within(coming)
        assert caplog.text.count("Too many open files") <= 3
        for one in (worker, late):
            await one.close()


# -- versions and what is applied ---------------------------------------------------------------------


async def test_a_version_that_a_lost_worker_has_is_no_other_version_later() -> None:
    model = Uniform()
    async with sender_of(model) as scheme, ChaosProxy(scheme.address) as proxy:
        refusing, behind = make_worker(scheme.address), make_worker(proxy.address)
        await join(scheme, refusing, behind)
        refuses: Any = binding_of(refusing.scheme)
        right = refuses.check

        def check(views: object) -> None:
            raise ValueError("not this one")

        refuses.check = check
        fill(model, 1)
        proxy.weather["to_sender"].delay = BRIEF
        sending = asyncio.create_task(scheme.send())
        await eventually(lambda: behind.scheme.version == 1, "the other has it")
        proxy.cut()
        with pytest.raises((RemoteApplyError, WorkerLostError)):
            await sending
        proxy.weather["to_sender"].delay = 0.0
        refuses.check = right
        await eventually(lambda: len(scheme.sender_transports) == 2, "it is back")
        fill(model, 2)
        assert (await scheme.send()).ok
        for worker in (refusing, behind):
            assert value_of(worker.model) == 2
            await worker.close()


async def test_a_failure_in_the_connections_thread_ends_the_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = torch.nn.Linear(600, 700)
    async with sender_of(model, codec="zstd") as scheme:
        worker = make_worker(scheme.address, torch.nn.Linear(600, 700), reconnect_for=PATIENCE)
        await join(scheme, worker)

        def decode(*_: object) -> None:
            raise MemoryError("none left")

        with monkeypatch.context() as patch:
            patch.setattr(codec, "decode", decode)
            with torch.no_grad():
                model.weight.zero_()
            with pytest.raises(WorkerLostError):
                await scheme.send()
        await eventually(lambda: bool(worker.model.weight.abs().sum() == 0), "it comes again for all of it")
        with torch.no_grad():
            model.weight.fill_(3.0)
        await eventually(lambda: bool(scheme.sender_transports), "it is back")
        assert (await scheme.send()).ok
        assert torch.equal(worker.model.weight, model.weight)
        await worker.close()


async def test_a_second_break_before_the_first_update_of_a_new_sender() -> None:
    model = Uniform()
    async with sender_of(model) as first:
        address = first.address
        worker = make_worker(address)
        await join(first, worker)
        fill(model, 5)
        await first.send()
        break_off(first)
    receiver = worker.scheme.get_receiver()
    receiver.applier.follow_another()
    lose_connection(worker.scheme, "the link broke again")
    assert worker.scheme.ended is None
    second = TCPWeightSyncScheme(address, token=TOKEN, timeout=PATIENCE)
    fill(model, 6)
    second.init_on_sender(model_id="policy", model=model)
    await second.connect()
    assert value_of(worker.model) == 6
    await worker.close()
    await second.aclose()


async def test_a_sender_that_comes_back_with_another_model_is_told() -> None:
    async with sender_of(Uniform()) as first:
        address = first.address
        worker = make_worker(address)
        await join(first, worker)
        break_off(first)
    second = TCPWeightSyncScheme(address, token=TOKEN, timeout=PATIENCE)
    second.init_on_sender(model_id="policy", model=torch.nn.Linear(3, 4))
    with pytest.raises(SyncTimeoutError, match=r"do not fit|missing|unexpected"):
        await second.connect(timeout=5 * BRIEF)
    assert not second.sender_transports
    await worker.rest()
    assert worker.lost is not None
    await worker.close()
    await second.aclose()


# -- bodies that are cut ------------------------------------------------------------------------------


def test_a_notify_that_crosses_a_cut() -> None:
    session = ReceiverSession(b"t", 0)
    session.state = ReceiverState.FETCHING
    assert session.receive(f.Notify(round=3)) == []
    session.receive(f.Cut())
    assert session.state is ReceiverState.IDLE
    drain(session)
    session.receive(f.Notify(round=3))
    session.wanting = True
    assert [type(frame) for frame in drain(session)] == [f.Fetch]


async def test_who_is_merely_slow_is_not_cut() -> None:
    model = Uniform(size=LARGE)
    async with sender_of(model) as scheme, ChaosProxy(scheme.address) as proxy:
        worker = make_worker(proxy.address, Uniform(-1.0, size=LARGE))
        await join(scheme, worker)
        # An update takes longer than the time after which a worker without progress counts as stalled.
        proxy.weather["to_worker"].rate = 4 * 4 * LARGE / (4 * STUCK_AFTER)
        version = 0
        while worker.scheme.version <= 0:
            version += 1
            fill(model, version)
            await scheme.send(wait=False)
            await asyncio.sleep(STUCK_AFTER / 4)
        assert value_of(worker.model) == worker.scheme.version
        proxy.weather["to_worker"].rate = 0.0
        await eventually(lambda: worker.scheme.version == version, "it catches up")
        assert scheme.stats.lost == 0
        await worker.close()


async def test_an_update_that_is_cut_and_offered_again_above_a_relay(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    size = 1 << 21  # more than all sockets on the way take in
    model = Uniform(size=size)
    async with (
        sender_of(model) as scheme,
        ChaosProxy(scheme.address) as proxy,
        relay_below(proxy.address) as relay,
    ):
        await connect(scheme, relay)
        worker = make_worker(relay.address, Uniform(-1.0, size=size))
        await serve(worker)
        proxy.weather["to_worker"].rate = 4e6
        fill(model, 1)
        await scheme.send(wait=False)
        await eventually(lambda: proxy.passed["to_worker"] > 33 << 20, "some of it has come")
        (link,) = connections_of(scheme).values()
        with monkeypatch.context() as patch:
            patch.setattr(link._progress, "idle_seconds", lambda: STUCK_AFTER + 1)
            link.cancel_if_stuck()
        assert link.notified is not None
        proxy.weather["to_worker"].rate = 0.0
        await eventually(lambda: value_of(worker.model) == 1, "it comes again")
        assert scheme.stats.lost == 0
        await worker.close()


# -- relays -------------------------------------------------------------------------------------------


async def test_a_relay_does_not_pass_the_end_on_before_it_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Uniform(size=LARGE)
    async with sender_of(model) as scheme, relay_below(scheme.address) as relay:
        await connect(scheme, relay)
        worker = make_worker(relay.address, Uniform(-1.0, size=LARGE))
        await serve(worker)
        finish = relay_intake._RelayLanding.finish
        broken = asyncio.Event()
        home = asyncio.get_running_loop()

        def break_first(self: Any, end: f.End) -> None:
            if not broken.is_set():
                home.call_soon_threadsafe(broken.set)
                raise OSError("the link broke before the end")
            finish(self, end)

        monkeypatch.setattr(relay_intake._RelayLanding, "finish", break_first)
        fill(model, 1)
        with pytest.raises(WorkerLostError):
            await scheme.send()
        await within(broken.wait())
        await eventually(lambda: value_of(worker.model) == 1, "the relay comes again for it")
        fill(model, 2)
        await eventually(lambda: bool(scheme.sender_transports), "it is back")
        assert (await scheme.send()).ok
        assert value_of(worker.model) == 2
        await worker.close()


async def test_a_relay_that_could_not_connect_can_try_again() -> None:
    model = Uniform()
    async with sender_of(model) as scheme, relay_below(scheme.address) as relay:
        with pytest.raises(SyncTimeoutError):
            await relay.connect(timeout=BRIEF)  # the trainer does not listen yet
        await connect(scheme, relay)
        worker = make_worker(relay.address)
        await serve(worker)
        assert value_of(worker.model) == value_of(model)
        await worker.close()


# -- copying ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("paced", [False, True])
def test_a_copy_waits_only_if_it_is_paced(paced: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    source = torch.arange(64, dtype=torch.uint8).repeat(1 << 18)
    buffer = torch.zeros_like(source)
    copying = BlockCopy(buffer, buffer.nbytes, [(buffer, source)], 1 << 16)
    leads: list[int] = []

    def nobody_comes(seconds: float) -> bool:
        leads.append(len(copying._checksums))
        return False

    monkeypatch.setattr(copying._nearer, "wait", nobody_comes)
    copying.complete(paced=paced)
    assert leads == ([5] if paced else [])
    assert torch.equal(buffer, source)
    assert copying.checksum(255) == copying.checksum(0)


# -- joint updates of workers whose index the sender chose ---------------------------------------------


async def test_a_part_that_is_refused_calls_the_other_off() -> None:
    policy, value = Uniform(), Uniform()
    async with sender_of(policy) as first, sender_of(value) as second:
        refusing, fine = make_worker(first.address), make_worker(second.address)
        await join(first, refusing)
        await join(second, fine)

        def refuse(views: Any) -> None:
            raise ValueError("not this one")

        binding_of(refusing.scheme).check = refuse  # type: ignore[method-assign]
        fill(policy, 1)
        fill(value, 1)
        with pytest.raises(RemoteApplyError, match="not this one"):
            async with atomic(first, second):
                pass
        assert (value_of(refusing.model), value_of(fine.model)) == (0, 0)
        fill(value, 2)
        assert (await second.send()).ok
        assert value_of(fine.model) == 2
        for worker in (refusing, fine):
            await worker.close()
