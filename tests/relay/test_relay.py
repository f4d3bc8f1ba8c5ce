"""Relays: what a trainer sends to one is what all below it run on."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from typing import Any

import pytest
import torch
from torch import nn

from aiosync import (
    AlreadyConnectedError,
    ArenaAllocationError,
    HandshakeError,
    ProtocolError,
    RemoteApplyError,
    TCPWeightSyncScheme,
    WeightRelay,
    WorkerLostError,
)
from aiosync._deadline import Deadline
from aiosync.protocol.frames import Update
from aiosync.relay.forwarder import RelayForwarder
from aiosync.transfer.slots import Lease, release_all
from aiosync.weights.segment import Segment
from tests.kit.clock import BRIEF, PATIENCE, eventually, within
from tests.kit.models import Uniform, fill, value_of
from tests.kit.proxy import ChaosProxy
from tests.kit.raw_peer import RawWorker
from tests.kit.relay import beside_a_silent_worker, connect, read_slowly, relay_below, serve
from tests.kit.seams import binding_of, pool_of, ticket_of
from tests.kit.tcp import TOKEN, break_off, join, make_worker, sender_of

LARGE = 1 << 19  # four tensors of 2 MiB: the update is longer than what sockets take at once


@pytest.mark.parametrize("size", [16, LARGE])
async def test_a_tree(size: int) -> None:
    model = Uniform(size=size)
    async with (
        sender_of(model) as scheme,
        relay_below(scheme.address) as left,
        relay_below(scheme.address) as right,
    ):
        await connect(scheme, left, right)
        nodes = (left, left, right, right)
        workers = [make_worker(node.address, Uniform(-1.0, size=size)) for node in nodes]
        await serve(*workers)
        assert [value_of(worker.model) for worker in workers] == [0] * 4
        assert len(left.workers) == len(right.workers) == 2
        before = scheme.stats.wire_nbytes
        for version in range(1, 6):
            fill(model, version)
            report = await scheme.send()
            assert report.ok
            # The trainer's send is over when the leaves have it.
            assert [value_of(worker.model) for worker in workers] == [version] * 4
            assert all(worker.scheme.version == version for worker in workers)
            assert left.version == right.version == version
        assert scheme.stats.wire_nbytes - before < 2.2 * 5 * (4 * 4 * size + 2000)
        for worker in workers:
            await worker.close()
        fill(model, 6)
        assert (await scheme.send()).ok


async def test_a_relay_connects_once() -> None:
    async with sender_of(Uniform()) as scheme, relay_below(scheme.address) as relay:
        await connect(scheme, relay)
        with pytest.raises(AlreadyConnectedError):
            await relay.connect()
        assert (await scheme.send()).ok


async def test_a_relay_below_a_relay() -> None:
    model = Uniform(size=LARGE)
    async with sender_of(model) as scheme, relay_below(scheme.address) as upper:
        await connect(scheme, upper)
        async with relay_below(upper.address) as lower:
            await lower.connect()
            worker = make_worker(lower.address, Uniform(-1.0, size=LARGE))
            await serve(worker)
            for version in range(1, 4):
                fill(model, version)
                assert (await scheme.send()).ok
                assert value_of(worker.model) == version
            await worker.close()


async def test_blocks_are_passed_on_while_the_rest_is_coming() -> None:
    model = Uniform(size=LARGE)
    async with sender_of(model) as scheme, ChaosProxy(scheme.address) as proxy:
        async with relay_below(proxy.address) as relay, ChaosProxy("tcp://127.0.0.1:1") as counted:
            await connect(scheme, relay)
            host, _, port = relay.address.removeprefix("tcp://").rpartition(":")
            counted._target = (host, int(port))
            worker = make_worker(counted.address, Uniform(-1.0, size=LARGE))
            await serve(worker)
            proxy.weather["to_worker"].truncate_after = proxy.passed["to_worker"] + 5 * (1 << 20)
            below = counted.passed["to_worker"]
            fill(model, 1)
            sending = asyncio.create_task(scheme.send(timeout=PATIENCE))
            await eventually(
                lambda: counted.passed["to_worker"] - below > 3 * (1 << 20), "a part has been passed on"
            )
            assert relay.version == 0
            assert value_of(worker.model) == 0
            # The link upstream breaks in the middle: what was passed on is taken back.
            proxy.weather["to_worker"].truncate_after = None
            proxy.cut()
            with pytest.raises(Exception, match="lost"):
                await sending
            await eventually(lambda: worker.scheme.version == 1, "it came in a second attempt")
            assert value_of(worker.model) == 1
            assert worker.scheme.stats.failures == 0
            await worker.close()


async def test_a_late_worker_gets_the_newest_from_the_relay() -> None:
    model = Uniform()
    async with sender_of(model) as scheme, relay_below(scheme.address) as relay:
        await connect(scheme, relay)
        for version in range(1, 4):
            fill(model, version)
            await scheme.send()
        worker = make_worker(relay.address)
        await serve(worker)
        assert worker.scheme.version == 3
        assert value_of(worker.model) == 3
        await worker.close()


async def test_a_refusal_below_reaches_the_trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Uniform()
    async with sender_of(model) as scheme, relay_below(scheme.address) as relay:
        await connect(scheme, relay)
        good, bad = make_worker(relay.address), make_worker(relay.address)
        await serve(good, bad)
        with monkeypatch.context() as patch:

            def check(views: object) -> None:
                raise ValueError("not this one")

            patch.setattr(binding_of(bad.scheme), "check", check)
            fill(model, 1)
            with pytest.raises(RemoteApplyError, match="not this one"):
                await scheme.send()
        assert value_of(good.model) == 1
        assert value_of(bad.model) == 0
        fill(model, 2)
        assert (await scheme.send()).ok
        assert [value_of(worker.model) for worker in (good, bad)] == [2, 2]
        for worker in (good, bad):
            await worker.close()


async def test_what_all_workers_of_a_relay_refused_comes_with_the_next_update() -> None:
    """The trainer counts on the relay to have it: workers that come later get it too."""
    model = Uniform()
    async with sender_of(model) as scheme, relay_below(scheme.address) as relay:
        await connect(scheme, relay)
        worker = make_worker(relay.address)
        await serve(worker)
        worker.model.more = nn.Linear(1, 1)
        with pytest.raises(RemoteApplyError):
            await scheme.send({"values.0": torch.full((16,), 1.0)}, strict=False)
        late = make_worker(relay.address)
        await serve(late)
        assert late.model.values[0][0] == 1
        del worker.model.more
        assert (await scheme.send({"values.1": torch.full((16,), 2.0)}, strict=False)).ok
        for each in (worker, late):
            assert [values[0].item() for values in each.model.values] == [1.0, 2.0, 0.0, 0.0]
            await each.close()


@pytest.mark.parametrize("delay", [0.0, BRIEF / 2])
async def test_a_trainer_that_is_started_again(delay: float) -> None:
    model = Uniform()
    async with sender_of(model) as first, ChaosProxy(first.address) as proxy:
        proxy.weather["to_sender"].delay = delay
        async with relay_below(proxy.address) as relay:
            await connect(first, relay)
            worker = make_worker(relay.address)
            await serve(worker)
            for version in range(1, 4):
                fill(model, version)
                await first.send()
            await first.send({"values.0": torch.full((16,), 4.0)}, strict=False)
            break_off(first)
            listener: Any = first.shared_transport
            listener.stop()
            fill(model, 9)
            second = TCPWeightSyncScheme(first.address, token=TOKEN, timeout=PATIENCE)
            second.init_on_sender(model_id="policy", model=model)
            await second.connect()
            if not delay:
                await eventually(lambda: value_of(worker.model) == 9, "the worker follows")
                await eventually(lambda: worker.scheme.version == second.version == 0, "and counts anew")
            # Not what was the newest of the trainer before, whose number may be the same.
            for value in (10, 11):
                fill(model, value)
                await second.send()
            await eventually(lambda: worker.scheme.version == second.version, "the worker counts anew")
            assert value_of(worker.model) == 11
            # Which entries the trainer before sent last has no meaning for this one's version numbers.
            with torch.no_grad():
                worker.model.values[0].fill_(-5.0)
            assert (await second.send({"values.1": torch.full((16,), 12.0)}, strict=False)).ok
            assert [values[0].item() for values in worker.model.values] == [-5.0, 12.0, 11.0, 11.0]
            await worker.close()
            await second.aclose()


@pytest.mark.parametrize("codec", ["zstd", "delta"])
async def test_encoded_on_the_way_down(codec: str) -> None:
    dice = torch.Generator().manual_seed(2)
    model = nn.Linear(600, 700)
    async with sender_of(model, codec=codec) as scheme, relay_below(scheme.address, codec=codec) as relay:
        await connect(scheme, relay)
        worker = make_worker(relay.address, nn.Linear(600, 700))
        await serve(worker)
        for _ in range(10):
            with torch.no_grad():
                where = torch.rand(model.weight.shape, generator=dice) < 0.01
                model.weight[where] += 1e-3
            assert (await scheme.send()).ok
            assert torch.equal(model.weight, worker.model.weight)
        await worker.close()


async def test_the_end_is_passed_on() -> None:
    async with sender_of(Uniform()) as scheme:
        async with relay_below(scheme.address) as relay:
            await connect(scheme, relay)
            worker = make_worker(relay.address)
            await serve(worker)
            await scheme.aclose()
            await within(relay.wait_closed())
            assert relay.ended is not None
            await relay.aclose()
            await eventually(lambda: worker.scheme.ended is not None, "the worker has heard")
            await worker.close()
            assert worker.lost is None


async def test_a_relay_needs_the_token() -> None:
    async with sender_of(Uniform()) as scheme:
        worker = make_worker(scheme.address)
        await join(scheme, worker)
        above = TCPWeightSyncScheme(scheme.address, token="another token, as long", timeout=PATIENCE)
        below = TCPWeightSyncScheme(token=TOKEN)
        relay = WeightRelay(above, below, model_id="policy")
        with pytest.raises(HandshakeError, match="token"):
            await relay.connect()
        await relay.aclose()
        await worker.close()


# -- rings and workers that are away ------------------------------------------------------------------


async def test_relays_that_would_form_a_ring() -> None:
    """The trainer dies, and a relay that follows its relays takes its place."""
    model = Uniform()
    async with sender_of(model) as scheme, relay_below(scheme.address) as first:
        await connect(scheme, first)
        async with relay_below(first.address) as second:
            await second.connect()
            worker = make_worker(second.address)
            await serve(worker)
            address = scheme.address
            for transport in scheme.sender_transports.values():
                transport.abort()  # type: ignore[attr-defined]
            await within(scheme.aclose())
            async with relay_below(second.address, address) as third:
                await third.connect()
                await eventually(lambda: first.ended is not None, "the ring is found out")
                assert "follows this relay" in str(first.ended)
                assert value_of(worker.model) == 0
            await worker.close()


@pytest.mark.parametrize("back_for_a_moment", [False, True])
async def test_a_relay_answers_for_a_worker_that_is_away(back_for_a_moment: bool) -> None:
    """It acts on the version that it had, also if its next connection broke before it got another."""
    model = Uniform()
    async with sender_of(model) as scheme, relay_below(scheme.address) as relay:
        await connect(scheme, relay)
        async with ChaosProxy(relay.address) as proxy:
            worker = make_worker(proxy.address)
            await serve(worker)
            fill(model, 1)
            assert (await scheme.send()).ok
            proxy.hold.clear()
            proxy.cut()
            await eventually(lambda: not relay.workers, "the relay has noticed")
            if back_for_a_moment:
                layout = worker.scheme.get_receiver().applier.layout
                assert layout is not None
                again: Any = {"ticket": ticket_of(worker.scheme), "signature": layout.identity}
                await (await RawWorker.join(relay._downstream, before=0, **again)).close()
                await eventually(lambda: not relay.workers, "the relay has noticed")
            fill(model, 2)
            with pytest.raises(RemoteApplyError, match=r"workers \[0\] have lost this relay"):
                await scheme.send()
            assert value_of(worker.model) == 1
            proxy.release()
            await eventually(lambda: value_of(worker.model) == 2, "it is back")
            fill(model, 3)
            assert (await scheme.send()).ok
            assert value_of(worker.model) == 3
            await worker.close()
        fill(model, 4)
        assert (await scheme.send()).ok  # it has said goodbye


async def test_a_worker_that_says_nothing_does_not_keep_newer_versions_from_the_others() -> None:
    model = Uniform()
    async with beside_a_silent_worker(model) as (scheme, _, worker):
        for version in range(1, 4):
            fill(model, version)
            await scheme.send(wait=False)
        await eventually(lambda: value_of(worker.model) == 3, "the newest", PATIENCE / 2)


async def test_trainers_that_end_before_the_relay_has_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers may have a version whose trainer the relay has lost before it had that version itself."""
    model = Uniform()
    released = asyncio.Event()
    released.set()
    stage = RelayForwarder.stage

    async def held_up(applier: RelayForwarder, pending: Any) -> None:
        await released.wait()
        await stage(applier, pending)

    monkeypatch.setattr(RelayForwarder, "stage", held_up)
    async with AsyncExitStack() as trainers, sender_of(model) as first, relay_below(first.address) as relay:
        await connect(first, relay)
        worker = make_worker(relay.address)
        await serve(worker)
        trainer: TCPWeightSyncScheme = first
        for value in (9, 20):
            break_off(trainer)
            listener: Any = trainer.shared_transport
            listener.stop()
            released.clear()
            fill(model, value)
            trainer = TCPWeightSyncScheme(first.address, token=TOKEN, timeout=PATIENCE)
            trainer.init_on_sender(model_id="policy", model=model)
            trainers.push_async_callback(trainer.aclose)
            await trainer.connect(min_workers=0)
            await eventually(lambda: value_of(worker.model) == value, "it comes through")  # noqa: B023
            asyncio.get_running_loop().call_later(BRIEF, released.set)
        await trainer.wait_ack()
        await worker.close()


async def test_a_link_that_breaks_when_an_update_is_whole_costs_no_slot() -> None:
    """The same version comes again and again; a worker that joins then is served all the same."""
    model = Uniform()
    async with sender_of(model) as scheme, ChaosProxy(scheme.address) as proxy:
        async with relay_below(proxy.address) as relay:
            await connect(scheme, relay)
            for _ in range(8):
                links = proxy.accepted
                proxy.cut()
                await eventually(lambda: proxy.accepted > links, "it connects again")  # noqa: B023
                await eventually(lambda: set(scheme.worker_versions.values()) == {0}, "it has answered")
                late = make_worker(relay.address)
                await late.connect()
                assert value_of(late.model) == 0
                await late.close()


async def test_a_worker_that_says_nothing_does_not_keep_the_relay_from_coming_back() -> None:
    model = Uniform()
    async with sender_of(model) as scheme, ChaosProxy(scheme.address) as proxy:
        async with relay_below(proxy.address) as relay:
            await connect(scheme, relay)
            worker = make_worker(relay.address)
            await serve(worker)
            silent = await RawWorker.join(relay._downstream)
            await silent.hear()
            fill(model, 1)
            await scheme.send(wait=False)
            await eventually(lambda: value_of(worker.model) == 1, "the relay waits for the silent one")
            proxy.cut()
            await eventually(lambda: not scheme.workers, "the trainer has noticed")
            fill(model, 2)
            await scheme.send(wait=False)
            await eventually(lambda: value_of(worker.model) == 2, "the newest", PATIENCE / 2)
            await silent.close()
            await worker.close()


async def test_a_worker_that_was_replaced_is_not_away() -> None:
    """It was killed; another process has its index now."""
    model = Uniform()
    async with sender_of(model) as scheme, relay_below(scheme.address) as relay:
        await connect(scheme, relay)
        async with ChaosProxy(relay.address) as proxy:
            killed = make_worker(proxy.address, reconnect_for=0)
            killed.init(worker_idx=3)
            await killed.connect()
            proxy.cut()
            await eventually(lambda: not relay.workers, "the relay has noticed")
            replacement = make_worker(relay.address)
            replacement.init(worker_idx=3)
            await replacement.connect()
            await replacement.serve()
            fill(model, 1)
            assert (await scheme.send()).ok
            assert value_of(replacement.model) == 1
            for worker in (killed, replacement):
                await worker.close()


async def test_a_worker_that_never_had_a_version_is_not_away() -> None:
    model = Uniform()
    async with sender_of(model) as scheme, relay_below(scheme.address) as relay:
        await connect(scheme, relay)
        peer = await RawWorker.join(relay._downstream)
        await peer.close()
        await eventually(lambda: not relay.workers, "the relay has noticed")
        fill(model, 1)
        assert (await scheme.send()).ok


# -- slots that slow workers read -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "loses_trainer"),
    [(16, False), (LARGE + 1, False), (16, True)],
    ids=["eager", "notified", "about to be overwritten"],
)
async def test_the_newest_version_is_kept_until_there_is_a_newer_one(size: int, loses_trainer: bool) -> None:
    """Also if a slow worker reads the only other slot."""
    model = Uniform(size=size)
    async with (
        sender_of(model) as scheme,
        relay_below(scheme.address, max_slots=2, timeout=BRIEF) as relay,
    ):
        await connect(scheme, relay)
        behind = await RawWorker.join(relay._downstream)
        behind.session.wanting = True
        while not isinstance(await behind.step(), Update):
            pass
        read_slowly(relay)
        fill(model, 1)
        with pytest.raises(RemoteApplyError, match="did not answer"):
            await scheme.send()
        if loses_trainer:
            applier = relay._applier
            assert applier is not None
            await applier.make_room()  # as if the trainer had announced version 2
            assert applier._write is not None and applier._write.reclaimed
            await applier.detach(Deadline.after(0.0))
            assert not applier.may_fetch
        # The trainer sends nothing more. The worker that is behind gets what it was notified of.
        behind.session.applied(0, {}, wanting=True)
        while not isinstance(frame := await behind.step(), Update):
            pass
        assert frame.version == 1
        late = make_worker(relay.address, Uniform(-1.0, size=size))
        await serve(late)
        assert value_of(late.model) == 1
        # A newer one overwrites it.
        fill(model, 2)
        await scheme.send(wait=False)
        await eventually(lambda: value_of(late.model) == 2, "the newest")
        await behind.close()
        await late.close()


async def test_an_update_that_cannot_begin_leaves_its_slot() -> None:
    async with sender_of(Uniform()) as scheme, relay_below(scheme.address) as relay:
        await connect(scheme, relay)
        applier = relay._applier
        assert applier is not None and applier._landing is not None
        landing = applier._landing
        await applier.make_room()
        slot = landing.next
        assert slot is not None
        with pytest.raises(ProtocolError):
            landing.begin(Update(round=1, version=1, payload={"blocks": "none"}))
        assert landing.next is slot


async def _occupied(scheme: TCPWeightSyncScheme, relay: WeightRelay, worker: Any) -> list[Lease]:
    """Connect all three, have slow workers read both of the relay's slots, and send version 2."""
    await connect(scheme, relay)
    await serve(worker)
    slow = read_slowly(relay)
    fill(scheme.model, 1)
    assert (await scheme.send()).ok
    slow += read_slowly(relay)
    fill(scheme.model, 2)
    await scheme.send(wait=False)
    return slow


async def test_a_relay_waits_for_a_slot_for_longer_than_its_timeout(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with (
        sender_of(Uniform()) as scheme,
        relay_below(scheme.address, max_slots=2, timeout=BRIEF) as relay,
    ):
        worker = make_worker(relay.address)
        slow = await _occupied(scheme, relay, worker)
        await eventually(lambda: "every slot is in use" in caplog.text, "the timeout has passed")
        assert value_of(worker.model) == 1
        release_all(slow)
        await eventually(lambda: value_of(worker.model) == 2, "it goes on")
        fill(scheme.model, 3)
        assert (await scheme.send()).ok
        assert value_of(worker.model) == 3
        await worker.close()


async def test_a_relay_that_waits_for_a_slot_connects_again(caplog: pytest.LogCaptureFixture) -> None:
    async with sender_of(Uniform()) as scheme, ChaosProxy(scheme.address) as proxy:
        async with relay_below(proxy.address, max_slots=2, timeout=BRIEF) as relay:
            worker = make_worker(relay.address)
            slow = await _occupied(scheme, relay, worker)
            await eventually(lambda: "every slot is in use" in caplog.text, "it waits")
            links = proxy.accepted
            proxy.cut()
            await eventually(lambda: proxy.accepted > links and bool(scheme.workers), "it is back")
            assert value_of(worker.model) == 1
            release_all(slow)
            await eventually(lambda: value_of(worker.model) == 2, "it goes on")
            await worker.close()


async def test_a_relay_without_memory_for_a_second_slot(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It uses the first one again, as soon as no worker reads it."""
    model = Uniform()

    def fail() -> Any:
        raise ArenaAllocationError(64, "no memory")

    async with sender_of(model) as scheme, relay_below(scheme.address) as relay:
        await connect(scheme, relay)
        worker = make_worker(relay.address)
        await serve(worker)
        monkeypatch.setattr(pool_of(relay), "grow", fail)
        slow = read_slowly(relay)
        fill(model, 1)
        sending = asyncio.create_task(scheme.send())
        await eventually(lambda: "no memory" in caplog.text, "the relay waits for memory")
        for lease in slow:
            lease.release()
        assert (await within(sending)).ok
        assert value_of(worker.model) == 1
        fill(model, 2)
        assert (await within(scheme.send())).ok
        assert value_of(worker.model) == 2
        assert len(pool_of(relay).slots) == 1
        await worker.close()


async def test_a_relay_without_memory_for_one_version_does_not_connect(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(nbytes: int) -> Any:
        raise ArenaAllocationError(nbytes, "no memory")

    async with sender_of(Uniform()) as scheme, relay_below(scheme.address) as relay:
        await scheme.connect(min_workers=0)
        monkeypatch.setattr(Segment, "private", fail)
        with pytest.raises(ArenaAllocationError, match="no memory"):
            await relay.connect()


async def test_a_relay_that_fails_ends(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A supervisor can start it again: it is not connected any longer without updates."""
    model, failure = Uniform(), RuntimeError("a bug")
    async with sender_of(model) as scheme, relay_below(scheme.address) as relay:
        await connect(scheme, relay)

        async def fail(applier: RelayForwarder) -> None:
            raise failure

        monkeypatch.setattr(RelayForwarder, "make_room", fail)
        fill(model, 1)
        with pytest.raises(WorkerLostError, match="a bug"):
            await scheme.send()
        await within(relay.wait_closed())
        assert "a bug" in str(relay.ended)
        assert any(record.exc_info and record.exc_info[1] is failure for record in caplog.records)
