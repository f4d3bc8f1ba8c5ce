"""The command ``aiosync`` and its subcommands ``demo``, ``bench``, ``relay`` and ``doctor``."""

import contextlib
import importlib
import inspect
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

# Optional package -> the extra that installs it. The command line prints it instead of a bare traceback.
_EXTRA_OF = {
    "gymnasium": "rl",
    "matplotlib": "cli",
    "psutil": "bench",
    "rich": "cli",
    "torchrl": "torchrl",
    "trustme": "bench",
    "typer": "cli",
    "zstandard": "delta",
}


@contextlib.contextmanager
def _naming_extras(command: str) -> Iterator[None]:
    """Turn a missing optional package into one line that says what to install."""
    try:
        yield
    except ModuleNotFoundError as missing:
        extra = _EXTRA_OF.get((missing.name or "").partition(".")[0])
        if extra is None:
            raise
        raise SystemExit(
            f"{command} needs {missing.name}, which is not installed: "
            f"python -m pip install 'aiosync[{extra}]'"
        ) from None


with _naming_extras("aiosync"):
    import typer

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="A trainer's model weights to the workers that roll out the policy.",
)

# The commands below hand their whole command line, --help included, to the program that they run.
_FORWARD = {"allow_extra_args": True, "ignore_unknown_options": True}


def _bundled(folder: str) -> Path:
    """Where ``examples`` or ``benchmarks`` lies: in an installed wheel, or in the checkout."""
    here = Path(__file__).resolve().parent
    installed = here / "_bundled" / folder
    return installed if installed.is_dir() else here.parent / folder


def _load(search: Path, module: str) -> Any:
    """Import a bundled module. Spawned workers import it too, by name: so its folder goes on ``sys.path``."""
    sys.path.insert(0, str(search))
    return importlib.import_module(module)


@app.command(add_help_option=False, context_settings=_FORWARD)
def demo(context: typer.Context) -> None:
    """Learn CartPole with an asyncio trainer and two workers; a table and a picture at the end."""
    with _naming_extras("aiosync demo"):
        example = _load(_bundled("examples"), "async_cartpole")
        program = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
        program.command()(example.main)
        program(context.args, prog_name="aiosync demo")


@app.command(add_help_option=False, context_settings=_FORWARD)
def bench(context: typer.Context) -> None:
    """Measure aiosync on this machine: `aiosync bench` lists the cases."""
    with _naming_extras("aiosync bench"):
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


@app.command()
def relay(**values: Any) -> None:
    """Hand a trainer's updates on to workers here, as they arrive, until the trainer closes."""
    import asyncio
    import logging

    import aiosync

    options = _RelayOptions(**values)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    token = os.environ.get(options.token_env or "AIOSYNC_TOKEN")
    if options.token_env is not None and token is None:
        raise typer.BadParameter(
            f"the environment variable {options.token_env} is not set", param_hint="--token-env"
        )
    try:
        asyncio.run(_run_relay(options, token))
    except aiosync.InsecureTransportError as exc:
        raise SystemExit(f"aiosync relay: {exc} (here: AIOSYNC_TOKEN, --certfile, --insecure)") from None
    except aiosync.AiosyncError as exc:
        raise SystemExit(f"aiosync relay: {exc}") from None
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


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
    async with aiosync.WeightRelay(above, below, model_id=options.model_id) as node:
        typer.echo(f"workers may connect to {node.address}")
        await node.wait_closed()
        typer.echo(f"the end, at version {node.version}: {node.ended}")


@app.command()
def doctor() -> None:
    """Look at this machine, and send a small model to a spawned worker (exit status 1: failed)."""
    with _naming_extras("aiosync doctor"):
        from aiosync._doctor import examine

        raise typer.Exit(0 if examine() else 1)


def main(args: Sequence[str] | None = None) -> None:
    """Run the command line ``args`` (default: this process's) and exit."""
    app(args, prog_name="aiosync")


if __name__ == "__main__":
    main()
