"""The base class of the schemes' blocking twins, written by hand."""

from __future__ import annotations

import copy
import sys
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar, Self

import aiosync
from aiosync.errors import InvalidArgumentError, SyncTimeoutError
from aiosync.receiver.commit_gate import PinnedBody
from aiosync.receiver.give_way import give_way
from aiosync.reports import SendReport
from aiosync.sync._bases import document
from aiosync.sync._endpoints import BlockingReceiver, BlockingSender
from aiosync.sync._portal import portal

if TYPE_CHECKING:
    import asyncio


class BlockingTwin:
    """Has an asyncio scheme and runs its coroutines on the process's portal."""

    _async_class: ClassVar[type[aiosync.WeightSyncScheme]]
    _twins: ClassVar[dict[str, type[BlockingTwin]]] = {}

    _async: aiosync.WeightSyncScheme
    _task: asyncio.Task[None] | None = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        document(cls, getattr(aiosync, cls.__name__, None))
        if "_async_class" in cls.__dict__:
            BlockingTwin._twins.update(dict.fromkeys(vars(cls._async_class).get("backends", ()), cls))

    @property  # type: ignore[misc] # object's can be assigned
    def __class__(self) -> type[Self]:
        """The twin's class. The first read after torchrl's import registers the twins with torchrl.

        So ``isinstance(twin, torchrl.weight_update.WeightSyncScheme)`` is true, in either order of import:
        ``isinstance`` of an abstract base class, as torchrl's are, reads the instance's ``__class__`` first.
        (Importing :mod:`aiosync.sync` registers nothing: an import of aiosync changes no other library.)
        """
        if "torchrl.weight_update" in sys.modules:
            import_module("aiosync.compat.torchrl")
        return type(self)

    # -- pickling ------------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        return {"_async": self._async}

    def __copy__(self) -> Self:
        """A copy of the recipe, for another endpoint in this process."""
        twin = type(self).__new__(type(self))
        twin._async = copy.copy(self._async)
        return twin

    @property
    def asyncio_scheme(self) -> aiosync.WeightSyncScheme:
        """The asyncio scheme that this twin calls, on the portal's event loop."""
        return self._async

    def __repr__(self) -> str:
        if "_async" not in vars(self):
            return f"<blocking {type(self).__name__}, whose constructor failed>"
        return repr(self._async).replace("<", "<blocking ", 1)

    # -- called by the generated methods ---------------------------------------------------------------

    @classmethod
    def twins_by_backend(cls) -> dict[str, type[BlockingTwin]]:
        """Each name that ``from_backend`` knows -> its class."""
        return {name: BlockingTwin._twins[name] for name in sorted(BlockingTwin._twins)}

    @classmethod
    def _blocking_from_backend(cls, backend: str, **kwargs: Any) -> Any:
        twins = cls.twins_by_backend()
        if backend not in twins:
            raise InvalidArgumentError(f"unknown backend {backend!r}: expected one of {', '.join(twins)}")
        return twins[backend](**kwargs)

    def _rebind(self, **what: Any) -> None:
        ((name, value),) = what.items()
        if self._async.synchronized_on_receiver and value is not None:
            portal().call(self._async.rebind, **what)
        else:
            setattr(self._async, name, value)

    def _blocking_connect(self, **arguments: Any) -> None:
        portal().call(self._connect, arguments)

    async def _connect(self, arguments: dict[str, Any]) -> None:
        scheme = self._async
        if scheme.initialized_on_receiver and scheme.sender_enlists:
            return
        receives = scheme.initialized_on_receiver and not isinstance(scheme, aiosync.NoWeightSyncScheme)
        if receives and not scheme.synchronized_on_receiver:
            # From the first commit on, no commit may happen during a forward pass in another thread.
            receiver = scheme.create_receiver(worker_idx=arguments.get("worker_idx"))
            receiver.model_applier.guard_forwards(scheme.timeout)
        await scheme.connect(**arguments)
        portal().adopt(self, self._close)
        if receives:
            receiver = scheme.get_receiver()
            self._task = portal().start_task(receiver.run(), f"aiosync-receiver-{scheme.worker_idx}")

    def _blocking_receiving(self) -> AbstractContextManager[None]:
        self._async._receiving()
        return nullcontext()

    @contextmanager
    def _blocking_pinned(self, timeout: float | None = None) -> Iterator[int]:
        if isinstance(self._async, aiosync.NoWeightSyncScheme):
            yield self._async.version
            return
        receiver = self._async.get_receiver()
        seconds = self._async._spec.seconds(timeout)
        body = PinnedBody()
        gate = receiver.model_applier.gate
        try:
            try:
                if not gate.enter_blocking(body, threading.get_ident(), seconds):
                    raise SyncTimeoutError("pin", seconds=seconds, hint="a commit waits for other readers")
                with body:
                    yield receiver.version
            finally:
                give_way(gate.yield_request, committed=gate.leave(body))
        finally:
            gate.leave(body)  # an interrupt may have ended the call above

    # -- methods that the asyncio schemes do not have --------------------------------------------------

    def send_async(self, weights: Any = None, worker_ids: int | list[int] | None = None) -> None:
        """Publish the next version and return without waiting for the workers.

        Raises as ``send``, for updates that were sent before.
        """
        portal().send(self._async.send, weights, worker_ids, wait=False)

    def wait_async(
        self, worker_ids: int | list[int] | None = None, timeout: float | None = None
    ) -> SendReport:
        """Wait until workers have applied what :meth:`send_async` published. Raises as ``send``."""
        return portal().send(self._async.wait_ack, worker_ids, timeout)

    def get_sender(self) -> BlockingSender:
        """Return the sending endpoint, which can send once :meth:`connect` was called.

        Raises:
            NotConnectedError: this process has none: ``init_on_sender`` was not called here, or another rank
                sends.
        """
        return BlockingSender(self._async.get_sender())

    def create_sender(self) -> BlockingSender:
        """Return the sending endpoint, created by the first call; raise NotInitializedError if
        ``init_on_sender`` was not called."""
        return BlockingSender(self._async.create_sender())

    def get_receiver(self) -> BlockingReceiver:
        """Return the receiving endpoint, which can receive once :meth:`connect` was called.

        Raises:
            NotConnectedError: this process has none: ``init_on_receiver`` was not called here.
            NotInitializedError: this worker's index is not known yet.
        """
        return BlockingReceiver(self._async.get_receiver())

    def create_receiver(self, *, worker_idx: int | None = None) -> BlockingReceiver:
        """Return the receiving endpoint, created by the first call; raise NotInitializedError if
        ``init_on_receiver`` was not called, or no worker index is known."""
        return BlockingReceiver(self._async.create_receiver(worker_idx=worker_idx))

    def close(self) -> None:
        """Close this process's endpoint; idempotent. Others stay open. The model keeps its version."""
        portal().call(self._close)

    def shutdown(self) -> None:
        """The same as :meth:`close`."""
        self.close()

    async def _close(self) -> None:
        task, self._task = self._task, None
        if task is not None:
            await portal().end_task(task)
        await self._async.aclose()
        portal().release(self)

    def __enter__(self) -> Self:
        scheme = self._async
        connected = scheme.synchronized_on_sender or scheme.synchronized_on_receiver
        try:
            self._blocking_connect()
        except BaseException:
            if not connected:
                self.close()  # __exit__ does not run if __enter__ raises
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
