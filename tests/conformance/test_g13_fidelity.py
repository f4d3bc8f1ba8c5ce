"""G13: what was applied is what the model computes with, and tensors handed out behave like any others."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import io
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from aiosync import InvalidArgumentError, LayoutMismatchError, RemoteApplyError, UnsupportedTensorError
from tests.kit.cases import SCHEMES, SchemeCase
from tests.kit.clock import BRIEF, PATIENCE, SCALE
from tests.kit.local import LocalCluster
from tests.kit.models import Uniform, fill, value_of
from tests.kit.processes import ROOT
from tests.kit.surgery import LARGE

COMMITS = pytest.mark.parametrize("commit", ["flip", "copy"])


class Policy(nn.Module):
    """Statistics that each forward pass replaces, a body and a head."""

    mean: Tensor
    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.body = nn.Linear(3, 3)
        self.head = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        self.mean = self.mean + x.detach().mean(0).to(self.mean.dtype)
        self.count = self.count + 1
        out: Tensor = self.head(self.body(x.to(self.body.weight.dtype)))
        return out


def changed(model: nn.Module, value: float) -> None:
    """Other values everywhere."""
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.fill_(value)


def assert_has(model: nn.Module, sent: Mapping[str, Tensor]) -> None:
    """Every entry that was sent, in the model's own dtypes."""
    state = model.state_dict()
    for name, tensor in sent.items():
        assert torch.equal(state[name], tensor.to(state[name].dtype)), name


SURGERY: dict[str, Callable[[Policy], object]] = {
    "running statistics": lambda model: model(torch.ones(2, 3)),
    "another layer": lambda model: setattr(model, "head", nn.Linear(3, 2)),
    "another parameter": lambda model: setattr(model.head, "weight", nn.Parameter(torch.ones(2, 3))),
    "another buffer": lambda model: model.register_buffer("mean", torch.ones(3)),
    "assigned": lambda model: model.load_state_dict(copy.deepcopy(Policy().state_dict()), assign=True),
    "double": lambda model: model.double(),
    "bfloat16": lambda model: model.bfloat16(),
    "shared": lambda model: model.share_memory(),
}


@COMMITS
@pytest.mark.parametrize("whole", [True, False])
async def test_what_all_workers_refused_is_not_part_of_the_next_update(
    case: SchemeCase, commit: str, whole: bool
) -> None:
    async with LocalCluster(case, model=Policy, commit=commit) as cluster:
        models = [worker.model for worker in cluster.workers]
        for model in models:
            model.more = nn.Linear(1, 1)
        changed(cluster.model, 5.0)
        with pytest.raises((RemoteApplyError, LayoutMismatchError)):
            if whole:
                await cluster.scheme.send()
            else:
                await cluster.scheme.send({"mean": cluster.model.mean}, strict=False)
        assert cluster.scheme.version == 0
        kept = []
        for model in models:
            del model.more
            model(torch.ones(2, 3))
            kept.append({name: tensor.clone() for name, tensor in model.state_dict().items()})
        assert (await cluster.scheme.send({"head.bias": torch.full((2,), 7.0)}, strict=False)).ok
        for model, before in zip(models, kept, strict=True):
            assert_has(model, {**before, "head.bias": torch.full((2,), 7.0)})


@COMMITS
@pytest.mark.parametrize("size", [1, LARGE])
async def test_parts_of_a_model_that_was_made_in_inference_mode(
    case: SchemeCase, commit: str, size: int
) -> None:
    """Whatever its parameters view, they compute."""

    def make() -> Policy:
        model = Policy()
        model.wide = nn.Parameter(torch.zeros(size))
        return model

    with torch.inference_mode():
        model = make()
    async with LocalCluster(case, model=make, worker_models={0: model}, commit=commit) as cluster:
        names = sorted(cluster.model.state_dict())
        for version in range(1, 13):
            changed(cluster.model, float(version))
            state = cluster.model.state_dict()
            sent = {name: state[name] for name in names if (version + names.index(name)) % 3}
            for each in [sent, dict(list(sent.items())[:1])]:
                await cluster.scheme.send(each, strict=False, wait=False)
            await cluster.scheme.wait_ack()
            assert_has(model, sent)
            with torch.inference_mode():
                assert model(torch.ones(2, 3)).shape == (2, 2)


DTYPES = [torch.bfloat16, torch.float64, torch.float16, torch.float32]


@COMMITS
@pytest.mark.parametrize("waits", [False, True])
async def test_each_value_is_converted_once(case: SchemeCase, commit: str, waits: bool) -> None:
    """A value that went through a narrow dtype on its way to a wide one has lost bits. The model is converted
    before the update comes, or, while a reader holds the commit up, after it was staged."""
    async with LocalCluster(case, model=Policy, commit=commit) as cluster:
        worker = cluster.workers[0]
        for number, dtype in enumerate(2 * DTYPES):
            for step in range(3):
                changed(cluster.model, 1 / (3 + number + 10 * step))
                sent = {name: tensor.clone() for name, tensor in cluster.model.state_dict().items()}
                if step == 1 and waits:
                    async with worker.scheme.pinned() as version:
                        sending = asyncio.create_task(cluster.scheme.send())
                        await asyncio.sleep(BRIEF)
                        assert worker.scheme.version == version
                        worker.model.to(dtype)
                    assert (await sending).ok
                else:
                    if step == 1:
                        worker.model.to(dtype)
                    assert (await cluster.scheme.send()).ok
                assert_has(worker.model, sent)


class Tied(nn.Module):
    """Two layers and a buffer of one memory; or, on workers, of three memories and several dtypes."""

    def __init__(self, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
        if dtype is None:
            self.b.weight = self.a.weight
            self.register_buffer("c", self.a.weight.data)
        else:
            self.b.to(dtype)
            self.register_buffer("c", torch.zeros(3, 3))


@COMMITS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
async def test_one_entry_that_becomes_tensors_of_several_dtypes(
    case: SchemeCase, commit: str, dtype: torch.dtype
) -> None:
    models = {0: Tied(dtype), 1: Tied(dtype)}
    models[1].to(dtype)
    async with LocalCluster(case, model=Tied, worker_models=models, commit=commit) as cluster:
        for version in range(1, 4):
            with torch.no_grad():
                cluster.model.a.weight.fill_(1 / (2 + version))
            assert (await cluster.scheme.send()).ok
            for model in models.values():
                assert_has(model, cluster.model.state_dict())


@COMMITS
async def test_a_model_that_is_converted_while_its_version_waits(case: SchemeCase, commit: str) -> None:
    """Later versions are not for this worker, so the sender offers it no other."""
    async with LocalCluster(case, model=Policy, commit=commit, per_worker_weights=False) as cluster:
        worker = cluster.workers[1]
        worker.model.bfloat16()
        changed(cluster.model, 1 / 3)
        sent = {name: tensor.clone() for name, tensor in cluster.model.state_dict().items()}
        async with worker.scheme.pinned():
            sending = asyncio.create_task(cluster.scheme.send())
            await asyncio.sleep(BRIEF)
            for _ in range(2):
                changed(cluster.model, 1 / 7)
                await cluster.scheme.send(None, [0], wait=False)
            worker.model.float()
        assert (await sending).workers[1].status == "applied"
        assert_has(worker.model, sent)


@COMMITS
@pytest.mark.parametrize("surgery", SURGERY)
async def test_replaced_tensors_are_found(case: SchemeCase, surgery: str, commit: str) -> None:
    async with LocalCluster(case, model=Policy, commit=commit) as cluster:
        first, second = (worker.model for worker in cluster.workers)
        for value in (1.0, 2.0, 3.0):
            SURGERY[surgery](first)
            dtypes = {name: tensor.dtype for name, tensor in first.state_dict().items()}
            changed(cluster.model, value)
            assert (await cluster.scheme.send()).ok
            assert_has(first, cluster.model.state_dict())
            assert_has(second, cluster.model.state_dict())
            assert {name: tensor.dtype for name, tensor in first.state_dict().items()} == dtypes
            first(torch.ones(2, 3))


def _set(parameter: Tensor, data: Tensor) -> None:
    parameter.data = data


MISFITS: dict[str, tuple[str, Callable[[Policy], object]]] = {
    "head": (r"head\.weight", lambda model: setattr(model, "head", nn.Linear(3, 4))),
    "gone": (r"head\.bias", lambda model: setattr(model, "head", nn.Identity())),
    "more": (r"extra\.weight", lambda model: setattr(model, "extra", nn.Linear(1, 1))),
    "slice": (r"head\.weight", lambda model: _set(model.head.weight, model.head.weight.data[:1])),
    "view": (r"head\.weight", lambda model: _set(model.head.weight, model.head.weight.data.view(3, 2))),
    "parametrization": (
        r"parametrizations\.weight",
        lambda model: nn.utils.parametrizations.weight_norm(model.head),
    ),
}


@COMMITS
@pytest.mark.parametrize("misfit", MISFITS)
async def test_a_model_that_fits_no_more_refuses(case: SchemeCase, misfit: str, commit: str) -> None:
    async with LocalCluster(case, model=Policy, commit=commit) as cluster:
        first, second = (worker.model for worker in cluster.workers)
        name, surgery = MISFITS[misfit]
        head = first.head
        surgery(first)
        before = copy.deepcopy(first.state_dict())
        changed(cluster.model, 1.0)
        for _ in range(2):
            with pytest.raises((LayoutMismatchError, RemoteApplyError), match=name):
                await cluster.scheme.send()
            assert all(torch.equal(tensor, before[name]) for name, tensor in first.state_dict().items())
            assert_has(second, cluster.model.state_dict())
        if misfit == "parametrization":
            nn.utils.parametrize.remove_parametrizations(first.head, "weight")
        elif misfit == "more":
            del first.extra
        else:
            first.head = head
            _set(head.weight, torch.zeros(2, 3))
        assert (await cluster.scheme.send()).ok
        assert_has(first, cluster.model.state_dict())


@pytest.mark.parametrize("size", [16, 200_000], ids=["small", "large"])
async def test_a_trainer_that_changes_a_shape_while_its_send_waits(case: SchemeCase, size: int) -> None:
    def make() -> nn.Module:
        return nn.ParameterDict({"w": torch.zeros(size)})

    async with LocalCluster(case, model=make, max_slots=2) as cluster:
        worker = cluster.workers[0]
        async with worker.scheme.pinned():
            for value in range(1, 8):
                cluster.model.w.data.fill_(value)
                await cluster.scheme.send(wait=False)
                await asyncio.sleep(0)
            sending = asyncio.create_task(cluster.scheme.send(timeout=PATIENCE))
            for _ in range(3):
                await asyncio.sleep(0)
            whole, cluster.model.w.data = cluster.model.w.data, torch.full((8,), 9.0)
            await asyncio.sleep(BRIEF)
        try:
            await sending  # it was quick enough
        except InvalidArgumentError as exc:
            assert "the model was changed" in str(exc)
        except LayoutMismatchError as exc:  # it had not begun
            assert "got float32[8]" in str(exc)
        cluster.model.w.data = whole
        values = worker.model.w.detach().unique().tolist()
        assert values in [[float(v)] for v in range(8)], values
        cluster.model.w.data.fill_(10.0)
        assert (await cluster.scheme.send()).ok
        assert value_of(worker.model) == 10.0


@COMMITS
async def test_a_layer_that_was_replaced_keeps_its_values(case: SchemeCase, commit: str) -> None:
    async with LocalCluster(case, workers=1, model=Policy, commit=commit) as cluster:
        model = cluster.workers[0].model
        changed(cluster.model, 1.0)
        await cluster.scheme.send()
        old, model.head = model.head, nn.Linear(3, 2)
        for value in (2.0, 3.0, 4.0):
            changed(cluster.model, value)
            await cluster.scheme.send()
        assert value_of(old) == 1


# -- what is not sent --------------------------------------------------------------------------------


@COMMITS
async def test_what_was_not_sent_keeps_its_values(case: SchemeCase, commit: str) -> None:
    async with LocalCluster(case, model=Policy, commit=commit) as cluster:
        first, second = (worker.model for worker in cluster.workers)

        def train_the_head(value: float) -> None:
            if commit == "flip" and case.views:  # what others view is read only: it has one of its own
                first.head = nn.Linear(3, 2)
            changed(first.head, value)

        for value in (1.0, 2.0, 3.0, 4.0):
            train_the_head(100 + value)
            changed(cluster.model, value)
            body = {f"body.{name}": tensor for name, tensor in cluster.model.body.named_parameters()}
            await cluster.scheme.send(body, strict=False)
            assert value_of(first.body) == value_of(second.body) == value
            assert value_of(first.head) == 100 + value
            assert_has(second.head, second.head.state_dict())
        kept = copy.deepcopy(second.head.state_dict())
        assert not torch.equal(kept["weight"], cluster.model.head.weight)
        await cluster.scheme.send()
        assert value_of(first.head) == value_of(second.head) == 4


@COMMITS
async def test_what_was_not_sent_keeps_its_bits_under_another_dtype(case: SchemeCase, commit: str) -> None:
    async with LocalCluster(case, model=Policy, commit=commit) as cluster:
        changed(cluster.model, 5.0)
        await cluster.scheme.send()
        weight = cluster.workers[0].model.head.weight.requires_grad_(False)
        weight.data = weight.data.view(torch.int32)
        bits = weight.data.clone()
        body = {f"body.{name}": tensor for name, tensor in cluster.model.body.named_parameters()}
        for value in (1.0, 2.0, 3.0):
            changed(cluster.model, value)
            with contextlib.suppress(LayoutMismatchError, RemoteApplyError):
                await cluster.scheme.send(body, strict=False)
            assert weight.dtype is torch.int32 and torch.equal(weight.data, bits)


@COMMITS
async def test_what_was_not_sent_in_any_of_the_versions_that_were_skipped(
    case: SchemeCase, commit: str
) -> None:
    async with LocalCluster(case, workers=1, model=Policy, commit=commit, serve=False) as cluster:
        worker = cluster.workers[0]
        worker.model.head = nn.Linear(3, 2)
        changed(worker.model.head, 50.0)
        for value in (1.0, 2.0, 3.0):
            changed(cluster.model, value)
            names = ["body.bias"] if value == 1 else ["body.weight"]
            sent = {name: cluster.model.state_dict()[name].clone() for name in names}
            await cluster.scheme.send(sent, strict=False, wait=False)
        await worker.serve()
        await cluster.scheme.wait_ack()
        assert value_of([worker.model.body.bias]) == 1
        assert value_of([worker.model.body.weight]) == 3
        assert value_of(worker.model.head) == 50


async def test_parts_that_take_turns(case: SchemeCase) -> None:
    async with LocalCluster(case, workers=1, model=lambda: Uniform(tensors=6)) as cluster:
        model = cluster.workers[0].model
        expected = [0.0] * 6
        for step in range(30):
            part = step % 6
            expected[part] = step + 1.0
            sent = {f"values.{part}": torch.full((16,), step + 1.0)}
            await cluster.scheme.send(sent, strict=False)
            assert [value_of([value]) for value in model.values] == expected
        assert cluster.workers[0].scheme.stats.memory <= 5 * 6 * 64 + 4096


# -- tensors that users get ----------------------------------------------------------------------------


class Mixed(nn.Module):
    """Parameters and buffers of many dtypes, one of them empty."""

    def __init__(self) -> None:
        super().__init__()
        for dtype in (torch.float32, torch.bfloat16, torch.float64):
            name = str(dtype).removeprefix("torch.")
            setattr(self, f"of_{name}", nn.Parameter(torch.ones(500, dtype=dtype)))
        self.register_buffer("empty", torch.zeros(0, dtype=torch.int8))
        self.register_buffer("steps", torch.zeros(3, dtype=torch.int64))


def assert_own_size(tensors: Mapping[str, Tensor]) -> None:
    """They can be saved together, and each is pickled at its own size."""
    nbytes = sum(tensor.nbytes for tensor in tensors.values())
    file = io.BytesIO()
    torch.save(dict(tensors), file)
    assert len(file.getvalue()) < nbytes + 8000
    for name, tensor in tensors.items():
        assert tensor.untyped_storage().nbytes() == tensor.nbytes, name
        assert len(pickle.dumps(tensor)) < tensor.nbytes + 2000, name


@COMMITS
async def test_tensors_cost_their_own_size(case: SchemeCase, commit: str) -> None:
    async with LocalCluster(case, workers=1, model=Mixed, commit=commit) as cluster:
        worker = cluster.workers[0]
        await cluster.scheme.send()
        await worker.rest()
        await cluster.scheme.send(wait=False)
        received: Any = await worker.scheme.receive()
        for weights in (received, worker.scheme.weights, cluster.scheme.weights):
            assert_own_size(dict(weights.flatten_keys(".").items()))
        assert_own_size(worker.model.state_dict())
    assert_own_size(worker.model.state_dict())
    assert len(pickle.dumps(worker.model)) < 500 * 14 + 8000


async def test_weights_that_were_shared_elsewhere(case: SchemeCase) -> None:
    """torch moves a tensor that is handed to another process."""
    async with LocalCluster(case) as cluster:
        for version in range(1, 8):
            for scheme in (cluster.scheme, *(worker.scheme for worker in cluster.workers)):
                scheme.weights.share_memory_()
            fill(cluster.model, version)
            await cluster.scheme.send()
            assert [value_of(worker.model) for worker in cluster.workers] == [version] * 2
            assert value_of(cluster.scheme.weights.values(True, True)) == version


@pytest.mark.parametrize("first", ["sender", "workers"])
async def test_a_closed_worker_has_memory_of_its_own(case: SchemeCase, first: str) -> None:
    cluster = LocalCluster(case)
    async with cluster:
        fill(cluster.model, 1)
        await cluster.scheme.send()
        if first == "sender":
            await cluster.scheme.aclose()
        for worker in cluster.workers:
            await worker.close()
    one, other = (worker.model for worker in cluster.workers)
    fill(one, 7)
    assert value_of(other) == 1
    assert value_of(cluster.model) == 1


@COMMITS
async def test_a_large_buffer_is_the_workers_own(case: SchemeCase, commit: str) -> None:
    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("table", torch.zeros(LARGE))

    async with LocalCluster(case, model=Table, commit=commit) as cluster:
        first, second = (worker.model for worker in cluster.workers)
        at = [first.table.data_ptr()]
        for value in (1.0, 2.0, 3.0):
            changed(cluster.model, value)
            await cluster.scheme.send()
            assert value_of([first.table]) == value_of([second.table]) == value
            at.append(first.table.data_ptr())
            first.table.fill_(9)
            assert value_of([second.table]) == value
        # With "flip" nothing of its size is copied on the event loop.
        assert (len(set(at)) > 1) == (commit == "flip")


async def test_many_small_buffers_are_not_all_copied_on_the_loop(case: SchemeCase) -> None:
    class Scales(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for number in range(24):
                self.register_buffer(f"scale_{number}", torch.zeros(LARGE // 4))

    async with LocalCluster(case, workers=1, model=Scales) as cluster:
        model = cluster.workers[0].model
        before = {name: buffer.data_ptr() for name, buffer in model.named_buffers()}
        for value in (1.0, 2.0, 3.0):
            changed(cluster.model, value)
            await cluster.scheme.send()
            assert value_of(list(model.buffers())) == value
        in_place = [name for name, buffer in model.named_buffers() if buffer.data_ptr() == before[name]]
        assert 4 * (LARGE // 4) * len(in_place) <= 256 * 1024


@COMMITS
async def test_a_model_made_in_inference_mode(case: SchemeCase, commit: str) -> None:
    with torch.inference_mode():
        model = Policy()
    models = {0: model}
    async with LocalCluster(case, workers=1, model=Policy, worker_models=models, commit=commit) as cluster:
        for value in (1.0, 2.0, 3.0):
            changed(cluster.model, value)
            await cluster.scheme.send()
            assert_has(model, cluster.model.state_dict())
            with torch.no_grad():
                model(torch.ones(2, 3))
            with torch.inference_mode():
                model(torch.ones(2, 3))


# -- what cannot be sent ---------------------------------------------------------------------------------


class OwnState(nn.Module):
    """Writes more into its state dict than it has registered."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.secret = torch.ones(2)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "secret"] = self.secret


class Hooked(nn.Module):
    """The same by a hook."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        register: Any = self._register_state_dict_hook
        register(lambda module, state, prefix, _: state.update({prefix + "secret": 1}))


def _quantized() -> nn.Module:
    found: nn.Module = torch.ao.quantization.quantize_dynamic(nn.Sequential(nn.Linear(2, 2)), {nn.Linear})
    return found


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("make", "name"),
    [(OwnState, "OwnState"), (Hooked, "Hooked"), (_quantized, r"'0\.")],
    ids=["own", "hook", "quantized"],
)
async def test_state_that_would_not_be_sent(case: SchemeCase, make: Any, name: str) -> None:
    cluster = LocalCluster(case, workers=1, model=make)
    try:
        with pytest.raises(UnsupportedTensorError, match=name):
            await cluster.scheme.connect(timeout=PATIENCE)
    finally:
        await cluster.close()


@pytest.mark.filterwarnings("ignore")
@COMMITS
async def test_torchscript_on_either_side(case: SchemeCase, commit: str) -> None:
    def make() -> Any:
        return torch.jit.script(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))

    async with LocalCluster(case, workers=1, model=make, commit=commit) as cluster:
        for value in (1.0, 2.0, 3.0):
            changed(cluster.model, value)
            await cluster.scheme.send()
            assert_has(cluster.workers[0].model, cluster.model.state_dict())


async def test_buffers_that_were_one_tensor(case: SchemeCase) -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            zeros = torch.zeros(2)
            self.register_buffer("mean", zeros)
            self.register_buffer("var", zeros)

    async with LocalCluster(case, workers=1, model=Twice) as cluster:
        cluster.model.mean = torch.ones(2)
        with pytest.raises(LayoutMismatchError, match=r"'mean'.*were one tensor.*clone\(\)"):
            await cluster.scheme.send()


_ON_ANOTHER_DEVICE = """
import asyncio, copy, sys
import torch
import tensordict.nn  # which itself computes with tensors as it is imported
torch.set_default_device("meta")
from aiosync import TCPWeightSyncScheme, WeightSyncScheme

def make(value):
    with torch.device("cpu"):
        model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3))
    torch.nn.init.constant_(model[0].weight, value)
    return model

async def main(name):
    options = {"cast": torch.bfloat16} if name == "cast" else {}
    scheme = WeightSyncScheme.from_backend("tcp" if name == "cast" else name, timeout=20, **options)
    trainer, model = make(0.0), make(9.0)
    scheme.init_on_sender(model_id="policy", model=trainer, num_workers=1)
    worker = copy.copy(scheme)
    worker.init_on_receiver(model_id="policy", model=model, worker_idx=0)
    await asyncio.gather(scheme.connect(), worker.connect())
    async with worker.receiving():
        for value in (1.0, 2.0, 3.0):
            torch.nn.init.constant_(trainer[0].weight, value)
            await scheme.send()
            assert model[0].weight.tolist() == [[value] * 3] * 3, model[0].weight
    await scheme.aclose()
    await worker.aclose()

asyncio.run(main(sys.argv[1]))
"""


@pytest.mark.parametrize("backend", ["shared", "process", "tcp", "cast", "memory"])
def test_another_default_device(backend: str) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _ON_ANOTHER_DEVICE, backend],
        capture_output=True,
        text=True,
        timeout=120 * SCALE,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=False,
    )
    assert done.returncode == 0, done.stderr


# -- forks -------------------------------------------------------------------------------------------------

LOCAL = [case for case in SCHEMES if case.name in ("shared", "process", "tcp", "memory")]


@pytest.mark.parametrize("here", LOCAL, ids=lambda case: case.name)
async def test_a_forked_child_has_the_model_of_that_moment(here: SchemeCase) -> None:
    async with LocalCluster(here, workers=1) as cluster:
        fill(cluster.model, 3)
        await cluster.scheme.send()
        model = cluster.workers[0].model
        pid = os.fork()
        if pid == 0:
            found = [parameter.detach().numpy()[0] for parameter in model.parameters()]
            os._exit(0 if found == [3.0] * 4 else 1)
        status = await asyncio.to_thread(os.waitpid, pid, 0)
        assert os.waitstatus_to_exitcode(status[1]) == 0
        fill(cluster.model, 4)
        assert (await cluster.scheme.send()).ok
        assert value_of(model) == 4
