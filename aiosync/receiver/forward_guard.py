"""Keeps commits out of forward passes that run in other threads than the commit (blocking twins)."""

from __future__ import annotations

import copyreg
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn
from torch._C import _dynamo

from aiosync.receiver.commit_gate import CommitGate


@dataclass(eq=False, repr=False)
class ForwardGuard:
    """Makes each call of a module a reader of the module's gate.

    The module gets a class that is made for it: a subclass of its class, whose ``__call__`` enters the gate.
    Its ``forward`` and its ``__dict__`` stay as they are, so ``torch.compile``, ``torch.jit.script`` and
    ``torch.export`` see the user's own code. Copies of the module, also pickled ones, have the original
    class. Replicas of ``DataParallel`` and forked children are not guarded. Several guards of one module
    share its class: each pass is then a reader of all their gates.

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
    on_pass: Callable[[], None]  # called at the beginning of each pass, when no commit can run any more

    def __post_init__(self) -> None:
        self._forks = self.gate.forks
        guards = _guards_of(self.module)
        if guards is None:
            guards = []
            # Not by the module's own __setattr__, which TorchScript's modules have.
            object.__setattr__(self.module, "__class__", _guarded_class(type(self.module), guards))
        guards.append(self)

    def enter(self, ticket: object) -> None:
        """Become a reader."""
        gate, reader = self.gate, threading.get_ident()
        if self._forks != gate.forks:
            return  # a forked child commits nothing
        if not gate.try_enter(ticket, reader):
            gate.enter_blocking(ticket, reader, self.patience, force=True)
        self.on_pass()

    def remove(self) -> None:
        """End the guard; idempotent. The last one restores the class. A running pass leaves its gate."""
        guards, found = _guards_of(self.module) or [], type(self.module)
        if self in guards:
            guards.remove(self)
        # If other code (parametrizations, FSDP) has made a subclass since, the module keeps that one.
        if not guards and _guards_in(found) is guards:
            object.__setattr__(self.module, "__class__", found.__bases__[1])


def _guards_in(cls: type) -> list[ForwardGuard] | None:
    """The guards of a guarded class; None: it is another class."""
    # An attribute of the function, because a metaclass may refuse attributes of the class.
    return getattr(cls.__dict__.get("__call__"), "aiosync_guards", None)


def _guards_of(module: nn.Module) -> list[ForwardGuard] | None:
    """The guards in the guarded class of a module; None: it has none."""
    found = (_guards_in(cls) for cls in type(module).__mro__)
    return next((guards for guards in found if guards is not None), None)


class _Unannounced:
    """A base before the user's class, whose ``__init_subclass__`` is then not called for the guarded class.

    That method may need arguments, or register each subclass by its name. This class has no ``__slots__``:
    the instances of the guarded class must have the same layout in memory as those of the user's class.
    """

    def __init_subclass__(cls, *, unannounced: bool = False, **kwargs: Any) -> None:
        if not unannounced:  # a subclass that the user makes
            super().__init_subclass__(**kwargs)


def _guarded_class(original: type[nn.Module], guards: list[ForwardGuard]) -> type[nn.Module]:
    def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        # A compiler that traces this call must find nothing else here.
        if torch.compiler.is_compiling():
            return super(guarded, module).__call__(*args, **kwargs)
        ticket, present = object(), tuple(guards)
        try:
            try:
                for guard in present:
                    if guard.module is module:  # a copy of a module may have its class
                        guard.enter(ticket)
                # Not by super(): meanwhile another thread may restore the module's class.
                return original.__call__(module, *args, **kwargs)
            finally:
                for guard in present:
                    guard.gate.leave_blocking(ticket)
        finally:
            for guard in present:  # again, in case an interrupt ended the first calls
                if ticket in guard.gate.inside:
                    guard.gate.leave_blocking(ticket)

    def reduce(module: nn.Module, protocol: int) -> Any:
        found = original.__reduce_ex__(module, protocol)
        if not isinstance(found, tuple):
            return found
        make, arguments, *rest = found
        arguments = tuple(original if argument is guarded else argument for argument in arguments)
        if make is copyreg.__newobj__ and arguments == (original,):  # type: ignore[attr-defined]
            # pickle insists that __newobj__ makes an object of the very class that this one has.
            make, arguments = copyreg._reconstructor, (original, object, None)  # type: ignore[attr-defined]
        return (original if make is guarded else make, arguments, *rest)

    call.aiosync_guards = guards  # type: ignore[attr-defined]
    _skip(call)
    body = {name: getattr(original, name) for name in ("__module__", "__qualname__", "__doc__")}
    body |= {"__slots__": (), "__call__": call, "__reduce_ex__": reduce}
    # By type.__new__, because the metaclass may register its classes too.
    new: Any = type.__new__
    guarded: Any = new(type(original), original.__name__, (_Unannounced, original), body, unannounced=True)
    return cast("type[nn.Module]", guarded)


def _skip(function: Any, *, with_calls: bool = False) -> None:
    """Make the compiler run this function's frame as it is.

    It compiles the functions that this one calls, unless ``with_calls``.
    """
    frames = _dynamo.eval_frame
    skip, compiled = frames._FrameAction.SKIP, frames._FrameAction.DEFAULT
    as_it_is = frames._FrameExecStrategy(skip, skip if with_calls else compiled)
    frames.set_code_exec_strategy(function.__code__, as_it_is)


for _function in (ForwardGuard.enter, CommitGate.leave_blocking):
    _skip(_function, with_calls=True)  # under ``fullgraph=True`` a lock would be an error
