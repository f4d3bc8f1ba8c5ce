"""Keeps commits out of forward passes that run in other threads than the commit (blocking twins)."""

from __future__ import annotations

import copyreg
import os
import threading
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import nn
from torch._C import _dynamo

from aiosync.receiver.commit_gate import CommitGate

__all__ = ["ForwardGuard"]


class ForwardGuard:
    """Makes each call of a module a reader of the module's gate.

    The module gets a class of its own, made for it: a subclass of the class that it had, whose ``__call__``
    enters the gate. Its ``forward`` and its ``__dict__`` stay as they are, so ``torch.compile``,
    ``torch.jit.script`` and ``torch.export`` see the user's own code. Copies of the module, pickled ones
    too, have the original class; replicas of ``DataParallel`` and forked children are not guarded.

    A forward hook would not do: an interrupt (Ctrl-C) leaves a forward pass without calling its hooks, and
    the commit would wait for ever for a reader that has gone.

    Not seen are calls of ``module.forward(...)`` itself, of other methods, of submodules by themselves, and
    of the module inside of another one that is compiled: put ``with scheme.pinned():`` around those.

    Args:
        gate: the gate.
        module: the module.
        patience: seconds that a forward pass waits for a commit that other readers hold up. It then goes
            ahead: a commit that comes later is better than a forward pass that never does.
        on_pass: called at the beginning of each pass, when no commit can come any more.

    Attributes:
        module: the module.
    """

    def __init__(
        self, gate: CommitGate, module: nn.Module, patience: float, on_pass: Callable[[], None]
    ) -> None:
        self._gate = gate
        self._on_pass = on_pass
        self.module = module
        self._patience = patience
        self._pid = os.getpid()
        self._original = type(module)
        self._guarded = _guarded_class(self._original, self)
        # Not by the module's own __setattr__, which TorchScript's modules have.
        object.__setattr__(module, "__class__", self._guarded)

    def enter(self, ticket: object) -> None:
        """Become a reader."""
        if self._pid != os.getpid():
            return  # in a forked child nothing is committed
        gate, reader = self._gate, threading.get_ident()
        if not gate.try_enter(ticket, reader):
            gate.enter_blocking(ticket, reader, self._patience, force=True)
        self._on_pass()

    def leave(self, ticket: object) -> None:
        """Stop being a reader; twice does no harm."""
        self._gate.leave(ticket)

    def remove(self) -> None:
        """Give the module its class back; idempotent. A pass that runs leaves the gate all the same."""
        if type(self.module) is self._guarded:
            object.__setattr__(self.module, "__class__", self._original)


class _Unannounced:
    """Comes before the user's class, whose ``__init_subclass__`` is then not called for the guarded class.

    It may need arguments, or enter each subclass into a table by its name. This class has no ``__slots__``:
    the instances of the guarded class must have the same layout in memory as those of the user's class.
    """

    def __init_subclass__(cls, *, unannounced: bool = False, **kwargs: Any) -> None:
        if not unannounced:  # a subclass that the user makes
            super().__init_subclass__(**kwargs)


def _guarded_class(original: type[nn.Module], guard: ForwardGuard) -> type[nn.Module]:
    def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        plain = super(guarded, module).__call__
        # A compiler that traces this call must find nothing else here.
        if torch.compiler.is_compiling() or guard.module is not module:
            return plain(*args, **kwargs)
        ticket = object()
        try:
            try:
                _untraced(guard.enter, ticket)
                return plain(*args, **kwargs)
            finally:
                _untraced(guard.leave, ticket)
        finally:
            _untraced(guard.leave, ticket)  # again, in case an interrupt came in the way of the first

    def reduce(module: nn.Module, protocol: int) -> Any:
        found = super(guarded, module).__reduce_ex__(protocol)
        if not isinstance(found, tuple):
            return found
        make, arguments, *rest = found
        arguments = tuple(original if argument is guarded else argument for argument in arguments)
        if make is copyreg.__newobj__ and arguments == (original,):  # type: ignore[attr-defined]
            # pickle insists that __newobj__ makes an object of the very class that this one has.
            make, arguments = copyreg._reconstructor, (original, object, None)  # type: ignore[attr-defined]
        return (original if make is guarded else make, arguments, *rest)

    _skip(call)
    names = {"__module__": original.__module__, "__qualname__": original.__qualname__}
    body = {**names, "__doc__": original.__doc__, "__slots__": (), "__call__": call, "__reduce_ex__": reduce}
    # By type.__new__, because the metaclass may register its classes too.
    new: Any = type.__new__
    bases = _Unannounced, original
    guarded: Any = new(type(original), original.__name__, bases, body, unannounced=True)
    return cast("type[nn.Module]", guarded)


def _skip(function: Any) -> None:
    """Have the compiler run this function's frame as it is, and go on compiling what it calls."""
    frames = _dynamo.eval_frame
    as_it_is = frames._FrameExecStrategy(frames._FrameAction.SKIP, frames._FrameAction.DEFAULT)
    frames.set_code_exec_strategy(function.__code__, as_it_is)


def _untraced(function: Callable[[object], None], ticket: object) -> None:
    """Call it without the compiler looking on: under ``fullgraph=True`` a lock would be an error."""
    before = _dynamo.eval_frame.set_eval_frame(None)
    try:
        function(ticket)
    finally:
        _dynamo.eval_frame.set_eval_frame(before)


_skip(_untraced)
