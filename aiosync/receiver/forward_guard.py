"""Keeps commits out of forward passes that run in other threads than the commit (blocking twins)."""

from __future__ import annotations

import copyreg
from collections.abc import Callable
from dataclasses import dataclass
from types import CodeType
from typing import Any

import torch
from torch import nn
from torch._C import _dynamo
from torch.autograd import profiler

from aiosync.receiver.commit_gate import CommitGate, ForwardPasses
from aiosync.receiver.commit_job import LOCK
from aiosync.receiver.give_way import give_way

# Not torch.compiler.is_compiling(), which is true as well where a function runs as it is, and takes longer.
_is_compiling = torch.compiler.is_dynamo_compiling

_PLAIN_CALL = nn.Module._wrapped_call_impl
"""What ``nn.Module.__call__`` is, unless other code has replaced it: as torch.fx does while it traces."""


@dataclass(eq=False, repr=False)
class ForwardGuard:
    """Makes each call of a module a reader of the module's gate.

    The module gets a class that is made for it: a subclass of its class, whose ``__call__`` enters the gate.
    Its ``forward`` and its ``__dict__`` stay as they are, so ``torch.compile``, ``torch.jit.script`` and
    ``torch.export`` see the user's own code. Copies of the module, also pickled ones, have the original
    class. Replicas of ``DataParallel`` are not guarded, nor are forked children, unless they guard the module
    anew. Several guards of one module share its class: each pass is then a reader of all their gates.

    A forward hook would not do: an interrupt (Ctrl-C) ends a forward pass without calling its hooks, and the
    commit would wait for ever for a reader that no longer exists.

    Not guarded are calls of ``module.forward(...)`` itself, of other methods, of submodules, and of the
    module inside of another one that is compiled: put ``with scheme.pinned():`` around those.
    """

    gate: CommitGate
    module: nn.Module
    # Seconds that a forward pass waits for a commit that other readers delay. Then it starts: a commit that
    # runs later is better than a forward pass that never runs.
    patience: float
    # Called at the beginning of the first pass, and of the one after call_on_next_pass(), when no commit can
    # run any more.
    on_pass: Callable[[], None]

    def __post_init__(self) -> None:
        passes = _passes_of(self.module)
        if passes is None or passes.forks != CommitGate.forks:
            _restore_class(self.module, passes)
            passes = _guard_class_of(self.module)
        self._passes = passes
        passes.guards.append(self)
        passes.set_module(self.module)
        self.gate.watch(passes)
        self.call_on_next_pass()

    def call_on_next_pass(self) -> None:
        """Call ``on_pass()`` when the next pass begins."""
        passes = self._passes
        with LOCK:
            if self in passes.guards and self not in passes.attention:
                passes.attention.append(self)

    def remove(self) -> None:
        """End the guard; idempotent. The last one restores the class. A running pass leaves its gate."""
        passes = self._passes
        if self not in passes.guards:
            return
        with LOCK:
            passes.guards.remove(self)
            passes.attention[:] = [each for each in passes.attention if each is not self]
        self.gate.unwatch(passes)
        if not passes.guards:
            passes.set_module(None)
            _restore_class(self.module, passes)


class _GuardedPasses(ForwardPasses):
    """The forward passes of one guarded module."""

    def __init__(self, code: CodeType) -> None:
        super().__init__(code)
        self.guards: list[ForwardGuard] = []
        self.forks = CommitGate.forks
        # Sets whose passes they are; None: those of no module. A guarded class keeps its module alive.
        self.set_module: Callable[[nn.Module | None], None]

    def begin(self, ticket: object) -> None:
        """Wait for commits, where ``attention`` is not empty as a pass begins."""
        if self.forks != CommitGate.forks:
            return  # a forked child commits nothing
        guards = tuple(self.guards)
        patience = max((guard.patience for guard in guards), default=0.0)
        self.wait_to_begin(ticket, [guard.gate for guard in guards], patience)
        for guard in guards:
            guard.on_pass()
            with LOCK:
                if guard in self.attention:
                    self.attention.remove(guard)

    def end(self) -> None:
        """Run the commits that waited for a pass, where ``attention`` is not empty as it ends."""
        give_way(self.yield_request, committed=self.forks == CommitGate.forks and self.run_ready())


def _passes_in(cls: type) -> _GuardedPasses | None:
    """The passes of a guarded class; None: it is another class."""
    # An attribute of the function, because a metaclass may refuse attributes of the class.
    return getattr(cls.__dict__.get("__call__"), "aiosync_passes", None)


def _passes_of(module: nn.Module) -> _GuardedPasses | None:
    """The passes of the module's guarded class; None: it has none."""
    found = (_passes_in(cls) for cls in type(module).__mro__)
    return next((passes for passes in found if passes is not None), None)


def _restore_class(module: nn.Module, passes: _GuardedPasses | None) -> None:
    """Undo :func:`_guard_class_of`, which has returned ``passes``; None: it was not called.

    If other code (parametrizations, FSDP) has made a subclass since, the module keeps that one.
    """
    if passes is not None and _passes_in(type(module)) is passes:
        object.__setattr__(module, "__class__", _unguarded(type(module)))


class _Unannounced:
    """A base before the user's class, whose ``__init_subclass__`` is then not called for the guarded class.

    That method may need arguments, or register each subclass by its name. This class has no ``__slots__``:
    the instances of the guarded class must have the same layout in memory as those of the user's class.
    """

    def __init_subclass__(cls, *, unannounced: bool = False, **kwargs: Any) -> None:
        if not unannounced:  # a subclass that the user makes
            super().__init_subclass__(**kwargs)


def _guard_class_of(module: nn.Module) -> _GuardedPasses:
    """Give the module a guarded class."""
    original = type(module)
    guarded_module: nn.Module | None = None

    def set_module(module: nn.Module | None) -> None:
        nonlocal guarded_module
        guarded_module = module

    # The time that this function adds to a pass is that of the memory which it touches: the pass before has
    # taken the processor's cache. So it looks at two lists and one byte, calls nothing else unless it has
    # to, and takes the place of torch's own function.
    def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        # A compiler that traces this call must find nothing else here; and a copy of the module may have its
        # class. Not by super(): another thread may restore the module's class at any moment.
        if _is_compiling() or module is not guarded_module:
            return original.__call__(module, *args, **kwargs)
        ticket = object()
        try:
            try:
                inside.append(ticket)
                if attention:
                    passes.begin(ticket)
                if (
                    original.__call__ is _PLAIN_CALL
                    and module._compiled_call_impl is None
                    and not profiler._is_profiler_enabled  # it looks for that method's frame
                ):
                    return module._call_impl(*args, **kwargs)  # as that method does
                return original.__call__(module, *args, **kwargs)
            finally:
                if ticket in inside:
                    inside.remove(ticket)
                if attention:
                    passes.end()
                elif asked[0][0]:
                    give_way(passes.yield_request, committed=False)
        except BaseException:  # an interrupt may have ended the calls above
            if ticket in inside:
                inside.remove(ticket)
            if attention:
                passes.end()
            raise

    passes = _GuardedPasses(call.__code__)
    passes.set_module = set_module
    inside, attention, asked = passes.inside, passes.attention, passes.asked
    call.aiosync_passes = passes  # type: ignore[attr-defined]
    _skip(call)
    _give_class(module, call)
    return passes


def _give_class(module: nn.Module, call: Callable[..., Any]) -> None:
    """Make the module's guarded class, with this ``__call__``, and give it to the module."""
    original = type(module)
    body = {name: getattr(original, name) for name in ("__module__", "__qualname__", "__doc__")}
    body |= {"__slots__": (), "__call__": call, "__reduce_ex__": _reducing(original)}
    # By type.__new__, because the metaclass may register its classes too.
    new: Any = type.__new__
    # A subclass of the guarded class of a process that this one was forked from has that base already.
    bases = (original,) if issubclass(original, _Unannounced) else (_Unannounced, original)
    guarded: Any = new(type(original), original.__name__, bases, body, unannounced=True)
    # Not by the module's own __setattr__, which TorchScript's modules have.
    object.__setattr__(module, "__class__", guarded)


def _reducing(original: type[nn.Module]) -> Callable[[nn.Module, int], Any]:
    """Return the ``__reduce_ex__`` of a guarded class: copies have the original class."""

    def reduce(module: nn.Module, protocol: int) -> Any:
        found = original.__reduce_ex__(module, protocol)
        if not isinstance(found, tuple):
            return found
        make, arguments, *rest = found
        arguments = tuple(map(_unguarded, arguments))
        if make is copyreg.__newobj__ and arguments == (original,):  # type: ignore[attr-defined]
            # pickle insists that __newobj__ makes an object of the very class that this one has.
            make, arguments = copyreg._reconstructor, (original, object, None)  # type: ignore[attr-defined]
        return (_unguarded(make), arguments, *rest)

    return reduce


def _unguarded(found: Any) -> Any:
    """The original class of a guarded class; anything else as it is."""
    return found.__bases__[-1] if isinstance(found, type) and _passes_in(found) is not None else found


def _skip(function: Any, *, with_calls: bool = False) -> None:
    """Make the compiler run this function's frame as it is.

    It compiles the functions that this one calls, unless ``with_calls``.
    """
    frames = _dynamo.eval_frame
    skip, compiled = frames._FrameAction.SKIP, frames._FrameAction.DEFAULT
    as_it_is = frames._FrameExecStrategy(skip, skip if with_calls else compiled)
    frames.set_code_exec_strategy(function.__code__, as_it_is)


for _function in (_GuardedPasses.begin, _GuardedPasses.end, give_way):
    _skip(_function, with_calls=True)  # under ``fullgraph=True`` a lock would be an error
