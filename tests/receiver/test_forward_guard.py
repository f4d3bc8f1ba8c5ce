"""The guard of the blocking twins: commits stay out of forward passes, and users find their own module."""

from __future__ import annotations

import abc
import copy
import dis
import gc
import linecache
import multiprocessing
import pickle
import sys
import threading
import time
import types
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from itertools import count
from typing import Any, Generic, TypeVar
from weakref import WeakSet

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import nn
from torch.nn.utils import parametrize

from aiosync.protocol.frames import Joint
from aiosync.receiver import commit_gate, commit_job, forward_guard, joint_commit
from aiosync.receiver.commit_gate import CommitGate, submit
from aiosync.receiver.commit_job import CommitJob, Outcome
from aiosync.receiver.forward_guard import ForwardGuard
from aiosync.receiver.joint_commit import join
from aiosync.transfer.yield_request import HeededRequest
from tests.kit.clock import BRIEF, PATIENCE

T = TypeVar("T")


class _Slow(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.inside = threading.Event()
        self.go_on = threading.Event()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        before = self.weight * 1
        self.inside.set()
        assert self.go_on.wait(PATIENCE)
        return x + before - self.weight


def test_a_guarded_forward_pass_keeps_commits_out() -> None:
    gate, module = CommitGate(), _Slow()
    guard = ForwardGuard(gate, module, PATIENCE, lambda: None)
    out: list[torch.Tensor] = []
    thread = threading.Thread(target=lambda: out.append(module(torch.zeros(1)).detach()))
    thread.start()
    assert module.inside.wait(PATIENCE)

    def commit() -> None:
        module.weight.data = torch.ones(1)

    job = submit([gate], commit)
    assert not job.done.done()
    module.go_on.set()
    thread.join()
    assert out == [torch.zeros(1)]
    assert job.done.done()
    assert module.weight.item() == 1
    guard.remove()
    guard.remove()
    assert type(module) is _Slow


class _Outer(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.inner(x) + 1
        return out


class _Policy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.linear(x))


class _Reading(nn.Module):
    """Its forward pass calls ``reads``, and then ``inner`` if it has one."""

    def __init__(self, reads: Callable[[], object], inner: nn.Module | None = None) -> None:
        super().__init__()
        self.reads = reads
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.reads()
        out: torch.Tensor = x if self.inner is None else self.inner(x)
        return out


def at_instruction(number: int, module: nn.Module, act: Callable[[], object]) -> Any:
    """A trace function that calls ``act`` before the n-th instruction of a guarded module's ``__call__``."""
    guarded_call = type(module).__call__.__code__

    def trace(frame: types.FrameType, event: str, argument: object) -> Any:
        nonlocal number
        if frame.f_code is not guarded_call:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            number -= 1
            if number == 0:
                act()
        return trace

    return trace


def at_call(number: int, act: Callable[[], object]) -> Any:
    """A trace function that calls ``act`` before the n-th instruction of the guard, the gate or a commit with
    which Python looks for signals."""
    files = {module.__file__ for module in (forward_guard, commit_gate, commit_job, joint_commit)}
    kinds = "CALL", "JUMP_BACKWARD"

    def trace(frame: types.FrameType, event: str, argument: object) -> Any:
        nonlocal number
        code = frame.f_code
        if code.co_filename not in files:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode" and dis.opname[code.co_code[frame.f_lasti]].startswith(kinds):
            # The call at the end of a ``with`` statement has released the lock when Python looks.
            line = linecache.getline(code.co_filename, frame.f_lineno or 0)
            number -= not line.lstrip().startswith("with ")
            if number == 0:
                act()
        return trace

    return trace


MOMENTS = 120
"""More than the instructions of a guarded ``__call__``."""


def watch_passes(guard: ForwardGuard) -> None:
    """From now on the guard calls ``on_pass`` for each pass."""
    guard._passes.attention.append("a test")


@pytest.fixture
def entered() -> list[object]:
    """Tickets of all forward passes of ``guarded``."""
    return []


@pytest.fixture
def guarded(entered: list[object]) -> Iterator[nn.Module]:
    module, gate = _Policy(), CommitGate()
    guard = ForwardGuard(gate, module, PATIENCE, lambda: entered.extend(gate.readers()))
    watch_passes(guard)
    yield module
    guard.remove()
    assert type(module) is _Policy


X = torch.ones(3, 2)

REGISTERED: dict[str, type] = {}


class _Registering(_Policy):
    """Its subclasses need an argument and a name of their own."""

    def __init_subclass__(cls, *, key: str) -> None:
        super().__init_subclass__()
        if key in REGISTERED:
            raise ValueError(key)
        REGISTERED[key] = cls


class _Registered(_Registering, key="policy"):
    pass


class _Meta(abc.ABCMeta):
    def __init__(cls, name: str, bases: tuple[type, ...], body: dict[str, Any]) -> None:
        super().__init__(name, bases, body)
        if name in REGISTERED:
            raise ValueError(name)
        REGISTERED[name] = cls


class _OfMeta(_Policy, metaclass=_Meta):
    pass


class _Slotted(_Policy):
    __slots__ = ("extra",)


class _Generic(_Policy, Generic[T]):
    pass


class _Typed(_Generic[int]):
    pass


@pytest.mark.parametrize("original", [_Registered, _OfMeta, _Slotted, _Generic, _Typed])
def test_classes_that_look_at_their_subclasses(original: Any) -> None:
    before = dict(REGISTERED)
    module = original()
    seen: list[int] = []
    guard = ForwardGuard(CommitGate(), module, PATIENCE, lambda: seen.append(1))
    assert module(X).shape == (3, 2)
    assert seen == [1]
    assert isinstance(module, original)
    assert isinstance(copy.deepcopy(module), _Policy)
    guard.remove()
    assert type(module) is original
    assert before == REGISTERED


def test_subclasses_of_a_guarded_class_are_announced() -> None:
    module = _Registered()
    guard = ForwardGuard(CommitGate(), module, PATIENCE, lambda: None)
    guarded: Any = type(module)
    made = types.new_class("Made", (guarded,), {"key": "made"})
    assert REGISTERED.pop("made") is made
    guard.remove()


@pytest.mark.parametrize(
    "copied",
    [copy.copy, copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))],
    ids=["copy", "deepcopy", "pickle"],
)
def test_a_copy_is_not_guarded(guarded: Any, entered: list[object], copied: Any) -> None:
    other: Any = copied(guarded)
    assert type(other) is _Policy
    other.__dict__["forward"] = lambda x: x * 7  # its own pass, not the original's
    assert torch.equal(other(X), X * 7)
    assert entered == []
    assert guarded(X).shape == (3, 2)
    assert len(entered) == 1


def test_a_replica_runs_its_own_pass(guarded: Any, entered: list[object]) -> None:
    replica = guarded._replicate_for_data_parallel()  # as DataParallel makes them
    replica.linear = nn.Linear(2, 1)
    assert replica(X).shape == (3, 1)
    assert entered == []


def test_a_patched_forward_is_kept(guarded: Any, entered: list[object]) -> None:
    guarded.forward = lambda x: x * 7
    assert torch.equal(guarded(X), X * 7)
    assert torch.equal(copy.deepcopy(guarded)(X), X * 7)
    assert len(entered) == 1


def test_a_patched_call_of_all_modules_is_kept(guarded: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[nn.Module] = []

    def call(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
        called.append(module)
        found: torch.Tensor = module.forward(x)
        return found * 7

    monkeypatch.setattr(nn.Module, "__call__", call)
    assert torch.equal(guarded(X), guarded.forward(X) * 7)
    assert called[0] is guarded


def test_a_profiler_finds_the_module(guarded: Any) -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], with_stack=True) as found:
        guarded(X)
    assert any(event.name.startswith("nn.Module: _Policy") for event in found.events())


def test_hooks_and_a_compiled_module_are_kept(guarded: Any) -> None:
    guarded.register_forward_hook(lambda module, given, found: found * 2)
    assert torch.equal(guarded(X), guarded.forward(X) * 2)
    guarded._compiled_call_impl = lambda x: x * 7
    assert torch.equal(guarded(X), X * 7)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("sends", [True, False])
@pytest.mark.parametrize("how", ["compile", "compile()", "outer", "script", "trace", "export", "strict"])
def test_compilers_see_the_users_own_code(
    guarded: Any, entered: list[object], how: str, sends: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``sends``: a sender asks for the processor at the end of the pass."""
    plain = copy.deepcopy(guarded)
    passes = forward_guard._passes_of(guarded)
    assert passes is not None
    monkeypatch.setattr(CommitGate, "blocking", WeakSet(passes.gates))
    monkeypatch.setattr(HeededRequest, "_whole_at", 0.0)
    monkeypatch.setattr(HeededRequest, "_not_before", 0.0)
    if sends:
        passes.gates[0].heed(HeededRequest(b"\1"))
    out: Any
    compiled: Any
    jit: Any = torch.jit
    if how == "compile":
        compiled = torch.compile(guarded, fullgraph=True, backend="eager")
        out = compiled(X)
        assert len(entered) == 1
        assert bool(HeededRequest._not_before) == sends
    elif how == "compile()":
        guarded.compile(fullgraph=True, backend="eager")
        out = guarded(X)
        assert len(entered) == 1
        guarded._compiled_call_impl = None
    elif how == "outer":
        compiled = torch.compile(_Outer(guarded), fullgraph=True, backend="eager")
        out = compiled(X) - 1
    elif how == "script":
        out = jit.script(guarded)(X)
    elif how == "trace":
        out = jit.trace(guarded, X)(X)
    else:
        out = torch.export.export(guarded, (X,), strict=how == "strict").module()(X)
    assert torch.allclose(out, plain(X))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["scripted", "compiled", "tensordict"])
def test_modules_of_other_makes(kind: str) -> None:
    gate = CommitGate()
    jit: Any = torch.jit
    make_tensordict_module: Any = TensorDictModule
    makers: dict[str, Any] = {
        "scripted": lambda: jit.script(_Policy()),
        "compiled": lambda: torch.compile(_Policy(), backend="eager"),
        "tensordict": lambda: make_tensordict_module(_Policy(), in_keys=["x"], out_keys=["y"]),
    }
    module = makers[kind]()
    seen: list[int] = []
    guard = ForwardGuard(gate, module, PATIENCE, lambda: seen.append(len(gate.readers())))
    module(TensorDict({"x": X}, [3]) if kind == "tensordict" else X)
    assert seen == [1]
    guard.remove()


def test_a_forward_pass_that_raises_leaves_the_gate() -> None:
    gate, module = CommitGate(), nn.Linear(2, 2)
    guard = ForwardGuard(gate, module, PATIENCE, lambda: None)
    with pytest.raises(RuntimeError):
        module(torch.zeros(3))
    assert submit([gate], lambda: None).done.done()
    guard.remove()


def test_a_forked_child_does_not_wait_for_what_its_parent_waits_for() -> None:
    gate, module = CommitGate(), nn.Linear(2, 2)
    guard = ForwardGuard(gate, module, 10 * PATIENCE, lambda: None)
    assert gate.try_enter("a reader", "a thread that the child does not have")
    job = submit([gate], lambda: None)
    child = multiprocessing.get_context("fork").Process(target=module, args=[torch.zeros(2)], daemon=True)
    child.start()
    child.join(PATIENCE)
    assert child.exitcode == 0
    child.close()
    assert job.withdraw()
    guard.remove()


@pytest.mark.parametrize("first", [0, 1])
def test_two_guards_of_one_module(first: int) -> None:
    """As when another receiver gets a model before the former one has ended."""
    gates, module = [CommitGate(), CommitGate()], _Slow()
    guards = [ForwardGuard(gate, module, PATIENCE, lambda: None) for gate in gates]
    thread = threading.Thread(target=module, args=[torch.zeros(1)])
    thread.start()
    assert module.inside.wait(PATIENCE)
    jobs = [submit([gate], lambda: None) for gate in gates]
    assert not any(job.done.done() for job in jobs)
    guards[first].call_on_next_pass()
    guards[first].remove()  # during the pass
    guards[first].call_on_next_pass()
    module.go_on.set()
    thread.join()
    assert all(job.done.done() for job in jobs)
    module(torch.zeros(1))
    assert guards[1 - first]._passes.attention == []  # the next pass has nothing to do in the gates
    guards[1 - first].remove()
    assert type(module) is _Slow


def test_a_copy_of_a_module_with_two_guards_is_not_guarded() -> None:
    module = _Policy()
    guards = [ForwardGuard(CommitGate(), module, PATIENCE, lambda: None) for _ in range(2)]
    for copied in copy.deepcopy(module), pickle.loads(pickle.dumps(module)):
        assert type(copied) is _Policy
    for guard in guards:
        guard.remove()
    assert type(module) is _Policy


class _Plain(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def test_a_module_that_got_another_class_meanwhile_can_be_guarded_again() -> None:
    gates, module = [CommitGate(), CommitGate()], nn.Linear(2, 2)
    first = ForwardGuard(gates[0], module, PATIENCE, lambda: None)
    parametrize.register_parametrization(module, "bias", _Plain())  # makes a subclass of the module's class
    first.remove()
    gates[0].try_enter("a reader", "of the ended guard")
    submit([gates[0]], lambda: None)  # waits, and would block a forward pass that enters this gate
    module(torch.zeros(2))
    entered: list[int] = []
    second = ForwardGuard(gates[1], module, PATIENCE, lambda: entered.append(len(gates[1].readers())))
    watch_passes(second)
    module(torch.zeros(2))
    assert entered == [1]
    second.remove()
    module(torch.zeros(2))
    assert entered == [1]


@pytest.mark.parametrize("moment", range(1, MOMENTS + 1))
def test_a_guard_may_end_at_any_moment_of_a_forward_pass(moment: int) -> None:
    """Another thread may end it; here the same thread does, before the n-th instruction of ``__call__``."""
    module, gate = _Policy(), CommitGate()
    guard = ForwardGuard(gate, module, PATIENCE, lambda: None)
    sys.settrace(at_instruction(moment, module, guard.remove))
    try:
        module(torch.zeros(2))
    finally:
        sys.settrace(None)
    guard.remove()
    assert type(module) is _Policy
    assert gate.readers() == []


class _Broken(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        return 2 * x


def test_a_compiler_that_begins_in_the_middle_finds_the_users_own_code() -> None:
    passes: list[None] = []
    frames: list[dict[str, int]] = []
    for guarded in (False, True):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        outer, gate = _Outer(_Broken()), CommitGate()
        if guarded:
            watch_passes(ForwardGuard(gate, outer.inner, PATIENCE, lambda: passes.append(None)))
        compiled = torch.compile(outer, backend="eager")
        for _ in range(3):
            assert torch.equal(compiled(X), outer(X))
        frames.append(dict(torch._dynamo.utils.counters["frames"]))
        assert gate.readers() == []
    assert len(passes) == 6
    assert frames[0] == frames[1]


@pytest.mark.parametrize("moment", range(1, MOMENTS + 1))
@pytest.mark.parametrize("submitted", [True, False])
def test_a_commit_may_come_at_any_moment_of_a_forward_pass(moment: int, submitted: bool) -> None:
    """In another thread, before the n-th instruction of ``__call__``."""
    gate, running, here = CommitGate(), threading.Event(), threading.Event()
    threads: list[threading.Thread] = []
    landed: list[int] = []

    def commit() -> None:
        running.set()
        here.set()
        time.sleep(0.005)  # the pass goes on, if nothing stops it
        landed.append(moment)
        running.clear()

    def come() -> None:
        if submitted:
            submit([gate], commit)
        else:
            gate.commit_at_once(commit)
        here.set()

    def act() -> None:
        threads.append(threading.Thread(target=come))
        threads[0].start()
        assert here.wait(PATIENCE)

    torn: list[bool] = []
    module = _Reading(lambda: torn.append(running.is_set()))
    guard = ForwardGuard(gate, module, PATIENCE, lambda: None)
    module(X)  # the first pass has something to do in the gate
    sys.settrace(at_instruction(moment, module, act))
    try:
        module(X)
    finally:
        sys.settrace(None)
    for thread in threads:
        thread.join(PATIENCE)
    assert torn == [False, False]
    assert len(landed) == len(threads) or not submitted
    assert gate.readers() == gate.waiting == []
    assert gate.commit_at_once(lambda: None)
    assert moment < MOMENTS or not threads
    guard.remove()


@pytest.mark.parametrize("joint", [False, True])
def test_an_interrupt_at_any_moment_of_a_forward_pass_keeps_no_commit_waiting(joint: bool) -> None:
    """Before any instruction of the guard, the gate or the commit with which Python looks for signals."""
    interrupts: list[int] = []

    def interrupt() -> None:
        interrupts.append(moment)
        raise KeyboardInterrupt

    def submits() -> None:
        trace = sys.gettrace()
        sys.settrace(None)  # not in submit(), which the event loop's thread calls
        if joint:
            outcomes.append(join(Joint(id=f"joint {moment}", size=1), 0, gate, nullcontext).done)
        else:
            outcomes.append(submit([gate], lambda: None).done)
        outcomes[0]._wakers.append(lambda: woken.append(moment))
        sys.settrace(trace)

    for moment in count(1):
        gate, outcomes, woken = CommitGate(), list[Outcome](), list[int]()
        module = _Reading(submits)
        guard = ForwardGuard(gate, module, PATIENCE, lambda: None)
        sys.settrace(at_call(moment, interrupt))
        try:
            with suppress(KeyboardInterrupt):
                module(X)
        finally:
            sys.settrace(None)
        assert gate.readers() == []
        assert all(outcome.done() and woken for outcome in outcomes), moment
        module.reads = lambda: None
        module(X)
        assert gate.waiting == gate._announced == []
        assert not joint_commit._joints
        with ThreadPoolExecutor(1) as threads:  # no lock was left behind
            assert threads.submit(gate.commit_at_once, lambda: None).result(PATIENCE)
        guard.remove()
        if moment not in interrupts:
            break
    assert len(interrupts) > 50


@pytest.mark.parametrize("pinned", [True, False])
def test_a_pass_in_a_pass_does_not_wait_for_what_the_outer_one_holds_up(pinned: bool) -> None:
    gates = [CommitGate(), CommitGate()]
    inner = _Reading(lambda: None)
    outer = _Reading(lambda: jobs.append(submit(gates, lambda: None)), inner)
    guards = [ForwardGuard(gates[0], outer, PATIENCE, lambda: None)]
    guards.append(ForwardGuard(gates[1], inner, PATIENCE, lambda: None))
    jobs: list[CommitJob] = []
    started = time.monotonic()
    if pinned:
        assert gates[0].enter_blocking("a body", threading.get_ident(), PATIENCE)
        outer(X)
        assert not jobs[0].done.done()
        gates[0].leave("a body")
    else:
        outer(X)  # submits one itself
    assert all(job.done.done() for job in jobs)
    assert time.monotonic() - started < PATIENCE / 2
    for guard in guards:
        guard.remove()


def test_a_body_in_a_pass_does_not_wait_for_what_the_pass_holds_up() -> None:
    gate = CommitGate()

    def read() -> None:
        job = submit([gate], lambda: None)
        assert gate.enter_blocking("a body", threading.get_ident(), PATIENCE / 2)
        gate.leave("a body")
        assert not job.done.done()

    module = _Reading(read)
    guard = ForwardGuard(gate, module, PATIENCE, lambda: None)
    module(X)
    assert gate.waiting == []
    guard.remove()


def test_a_worker_that_calls_no_guarded_pass_collects_nothing() -> None:
    guard = ForwardGuard(CommitGate(), _Reading(lambda: None), PATIENCE, lambda: None)
    for _ in range(10):
        guard.call_on_next_pass()
    assert len(guard._passes.attention) == 1
    guard.remove()


@pytest.mark.parametrize("moment", range(1, MOMENTS + 1))
def test_a_guard_that_ends_in_the_middle_of_a_pass_keeps_no_commit_waiting(moment: int) -> None:
    """Another thread ends it, before the n-th instruction of ``__call__``."""
    gate, jobs = CommitGate(), list[CommitJob]()
    module = _Reading(lambda: jobs.append(submit([gate], lambda: None)))
    guard = ForwardGuard(gate, module, PATIENCE, lambda: None)
    sys.settrace(at_instruction(moment, module, lambda: in_thread(guard.remove)))
    try:
        module(X)
    finally:
        sys.settrace(None)
    assert all(job.done.done() for job in jobs)
    assert gate.waiting == gate.readers() == []
    guard.remove()


def in_thread(function: Callable[[], object]) -> None:
    thread = threading.Thread(target=function)
    thread.start()
    thread.join(PATIENCE)
    assert not thread.is_alive()


def test_a_failing_callback_is_called_at_the_next_pass() -> None:
    calls: list[int] = []

    def on_pass() -> None:
        calls.append(1)
        if len(calls) == 1:
            raise ZeroDivisionError

    gate, module = CommitGate(), _Reading(lambda: None)
    guard = ForwardGuard(gate, module, PATIENCE, on_pass)
    with pytest.raises(ZeroDivisionError):
        module(X)
    for _ in range(3):
        module(X)
    assert len(calls) == 2
    guard.remove()


def test_a_module_that_is_guarded_no_longer_is_freed_at_once() -> None:
    module = _Policy()
    gone = weakref.ref(module)
    guard = ForwardGuard(CommitGate(), module, PATIENCE, lambda: None)
    module(X)
    guard.remove()
    gc.disable()
    try:
        guard.module = nn.Linear(2, 2)
        del module
        assert gone() is None
    finally:
        gc.enable()


def test_passes_that_begin_when_the_guard_has_ended_hold_nothing_up() -> None:
    """Of a subclass that the module has got meanwhile."""
    gate, module = CommitGate(), _Slow()
    guard = ForwardGuard(gate, module, PATIENCE, lambda: None)
    object.__setattr__(module, "__class__", type("Sub", (type(module),), {}))
    first = threading.Thread(target=module, args=[torch.zeros(1)])
    first.start()
    assert module.inside.wait(PATIENCE)
    guard.remove()
    job = submit([gate], lambda: None)
    module.go_on.set()
    first.join()
    module.inside.clear()
    assert job.done.done()
    assert gate.commit_at_once(lambda: None)


@pytest.mark.parametrize("waits", [True, False])
def test_a_commit_may_read_the_model(waits: bool) -> None:
    gate, module = CommitGate(), _Reading(lambda: None)
    guard = ForwardGuard(gate, module, PATIENCE, lambda: None)
    started, out = time.monotonic(), list[torch.Tensor]()
    if waits:
        gate.try_enter("a reader", "of another thread")
        job = submit([gate], lambda: out.append(module(X)))
        gate.leave("a reader")
        assert job.done.done()
    else:
        assert gate.commit_at_once(lambda: out.append(module(X)))
    assert len(out) == 1
    assert time.monotonic() - started < PATIENCE / 2
    assert gate.waiting == gate._announced == guard._passes.attention == []
    guard.remove()


def test_a_joint_commit_waits_for_a_pass_that_one_of_its_gates_no_longer_watches() -> None:
    gates, module = [CommitGate(), CommitGate()], _Slow()
    guards = [ForwardGuard(gate, module, PATIENCE, lambda: None) for gate in gates]
    thread = threading.Thread(target=module, args=[torch.zeros(1)])
    thread.start()
    assert module.inside.wait(PATIENCE)
    assert gates[1].try_enter("a reader", "of another thread")
    job = submit(gates, lambda: None)
    guards[0].remove()
    again = ForwardGuard(gates[0], module, PATIENCE, lambda: None)
    again.remove()
    module.go_on.set()
    thread.join()
    assert not job.done.done()
    module.inside.clear()
    module.go_on.clear()
    thread = threading.Thread(target=module, args=[torch.zeros(1)])
    thread.start()
    gates[1].leave("a reader")
    assert job.done.done()  # and the pass, which has waited for it, begins
    assert module.inside.wait(PATIENCE / 2)
    module.go_on.set()
    thread.join()
    assert all(not gate._announced for gate in gates)
    guards[1].remove()
    assert type(module) is _Slow


def test_a_pass_waits_for_a_commit_only_as_long_as_it_has_patience() -> None:
    gate, module = CommitGate(), _Reading(lambda: None)
    guard = ForwardGuard(gate, module, BRIEF / 3, lambda: None)
    gate.try_enter("a reader", "that does not leave")
    job = submit([gate], lambda: None)
    module(X)
    assert not job.done.done()
    gate.leave("a reader")
    assert job.done.done()
    guard.remove()


def test_a_forked_child_can_guard_the_module_anew() -> None:
    """A pass of the parent's other thread was running: in the child it never ends."""
    module = _Slow()
    guard = ForwardGuard(CommitGate(), module, PATIENCE, lambda: None)
    thread = threading.Thread(target=module, args=[torch.zeros(1)])
    thread.start()
    assert module.inside.wait(PATIENCE)

    def child() -> None:
        gate, seen = CommitGate(), list[object]()
        ForwardGuard(gate, module, PATIENCE, lambda: seen.extend(gate.readers()))
        assert gate.commit_at_once(lambda: None)
        module.go_on.set()
        module(torch.zeros(1))
        assert len(seen) == 1
        assert type(copy.copy(module)) is _Slow
        assert gate.commit_at_once(lambda: None)

    process = multiprocessing.get_context("fork").Process(target=child, daemon=True)
    process.start()
    process.join(PATIENCE)
    assert process.exitcode == 0
    process.close()
    module.go_on.set()
    thread.join()
    guard.remove()
    assert type(module) is _Slow


def test_without_the_interpreters_lock_each_pass_takes_the_gates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commit_gate, "_ORDERED", False)
    gate, module = CommitGate(), _Reading(lambda: None)
    guard = ForwardGuard(gate, module, PATIENCE, lambda: None)
    began: list[object] = []
    monkeypatch.setattr(guard._passes, "begin", began.append)
    for _ in range(3):
        module(X)
    assert len(began) == 3
    assert gate.readers() == []
    guard.remove()
