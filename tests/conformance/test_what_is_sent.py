"""Every form that weights come in, and everything that a model may hold."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import nn

from aiosync import InvalidArgumentError
from tests.kit.cases import SchemeCase
from tests.kit.local import LocalCluster
from tests.kit.models import Norm, Uniform, fill, value_of
from tests.weights.models import DTYPES, Tied, bits, filled

# -- forms of weights --------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["module", "flat", "nested", "tensordict", "state_dict"])
async def test_every_form_of_weights(case: SchemeCase, form: str) -> None:
    async with LocalCluster(case) as cluster:
        other = Uniform(3.0)
        nested = {"values": {str(i): p.detach() for i, p in enumerate(other.values)}}
        weights: Any = {
            "module": other,
            "flat": {n: p.detach() for n, p in other.named_parameters()},
            "nested": nested,
            "tensordict": TensorDict(nested),
            "state_dict": other.state_dict(),
        }[form]
        await cluster.scheme.send(weights)
        assert [value_of(w.model) for w in cluster.workers] == [3, 3]
        assert value_of(cluster.model) == 0


async def test_a_path_on_the_context(case: SchemeCase) -> None:
    class Context:
        def __init__(self) -> None:
            self.num_workers = 2
            self.policy = Uniform()
            self.others = [Uniform(5.0)]

    context = Context()
    init = {"model_id": "policy", "context": context}
    async with LocalCluster(case, init=init) as cluster:
        fill(context.policy, 2)
        await cluster.scheme.send()
        assert value_of(cluster.workers[0].model) == 2
        await cluster.scheme.send("others[0]")
        assert value_of(cluster.workers[0].model) == 5
        with pytest.raises(AttributeError, match="nothing"):
            await cluster.scheme.send("others[0].nothing")


async def test_a_context_with_get_model_and_factory(case: SchemeCase) -> None:
    class Context:
        policy_device = "cpu"

        def __init__(self) -> None:
            self.num_workers = 2
            self.policy_factory = lambda: Uniform(4.0)

        def get_model(self, model_id: str) -> Any:
            assert model_id == "policy"
            return None

    context = Context()
    init = {"model_id": "policy", "context": context}
    async with LocalCluster(case, init=init) as cluster:
        assert [value_of(w.model) for w in cluster.workers] == [4, 4]
        with pytest.raises(InvalidArgumentError, match="say which to send"):
            await cluster.scheme.send()
        await cluster.scheme.send(Uniform(5.0))
        assert [value_of(w.model) for w in cluster.workers] == [5, 5]


async def test_weights_instead_of_a_model(case: SchemeCase) -> None:
    weights = {f"values.{i}": torch.full((16,), 2.0) for i in range(4)}
    init = {"weights": weights, "num_workers": 2}
    async with LocalCluster(case, init=init) as cluster:
        assert [value_of(w.model) for w in cluster.workers] == [2, 2]
        for tensor in weights.values():
            tensor.fill_(3)
        await cluster.scheme.send()
        assert [value_of(w.model) for w in cluster.workers] == [3, 3]


async def test_weights_given_to_connect(case: SchemeCase) -> None:
    cluster = LocalCluster(case)
    try:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(cluster.scheme.connect(weights=Uniform(6.0)))
            for worker in cluster.workers:
                tasks.create_task(worker.connect())
        assert [value_of(w.model) for w in cluster.workers] == [6, 6]
    finally:
        await cluster.close()


async def test_a_worker_without_a_model_gets_the_weights(case: SchemeCase) -> None:
    cluster = LocalCluster(case, workers=1, serve=False)
    cluster.workers[0].init(model=None)
    async with cluster:
        fill(cluster.model, 1)
        await cluster.scheme.send(wait=False)
        weights: Any = await cluster.workers[0].scheme.receive()
        assert value_of(weights.values(True, True)) == 1


async def test_tensordicts_and_dicts_as_destinations(case: SchemeCase) -> None:
    flat: dict[str, Any] = {f"values.{i}": torch.zeros(16) for i in range(4)}
    nested = TensorDict({"values": {str(i): torch.zeros(16) for i in range(4)}})
    async with LocalCluster(case, worker_models={0: flat, 1: nested}) as cluster:
        fill(cluster.model, 2)
        await cluster.scheme.send()
        assert value_of(flat.values()) == 2
        assert value_of(nested.values(True, True)) == 2


# -- what is in a model ------------------------------------------------------------------------------


class _AllDtypes(nn.Module):
    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        for dtype in DTYPES:
            name = str(dtype).removeprefix("torch.")
            for shape in ((), (3,), (2, 0), (2, 3)):
                value = filled(shape, dtype, seed)
                self.register_buffer(f"{name}_{len(shape)}_{value.numel()}", value)


@pytest.mark.filterwarnings("ignore:ComplexHalf support")
async def test_every_dtype_and_shape(case: SchemeCase) -> None:
    made = iter(range(10))
    async with LocalCluster(case, workers=1, model=lambda: _AllDtypes(next(made))) as cluster:
        worker = cluster.workers[0]
        for _ in range(2):
            for name, tensor in cluster.model.state_dict().items():
                assert bits(tensor) == bits(worker.model.state_dict()[name]), name
            for _, tensor in cluster.model.named_buffers():
                tensor.copy_(filled(tuple(tensor.shape), tensor.dtype, 77))
            await cluster.scheme.send()


async def test_tied_parameters_stay_tied(case: SchemeCase) -> None:
    async with LocalCluster(case, workers=1, model=Tied) as cluster:
        worker = cluster.workers[0].model
        for value in (1.0, 2.0):
            fill(cluster.model, value)
            await cluster.scheme.send()
            assert value_of(worker) == value
            assert worker.head.weight is worker.embed.weight


async def test_a_model_without_parameters(case: SchemeCase) -> None:
    async with LocalCluster(case, model=nn.Identity) as cluster:
        assert (await cluster.scheme.send()).version == 1
        assert (await cluster.scheme.send()).ok


async def test_a_model_on_meta_is_materialised(case: SchemeCase) -> None:
    with torch.device("meta"):
        empty = Uniform()
    async with LocalCluster(case, workers=1, worker_models={0: empty}) as cluster:
        assert value_of(empty) == 0
        fill(cluster.model, 3)
        await cluster.scheme.send()
        assert value_of(empty) == 3
        assert all(isinstance(p, nn.Parameter) for p in empty.parameters())


@pytest.mark.parametrize("commit", ["flip", "copy"])
async def test_a_workers_buffers_stay_its_own(case: SchemeCase, commit: str) -> None:
    async with LocalCluster(case, model=Norm, commit=commit) as cluster:
        cluster.model.train()(torch.randn(8, 3))
        await cluster.scheme.send()
        first, second = (w.model for w in cluster.workers)
        assert torch.equal(first.norm.running_mean, cluster.model.norm.running_mean)
        first.train()(torch.randn(8, 3) + 5)
        assert not torch.equal(first.norm.running_mean, second.norm.running_mean)
        assert torch.equal(second.norm.running_mean, cluster.model.norm.running_mean)
        kept = cluster.model.norm.running_mean.clone()
        published = dict(cluster.scheme.weights.flatten_keys(".").items())
        assert torch.equal(published["norm.running_mean"], kept)
        # A subset without them leaves them alone.
        mine = first.norm.running_mean.clone()
        await cluster.scheme.send({"linear.weight": torch.full((3, 3), 2.0)}, strict=False, worker_ids=[0, 1])
        assert torch.equal(first.norm.running_mean, mine)
        assert value_of([first.linear.weight]) == 2


@pytest.mark.parametrize("commit", ["flip", "copy"])
async def test_how_a_commit_reaches_the_parameters(case: SchemeCase, commit: str) -> None:
    async with LocalCluster(case, workers=1, commit=commit) as cluster:
        model = cluster.workers[0].model
        at = [p.data_ptr() for p in model.parameters()]
        for version in range(1, 5):
            fill(cluster.model, version)
            await cluster.scheme.send()
            assert value_of(model) == version
            now = [p.data_ptr() for p in model.parameters()]
            if commit == "copy":
                assert now == at
            else:
                assert now != at
            at = now


@pytest.mark.parametrize("commit", ["flip", "copy"])
async def test_a_cast_narrows_on_the_way(case: SchemeCase, commit: str) -> None:
    async with LocalCluster(case, workers=1, model=Norm, cast=torch.bfloat16, commit=commit) as cluster:
        worker = cluster.workers[0].model
        for _ in range(3):
            with torch.no_grad():
                cluster.model.linear.weight.normal_()
            report = await cluster.scheme.send()
            sent = cluster.model.linear.weight.detach()
            assert worker.linear.weight.dtype is torch.float32
            assert torch.equal(worker.linear.weight, sent.bfloat16().float())
            assert worker.norm.num_batches_tracked.dtype is torch.int64
            assert report.nbytes > 0


async def test_a_workers_own_floating_dtype(case: SchemeCase) -> None:
    half = Uniform().half()
    async with LocalCluster(case, workers=2, worker_models={1: half}) as cluster:
        for version in (1, 2, 3):
            fill(cluster.model, version)
            await cluster.scheme.send()
            assert next(half.parameters()).dtype is torch.float16
            assert [value_of(w.model) for w in cluster.workers] == [version, version]


async def test_a_tensor_that_cannot_be_sent(case: SchemeCase) -> None:
    async with LocalCluster(case) as cluster:
        weights = {f"values.{i}": torch.ones(16) for i in range(4)}
        with pytest.raises(TypeError, match=r"values\.1"):
            await cluster.scheme.send({**weights, "values.1": torch.ones(16).to_sparse()})
        await cluster.scheme.send(weights)
        assert value_of(cluster.workers[0].model) == 1


class _Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.register_buffer("mask", torch.ones(2), persistent=False)


async def test_what_a_model_keeps_to_itself_may_be_given_and_is_not_sent(case: SchemeCase) -> None:
    async with LocalCluster(case, workers=1, model=_Masked) as cluster:
        worker: Any = cluster.workers[0].model
        cluster.model.mask.fill_(7)
        for weights in (cluster.model, cluster.model.state_dict(), TensorDict.from_module(cluster.model)):
            fill(cluster.model, cluster.scheme.version + 1)
            await cluster.scheme.send(weights)
            assert value_of(worker) == cluster.scheme.version
            assert value_of([worker.mask]) == 1
