"""A policy behind HTTP, under load, with Starlette, FastAPI and Litestar."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn

from aiosync import InvalidArgumentError, SyncTimeoutError, TCPWeightSyncScheme
from aiosync.integrations import asgi
from aiosync.integrations.asgi import ASGIApp, ServedPolicy
from tests.kit.clock import BRIEF, PATIENCE, PROGRAM, eventually, within
from tests.kit.models import Uniform, fill, value_of
from tests.kit.ports import free_port
from tests.kit.tcp import TOKEN, break_off, sender_of

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
CLIENTS = 8


def starlette(served: ServedPolicy, policy: Uniform) -> Any:
    from starlette.applications import Starlette
    from starlette.middleware import Middleware
    from starlette.requests import Request
    from starlette.responses import JSONResponse, Response, StreamingResponse
    from starlette.routing import Route

    async def act(request: Request) -> Response:
        before = value_of(policy)
        await asyncio.sleep(0.001)
        return JSONResponse([before, value_of(policy)])

    def act_in_thread(request: Request) -> Response:
        before = value_of(policy)
        time.sleep(0.001)
        return JSONResponse([before, value_of(policy)])

    async def stream(request: Request) -> Response:
        async def parts() -> AsyncIterator[str]:
            for _ in range(int(request.query_params["parts"])):
                yield f"{value_of(policy)}\n"
                await asyncio.sleep(0.05)

        return StreamingResponse(parts())

    async def echo(request: Request) -> Response:
        return Response(await request.body())

    routes = [
        Route("/act", act),
        Route("/act-in-thread", act_in_thread),
        Route("/stream", stream),
        Route("/echo", echo, methods=["POST"]),
    ]
    return Starlette(routes=routes, middleware=[Middleware(served.middleware)], lifespan=served.lifespan)


def fastapi(served: ServedPolicy, policy: Uniform) -> Any:
    from fastapi import FastAPI

    app = FastAPI(lifespan=served.lifespan)
    app.add_middleware(served.middleware)

    @app.get("/act")
    async def act() -> list[float]:
        before = value_of(policy)
        await asyncio.sleep(0.001)
        return [before, value_of(policy)]

    @app.get("/act-in-thread")
    def act_in_thread() -> list[float]:
        before = value_of(policy)
        time.sleep(0.001)
        return [before, value_of(policy)]

    return app


def litestar(served: ServedPolicy, policy: Uniform) -> Any:
    from litestar import Litestar, get

    @get("/act")
    async def act() -> list[float]:
        before = value_of(policy)
        await asyncio.sleep(0.001)
        return [before, value_of(policy)]

    @get("/act-in-thread", sync_to_thread=True)
    def act_in_thread() -> list[float]:
        before = value_of(policy)
        time.sleep(0.001)
        return [before, value_of(policy)]

    return served.middleware(Litestar([act, act_in_thread], lifespan=[served.lifespan]))


@asynccontextmanager
async def client_of(app: ASGIApp) -> AsyncIterator[httpx.AsyncClient]:
    """A client of a server that runs beside it."""
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning", lifespan="on"))
    serving = asyncio.create_task(server.serve())
    try:
        await eventually(lambda: server.started or serving.done(), "the server has started")
        assert server.started
        port = server.servers[0].sockets[0].getsockname()[1]
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=PATIENCE) as client:
            yield client
    finally:
        server.should_exit = True
        await within(serving)


class World:
    """A trainer, a server and a client of it."""

    def __init__(self, make: Callable[[ServedPolicy, Uniform], Any] = starlette, **options: Any) -> None:
        self.trained, self.policy = Uniform(0.0), Uniform(-1.0)
        self._make, self._options = make, options
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> World:
        self.trainer = await self._stack.enter_async_context(sender_of(self.trained))
        connecting = asyncio.create_task(self.trainer.connect(min_workers=0))
        await within(connecting)
        scheme = TCPWeightSyncScheme(
            self.trainer.address,
            token=TOKEN,
            timeout=PATIENCE,
            reconnect_for=PATIENCE,
            on_sender_close="wait",
        )
        self.served = ServedPolicy(scheme, self.policy, **self._options)
        app = self._make(self.served, self.policy)
        self.client = await self._stack.enter_async_context(client_of(app))
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def send(self, value: float) -> None:
        fill(self.trained, value)
        await within(self.trainer.send())


@pytest.mark.parametrize("make", [starlette, fastapi, litestar])
async def test_each_answer_has_one_version_and_says_which(make: Callable[..., Any]) -> None:
    async with World(make) as world:
        answers: list[tuple[int, list[float]]] = []
        stop = asyncio.Event()

        async def ask(path: str) -> None:
            while not stop.is_set():
                answer = await world.client.get(path)
                assert answer.status_code == 200, answer.text
                answers.append((int(answer.headers["x-policy-version"]), answer.json()))

        async with asyncio.TaskGroup() as tasks:
            for client in range(CLIENTS):
                tasks.create_task(ask("/act" if client % 2 else "/act-in-thread"))
            for version in range(1, 30):
                await world.send(float(version))
            stop.set()
        assert {version for version, _ in answers} >= {1, 29} or len({v for v, _ in answers}) > 5
        assert all(seen == [version, version] for version, seen in answers)


@pytest.mark.parametrize("make", [starlette, fastapi, litestar])
async def test_health(make: Callable[..., Any]) -> None:
    async with World(make, max_age=10 * PATIENCE, lost_for=0.0) as world:
        assert (await world.client.head("/healthz")).status_code == 200
        assert (await world.client.post("/healthz")).status_code == 404
        answer = await world.client.get("/healthz")
        assert answer.status_code == 200
        assert answer.json()["status"] == "ok" and answer.json()["version"] == 0
        assert "x-policy-version" not in answer.headers
        await world.send(1.0)
        assert (await world.client.get("/healthz")).json()["version"] == 1
        world.served._max_age = 0.0
        stale = await world.client.get("/healthz")
        assert stale.status_code == 503 and "no update for" in stale.json()["reason"]
        assert stale.headers["cache-control"] == "no-store"
        assert (await world.client.get("/readyz")).status_code == 200  # it can answer all the same
        world.served._max_age = None
        break_off(world.trainer)
        await eventually(lambda: world.served.trouble is not None, "the loss is noticed")
        lost = await world.client.get("/healthz")
        assert lost.status_code in (200, 503)  # it may be connected again by now
        await eventually(lambda: world.served.trouble is None, "it is connected again")
        # The policy answers all the same.
        assert (await world.client.get("/act")).json() == [1.0, 1.0]


async def test_a_trainer_that_has_closed_is_missed() -> None:
    async with World(lost_for=0.0) as world:
        await world.send(1.0)
        await within(world.trainer.aclose())
        await eventually(lambda: world.served.trouble is not None, "the trainer is missed")
        lost = await world.client.get("/healthz")
        assert lost.status_code == 503 and "no trainer for" in lost.json()["reason"]
        assert (await world.client.get("/act")).headers["x-policy-version"] == "1"


async def test_a_slow_upload_does_not_hold_a_lease() -> None:
    async with World() as world:
        release = asyncio.Event()

        async def upload() -> AsyncIterator[bytes]:
            yield b"one"
            await release.wait()
            yield b"two"

        uploading = asyncio.create_task(world.client.post("/echo", content=upload()))
        await asyncio.sleep(0.05)
        await world.send(1.0)
        release.set()
        answer = await within(uploading)
        assert answer.content == b"onetwo" and answer.headers["x-policy-version"] == "1"


async def test_a_large_upload_arrives_whole() -> None:
    async with World() as world:
        body = os.urandom(5 << 20)
        assert (await world.client.post("/echo", content=body)).content == body


@pytest.mark.parametrize(("http", "small"), [("1.1", True), ("2", False), ("3", False)])
def test_a_request_whose_length_is_unknown_is_not_buffered(http: str, small: bool) -> None:
    """Only HTTP/1 says that there is no body by saying nothing."""
    assert asgi._is_small({"type": "http", "http_version": http, "headers": []}) is small
    assert asgi._is_small({"type": "http", "http_version": http, "headers": [(b"content-length", b"3")]})


async def test_an_answer_keeps_its_version_to_the_end() -> None:
    async with World() as world:
        async with world.client.stream("GET", "/stream?parts=6") as answer:
            lines = answer.aiter_lines()
            assert await anext(lines) == "0.0"
            sending = asyncio.create_task(world.send(1.0))
            assert [line async for line in lines] == ["0.0"] * 5
        await within(sending)
        assert (await world.client.get("/act")).json() == [1.0, 1.0]


async def test_an_answer_that_takes_too_long_loses_its_lease(caplog: pytest.LogCaptureFixture) -> None:
    async with World(longest_lease=0.1) as world:
        async with world.client.stream("GET", "/stream?parts=40") as answer:
            lines = answer.aiter_lines()
            assert await anext(lines) == "0.0"
            await world.send(1.0)  # does not wait for the answer's end
            assert [line async for line in lines][-1] == "1.0"
    assert "the answer to /stream takes more than 0.1 s" in caplog.text


async def test_a_large_upload_that_stalls_holds_no_lease() -> None:
    async with World() as world:
        release = asyncio.Event()

        async def upload() -> AsyncIterator[bytes]:
            yield bytes(3 << 20)
            await release.wait()
            yield b"end"

        uploading = asyncio.create_task(world.client.post("/echo", content=upload()))
        await asyncio.sleep(0.1)
        await within(world.send(1.0), 1.0)
        release.set()
        answer = await within(uploading)
        assert len(answer.content) == (3 << 20) + 3 and answer.headers["x-policy-version"] == "1"


async def test_an_application_of_its_own_lifespan_and_root_path() -> None:
    """The scheme was initialized before; the lifespan runs twice; the server has a root_path."""
    trained, policy = Uniform(0.0), Uniform(-1.0)
    async with sender_of(trained) as trainer:
        await within(trainer.connect(min_workers=0))
        scheme = TCPWeightSyncScheme(trainer.address, token=TOKEN, timeout=PATIENCE)
        scheme.init_on_receiver(model_id="policy", model=policy)
        served = ServedPolicy(scheme)
        for version in range(1, 3):
            async with served.lifespan():
                fill(trained, float(version))
                await within(trainer.send())
                assert served.version == version and value_of(policy) == float(version)
                sent: list[Any] = []

                async def send(message: Any, sent: list[Any] = sent) -> None:
                    sent.append(message)

                async def nothing(*_: object) -> None:
                    raise AssertionError("the application is not called")

                scope = {
                    "type": "http",
                    "method": "GET",
                    "path": "/api/readyz",
                    "root_path": "/api",
                    "headers": [],
                }
                await served.middleware(nothing)(scope, nothing, send)
                assert sent[0]["status"] == 200


async def test_a_task_that_has_failed_is_reported(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with World() as world:
        world.served._failure = None

        def fails(*_: object, **__: object) -> Any:
            raise RuntimeError("a bug")

        monkeypatch.setattr(world.served._scheme, "receiving", fails)
        await within(world.served._receive())
        answer = await world.client.get("/healthz")
        assert answer.status_code == 503 and "a bug" in answer.json()["reason"]
        assert "receiving has failed" in caplog.text
        assert (await world.client.get("/act")).status_code == 200


async def test_outside_of_the_lifespan_requests_have_no_lease() -> None:
    served = ServedPolicy(TCPWeightSyncScheme(token=TOKEN), Uniform(3.0))
    app = served.middleware(starlette(served, Uniform(3.0)))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://x") as client:
        answer = await client.get("/act")
        assert answer.json() == [3.0, 3.0] and answer.headers.get_list("x-policy-version") == ["-1"]
        assert (await client.get("/readyz")).status_code == 503


async def test_without_a_trainer_the_server_does_not_start() -> None:
    scheme = TCPWeightSyncScheme(f"tcp://127.0.0.1:{free_port()}", token=TOKEN, timeout=BRIEF)
    served = ServedPolicy(scheme, Uniform())
    with pytest.raises(SyncTimeoutError):
        async with served.lifespan():
            pass
    assert served.version == -1 and served.trouble == "no weights have arrived"


@pytest.mark.parametrize("name", ["lost_for", "max_age", "longest_lease", "drain"])
def test_seconds_are_checked(name: str) -> None:
    options: dict[str, Any] = {name: -1.0}
    with pytest.raises(InvalidArgumentError, match=name):
        ServedPolicy(TCPWeightSyncScheme(), Uniform(), **options)


@asynccontextmanager
async def program(name: str, *args: str) -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    """An example that runs, and the address that it has printed."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-u", str(EXAMPLES / name), *args,
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "AIOSYNC_TOKEN": TOKEN},
    )  # fmt: skip
    try:
        assert process.stdout is not None
        line = (await within(process.stdout.readline(), PROGRAM)).decode()
        assert " at " in line, line
        yield process, line.rsplit(" at ", 1)[1].strip()
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def test_the_trainer_is_redeployed_under_load_and_the_server_drains(tmp_path: Path) -> None:
    listen = f"tcp://127.0.0.1:{free_port()}"
    trainer_options = ("--listen", listen, "--checkpoint", str(tmp_path / "policy.pt"), "--every", "0.05")
    failed: list[Any] = []
    versions: list[list[int]] = [[] for _ in range(CLIENTS)]
    stop = asyncio.Event()
    async with AsyncExitStack() as stack:
        trainer = await stack.enter_async_context(program("serve_trainer.py", *trainer_options))
        (server, address) = await stack.enter_async_context(
            program("serve_policy.py", "--trainer", listen, "--port", "0")
        )
        client = await stack.enter_async_context(httpx.AsyncClient(base_url=address, timeout=PATIENCE))

        async def ask(number: int) -> None:
            path = "/act" if number % 2 else "/act-in-thread"
            while not stop.is_set():
                answer = await client.post(path, json=[0.1] * 8)
                if answer.status_code != 200 or answer.json()["action"] not in range(4):
                    failed.append(answer)
                versions[number].append(int(answer.headers.get("x-policy-version", -1)))

        async def newest() -> int:
            return int((await client.get("/healthz")).json()["version"])

        asking = [asyncio.create_task(ask(number)) for number in range(CLIENTS)]

        async def five_more() -> None:
            before = await newest()
            while await newest() < before + 5:
                pass

        for _ in range(2):
            await within(five_more())
            trainer[0].kill()
            await trainer[0].wait()
            trainer = await stack.enter_async_context(program("serve_trainer.py", *trainer_options))
        await within(five_more())
        stop.set()
        await within(asyncio.gather(*asking))
        assert not failed
        back = [pair for seen in versions for pair in itertools.pairwise(seen) if pair[0] > pair[1]]
        assert not back, f"versions went back: {back}"
        assert min(map(len, versions)) > 20

        # SIGTERM: the health check fails at once, requests are answered for another second.
        async def failing() -> httpx.Response:
            while True:
                if (health := await client.get("/healthz")).status_code == 503:
                    return health

        server.send_signal(signal.SIGTERM)
        health = await within(failing())
        assert health.json()["reason"] == "this server is about to end"
        assert (await client.post("/act", json=[0.1] * 8)).status_code == 200
        assert await within(server.wait()) in (0, -signal.SIGTERM)
