"""``aiosync bench``: aiosync beside torchrl and beside one warm memcpy, in one run and in turn."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

__all__ = ["app", "main"]

_SCHEMES = "shared,process"
_MODELS = "tiny,medium,large"

app = typer.Typer(add_completion=False)


@app.command()
def bench(
    models: Annotated[
        str, typer.Option(help="of tiny, medium, large (--collecting: of cartpole, pixels)")
    ] = _MODELS,
    workers: Annotated[str, typer.Option(help="how many workers, each")] = "1,2,4",
    schemes: Annotated[
        str,
        typer.Option(help="of shared, process (distributed, rpc; actors, modules; collectors; sync, async)"),
    ] = _SCHEMES,
    contenders: Annotated[
        str, typer.Option(help="of aiosync, torchrl, torchrl-alias")
    ] = "aiosync,torchrl,torchrl-alias",
    rounds: Annotated[int, typer.Option(help="timed sends each; 0: as suits the model")] = 0,
    quick: Annotated[bool, typer.Option("--quick", help="a fifth of the rounds")] = False,
    torn: Annotated[bool, typer.Option("--torn", help="only count torn reads")] = False,
    reads: Annotated[int, typer.Option(help="with --torn: reads per case")] = 1_000_000,
    network: Annotated[
        bool, typer.Option("--network", help="TCP and Unix sockets beside blocking sockets, and only that")
    ] = False,
    delta: Annotated[
        bool, typer.Option("--delta", help="bytes per update of a transformer that learns, and only that")
    ] = False,
    relay: Annotated[
        bool, typer.Option("--relay", help="a trainer, two relays and eight workers, and only that")
    ] = False,
    distributed: Annotated[
        bool,
        typer.Option("--distributed", help="torch.distributed and RPC beside bare gloo, and only that"),
    ] = False,
    ray: Annotated[
        bool, typer.Option("--ray", help="Ray actors, and models inside them, and only that")
    ] = False,
    collectors: Annotated[
        bool, typer.Option("--collectors", help="torchrl's collectors with our schemes, and only that")
    ] = False,
    collecting: Annotated[
        bool, typer.Option("--collecting", help="our collectors beside torchrl's, and only that")
    ] = False,
    frames: Annotated[int, typer.Option(help="with --collectors, --collecting: in each batch")] = 200,
    total: Annotated[int, typer.Option(help="with --collecting: frames of each turn")] = 20_000,
    blocking: Annotated[
        bool, typer.Option("--blocking", help="what a blocking call costs, and only that")
    ] = False,
    parameters: Annotated[str, typer.Option(help="with --collectors: sizes of the policy")] = "1000,25000000",
    acting: Annotated[bool, typer.Option("--acting", help="with --distributed: workers act")] = False,
    apart: Annotated[
        bool, typer.Option("--apart", help="with --distributed, --ray: as between machines")
    ] = False,
    mbit: Annotated[float, typer.Option(help="with --relay: megabits per second of a link; 0: any")] = 1000.0,
    updates: Annotated[int, typer.Option(help="with --delta: how many updates")] = 200,
    mib: Annotated[str, typer.Option(help="with --network, --relay: model sizes in MiB")] = "256,1024",
    links: Annotated[str, typer.Option(help="with --network: of tcp, unix, tls")] = "tcp,unix,tls",
    uvloop: Annotated[bool, typer.Option("--uvloop/--asyncio", help="event loop")] = False,
    deadline: Annotated[float, typer.Option(help="seconds that one step may take")] = 120.0,
    json: Annotated[Path | None, typer.Option(help="write everything there")] = None,
    png: Annotated[Path | None, typer.Option(help="draw a picture there")] = None,
    check: Annotated[bool, typer.Option("--check", help="exit 1 if a target is missed")] = False,
) -> None:
    """Measure aiosync, torchrl and the physical limit side by side, in one run and in turn."""
    if (
        check
        and not collecting
        and (delta or network or relay or distributed or ray or collectors or blocking)
    ):
        raise typer.BadParameter(
            "only the comparisons with torchrl have targets to check", param_hint="--check"
        )
    if delta:
        from benchmarks import delta as differences

        differences.run(updates, json)
        return
    if network:
        from benchmarks import network as sockets

        chosen = _chosen("--links", links, ("tcp", "unix", "tls"))
        sockets.run(_numbers("--mib", mib), _numbers("--workers", workers), chosen, rounds or 9, json)
        return
    if distributed:
        from benchmarks import distributed as ranks
        from benchmarks.models import MODELS

        kinds = ranks.KINDS if schemes == _SCHEMES else _chosen("--schemes", schemes, ranks.KINDS)
        ranks.run(
            kinds,
            _chosen("--models", models, tuple(MODELS)),
            _numbers("--workers", workers),
            rounds,
            json,
            acting=acting,
            apart=apart,
        )
        return
    if ray:
        from benchmarks import on_ray
        from benchmarks.models import MODELS

        on_ray.run(
            on_ray.KINDS if schemes == _SCHEMES else _chosen("--schemes", schemes, on_ray.KINDS),
            _chosen("--models", models, tuple(MODELS)),
            _numbers("--workers", workers),
            rounds,
            json,
            apart=apart,
        )
        return
    if collectors:
        from benchmarks import classic

        kinds = (
            tuple(classic.CASES)
            if schemes == _SCHEMES
            else _chosen("--schemes", schemes, tuple(classic.CASES))
        )
        classic.run(kinds, _numbers("--parameters", parameters), rounds or 3, 50, frames, json)
        return
    if collecting:
        from benchmarks import collecting as ours

        envs = ours.ENVS if models == _MODELS else _chosen("--models", models, ours.ENVS)
        modes = ours.MODES if schemes == _SCHEMES else _chosen("--schemes", schemes, ours.MODES)
        missed = ours.run(envs, modes, rounds or 3, total, frames, json)
        if missed and check:
            raise typer.Exit(1)
        return
    if blocking:
        from benchmarks import blocking as calls

        calls.run(rounds or 20, json)
        return
    if relay:
        from benchmarks import relay as tree

        tree.run(_numbers("--mib", mib)[0], mbit, rounds or 5, json)
        return
    # Here and not above: each spawned process imports this module as its main one.
    from benchmarks.run import Options, run

    options = Options(
        models=_split(models),
        workers=tuple(_numbers("--workers", workers)),
        schemes=_split(schemes),
        contenders=_split(contenders),
        rounds=rounds,
        quick=quick,
        torn=torn,
        reads=reads,
        uvloop=uvloop,
        deadline=deadline,
    )
    try:
        missed = run(options, json_path=json, png_path=png, check_targets=check)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    if missed and check:
        raise typer.Exit(1)


def _numbers(option: str, text: str) -> list[int]:
    try:
        found = [int(part) for part in _split(text)]
    except ValueError:
        found = []
    if not found or min(found) < 1:
        raise typer.BadParameter(
            f"expected whole numbers of at least 1, with commas, got {text!r}", param_hint=option
        )
    return found


def _chosen(option: str, text: str, known: tuple[str, ...]) -> tuple[str, ...]:
    found = _split(text)
    if not found or not set(found) <= set(known):
        raise typer.BadParameter(
            f"expected some of {', '.join(known)}, with commas, got {text!r}", param_hint=option
        )
    return found


def _split(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def main() -> None:
    """Run the command line."""
    app()


if __name__ == "__main__":
    main()
