"""A policy behind HTTP: a lifespan that receives weights, and a lease on the policy for each request.

It is plain ASGI, so it works with Starlette, FastAPI, Litestar and every other framework::

    from aiosync.integrations.asgi import ServedPolicy

    scheme = aiosync.TCPWeightSyncScheme("tcp://trainer:5555", token=token, on_sender_close="wait")
    served = ServedPolicy(scheme, policy)

    app = FastAPI(lifespan=served.lifespan)
    app.add_middleware(served.middleware)

    @app.post("/act")
    def act(observation: list[float]):  # or async def
        return policy(torch.tensor(observation)).tolist()

Each answer has the header ``X-Policy-Version``: the version that acted. ``GET /healthz`` says whether the
weights are new enough.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import signal
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, MutableMapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from types import FrameType
from typing import Any, TypeAlias

from aiosync._options import check_seconds
from aiosync.errors import SyncTimeoutError, WorkerLostError
from aiosync.events import SyncEvent
from aiosync.schemes.base import WeightSyncScheme

__all__ = ["ServedPolicy"]

logger = logging.getLogger("aiosync")

Scope: TypeAlias = MutableMapping[str, Any]
Message: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]
ASGIApp: TypeAlias = Callable[[Scope, Receive, Send], Awaitable[None]]

_BUFFERED = 1 << 20
"""Bytes of a request's body that are read before the lease begins: a slow client is not to hold a lease."""


class ServedPolicy:
    """A policy whose weights come from a trainer, in a web server's process.

    A *lease* keeps the current version: no update is committed until it ends. The middleware takes one for
    each request, from the moment that the request's body has arrived until the answer has been handed to the
    server. An update waits for the leases that are held, and new leases wait for that update. So an answer
    that takes long delays the answers to others once per update; see ``longest_lease``.

    Args:
        scheme: how to reach the trainer. Its ``init_on_receiver`` is called here, unless it was called.
            For a trainer that is started again, give a ``TCPWeightSyncScheme`` ``on_sender_close="wait"``
            and a long ``reconnect_for``.
        model: the policy, as for ``init_on_receiver``; None: the scheme has it.
        model_id: the model's name on the trainer.
        max_age: seconds after the last update from which on the health check fails; None: any age will do.
        lost_for: seconds without a trainer from which on it fails.
        longest_lease: seconds after which a request loses its lease, with a warning. It continues, but its
            weights may change.
        health: the path of the health check; None: there is none.
        header: the name of the answers' header with the version; None: there is none.
        drain: seconds between SIGTERM, from which on the health check fails, and the server's own handler
            of the signal. A load balancer needs them to notice.

    Attributes:
        draining: whether SIGTERM has arrived.

    Raises:
        InvalidArgumentError: a number of seconds is negative or none.
    """

    def __init__(
        self,
        scheme: WeightSyncScheme,
        model: Any = None,
        *,
        model_id: str = "policy",
        max_age: float | None = None,
        lost_for: float = 60.0,
        longest_lease: float = 5.0,
        health: str | None = "/healthz",
        header: str | None = "X-Policy-Version",
        drain: float = 0.0,
    ) -> None:
        for name, seconds in {"lost_for": lost_for, "longest_lease": longest_lease, "drain": drain}.items():
            check_seconds(name, seconds)
        if max_age is not None:
            check_seconds("max_age", max_age)
        self.draining = False
        self._scheme = scheme
        self._model = model
        self._model_id = model_id
        self._max_age = max_age
        self._lost_for = lost_for
        self._longest_lease = longest_lease
        self._health = health
        self._header = None if header is None else header.lower().encode("latin-1")
        self._drain = drain
        self._committed: float | None = None  # when the current version was, on the monotonic clock
        self._lost: tuple[float, str] | None = None  # since when there is no trainer, and why

    @property
    def version(self) -> int:
        """The version that acts; -1 before the first."""
        return self._scheme.version

    def lease(self, timeout: float | None = None) -> AbstractAsyncContextManager[int]:
        """Keep the current version inside ``async with served.lease() as version``: for handlers of
        WebSockets and background tasks, which the middleware does not cover. Raises as ``scheme.pinned``."""
        return self._scheme.pinned(timeout)

    # -- the lifespan ---------------------------------------------------------------------------------

    @asynccontextmanager
    async def lifespan(self, app: object = None) -> AsyncIterator[None]:
        """Connect to the trainer, and receive its updates until the server ends.

        Starlette and FastAPI take it as ``lifespan=``, Litestar as ``lifespan=[...]``. ``app`` is not used.

        Raises:
            WorkerLostError, HandshakeError, SyncTimeoutError: as a worker's ``connect``: the server does not
                start without weights.
        """
        scheme = self._scheme
        if not scheme.initialized_on_receiver:
            scheme.init_on_receiver(model_id=self._model_id, model=self._model)
        stop = scheme.on_event(self._note)
        try:
            async with scheme:
                self._committed = time.monotonic()
                receiving = asyncio.create_task(self._receive(), name="aiosync-serving")
                try:
                    with self._drained_at_sigterm():
                        yield
                finally:
                    receiving.cancel()
                    await asyncio.wait([receiving])
        finally:
            stop()

    async def _receive(self) -> None:
        try:
            async with self._scheme.receiving():
                await asyncio.Event().wait()
        except WorkerLostError as exc:
            # The server goes on with the weights that it has; its health check fails.
            logger.error("no more updates for %s: %s", self._model_id, exc)

    def _note(self, event: SyncEvent) -> None:
        match event.kind:
            case "committed" | "followed":
                self._committed, self._lost = time.monotonic(), None
            case "connected":
                self._lost = None
            case "lost" if self._lost is None:
                self._lost = time.monotonic(), event.message

    @contextlib.contextmanager
    def _drained_at_sigterm(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread() or sys.platform == "win32":
            yield  # the server in this thread gets no signals
            return
        loop, servers = asyncio.get_running_loop(), signal.getsignal(signal.SIGTERM)

        def drain(number: int, frame: FrameType | None) -> None:
            self.draining = True
            if callable(servers):
                loop.call_soon_threadsafe(loop.call_later, self._drain, servers, number, frame)
            else:
                loop.call_soon_threadsafe(loop.call_later, self._drain, again)

        def again() -> None:
            signal.signal(signal.SIGTERM, servers)
            signal.raise_signal(signal.SIGTERM)

        signal.signal(signal.SIGTERM, drain)
        try:
            yield
        finally:
            if signal.getsignal(signal.SIGTERM) is drain:
                signal.signal(signal.SIGTERM, servers)

    # -- requests -------------------------------------------------------------------------------------

    def middleware(self, app: Any) -> Any:
        """Return an ASGI application that answers as ``app`` does, with a lease for each request.

        Starlette takes it as ``Middleware(served.middleware)``, FastAPI by ``add_middleware``, Litestar in
        ``middleware=[...]``. Raises nothing itself; if no lease is to be had, a request is answered with 503.
        """

        async def leased(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] != "http":
                await app(scope, receive, send)
            elif self._health is not None and scope["path"] == self._health:
                await self._answer_health(send)
            else:
                await self._with_lease(app, scope, await _buffered(receive), send)

        return leased

    async def _with_lease(self, app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
        async with AsyncExitStack() as lease:
            try:
                version = await lease.enter_async_context(self.lease())
            except SyncTimeoutError as exc:
                await _respond(send, 503, {"status": "busy", "reason": str(exc)})
                return
            # The lease belongs to the endpoint, and not to this task: a timer may end it.
            limit = asyncio.create_task(self._limit(lease, str(scope["path"])))

            async def send_with_version(message: Message) -> None:
                if message["type"] == "http.response.start" and self._header is not None:
                    found = (self._header, str(version).encode())
                    message = {**message, "headers": [*message.get("headers", ()), found]}
                await send(message)
                if message["type"] == "http.response.body" and not message.get("more_body", False):
                    await lease.aclose()  # what the application does afterwards is not the answer

            try:
                await app(scope, receive, send_with_version)
            finally:
                limit.cancel()

    async def _limit(self, lease: AsyncExitStack, path: str) -> None:
        await asyncio.sleep(self._longest_lease)
        held = "the answer to %s takes more than %g s: its weights may change from here on"
        logger.warning(held, path, self._longest_lease)
        await lease.aclose()

    # -- health ---------------------------------------------------------------------------------------

    @property
    def trouble(self) -> str | None:
        """Why the health check fails; None: it does not."""
        now = time.monotonic()
        if self.draining:
            return "this server is about to end"
        if self._scheme.version < 0 or self._committed is None:
            return "no weights have arrived"
        if (ended := self._scheme.ended) is not None:
            return f"no more updates will come: {ended}"
        if self._lost is not None and now - self._lost[0] >= self._lost_for:
            return f"no trainer for {now - self._lost[0]:.0f} s: {self._lost[1]}"
        if self._max_age is not None and now - self._committed > self._max_age:
            return f"no update for {now - self._committed:.0f} s"
        return None

    async def _answer_health(self, send: Send) -> None:
        trouble = self.trouble
        found: dict[str, Any] = {"status": "ok" if trouble is None else "failed", "version": self.version}
        if self._committed is not None:
            found["seconds_since_update"] = round(time.monotonic() - self._committed, 3)
        if trouble is not None:
            found["reason"] = trouble
        await _respond(send, 200 if trouble is None else 503, found)


async def _respond(send: Send, status: int, content: dict[str, Any]) -> None:
    body = json.dumps(content).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def _buffered(receive: Receive) -> Receive:
    """Read a request's body, up to a limit; return what delivers it to the application, and the rest."""
    messages: list[Message] = []
    size = 0
    while size <= _BUFFERED:
        message = await receive()
        messages.append(message)
        size += len(message.get("body", b""))
        if message["type"] != "http.request" or not message.get("more_body", False):
            break
    messages.reverse()

    async def again() -> Message:
        return messages.pop() if messages else await receive()

    return again
