"""The command ``aiosync`` and its subcommands ``demo``, ``bench``, ``relay``, ``timeline`` and ``doctor``.

Packages that take seconds to import, as torch, are imported when the arguments have been parsed.
"""

import asyncio
import contextlib
import importlib
import inspect
import os
import signal
import sys
from collections.abc import Coroutine, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from aiosync import __version__
from aiosync._extras import extra_of, how_to_install

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Send a trainer's model weights to the workers that roll out the policy.",
)


@contextlib.contextmanager
def _naming_extras(command: str) -> Iterator[None]:
    """Turn a missing optional package into one line that says what to install."""
    try:
        yield
    except ModuleNotFoundError as missing:
        extra = extra_of(missing.name or "")
        if extra is None:
            raise
        raise SystemExit(
            f"{command} needs {missing.name}, which is not installed: {how_to_install(extra)}"
        ) from None


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """End with the shell's status of Ctrl-C, and without a traceback."""
    try:
        yield
    except KeyboardInterrupt:
        typer.echo("Stopped by Ctrl-C.", err=True)
        raise typer.Exit(128 + signal.SIGINT) from None


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"aiosync {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option("--version", is_eager=True, callback=_print_version, help="Print the version and exit."),
    ] = False,
) -> None:
    pass


def _bundled(folder: str) -> Path:
    """Where ``examples`` or ``benchmarks`` lies: in an installed wheel, or in the checkout."""
    here = Path(__file__).resolve().parent
    installed = here / "_bundled" / folder
    return installed if installed.is_dir() else here.parent / folder


def _load(search: Path, module: str) -> Any:
    """Import a bundled module. Spawned workers import it too, by name: so its folder goes on ``sys.path``."""
    sys.path.insert(0, str(search))
    return importlib.import_module(module)


@app.command()
def demo(
    scheme: Annotated[
        Literal["shared", "process", "tcp", "distributed", "rpc", "ray"],
        typer.Option(help="What moves the weights."),
    ] = "shared",
    workers: Annotated[int, typer.Option(min=1, help="Worker processes.")] = 2,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the policy and the environments.")] = 0,
    updates: Annotated[int, typer.Option(min=1, help="Stop after this many updates.")] = 1000,
    minutes: Annotated[float, typer.Option(min=0, help="Stop after this many minutes.")] = 5.0,
    out: Annotated[Path, typer.Option(help="File of the picture.")] = Path("async_cartpole.png"),
) -> None:
    """Learn CartPole with an asyncio trainer and two workers; a table and a picture at the end."""
    with _naming_extras("aiosync demo"), _interruptible():
        example = _load(_bundled("examples"), "async_cartpole")
        example.main(scheme, workers, seed, updates, minutes, out)


# It hands its command line, --help included, to the case that it runs.
@app.command(
    add_help_option=False, context_settings={"allow_extra_args": True, "ignore_unknown_options": True}
)
def bench(context: typer.Context) -> None:
    """Measure aiosync on this machine: `aiosync bench` lists the cases."""
    with _naming_extras("aiosync bench"), _interruptible():
        module = _load(_bundled("benchmarks").parent, "benchmarks.cli")
        module.app(context.args, prog_name="aiosync bench")


@dataclass(frozen=True, kw_only=True)
class _RelayOptions:
    """The options of ``aiosync relay``."""

    upstream: Annotated[str, typer.Option(help="The trainer's address, or that of the relay above.")]
    listen: Annotated[str, typer.Option(help="tcp://host:port or unix:///path for workers here.")]
    model_id: Annotated[str | None, typer.Option(help="The model, as the trainer calls it.")] = None
    token_env: Annotated[
        str | None, typer.Option(help="The environment variable that has the token.  [AIOSYNC_TOKEN, if set]")
    ] = None
    certfile: Annotated[str | None, typer.Option(help="This node's certificate, PEM: speak TLS.")] = None
    keyfile: Annotated[str | None, typer.Option(help="Its private key, if not in the same file.")] = None
    cafile: Annotated[str | None, typer.Option(help="What signed the others' certificates, PEM.")] = None
    codec: Annotated[Literal["full", "zstd", "delta"], typer.Option(help="From here on.")] = "full"
    timeout: Annotated[float, typer.Option(help="Seconds that one step may take.")] = 120.0
    reconnect_for: Annotated[float, typer.Option(help="Seconds to look for a lost trainer.")] = 60.0
    on_sender_close: Annotated[
        Literal["stop", "wait"], typer.Option(help="When the trainer closes: stop, or wait for the next one.")
    ] = "stop"
    insecure: Annotated[bool, typer.Option("--insecure", help="Let everybody in.")] = False
    metrics_port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="Serve Prometheus metrics here; 0: a free port.")
    ] = None
    metrics_host: Annotated[str, typer.Option(help="The address that they are served at.")] = "127.0.0.1"


@app.command()
def relay(**values: Any) -> None:
    """Hand a trainer's updates on to workers here, as they arrive, until the trainer closes or SIGTERM."""
    options = _RelayOptions(**values)
    token = os.environ.get(options.token_env or "AIOSYNC_TOKEN")
    if options.token_env is not None and token is None:
        raise typer.BadParameter(
            f"the environment variable {options.token_env} is not set", param_hint="--token-env"
        )
    import logging

    from aiosync import AiosyncError, InsecureTransportError

    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        with _naming_extras("aiosync relay"), _interruptible():
            asyncio.run(_run_relay(options, token))
    except InsecureTransportError as exc:
        raise SystemExit(f"aiosync relay: {exc} (here: AIOSYNC_TOKEN, --certfile, --insecure)") from None
    except (AiosyncError, OSError) as exc:
        raise SystemExit(f"aiosync relay: {exc}") from None


# typer reads a command's options from its signature.
relay.__signature__ = inspect.signature(_RelayOptions)  # type: ignore[attr-defined]


async def _run_relay(options: _RelayOptions, token: str | None) -> None:
    import aiosync

    wants_tls = any((options.certfile, options.keyfile, options.cafile))
    tls = aiosync.TLSConfig(options.certfile, options.keyfile, options.cafile) if wants_tls else None
    common: dict[str, Any] = {"token": token, "tls": tls, "timeout": options.timeout}
    above = aiosync.TCPWeightSyncScheme(
        options.upstream,
        reconnect_for=options.reconnect_for,
        on_sender_close=options.on_sender_close,
        **common,
    )
    below = aiosync.TCPWeightSyncScheme(
        options.listen, codec=options.codec, insecure=options.insecure, **common
    )
    with contextlib.ExitStack() as stack:
        if options.metrics_port is not None:
            stack.enter_context(_metrics_served(options, above, below))
        async with aiosync.WeightRelay(above, below, model_id=options.model_id) as node:
            typer.echo(f"workers may connect to {node.address}")
            # Inside: the relay says goodbye to its workers and removes its socket's file.
            ended = await _until_sigterm(node.wait_closed())
            end = f"the end, at version {node.version}: {node.ended if ended else 'SIGTERM'}"
            typer.echo(end, err=node.lost)
            if node.lost:
                raise typer.Exit(1)  # a service manager starts the relay again


async def _until_sigterm(work: Coroutine[Any, Any, None]) -> bool:
    """Run ``work`` until its end or until SIGTERM; returns whether it has ended by itself."""
    task, loop = asyncio.ensure_future(work), asyncio.get_running_loop()
    if sys.platform == "win32":
        await task
        return True
    loop.add_signal_handler(signal.SIGTERM, task.cancel)
    try:
        await asyncio.wait([task])
        return not task.cancelled() and task.result() is None
    finally:
        task.cancel()
        loop.remove_signal_handler(signal.SIGTERM)


@contextlib.contextmanager
def _metrics_served(options: _RelayOptions, *schemes: Any) -> Iterator[None]:
    """Serve the schemes' metrics over HTTP."""
    from prometheus_client import CollectorRegistry, start_http_server

    from aiosync.metrics import to_prometheus

    registry = CollectorRegistry()
    for scheme in schemes:
        to_prometheus(scheme, registry)
    assert options.metrics_port is not None
    server, thread = start_http_server(options.metrics_port, options.metrics_host, registry)
    typer.echo(f"metrics: http://{options.metrics_host}:{server.server_port}/metrics")
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@app.command()
def timeline(
    file: Annotated[Path, typer.Argument(help="Events that aiosync.timeline.record() has written.")],
    png: Annotated[Path | None, typer.Option(help="Draw the sends into this file.")] = None,
    trace: Annotated[
        Path | None, typer.Option(help="Write a trace for Perfetto or chrome://tracing.")
    ] = None,
    last: Annotated[int, typer.Option(min=1, help="Of that many sends.")] = 20,
) -> None:
    """What each of the last sends spent on copying, on the wire, on waiting and on committing, per worker."""
    with _naming_extras("aiosync timeline"), _interruptible():
        from rich.console import Console
        from rich.table import Table

        from aiosync import AiosyncError
        from aiosync import timeline as lines

        try:
            spans = lines.spans_of(lines.read(file), last=last)
            if png is not None:
                lines.to_png(spans, png)
            if trace is not None:
                trace.write_bytes(lines.to_chrome_trace(spans))
        except (AiosyncError, OSError) as exc:
            raise SystemExit(f"aiosync timeline: {exc}") from None
        if not spans:
            raise SystemExit(f"aiosync timeline: {file} has no sends: record a trainer's scheme")
        sends = len({(span.model, span.version) for span in spans})
        table = Table("model", "", *lines.PHASES, title=f"{sends} sends: median (longest) in ms")
        for (model, worker), phases in lines.medians(spans).items():
            found = (phases.get(phase) for phase in lines.PHASES)
            cells = ("" if f is None else f"{f[0] * 1e3:.2f} ({f[1] * 1e3:.2f})" for f in found)
            table.add_row(model, "trainer" if worker is None else f"worker {worker}", *cells)
        Console(markup=False).print(table)


@app.command()
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
) -> None:
    """Look at this machine, and send a small model to a spawned worker (exit status 1: failed)."""
    with _naming_extras("aiosync doctor"), _interruptible():
        from aiosync._doctor import examine

        raise typer.Exit(0 if examine(as_json=as_json) else 1)


def main(args: Sequence[str] | None = None) -> None:
    """Run the command line ``args`` (default: this process's) and exit."""
    app(args, prog_name="aiosync")


if __name__ == "__main__":
    main()
