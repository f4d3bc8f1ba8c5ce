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

Answers have the header ``X-Policy-Version``: the version that acted. ``GET /readyz`` says whether the server
can answer, ``GET /healthz`` whether its weights are new enough.
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
from contextlib import AsyncExitStack, asynccontextmanager
from types import FrameType
from typing import Any, TypeAlias

from aiosync._options import check_seconds
from aiosync.errors import NotConnectedError, SyncTimeoutError, WorkerLostError
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
"""Most bytes of a body that is read before the application is called: a slow client is to hold no lease."""


class ServedPolicy:
    """A policy whose weights come from a trainer, in a web server's process.

    A *lease* keeps the current version: no update is committed until it ends. The middleware takes one for
    each request, from the moment that the request's body has arrived until the last part of the answer is
    handed to the server. An update waits for the leases that are held, and new leases wait for that update.
    So an answer that takes long delays the answers to others once per update; see ``longest_lease``.

    If the trainer is lost for longer than the scheme looks for it (``reconnect_for``), the server goes on
    with the weights that it has, gets no more, and its health check fails.

    Args:
        scheme: how to reach the trainer. Its ``init_on_receiver`` is called here, unless it was called.
            For a trainer that is started again, give a ``TCPWeightSyncScheme`` ``on_sender_close="wait"``
            and a long ``reconnect_for``.
        model: the policy, as for ``init_on_receiver``; None: the scheme has it.
        model_id: the model's name on the trainer.
        max_age: seconds after the last update from which on the health check fails; None: any age will do.
        lost_for: seconds without a trainer from which on it fails.
        longest_lease: seconds after which a lease ends by itself, with a warning. The request continues, but
            its weights may change.
        health: the path of the health check, which fails if the weights are too old; None: there is none.
        ready: the path of the check whether the server has weights and is not about to end; None: there is
            none.
        header: the name of the answers' header with the version; None: there is none.
        drain: seconds between SIGTERM, from which on both checks fail, and the server's own handler of the
            signal. A load balancer needs them to notice. Only for servers whose handler is set by
            ``signal.signal``, as uvicorn's is.

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
        longest_lease: float = 2.0,
        health: str | None = "/healthz",
        ready: str | None = "/readyz",
        header: str | None = "X-Policy-Version",
        drain: float = 0.0,
    ) -> None:
        for name, seconds in {"lost_for": lost_for, "longest_lease": longest_lease, "drain": drain}.items():
            check_seconds(name, seconds)
        if max_age is not None:
            check_seconds("max_age", max_age)
        self.draining = False
        self._scheme = scheme
        known = scheme.initialized_on_receiver
        self._model = scheme.model if known else model
        self._model_id = (scheme.model_id or model_id) if known else model_id
        self._max_age = max_age
        self._lost_for = lost_for
        self._longest_lease = longest_lease
        self._checks = {path: full for path, full in ((health, True), (ready, False)) if path is not None}
        self._header = None if header is None else header.lower().encode("latin-1")
        self._drain = drain
        self._committed: float | None = None  # when the current version was, on the monotonic clock
        self._lost: tuple[float, str] | None = None  # since when there is no trainer, and why
        self._failure: str | None = None  # why the task that receives has ended

    @property
    def version(self) -> int:
        """The version that acts; -1 before the first."""
        return self._scheme.version

    @asynccontextmanager
    async def lease(self, what: str = "a lease") -> AsyncIterator[int]:
        """Keep the current version inside ``async with served.lease() as version``: for handlers of
        WebSockets and background tasks, which the middleware does not cover.

        Args:
            what: names the lease in the warning if it takes longer than ``longest_lease``.

        Raises:
            NotConnectedError: the lifespan does not run.
            SyncTimeoutError: an update has waited for other leases until the scheme's timeout.
        """
        async with AsyncExitStack() as stack:
            version = await stack.enter_async_context(self._scheme.pinned())
            # The lease belongs to the endpoint, and not to this task: a timer may end it.
            limit = asyncio.create_task(self._limit(stack, what))
            try:
                yield version
            finally:
                limit.cancel()

    async def _limit(self, stack: AsyncExitStack, what: str) -> None:
        await asyncio.sleep(self._longest_lease)
        held = "%s takes more than %g s: its weights may change from here on"
        logger.warning(held, what, self._longest_lease)
        await stack.aclose()

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
        self.draining, self._lost, self._failure = False, None, None
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
        # Whatever happens, the server goes on with the weights that it has. The health check fails.
        try:
            async with self._scheme.receiving():
                await asyncio.Event().wait()
        except WorkerLostError as exc:
            logger.error("%s keeps version %d: %s", self._model_id, self.version, exc)
        except Exception as exc:
            logger.exception("%s keeps version %d: receiving has failed", self._model_id, self.version)
            self._failure = f"receiving has failed: {exc!r}"

    def _note(self, event: SyncEvent) -> None:
        match event.kind:
            case "committed":
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
            if signal.getsignal(signal.SIGTERM) is drain and servers is not None:
                signal.signal(signal.SIGTERM, servers)

    # -- requests -------------------------------------------------------------------------------------

    def middleware(self, app: Any) -> Any:
        """Return an ASGI application that answers as ``app`` does, with a lease for each request.

        Starlette takes it as ``Middleware(served.middleware)``, FastAPI by ``add_middleware``. Litestar runs
        middleware only where it has a route: wrap the application, ``served.middleware(Litestar(...))``.
        Outside of the lifespan requests are answered without a lease: no update can arrive.
        """

        async def leased(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] != "http":
                await app(scope, receive, send)
                return
            path = str(scope["path"]).removeprefix(scope.get("root_path", ""))
            if path in self._checks and scope["method"] in ("GET", "HEAD"):
                await self._answer_check(send, full=self._checks[path])
            else:
                await self._answer(app, scope, receive, send)

        return leased

    async def _answer(self, app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
        async with AsyncExitStack() as lease:
            begun = False

            async def begin() -> None:
                nonlocal begun
                if not begun:
                    begun = True
                    with contextlib.suppress(NotConnectedError):
                        await lease.enter_async_context(self.lease(f"the answer to {scope['path']}"))

            async def receive_then_begin() -> Message:
                message = await receive()
                if not message.get("more_body", False):
                    await begin()
                return message

            async def send_with_version(message: Message) -> None:
                if message["type"] == "http.response.start":
                    await begin()
                    message = self._with_version(message)
                elif message["type"] == "http.response.body" and not message.get("more_body", False):
                    # Before the last part is sent: a client that reads slowly is not to hold the lease.
                    await lease.aclose()
                await send(message)

            if not _is_small(scope):  # the lease begins with the body's last part
                await app(scope, receive_then_begin, send_with_version)
                return
            buffered = await _buffered(receive)
            try:
                await begin()
            except SyncTimeoutError as exc:
                await _respond(send, 503, {"status": "busy", "reason": str(exc)})
                return
            await app(scope, buffered, send_with_version)

    def _with_version(self, message: Message) -> Message:
        if self._header is None:
            return message
        others = [pair for pair in message.get("headers", ()) if bytes(pair[0]).lower() != self._header]
        return {**message, "headers": [*others, (self._header, str(self.version).encode())]}

    # -- health ---------------------------------------------------------------------------------------

    @property
    def trouble(self) -> str | None:
        """Why the health check fails; None: it does not."""
        now = time.monotonic()
        if (unready := self._unready) is not None:
            return unready
        ended = self._failure or self._scheme.ended
        if ended is not None:
            return f"no more updates will come: {ended}"
        if self._lost is not None and now - self._lost[0] >= self._lost_for:
            return f"no trainer for {now - self._lost[0]:.0f} s: {self._lost[1]}"
        if (
            self._max_age is not None
            and self._committed is not None
            and now - self._committed > self._max_age
        ):
            return f"no update for {now - self._committed:.0f} s"
        return None

    @property
    def _unready(self) -> str | None:
        if self.draining:
            return "this server is about to end"
        return None if self._scheme.version >= 0 else "no weights have arrived"

    async def _answer_check(self, send: Send, *, full: bool) -> None:
        trouble = self.trouble if full else self._unready
        found: dict[str, Any] = {"status": "ok" if trouble is None else "failed", "version": self.version}
        if self._committed is not None:
            found["seconds_since_update"] = round(time.monotonic() - self._committed, 3)
        if trouble is not None:
            found["reason"] = trouble
        await _respond(send, 200 if trouble is None else 503, found)


async def _respond(send: Send, status: int, content: dict[str, Any]) -> None:
    body = json.dumps(content).encode()
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        (b"cache-control", b"no-store"),
    ]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def _is_small(scope: Scope) -> bool:
    """Whether a request has no body, or says that it is one that can be buffered."""
    headers = {bytes(name).lower(): bytes(value) for name, value in scope["headers"]}
    # HTTP/1 says that there is a body; HTTP/2 and 3 do not.
    may_have_body = b"transfer-encoding" in headers or not scope.get("http_version", "1.1").startswith("1")
    length = headers.get(b"content-length", b"" if may_have_body else b"0")
    return length.isdigit() and int(length) <= _BUFFERED


async def _buffered(receive: Receive) -> Receive:
    """Read a request's body; return what delivers it to the application, and then what follows."""
    messages: list[Message] = []
    more = True
    while more:
        messages.append(message := await receive())
        more = message["type"] == "http.request" and message.get("more_body", False)
    messages.reverse()

    async def again() -> Message:
        return messages.pop() if messages else await receive()

    return again
