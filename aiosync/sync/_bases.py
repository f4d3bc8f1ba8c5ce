"""The base classes of the generated twins of collectors and updaters, written by hand."""

from __future__ import annotations

import inspect
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Self, TypeVar

from tensordict import TensorDictBase

from aiosync import collectors
from aiosync.collectors.collector import ThreadLimit
from aiosync.errors import BlockingCallError
from aiosync.sync._portal import portal
from aiosync.updaters.base import bounded, current_deadline
from aiosync.updaters.push_lock import Turn

if TYPE_CHECKING:
    from aiosync.collectors import MultiCollector

T = TypeVar("T")


def document(twin: type, asyncio_class: type | None) -> None:
    """Append the asyncio class's docstring to a generated twin's: it has the arguments."""
    if asyncio_class is not None and twin.__doc__ and twin.__module__.startswith("aiosync.sync."):
        twin.__doc__ = f"{inspect.getdoc(twin)}\n\n{inspect.getdoc(asyncio_class)}"


class BlockingCollector:
    """The collectors' twins iterate, and are context managers, by calls on the portal's loop."""

    _async: MultiCollector
    _threads: ThreadLimit | None = None
    _begun = False  # connect() or close() was called

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        document(cls, getattr(collectors, cls.__name__, None))

    @property
    def num_workers(self) -> int:
        """The number of workers."""
        return self._async.num_workers

    @property
    def policy(self) -> Any:
        """The trainer's policy; None if there is none."""
        return self._async.policy

    def __iter__(self) -> Iterator[TensorDictBase]:
        return self

    def __next__(self) -> TensorDictBase:
        """The next batch; see the asyncio class's ``__anext__``."""
        try:
            return portal().call(self._started.__anext__)
        except StopAsyncIteration:
            raise StopIteration from None

    def iterator(self) -> Iterator[Any]:
        """Return this collector, which is its own iterator."""
        return self

    def __len__(self) -> int:
        """See the asyncio class."""
        return len(self._async)

    def __bool__(self) -> bool:
        return True

    if not TYPE_CHECKING:  # a checker would take every name for an attribute

        def __getattr__(self, name: str) -> Any:
            """The attributes of the asyncio class, such as its options."""
            if name.startswith("_"):
                raise AttributeError(
                    f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self
                )
            return getattr(self._async, name)

    @property
    def _started(self) -> MultiCollector:
        """The asyncio collector. Its workers are started by the first call that needs them, if
        :meth:`connect` was not called."""
        if not self._begun:
            self._blocking_connect()
        return self._async

    def _blocking_connect(self, timeout: float | None = None) -> None:
        self._begun = True
        portal().adopt(self, self._async.aclose)  # ends the workers at exit if close() is not called
        try:
            portal().call(self._async.connect, timeout)
        finally:
            if self._async.closed:  # it has failed, or another thread has closed it
                portal().release(self)
        # connect() has done this for the portal's thread: torch counts threads for each calling thread.
        self._threads = ThreadLimit(self._async)
        self._threads.set()

    def __enter__(self) -> Self:
        self._started  # noqa: B018 - starts the workers
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self, timeout: float | None = None) -> None:
        """End the workers; idempotent. ``timeout``: seconds that they have to end by themselves."""
        self._begun = True
        portal().release(self)
        if self._threads is not None:
            self._threads.restore()
        portal().call(self._async.aclose, timeout)

    def shutdown(
        self, timeout: float | None = None, close_env: bool = True, raise_on_error: bool = True
    ) -> None:
        """End the workers; idempotent. Arguments and errors: see the asyncio class."""
        self._begun = True
        portal().release(self)
        if self._threads is not None:
            self._threads.restore()
        portal().call(self._async.shutdown, timeout, close_env, raise_on_error)

    def async_shutdown(self, timeout: float | None = None, close_env: bool = True) -> None:
        """End the workers, also after :meth:`start`; see :meth:`shutdown`."""
        self.shutdown(timeout, close_env)

    @contextmanager
    def _blocking_pause(self, timeout: float | None = None) -> Iterator[None]:
        pausing = self._started.pause(timeout)
        portal().call(pausing.__aenter__)
        try:
            yield
        finally:
            portal().call(pausing.__aexit__, None, None, None)


def run_inline(steps: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine of an updater in this thread. Only ``_settle`` may wait, else BlockingCallError."""
    try:
        steps.send(None)
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]
    steps.close()
    raise BlockingCallError(
        "_push_weights() of a blocking updater awaited something itself: make it a plain function, or "
        "use the class of the same name in aiosync.updaters"
    )


class InlineHooks:
    """The updaters' twins run in the caller's thread: they call hooks there, and await on the portal what a
    hook returns."""

    async def _settle(self, result: Any) -> Any:
        return portal().call(bounded, result) if inspect.isawaitable(result) else result

    async def _wait_for(self, turn: Turn) -> None:
        deadline = current_deadline()
        try:
            turn.result(deadline.remaining())
        except TimeoutError:
            raise deadline.error("stage", hint="another push was in progress") from None
