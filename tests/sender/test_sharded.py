"""Trainers whose weights are spread over ranks (FSDP2): real ones, of processes, over gloo."""

from __future__ import annotations

import asyncio
import multiprocessing
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, TCPStore
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from aiosync import DistributedWeightSyncScheme, GatherError, InvalidArgumentError, atomic
from aiosync.weights.sharded import Block, check_blocks
from tests.kit.cases import SchemeCase, named
from tests.kit.clock import PATIENCE, within
from tests.kit.local import LocalCluster, LocalWorker
from tests.kit.models import fill, value_of
from tests.sender import trainers
from tests.sender.trainers import LAYER, LAYERS, MIB, Net


@asynccontextmanager
async def workers_of(port: int, *, large: bool = False) -> AsyncIterator[list[LocalWorker]]:
    """Two workers that know the store; they connect when the sender comes."""
    address = f"tcp://127.0.0.1:{port}"
    workers = [
        LocalWorker(
            DistributedWeightSyncScheme(init_method=address, timeout=PATIENCE), index, Net(large=large), {}
        )
        for index in range(2)
    ]

    async def connect(worker: LocalWorker) -> None:
        await worker.connect()
        await worker.serve()

    connecting = [asyncio.create_task(connect(worker)) for worker in workers]
    try:
        yield workers
        await asyncio.gather(*connecting)
    finally:
        for task in connecting:
            task.cancel()
        await asyncio.wait(connecting)
        for worker in workers:
            await worker.close()


async def trainer(
    scenario: Callable[..., Any], ranks: int = 2, *, large: bool = False
) -> tuple[list[Any], list[LocalWorker]]:
    """Run a scenario on every rank of a trainer; what they returned, and the workers, closed."""
    store: Any = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("forkserver")
    pipes, processes = [], []
    try:
        async with workers_of(store.port, large=large) as workers:
            for rank in range(ranks):
                ours, theirs = context.Pipe(duplex=False)
                arguments = scenario.__name__, rank, ranks, store.port, large, theirs
                processes.append(context.Process(target=trainers.main, args=arguments))
                processes[-1].start()
                theirs.close()
                pipes.append(ours)
            loop = asyncio.get_running_loop()
            results = [await within(loop.run_in_executor(None, pipe.recv)) for pipe in pipes]
            traces = [trace for trace, _ in results if trace]
            assert not traces, "\n".join(traces)
    finally:
        for process in processes:
            process.kill()
            process.join()
            process.close()
        for pipe in pipes:
            pipe.close()
    return [value for _, value in results], workers


@pytest.mark.parametrize(
    ("scenario", "ranks"),
    [(trainers.train, 2), (trainers.train, 3), (trainers.spread, 4), (trainers.evaluated, 2)],
)
async def test_workers_hold_the_full_state_dict(scenario: Callable[..., Any], ranks: int) -> None:
    (whole, *others), workers = await trainer(scenario, ranks)
    assert others == [whole] * (ranks - 1) or scenario is trainers.train
    for worker in workers:
        state = worker.model.state_dict()
        assert state.keys() == whole.keys()
        for key, value in whole.items():
            assert torch.equal(state[key], torch.tensor(value, dtype=state[key].dtype)), key


async def test_gathering_takes_memory_for_one_tensor() -> None:
    """At most: where a part lies in one piece, not even that. Rank 0 has the two slots that it sends from."""
    (leading, other), _ = await trainer(trainers.memory, large=True)
    one, model = 4 * LAYER, 4 * LAYER * LAYERS
    assert other < 4 * one, (
        f"{other / MIB:.1f} MiB for tensors of {one / MIB:g} MiB, of {model / MIB:g} in all"
    )
    assert leading < 2 * model + 4 * one, f"{leading / MIB:.1f} MiB with two slots of {model / MIB:g} MiB"


async def test_what_is_not_sent_is_not_waited_for() -> None:
    (leading, other), workers = await trainer(trainers.refused)
    kinds = ["UnknownWorkerError", "LayoutMismatchError", "InvalidArgumentError", "GatherError"]
    assert [kind for kind, _ in leading] == [*kinds, "UnknownWorkerError"]
    kinds = ["GatherError", "GatherError", "InvalidArgumentError", "InvalidArgumentError"]
    assert [kind for kind, _ in other] == [*kinds, "GatherError"]
    assert "unknown worker 7" in other[0][1]
    assert "missing" in other[1][1]
    assert "rank 1 has failed" in leading[3][1]
    assert [worker.model.single.item() for worker in workers] == [5, 5]


async def test_weights_in_another_order() -> None:
    (whole, _), workers = await trainer(trainers.reordered)
    for worker in workers:
        assert {key: value.tolist() for key, value in worker.model.state_dict().items()} == whole


async def test_a_rank_that_is_out_of_step() -> None:
    ((leading, _), (other, version)), _ = await trainer(trainers.out_of_step)
    assert [kind for kind, _ in leading] == ["GatherError", "SyncTimeoutError"]
    assert [kind for kind, _ in other] == ["SyncTimeoutError", "GatherError"]
    assert "not every rank of the trainer made the call" in other[0][1]
    assert "a rank has given up its send()" in leading[0][1]
    assert "rank 0 has given up" in other[1][1]
    assert version in (3, 4)  # whether the cancelled one was still published


async def test_two_sends_at_once() -> None:
    versions, workers = await trainer(trainers.together)
    assert versions == [2, 2]
    assert [worker.model.single.item() for worker in workers] == [3, 3]


async def test_a_trainer_that_resumes_and_connects_twice_at_once() -> None:
    versions, workers = await trainer(trainers.resumed)
    assert versions == [(4, 5, 5)] * 2
    assert [worker.scheme.version for worker in workers] == [5, 5]


async def test_a_rank_that_calls_connect_again_while_rank_0_publishes() -> None:
    """The second call is none on the other ranks. Later sends would pair different steps of the ranks."""
    last, workers = await trainer(trainers.retried)
    assert last == [3, 3]
    for worker in workers:
        assert worker.scheme.version == 3
        assert all(torch.all(weights == 3) for weights in worker.model.parameters())


async def test_sends_after_a_connect_that_failed_on_rank_0_alone() -> None:
    """They are sends on every rank, or the ranks' later calls would not match."""
    ((error, leading), (none, other)), workers = await trainer(trainers.connected_in_part)
    assert (error, none) == ("SyncTimeoutError", "")
    assert leading == other == 3
    for worker in workers:
        assert all(torch.all(weights == 3) for weights in worker.model.parameters())


async def test_calls_match_in_the_order_in_which_they_begin() -> None:
    """Not in that in which a rank has its weights ready."""
    versions, workers = await trainer(trainers.slow_sources)
    assert versions == [2, 2]
    for worker in workers:
        assert all(torch.all(weights == 3) for weights in worker.model.parameters())


async def test_a_worker_that_does_not_answer_fails_the_call_of_each_rank() -> None:
    ((leading, *versions), (other, *others)), _ = await trainer(trainers.unanswered)
    assert leading[0] == "SyncTimeoutError"
    assert other[0] == "GatherError"
    assert leading[1] in other[1]
    assert versions == others == [1, 2]


async def test_a_send_that_ends_before_its_turn_changes_no_version() -> None:
    (leading, other), _ = await trainer(trainers.ended_before_its_turn)
    assert leading == ("SyncTimeoutError", 1, 2)
    assert other == ("GatherError", 1, 2)


async def test_a_rank_waits_for_rank_0_as_long_again_once_it_has_the_shards() -> None:
    """Rank 0's workers may answer at the last moment, and the ranks do not begin at the same one."""
    errors, _ = await trainer(trainers.answered_late)
    assert errors == [("", ""), ("", "")]


async def test_overlapping_connects_that_end_in_another_order_on_each_rank() -> None:
    ((leading, _), (other, _)), workers = await trainer(trainers.overlapping)
    assert leading == ["GatherError", "SyncTimeoutError"]
    assert other == ["InvalidArgumentError", "GatherError"]
    for worker in workers:
        assert all(torch.all(weights == 3) for weights in worker.model.parameters())


async def test_a_rank_that_is_gone() -> None:
    (error, _), _ = await trainer(trainers.abandoned)
    assert error[0] == "GatherError"
    assert "is gone, or has closed its scheme" in error[1]


async def test_a_scheme_that_was_not_told() -> None:
    errors, _ = await trainer(trainers.not_told)
    assert [kind for kind, _ in errors] == ["InvalidArgumentError"] * 2
    assert "give init_on_sender() the model" in errors[0][1]


async def test_rank_0_closes_while_it_waits() -> None:
    (leading, other), _ = await trainer(trainers.closed)
    assert [kind for kind, _ in leading] == ["NotConnectedError"] * 2
    assert other[0] == "GatherError"


async def test_another_rank_closes_while_it_waits() -> None:
    (leading, other), _ = await trainer(trainers.closed_contributor)
    assert leading[0] == "GatherError"
    assert other[0] == "NotConnectedError"


async def test_what_a_ranks_own_code_raises() -> None:
    (leading, other), _ = await trainer(trainers.failing)
    assert leading == ("GatherError", "rank 1 has failed: of its own")
    assert other[0] == "ZeroDivisionError"


@pytest.mark.parametrize("joint", [False, True])
async def test_a_dtensor_that_nobody_told_of(*, joint: bool) -> None:
    """Into a scheme that was initialised with whole weights."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        async with LocalCluster(SchemeCase("memory", named("memory")), workers=1) as cluster:
            scheme, mesh = cluster.scheme, init_device_mesh("cpu", (1,))
            state = {k: distribute_tensor(v, mesh, [Shard(0)]) for k, v in cluster.model.state_dict().items()}
            with pytest.raises(InvalidArgumentError, match=r"give init_on_sender\(\) the model"):
                if joint:
                    async with atomic(scheme) as tx:
                        tx.send(scheme, state)
                else:
                    await scheme.send(state)
            fill(cluster.model, 4)
            assert (await scheme.send()).ok
            assert value_of(cluster.workers[0].model) == 4
    finally:
        dist.destroy_process_group()


def test_parts_that_are_not_the_whole() -> None:
    whole = torch.zeros(4, 2)

    def part(row: int, rows: int, dtype: str = "torch.float32", shape: tuple[int, ...] = (4, 2)) -> Block:
        return Block(shape, (row, 0), (rows, 2), dtype)

    check_blocks("w", whole, [part(0, 3), part(3, 1)])
    for parts in (
        [part(0, 3)],
        [part(0, 3), part(2, 1)],
        [part(0, 3), part(3, 1, "torch.float16")],
        [part(0, 2), part(2, 2, shape=(2, 4))],
    ):
        with pytest.raises(GatherError):
            check_blocks("w", whole, parts)
