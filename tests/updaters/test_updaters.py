"""The legacy updaters: what the base class promises, and what each does; coroutines and blocking twins."""

from __future__ import annotations

import asyncio
import copy
import inspect
import multiprocessing
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import nn
from torch._C._distributed_c10d import PrefixStore, TCPStore

from aiosync import (
    BlockingCallError,
    InvalidArgumentError,
    LayoutMismatchError,
    NotInitializedError,
    RemoteApplyError,
    SyncTimeoutError,
    UnknownWorkerError,
    WeightSourceError,
    WorkerLostError,
    updaters,
)
from aiosync.sync import updaters as blocking
from aiosync.updaters.remote import RemoteCollectorsUpdater
from aiosync.weights.strategy import WeightStrategy
from tests.kit.clock import BRIEF, PATIENCE, within
from tests.updaters.workers import follow

KINDS = ["asyncio", "blocking"]


@pytest.fixture(params=KINDS)
def library(request: pytest.FixtureRequest) -> Any:
    """Where the classes come from."""
    return updaters if request.param == "asyncio" else blocking


async def settled(result: Any) -> Any:
    """What a call of either kind comes to."""
    return await result if inspect.isawaitable(result) else result


class Collector:
    """Counts."""

    def __init__(self) -> None:
        self.version = 0

    def increment_version(self) -> None:
        self.version += 1


def recording(library: Any, *, asynchronous: bool = False, workers: Any = None) -> Any:
    """An updater that only notes what it is asked."""

    class Recording(library.WeightUpdaterBase):  # type: ignore[misc]
        def __init__(self) -> None:  # without super().__init__(), as many have it
            self.calls: list[tuple[Any, Any]] = []
            self.skipped: set[Any] = set()

        def _get_server_weights(self) -> Any:
            return {"server": torch.ones(1)}

        def _skip_update(self, worker_id: Any) -> bool:
            return worker_id in self.skipped

        def all_worker_ids(self) -> Any:
            return workers

        def _sync_weights_with_worker(self, *, worker_id: Any = None, server_weights: Any) -> Any:
            self.calls.append((worker_id, server_weights))
            return asyncio.sleep(0) if asynchronous else None

    return Recording()


# -- the base class ----------------------------------------------------------------------------------


@pytest.mark.parametrize("asynchronous", [False, True])
async def test_hooks_are_called_in_order(library: Any, *, asynchronous: bool) -> None:
    updater = recording(library, asynchronous=asynchronous)
    heard: list[str] = []

    async def second() -> None:
        await asyncio.sleep(0)
        heard.append("second")

    assert updater.post_hooks == []
    updater.register_post_hook(lambda: heard.append(f"first, after {len(updater.calls)}"))
    updater.register_post_hook(second)
    updater.register_post_hook(lambda: heard.append("third"))
    assert len(updater.post_hooks) == 3
    weights = {"w": torch.zeros(2)}
    await settled(updater.push_weights(weights))
    assert heard == ["first, after 1", "second", "third"]
    await settled(updater(weights))
    assert updater.calls == [(None, weights), (None, weights)]
    assert len(heard) == 6


async def test_no_hook_after_a_failure(library: Any) -> None:
    updater = recording(library)
    heard: list[int] = []
    updater.register_post_hook(lambda: heard.append(1))
    with pytest.raises(WeightSourceError):
        await settled(updater.push_weights(3))
    assert heard == []


async def test_several_collectors(library: Any) -> None:
    updater = recording(library)
    assert updater.collector is None
    assert updater.collectors is None
    await settled(updater.increment_version())
    first = Collector()
    updater.register_collector(first)
    assert updater.collector is first
    second = Collector()
    updater.register_collector(second)
    assert updater.collectors == [first, second]
    with pytest.raises(ValueError, match="2 collectors are registered"):
        _ = updater.collector
    await settled(updater.increment_version())
    del second
    await settled(updater.increment_version())
    assert first.version == 2
    assert updater.collectors == [first, None]
    assert recording(library).collectors is None  # nothing is shared between updaters


@pytest.mark.parametrize(
    ("worker_ids", "reached"),
    [
        (None, [0, 1, torch.device("cpu")]),
        (1, [1]),
        (torch.device("cpu"), [torch.device("cpu")]),
        ([0, 1], [0, 1]),
        ([torch.device("cpu")], [torch.device("cpu")]),
        ([], []),
    ],
)
async def test_who_is_updated(library: Any, worker_ids: Any, reached: list[Any]) -> None:
    updater = recording(library, workers=[0, 1, torch.device("cpu")])
    await settled(updater.push_weights({"w": torch.zeros(1)}, worker_ids=worker_ids))
    assert [worker for worker, _ in updater.calls] == reached


async def test_who_is_left_out(library: Any) -> None:
    updater = recording(library, workers=[0, 1, 2])
    updater.skipped = {1}
    await settled(updater.push_weights({"w": torch.zeros(1)}))
    assert [worker for worker, _ in updater.calls] == [0, 2]


async def test_where_weights_come_from(library: Any) -> None:
    updater = recording(library)
    await settled(updater.push_weights())
    module = nn.Linear(2, 1)
    await settled(updater.push_weights(module))
    await settled(updater.push_weights(TensorDictModule(module, in_keys=["a"], out_keys=["b"])))
    own = TensorDict({"w": torch.ones(2)})
    await settled(updater.push_weights(own))
    given = [weights for _, weights in updater.calls]
    assert list(given[0]) == ["server"]
    assert isinstance(given[1], TensorDict)
    assert torch.equal(given[1]["weight"], module.weight)
    assert not given[1]["weight"].requires_grad
    assert torch.equal(given[2]["module", "weight"], module.weight)
    assert given[3] is own
    with pytest.raises(TypeError, match=r"expected an nn\.Module, a TensorDict or a dict"):
        await settled(updater.push_weights([1]))


async def test_deadlines(library: Any) -> None:
    updater, other = recording(library), recording(library)
    updater.register_post_hook(lambda: other.push_weights({"w": torch.zeros(1)}, timeout=BRIEF))
    updater.register_post_hook(lambda: asyncio.sleep(2 * BRIEF))  # the other's deadline is not this one's
    await settled(updater.push_weights({"w": torch.zeros(1)}))
    updater = recording(library)

    async def fails() -> None:
        raise TimeoutError("of its own")

    updater.register_post_hook(fails)
    with pytest.raises(TimeoutError, match="of its own"):
        await settled(updater.push_weights({"w": torch.zeros(1)}))
    updater = recording(library)

    async def never() -> None:
        await asyncio.Event().wait()

    updater.register_post_hook(never)
    with pytest.raises(SyncTimeoutError):
        await settled(updater.push_weights({"w": torch.zeros(1)}, timeout=BRIEF))
    with pytest.raises(InvalidArgumentError, match="timeout=-1"):
        await settled(updater.push_weights({"w": torch.zeros(1)}, timeout=-1))


def test_what_can_be_left_as_it_is(library: Any) -> None:
    updater = recording(library)
    assert updater.init(1, two=2) is None
    assert type(updater).from_policy(nn.Linear(1, 1)) is None
    assert library.WeightUpdaterBase.all_worker_ids(updater) is None
    with pytest.raises(TypeError, match="abstract"):
        library.WeightUpdaterBase()


def test_hooks_run_in_the_callers_thread() -> None:
    updater = recording(blocking)
    threads: list[int] = []
    updater.register_post_hook(lambda: threads.append(threading.get_ident()))
    updater.push_weights({"w": torch.zeros(1)})
    assert threads == [threading.get_ident()]


def test_a_blocking_updater_that_awaits() -> None:
    class Wrong(blocking.RemoteModuleWeightUpdater):
        async def _push_weights(self, *, policy_or_weights: Any, worker_ids: Any) -> None:
            await asyncio.sleep(0)

    with pytest.raises(BlockingCallError, match="awaited something itself"):
        Wrong().push_weights({})


async def test_a_push_that_is_a_plain_function() -> None:
    heard: list[Any] = []

    class Plain(updaters.RemoteModuleWeightUpdater):
        def _push_weights(self, *, policy_or_weights: Any, worker_ids: Any) -> None:  # type: ignore[override]
            heard.append(policy_or_weights)

    await Plain().push_weights({"w": 1})
    assert heard == [{"w": 1}]


def test_the_twins_are_of_the_family() -> None:
    for name in updaters.__all__:
        twin, original = getattr(blocking, name), getattr(updaters, name)
        assert issubclass(twin, original)
        assert issubclass(twin, blocking.WeightUpdaterBase)
        assert inspect.signature(twin.push_weights) == inspect.signature(original.push_weights)
    assert sorted(updaters.__all__) == sorted(blocking.__all__)


# -- the local ones ----------------------------------------------------------------------------------


def _policy(value: float) -> nn.Linear:
    policy = nn.Linear(3, 2)
    for parameter in policy.parameters():
        nn.init.constant_(parameter, value)
    return policy


async def test_vanilla(library: Any) -> None:
    policy = _policy(0.0)
    updater = library.VanillaWeightUpdater.from_policy(policy)
    assert isinstance(updater, library.VanillaWeightUpdater)
    await settled(updater.push_weights())  # has none, and none are given
    assert policy.weight.unique().tolist() == [0]
    await settled(updater.push_weights(_policy(2.0)))
    assert policy.weight.unique().tolist() == [2]
    assert isinstance(policy.weight, nn.Parameter)
    with pytest.raises(LayoutMismatchError):
        await settled(updater.push_weights({"weight": torch.ones(3, 2), "bias": torch.full((2,), 9.0)}))
    assert policy.bias.unique().tolist() == [2]
    await settled(updater.aclose() if library is updaters else updater.close())


async def test_vanilla_takes_a_part_and_all_buffers(library: Any) -> None:
    policy, other = _policy(0.0), _policy(4.0)
    for module, value in ((policy, 0.0), (other, 4.0)):
        module.register_buffer("mask", torch.full((2,), value), persistent=False)
    updater = library.VanillaWeightUpdater.from_policy(policy)
    await settled(updater.push_weights({"bias": torch.full((2,), 3.0)}))
    assert (policy.weight.unique().tolist(), policy.bias.unique().tolist()) == ([0], [3])
    await settled(updater.push_weights(other))
    assert policy.get_buffer("mask").tolist() == [4, 4]
    assert policy.weight.unique().tolist() == [4]


async def test_vanilla_with_a_getter(library: Any) -> None:
    policy, source = _policy(0.0), _policy(5.0)
    updater = library.VanillaWeightUpdater(
        weight_getter=lambda: TensorDict.from_module(source).data,
        policy_weights=TensorDict.from_module(policy),
    )
    await settled(updater())
    assert policy.weight.unique().tolist() == [5]


async def test_multi_processed(library: Any) -> None:
    """By device, as torchrl's collectors have it, in memory that workers share."""
    cpu = torch.device("cpu")
    shared = TensorDict.from_module(_policy(0.0)).data.clone().share_memory_()
    other = TensorDict.from_module(_policy(0.0)).data.clone()
    source: list[Any] = [None]
    updater = library.MultiProcessedWeightUpdater(
        get_server_weights=lambda: source[0], policy_weights={cpu: shared, 1: other}
    )
    assert updater.all_worker_ids() == [cpu, 1]
    await settled(updater.push_weights())  # the getter has none
    await settled(updater.push_weights(_policy(1.0)))
    assert [w["weight"].unique().tolist() for w in (shared, other)] == [[1], [1]]
    source[0] = TensorDict.from_module(_policy(3.0)).data
    await settled(updater.push_weights(worker_ids=cpu))
    assert [w["weight"].unique().tolist() for w in (shared, other)] == [[3], [1]]
    assert shared["weight"].is_shared()
    with pytest.raises(UnknownWorkerError, match="unknown worker 7"):
        await settled(updater.push_weights(_policy(1.0), worker_ids=[7]))
    silent = library.MultiProcessedWeightUpdater(get_server_weights=None, policy_weights={cpu: shared})
    await settled(silent.push_weights())


async def test_remote_module(library: Any) -> None:
    updater = library.RemoteModuleWeightUpdater()
    await settled(updater.push_weights(_policy(1.0)))
    with pytest.raises(RuntimeError, match="has no weights of its own") as caught:
        await settled(updater.push_weights())
    assert caught.type is NotInitializedError
    assert updater.all_worker_ids() is None


async def test_two_pushes_at_once(library: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """One after the other: else some parameters would have the values of one, and some those of the other."""
    inside, most = 0, 0
    apply = WeightStrategy.apply_weights

    def slowly(*args: Any, **kwargs: Any) -> None:
        nonlocal inside, most
        inside += 1
        most = max(most, inside)
        time.sleep(0.1)
        apply(*args, **kwargs)
        inside -= 1

    monkeypatch.setattr(WeightStrategy, "apply_weights", slowly)
    policy = _policy(0.0)
    updater = library.VanillaWeightUpdater.from_policy(policy)
    if library is updaters:
        pushes = [updater.push_weights(_policy(value)) for value in (1.0, 2.0)]
    else:
        pushes = [asyncio.to_thread(updater.push_weights, _policy(value)) for value in (1.0, 2.0)]
    await asyncio.gather(*pushes)
    assert most == 1
    assert policy.weight.unique().tolist() in ([1], [2])
    copied = copy.deepcopy(updater)
    await settled(copied.push_weights(_policy(3.0)))


@pytest.mark.parametrize("who", ["blocking", "another loop", "the same loop"])
async def test_a_push_that_waits_for_another_one(who: str) -> None:
    """Of a blocking twin, of another event loop, and of a loop that the former push did not run on."""
    begun, go, order = threading.Event(), threading.Event(), []

    def push(number: int) -> None:
        order.append(number)
        begun.set()
        assert go.wait(PATIENCE)

    def in_a_thread(number: int) -> None:
        found = updater.push_weights(number)
        if inspect.isawaitable(found):
            asyncio.run(found)  # type: ignore[arg-type]

    library: Any = blocking if who == "blocking" else updaters
    updater = _pushing(library, push)
    for _ in range(2):  # each time on other loops
        begun.clear()
        go.clear()
        order.clear()
        first = asyncio.create_task(asyncio.to_thread(in_a_thread, 1))
        assert await asyncio.to_thread(begun.wait, PATIENCE)
        with pytest.raises(SyncTimeoutError):
            await settled(updater.push_weights(2, timeout=BRIEF))
        if who == "the same loop":
            others = [asyncio.ensure_future(updater.push_weights(number)) for number in (3, 4)]
        else:
            others = [asyncio.create_task(asyncio.to_thread(in_a_thread, 3))]
        cancelled = asyncio.create_task(asyncio.to_thread(in_a_thread, 5)) if who == "blocking" else None
        await asyncio.sleep(BRIEF)
        assert order == [1]
        go.set()
        await within(asyncio.gather(first, *others, *([cancelled] if cancelled else [])))
        assert order[0] == 1
        assert 2 not in order


def _pushing(library: Any, push: Callable[[int], None]) -> Any:
    class Pushing(library.WeightUpdaterBase):  # type: ignore[misc]
        def _maybe_map_weights(self, weights: Any) -> Any:
            return weights

        def _sync_weights_with_worker(self, *, worker_id: Any = None, server_weights: Any) -> None:
            push(server_weights)

    return Pushing()


async def test_a_push_inside_a_push(library: Any) -> None:
    """It is a part of that; and the next one waits for both."""
    pushed = []

    class Nested(library.WeightUpdaterBase):  # type: ignore[misc]
        def _sync_weights_with_worker(self, *, worker_id: Any = None, server_weights: Any) -> Any:
            pushed.append(server_weights["n"])
            if server_weights["n"]:
                return self.push_weights({"n": server_weights["n"] - 1})
            return None

    updater = Nested()
    await settled(updater.push_weights({"n": 3}, timeout=PATIENCE))
    await settled(updater.push_weights({"n": 0}, timeout=PATIENCE))
    assert pushed == [3, 2, 1, 0, 0]


def test_a_push_whose_event_loop_is_closed() -> None:
    """Ctrl-C has ended run_until_complete(), say. Its coroutine is closed in another context than its own."""
    waits = True

    class Slow(updaters.WeightUpdaterBase):
        async def _sync_weights_with_worker(self, *, worker_id: Any = None, server_weights: Any) -> None:
            if waits:
                await asyncio.Event().wait()

    updater, loop = Slow(), asyncio.new_event_loop()
    pushes = [loop.create_task(updater.push_weights({})) for _ in range(2)]
    loop.run_until_complete(asyncio.sleep(0.05))
    loop.close()
    waits = False
    for push in pushes:
        push.get_coro().close()
    asyncio.run(updater.push_weights({}, timeout=PATIENCE / 2))


async def test_a_push_that_is_cancelled_while_it_waits() -> None:
    inside, go = 0, asyncio.Event()

    class Slow(updaters.WeightUpdaterBase):
        async def _sync_weights_with_worker(self, *, worker_id: Any = None, server_weights: Any) -> None:
            nonlocal inside
            inside += 1
            try:
                assert inside == 1
                await go.wait()
            finally:
                inside -= 1

    updater = Slow()
    pushes = [asyncio.create_task(updater.push_weights({})) for _ in range(6)]
    await asyncio.sleep(0.05)
    for number in (1, 3):
        pushes[number].cancel()
    pushes[0].cancel()  # the one that has the turn
    await asyncio.sleep(0.05)
    go.set()
    results = await within(asyncio.gather(*pushes, return_exceptions=True))
    assert [isinstance(each, asyncio.CancelledError) for each in results] == [
        True,
        True,
        False,
        True,
        False,
        False,
    ]


class _Refusing(RemoteCollectorsUpdater):
    """Collectors that refuse, or that are lost."""

    def _make_transport(self, worker: int) -> Any:
        error = WorkerLostError([1], "gone") if worker else RemoteApplyError(0, -1, "ValueError", "no", "")

        async def fail(*args: Any, **kwargs: Any) -> None:
            raise error

        return SimpleNamespace(send_weights=fail, send_weights_async=fail)


@pytest.mark.parametrize("wait", [True, False])
async def test_all_collectors_that_fail_are_named(wait: bool) -> None:
    updater = _Refusing({"w": torch.ones(1)}, 2)
    with pytest.raises(RemoteApplyError) as caught:
        await updater.push_weights(wait=wait)
    assert any("WorkerLostError" in note and "gone" in note for note in caught.value.__notes__)


# -- over a store ------------------------------------------------------------------------------------


class Store:
    """A store of torch.distributed, with a worker behind it."""

    def __init__(self, answer: Callable[[str], bytes] = lambda _: b"updated") -> None:
        self.entries: dict[str, bytes] = {}
        self.log: list[str] = []
        self._answer = answer

    def set(self, key: str, value: bytes) -> None:
        self.entries[key] = value
        self.log.append(key)

    def get(self, key: str) -> bytes:
        self.entries[key] = self._answer(key)
        return self.entries[key]

    def delete_key(self, key: str) -> None:
        del self.entries[key]


class Sent(TensorDict):  # type: ignore[misc]
    """Notes where it was sent."""

    to: list[tuple[str, int]]

    def send(self, dst: int, **_: Any) -> None:
        self.to.append(("send", dst))

    def isend(self, dst: int, **_: Any) -> None:
        self.to.append(("isend", dst))


def sent() -> Sent:
    weights = Sent({"w": torch.ones(1)})
    object.__setattr__(weights, "to", [])
    return weights


@pytest.mark.parametrize("sync", [True, False])
async def test_distributed(library: Any, *, sync: bool) -> None:
    store, weights, others = Store(), sent(), sent()
    updater = library.DistributedWeightUpdater(store, weights, 3, sync)
    assert updater.all_worker_ids() == [1, 2, 3]
    await settled(updater.push_weights())
    how = "send" if sync else "isend"
    assert weights.to == [(how, rank) for rank in (1, 2, 3)]
    assert store.log == ["NODE_1_in", "NODE_2_in", "NODE_3_in"]
    assert set(store.entries.values()) == {b"update_weights"}  # the answers were deleted
    await settled(updater.push_weights(others, worker_ids=2))
    await settled(updater.push_weights(others, worker_ids=[3, 1]))
    assert [rank for _, rank in others.to] == [2, 3, 1]


@pytest.mark.parametrize("worker_ids", [0, -1, 4, [1, 0], torch.device("cpu")])
async def test_distributed_ranks(library: Any, worker_ids: Any) -> None:
    store, weights = Store(), sent()
    updater = library.DistributedWeightUpdater(store, weights, 3, True)
    with pytest.raises(RuntimeError, match="worker ranks are 1 to 3"):
        await settled(updater.push_weights(worker_ids=worker_ids))
    assert weights.to == []
    assert store.log == []


async def test_distributed_takes_a_dict(library: Any) -> None:
    store = Store()
    updater = library.DistributedWeightUpdater(store, sent(), 1, True)
    with pytest.raises(ValueError, match="process group has not been initialized"):
        await settled(updater.push_weights({"w": torch.ones(1)}))  # gets as far as torch.distributed
    with pytest.raises(WeightSourceError):
        await settled(updater.push_weights([1]))
    assert store.log == ["NODE_1_in"]
    await settled(updater.aclose() if library is updaters else updater.close())


async def test_distributed_status(library: Any) -> None:
    store = Store(lambda key: b"failed" if key == "NODE_2_out" else b"updated")
    updater = library.DistributedWeightUpdater(store, sent(), 3, True)
    with pytest.raises(
        RuntimeError, match="rank 2: expected the status 'updated' in the store, got b'failed'"
    ):
        await settled(updater.push_weights())
    assert store.log == ["NODE_1_in", "NODE_2_in"]
    assert not [key for key in store.entries if key.endswith("_out")]  # the next push waits for its own


@pytest.mark.parametrize("sync", [True, False])
async def test_distributed_with_real_ranks(library: Any, *, sync: bool) -> None:
    store: Any = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("forkserver")
    processes = [context.Process(target=follow, args=(store.port, rank, 3, 2)) for rank in (1, 2)]
    for process in processes:
        process.start()
    dist.init_process_group("gloo", store=PrefixStore("group", store.clone()), rank=0, world_size=3)
    try:
        weights = TensorDict({"w": torch.zeros(1000), "nested": TensorDict({"b": torch.zeros(3)})})
        updater = library.DistributedWeightUpdater(store, weights, 2, sync)
        for number in range(2):
            weights.apply_(lambda x, value=number + 1.0: x.fill_(value))
            await settled(updater.push_weights())
            for rank in (1, 2):
                assert store.get(f"seen_{rank}_{number}").decode() == str({number + 1.0})
    finally:
        dist.destroy_process_group()
        for process in processes:
            process.join(PATIENCE)
            process.close()


async def test_distributed_waits_for_an_answer_that_was_late_before_it_sends_again() -> None:
    answers = iter([b"", b"failed", b"updated", b"", b"", b"updated"])

    def answer(_: str) -> bytes:
        if found := next(answers):
            return found
        raise TimeoutError("of the store")

    store, weights = Store(answer), sent()
    updater = updaters.DistributedWeightUpdater(store, weights, 1, True)
    with pytest.raises(TimeoutError, match="of the store"):
        await updater.push_weights()
    await updater.push_weights()
    assert store.log == ["NODE_1_in", "NODE_1_in"]
    # A rank that was started again never answers what the one before it got.
    for _ in range(2):
        with pytest.raises(TimeoutError, match="of the store"):
            await updater.push_weights()
    await updater.push_weights()
    assert store.log == ["NODE_1_in"] * 4
    assert next(answers, None) is None


async def test_distributed_does_not_block_the_loop() -> None:
    answered = threading.Event()

    def answer(_: str) -> bytes:
        answered.wait(PATIENCE)
        return b"updated"

    updater = updaters.DistributedWeightUpdater(Store(answer), sent(), 1, True)
    pushing = asyncio.create_task(updater.push_weights())
    for _ in range(10):
        await asyncio.sleep(0)
    answered.set()
    await pushing
    answered.clear()
    with pytest.raises(SyncTimeoutError):
        await updater.push_weights(timeout=BRIEF)
    answered.set()
