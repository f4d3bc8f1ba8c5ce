"""What real code does to a worker's model between two updates, as a hypothesis state machine."""

from __future__ import annotations

import asyncio
import copy
import io
import os
import pickle
from collections.abc import Callable, Coroutine
from contextlib import nullcontext
from typing import Any, TypeVar

import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from torch import Tensor, nn

from aiosync import LayoutMismatchError, WorkerError
from tests.kit.cases import SchemeCase
from tests.kit.clock import within
from tests.kit.local import LocalCluster

__all__ = ["Net", "Surgery"]

T = TypeVar("T")

WORKERS = 2
LARGE = 80_000
"""Elements of a buffer that is too large to be copied on the event loop."""


class Norm(nn.Module):
    """Running statistics that each forward pass replaces, and others that it writes into."""

    mean: Tensor
    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.mean = self.mean + x.detach().mean(0).to(self.mean.dtype)
        self.count += 1
        out: Tensor = x - self.mean.to(x.dtype)
        return out


class Net(nn.Module):
    """A bit of everything: tied parameters, buffers of both kinds, extra state, a head to be replaced."""

    def __init__(self, *, large: bool = False) -> None:
        super().__init__()
        self.body = nn.Linear(4, 4)
        self.tied = nn.Linear(4, 4, bias=False)
        self.tied.weight = self.body.weight
        self.norm = Norm()
        self.batch_norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 2)
        self.steps = 0
        if large:
            self.register_buffer("table", torch.zeros(LARGE))
            self.wide = nn.Parameter(torch.zeros(LARGE))

    def get_extra_state(self) -> int:
        return self.steps

    def set_extra_state(self, state: int) -> None:
        self.steps = state

    def forward(self, x: Tensor) -> Tensor:
        for layer in (self.body, self.tied, self.norm, self.batch_norm, self.head):
            weight = getattr(layer, "weight", None)
            x = layer(x if weight is None else x.to(weight.dtype))
        return x


def entries_of(model: nn.Module) -> dict[str, Tensor]:
    """Name -> tensor as aiosync names them, live."""
    found = {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }
    return {**found, "__extra_state__": torch.tensor(model.steps)}


def snapshot(model: nn.Module) -> dict[str, Tensor]:
    """Copies of all entries."""
    return {name: tensor.detach().clone() for name, tensor in entries_of(model).items()}


def randomize(model: Net, seed: int) -> None:
    """Other values everywhere, as a trainer's optimizer and statistics leave them."""
    made = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            if tensor.is_floating_point():
                tensor.copy_(torch.randn(tensor.shape, generator=made, dtype=torch.float64))
            else:
                tensor.fill_(seed)
    model.steps = seed


def same(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors of one shape have the same bits."""
    return torch.equal(as_bytes(one), as_bytes(other))


def as_bytes(tensor: Tensor) -> Tensor:
    """The elements as 1-D uint8."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor], what: str) -> None:
    """Every entry has the same dtype, shape and bits."""
    assert found.keys() == expected.keys(), what
    for name, tensor in expected.items():
        other = found[name].detach()
        assert other.shape == tensor.shape, f"{what}: {name} has shape {tuple(other.shape)}"
        assert other.dtype == tensor.dtype, f"{what}: {name} has dtype {other.dtype}, not {tensor.dtype}"
        assert same(other, tensor), f"{what}: {name} differs"


class Surgery(RuleBasedStateMachine):
    """A sender, two workers, and surgery between the sends.

    After a send that was applied every sent entry equals what was sent, converted to the worker's dtype, bit
    for bit; every other entry and the other worker's model are as they were; a refusal changes nothing.

    Args:
        case: the scheme.
        commit: its option.
    """

    def __init__(self, case: SchemeCase, commit: str) -> None:
        super().__init__()
        self.case = case
        self.commit = commit
        # Parameters that view what other workers view are read only by contract.
        self.may_write = commit == "copy" or not case.views
        self.cluster: LocalCluster | None = None
        self.runner = asyncio.Runner()
        self.seed = 0
        # What each worker has refused: the next version that it applies brings that along.
        self.missed: list[dict[str, Tensor]] = [{} for _ in range(WORKERS)]

    # -- the beginning and the end ---------------------------------------------------------------------

    @initialize(large=st.booleans(), inference=st.booleans())
    def begin(self, large: bool, inference: bool) -> None:
        """Connect everybody."""
        models: dict[int, Any] = {}
        for index in range(WORKERS):
            with torch.inference_mode() if inference and index == 0 else nullcontext():
                models[index] = Net(large=large)
        self.large = large

        async def connect() -> LocalCluster:
            cluster = LocalCluster(
                self.case,
                WORKERS,
                model=lambda: Net(large=large),
                worker_models=models,
                commit=self.commit,
            )
            return await cluster.__aenter__()

        self.cluster = self.run(connect())
        for index in range(WORKERS):
            self.check_applied(index, set(entries_of(self.trainer)), snapshot(self.model(index)))

    def teardown(self) -> None:
        """Close everybody; each model is in memory of its own then."""
        try:
            if self.cluster is not None:
                before = [snapshot(self.model(index)) for index in range(WORKERS)]
                self.run(self.cluster.close())
                for index in range(WORKERS):
                    assert_same(snapshot(self.model(index)), before[index], f"worker {index} after close")
                self.write(0, 5.0)
                assert_same(snapshot(self.model(1)), before[1], "worker 1 after worker 0 wrote")
        finally:
            self.runner.close()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the cluster's loop."""
        return self.runner.run(within(work))

    @property
    def trainer(self) -> Net:
        """The trainer's model."""
        assert self.cluster is not None
        found: Net = self.cluster.model
        return found

    def model(self, index: int) -> Net:
        """A worker's model."""
        assert self.cluster is not None
        found: Net = self.cluster.workers[index].model
        return found

    # -- sends -----------------------------------------------------------------------------------------

    def fits(self, index: int) -> bool:
        """Whether a worker's model has the trainer's names, shapes and kinds of dtype."""
        mine, theirs = entries_of(self.model(index)), entries_of(self.trainer)
        return mine.keys() == theirs.keys() and all(
            mine[name].shape == tensor.shape and mine[name].is_floating_point() == tensor.is_floating_point()
            for name, tensor in theirs.items()
        )

    def change_trainer(self) -> None:
        """A step of the optimizer."""
        self.seed += 1
        randomize(self.trainer, self.seed)

    @rule()
    def send(self) -> None:
        """All entries, to both workers."""
        self.change_trainer()
        self.send_and_check(None, set(entries_of(self.trainer)))

    @rule(data=st.data())
    def send_some(self, data: st.DataObject) -> None:
        """Some entries, to both workers."""
        self.change_trainer()
        names = data.draw(st.sets(st.sampled_from(sorted(entries_of(self.trainer))), min_size=1))
        entries = entries_of(self.trainer)
        tied = {"body.weight", "tied.weight"}
        if names & tied:
            names |= tied  # both have these values from now on
        self.send_and_check({name: entries[name] for name in names}, names)

    @rule(data=st.data(), count=st.integers(2, 4))
    def send_without_waiting(self, data: st.DataObject, count: int) -> None:
        """Several sends, of which workers may skip all but the last."""
        assert self.cluster is not None
        if not all(self.fits(index) for index in range(WORKERS)):
            return  # a refusal ends the series
        before = [snapshot(self.model(index)) for index in range(WORKERS)]
        sent: dict[str, Tensor] = {}
        given = []
        for _ in range(count):
            self.change_trainer()
            values = snapshot(self.trainer)
            names = set(values)
            if data.draw(st.booleans()):
                names = data.draw(st.sets(st.sampled_from(sorted(values)), min_size=1))
                names |= {"body.weight", "tied.weight"} if names & {"body.weight", "tied.weight"} else set()
            given.append({name: values[name] for name in names})
            sent |= given[-1]

        async def send() -> None:
            assert self.cluster is not None
            for weights in given:
                await self.cluster.scheme.send(weights, strict=False, wait=False)
            await self.cluster.scheme.wait_ack()

        self.run(send())
        for index in range(WORKERS):
            self.check(index, self.missed[index] | sent, before[index])
            self.missed[index] = {}

    def send_and_check(self, weights: dict[str, Tensor] | None, names: set[str]) -> None:
        """Send; then look at both models."""
        assert self.cluster is not None
        before = [snapshot(self.model(index)) for index in range(WORKERS)]
        fit = [self.fits(index) for index in range(WORKERS)]
        version = self.cluster.scheme.version
        sending = self.cluster.scheme.send(weights, strict=weights is None)
        try:
            self.run(sending)
        except (WorkerError, LayoutMismatchError):
            assert not all(fit)
        else:
            assert all(fit)
        values = snapshot(self.trainer)
        sent = {name: values[name] for name in names}
        for index in range(WORKERS):
            behind = self.missed[index] | sent
            self.check(index, behind if fit[index] else {}, before[index])
            if self.cluster.scheme.version > version:  # else all refused it, and it was withdrawn
                self.missed[index] = {} if fit[index] else behind

    def check_applied(self, index: int, names: set[str], before: dict[str, Tensor]) -> None:
        """These entries are the trainer's, all others are as before."""
        values = snapshot(self.trainer)
        self.check(index, {name: values[name] for name in names}, before)

    def check(self, index: int, sent: dict[str, Tensor], before: dict[str, Tensor]) -> None:
        """These entries have these values, all others are as before."""
        expected = {
            name: sent[name].to(value.dtype) if name in sent else value for name, value in before.items()
        }
        assert_same(snapshot(self.model(index)), expected, f"worker {index}")
        self.model(index).eval()
        with torch.no_grad():
            _ = self.model(index).head.bias + 1  # can be computed with

    # -- surgery ---------------------------------------------------------------------------------------

    def operate(self, index: int, surgery: Callable[[Net], object]) -> None:
        """Do it to one worker; the other's model stays as it is."""
        model, other = self.model(index), self.model(1 - index)
        before = snapshot(other)
        special = any(tensor.is_inference() for tensor in (*model.parameters(), *model.buffers()))
        with torch.inference_mode() if special else nullcontext():
            surgery(model)
        assert_same(snapshot(other), before, f"worker {1 - index}, after worker {index}'s surgery")

    def write(self, index: int, value: float) -> None:
        """Write into every parameter."""

        def fill(model: Net) -> None:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.fill_(value)

        self.operate(index, fill)

    index = st.integers(0, WORKERS - 1)

    @rule(index=index)
    def forward(self, index: int) -> None:
        """Running statistics are replaced and written into."""
        self.operate(index, lambda model: model.train()(torch.randn(3, 4)))

    @rule(index=index, dtype=st.sampled_from([torch.float64, torch.bfloat16, torch.float32]))
    def convert(self, index: int, dtype: torch.dtype) -> None:
        """Another dtype."""
        self.operate(index, lambda model: model.to(dtype))

    @rule(index=index)
    def load_and_assign(self, index: int) -> None:
        """Other tensors take the places of all."""
        if self.fits(index):
            state = copy.deepcopy(Net(large=self.large).state_dict())
            self.operate(index, lambda model: model.load_state_dict(state, assign=True))

    @precondition(lambda self: self.may_write)
    @rule(index=index)
    def load(self, index: int) -> None:
        """Other values."""
        if self.fits(index):
            state = copy.deepcopy(Net(large=self.large).state_dict())
            self.operate(index, lambda model: model.load_state_dict(state))

    @rule(index=index, outputs=st.sampled_from([2, 2, 3]))
    def replace_the_head(self, index: int, outputs: int) -> None:
        """Another layer, which may not fit."""
        self.operate(index, lambda model: setattr(model, "head", nn.Linear(4, outputs)))

    @rule(index=index)
    def replace_a_parameter(self, index: int) -> None:
        """Another parameter."""

        def replace(model: Net) -> None:
            weight = model.head.weight
            model.head.weight = nn.Parameter(torch.randn(weight.shape).to(weight.dtype))

        self.operate(index, replace)

    @rule(index=index)
    def add_a_layer(self, index: int) -> None:
        """An entry that the trainer does not have; or it goes again."""

        def toggle(model: Net) -> None:
            if "more" in model._modules:
                del model.more
            else:
                model.more = nn.Linear(1, 1)

        self.operate(index, toggle)

    @rule(index=index)
    def copy_it(self, index: int) -> None:
        """Copies are independent, and cost their own size."""

        def attempt(model: Net) -> None:
            before = snapshot(model)
            nbytes = sum(t.nbytes for t in (*model.parameters(), *model.buffers()))
            file = io.BytesIO()
            torch.save(model.state_dict(), file)
            assert len(file.getvalue()) < nbytes + 20_000
            file.seek(0)
            loaded = torch.load(file)
            assert all(same(loaded[n], t) for n, t in model.state_dict().items() if "extra" not in n)
            assert len(pickle.dumps(model)) < nbytes + 20_000
            copied = copy.deepcopy(model)
            with torch.no_grad():
                for tensor in (*copied.parameters(), *copied.buffers()):
                    tensor.zero_()
            assert_same(snapshot(model), before, "after its copy was written into")

        self.operate(index, attempt)

    @rule(index=index)
    def share(self, index: int) -> None:
        """torch moves each tensor to memory that other processes can map."""
        self.operate(index, lambda model: model.share_memory())

    @rule(index=st.integers(-1, WORKERS - 1))
    def share_the_weights(self, index: int) -> None:
        """What the scheme hands out is shared with another process."""
        assert self.cluster is not None
        scheme = self.cluster.scheme if index < 0 else self.cluster.workers[index].scheme
        weights = scheme.weights
        before = [snapshot(self.model(i)) for i in range(WORKERS)]
        weights.share_memory_()
        for i in range(WORKERS):
            assert_same(snapshot(self.model(i)), before[i], f"worker {i} after weights were shared")

    @rule(index=index, on=st.booleans())
    def set_flags(self, index: int, on: bool) -> None:
        """Gradients and modes."""
        self.operate(index, lambda model: model.train(on))
        for parameter in self.model(index).parameters():
            if not parameter.is_inference():
                parameter.requires_grad_(on)

    @precondition(lambda self: self.may_write)
    @rule(index=index)
    def learn(self, index: int) -> None:
        """A step of an optimizer of the worker's own."""
        model = self.model(index)
        if any(p.is_inference() for p in (*model.parameters(), *model.buffers())):
            return
        if not all(p.requires_grad for p in model.parameters()):
            return
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        self.operate(index, lambda model: model.train()(torch.randn(3, 4)).sum().backward())
        self.operate(index, lambda model: optimizer.step())
        optimizer.zero_grad()

    @rule(index=index)
    def infer(self, index: int) -> None:
        """A forward pass in inference mode, which replaces buffers by tensors of that mode."""

        def attempt(model: Net) -> None:
            with torch.inference_mode():
                model.eval()(torch.randn(3, 4))

        self.operate(index, attempt)

    @rule(index=index, writes=st.booleans())
    def fork(self, index: int, writes: bool) -> None:
        """A child has the model as it was, and what it writes stays its own."""
        model = self.model(index)
        before = snapshot(model)
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                assert_same(snapshot(model), before, "in the child")
                if writes and self.may_write:
                    with torch.inference_mode():
                        for tensor in (*model.parameters(), *model.buffers()):
                            if not tensor.is_shared():
                                tensor.zero_()
                code = 0
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert_same(snapshot(model), before, "after its child wrote")
