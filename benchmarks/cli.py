"""``aiosync bench``: one command for each case."""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

__all__ = ["app", "main"]

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Measure aiosync beside other software and the machine's own limits, in one run and in turn.",
)


def _writable(path: Path | None) -> Path | None:
    """The path, if a file can be written there: a run takes minutes, and its figures go there at its end."""
    if path is None:
        return None
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise typer.BadParameter(f"expected a file in a folder that exists, got {str(path)!r}")
    if not os.access(path if path.exists() else path.absolute().parent, os.W_OK):
        raise typer.BadParameter(f"expected a file that can be written, got {str(path)!r}")
    return path


def _picture(path: Path | None) -> Path | None:
    if path is not None:
        kinds = importlib.import_module("matplotlib.figure").Figure().canvas.get_supported_filetypes()
        if path.suffix.removeprefix(".") not in kinds:
            raise typer.BadParameter(f"expected a file named .{', .'.join(kinds)}, got {str(path)!r}")
    return _writable(path)


Json = Annotated[Path | None, typer.Option(help="Write all figures there.", callback=_writable)]
Models = Annotated[str, typer.Option(help="Of tiny, medium, large.")]
Workers = Annotated[str, typer.Option(help="How many workers, each.")]
Rounds = Annotated[int, typer.Option(min=0, help="Timed turns of each contender; 0: as suits the model.")]
Contenders = Annotated[
    str | None, typer.Option(help="Of aiosync, torchrl, torchrl-alias.  [default: all that are installed]")
]
Mib = Annotated[str, typer.Option(help="Model sizes in MiB.")]
Apart = Annotated[bool, typer.Option("--apart", help="Share no memory, as between machines.")]
Uvloop = Annotated[bool, typer.Option("--uvloop/--asyncio", help="Event loop.")]
Deadline = Annotated[float, typer.Option(help="Seconds that one step may take.")]
Check = Annotated[bool, typer.Option("--check", help="Exit with 1 if a target is missed.")]


@app.command()
def send(
    models: Models = "tiny,medium,large",
    workers: Workers = "1,2,4",
    schemes: Annotated[str, typer.Option(help="Of shared, process.")] = "shared,process",
    contenders: Contenders = None,
    rounds: Rounds = 0,
    quick: Annotated[bool, typer.Option("--quick", help="A fifth of the rounds.")] = False,
    uvloop: Uvloop = False,
    deadline: Deadline = 120.0,
    json: Json = None,
    png: Annotated[Path | None, typer.Option(help="Draw a picture there.", callback=_picture)] = None,
    check: Check = False,
) -> None:
    """Sends within one machine, beside torchrl's and beside one warm memcpy."""
    case = _case("send")
    options = case.Options(
        models=_models(models),
        workers=_numbers("--workers", workers),
        schemes=_some("--schemes", schemes, case.SCHEMES),
        contenders=_contenders(contenders),
        rounds=rounds,
        quick=quick,
        uvloop=uvloop,
        deadline=deadline,
    )
    _exit(case.run(options, json, png, show_targets=check), check)


@app.command()
def torn(
    schemes: Annotated[str, typer.Option(help="Of shared, process.")] = "shared,process",
    contenders: Contenders = None,
    reads: Annotated[int, typer.Option(min=1, help="Reads of aiosync's worker, per case.")] = 1_000_000,
    uvloop: Uvloop = False,
    deadline: Deadline = 120.0,
    json: Json = None,
    check: Check = False,
) -> None:
    """Reads of the model under back-to-back sends: how many saw two versions at once."""
    chosen = _some("--schemes", schemes, ("shared", "process")), _contenders(contenders)
    missed = _case("torn").run(*chosen, reads, uvloop, deadline, json, show_targets=check)
    _exit(missed, check)


@app.command()
def network(
    mib: Mib = "256,1024",
    workers: Workers = "1,2,4",
    links: Annotated[str, typer.Option(help="Of tcp, unix, tls.")] = "tcp,unix,tls",
    rounds: Annotated[int, typer.Option(min=1, help="Timed sends of each.")] = 9,
    json: Json = None,
) -> None:
    """TCP, Unix sockets and TLS beside one blocking socket."""
    case = _case("network")
    chosen = _some("--links", links, case.LINKS)
    case.run(_numbers("--mib", mib), _numbers("--workers", workers), chosen, rounds, json)


@app.command()
def delta(
    updates: Annotated[int, typer.Option(min=1, help="How many updates of each kind.")] = 200,
    json: Json = None,
) -> None:
    """Bytes per update of a transformer that learns, by codec."""
    _case("delta").run(updates, json)


@app.command()
def relay(
    mib: Annotated[int, typer.Option(min=1, help="Size of the model in MiB.")] = 256,
    mbit: Annotated[float, typer.Option(min=0, help="Megabits per second of a link; 0: unlimited.")] = 1000.0,
    rounds: Annotated[int, typer.Option(min=1, help="Timed sends of each.")] = 5,
    json: Json = None,
) -> None:
    """A trainer, two relays and eight workers, beside eight workers of the trainer's own."""
    _case("relay").run(mib, mbit, rounds, json)


@app.command()
def distributed(
    models: Models = "tiny,medium,large",
    workers: Workers = "1,2,4",
    schemes: Annotated[str, typer.Option(help="Of distributed, rpc.")] = "distributed,rpc",
    rounds: Rounds = 0,
    acting: Annotated[bool, typer.Option("--acting", help="Workers roll out meanwhile.")] = False,
    apart: Apart = False,
    json: Json = None,
) -> None:
    """torch.distributed and torch RPC, beside torchrl's schemes and bare gloo."""
    case = _case("distributed")
    chosen = _some("--schemes", schemes, case.SCHEMES), _models(models), _numbers("--workers", workers)
    case.run(*chosen, rounds, json, acting=acting, apart=apart)


@app.command()
def ray(
    models: Models = "tiny,medium,large",
    workers: Workers = "1,2,4",
    schemes: Annotated[str, typer.Option(help="Of actors, modules.")] = "actors,modules",
    rounds: Rounds = 0,
    apart: Apart = False,
    json: Json = None,
) -> None:
    """Ray actors, and models inside them, beside torchrl's schemes."""
    case = _case("ray")
    chosen = _some("--schemes", schemes, case.KINDS), _models(models), _numbers("--workers", workers)
    case.run(*chosen, rounds, json, apart=apart)


@app.command()
def blocking(
    rounds: Annotated[int, typer.Option(min=1, help="Blocks of 50 calls of each.")] = 20, json: Json = None
) -> None:
    """What a blocking call costs beside the coroutine that it runs."""
    _case("blocking").run(rounds, json)


def _case(name: str) -> Any:
    """Import a case. Not done above: each spawned process may import this module as its main one."""
    try:
        return importlib.import_module(f"benchmarks.cases.{name}")
    except ModuleNotFoundError as missing:
        if not (missing.name or "").startswith("benchmarks."):
            raise
        raise SystemExit(
            f"aiosync bench {name} compares with other software: it is in aiosync's repository, "
            "not in the installed package"
        ) from None


def _models(text: str) -> tuple[str, ...]:
    return _some("--models", text, tuple(importlib.import_module("benchmarks.harness.models").MODELS))


def _contenders(text: str | None) -> tuple[str, ...]:
    known = ("aiosync", "torchrl", "torchrl-alias")
    here = tuple(filter(importlib.import_module("benchmarks.contenders").installed, known))
    if text is None:
        return here
    found = _some("--contenders", text, known)
    if not set(found) <= set(here):
        raise typer.BadParameter(
            f"expected some of {', '.join(here)}: torchrl is not installed, or this is not a checkout of "
            f"aiosync's repository; got {text!r}",
            param_hint="--contenders",
        )
    return found


def _numbers(option: str, text: str) -> tuple[int, ...]:
    try:
        found = tuple(int(part) for part in _split(text))
    except ValueError:
        found = ()
    if not found or min(found) < 1:
        raise typer.BadParameter(
            f"expected whole numbers of at least 1, with commas, got {text!r}", param_hint=option
        )
    return found


def _some(option: str, text: str, known: Sequence[str]) -> tuple[str, ...]:
    found = _split(text)
    if not found or not set(found) <= set(known):
        raise typer.BadParameter(
            f"expected some of {', '.join(known)}, with commas, got {text!r}", param_hint=option
        )
    return found


def _split(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def _exit(missed: int, check: bool) -> None:
    if missed and check:
        raise typer.Exit(1)


def main() -> None:
    """Run the command line."""
    app()


if __name__ == "__main__":
    main()
