"""Options that several cases take on the command line. A wrong one is refused before the work starts."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Collection, Iterable
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.contenders import installed
from benchmarks.harness.model_specs import MODELS

_CONTENDERS = ("aiosync", "torchrl", "torchrl-alias")


class Names(tuple[str, ...]):
    """Names, on the command line with commas."""


class Numbers(tuple[int, ...]):
    """Numbers, on the command line with commas."""


class Against(StrEnum):
    """What aiosync's collectors are measured against."""

    TORCHRL = "torchrl"
    PLAIN = "plain"


def _listed(make: Any, valid: Callable[[str], bool], expected: str, **given: Any) -> Any:
    """An option whose text lists ``valid`` parts, of which ``make`` makes its value."""

    def parse(text: str | Iterable[Any]) -> Any:
        parts = text.split(",") if isinstance(text, str) else map(str, text)  # a default is a tuple already
        found = [part.strip() for part in parts if part.strip()]
        if not found or not all(map(valid, found)):
            raise typer.BadParameter(f"expected {expected}, with commas, got {text!r}")
        return make(found)

    return typer.Option(parser=parse, **given)


def names_of(known: Collection[str], check: Callable[[Names], Names] | None = None) -> Any:
    """An option that takes some of the ``known`` names."""
    expected, about = f"some of {', '.join(known)}", f"Of {', '.join(known)}."
    return _listed(Names, known.__contains__, expected, metavar="NAMES", callback=check, help=about)


def numbers(about: str) -> Any:
    """An option that takes positive numbers."""

    def valid(part: str) -> bool:
        return part.isdecimal() and int(part) > 0

    expected = "whole numbers of at least 1"
    return _listed(lambda parts: Numbers(map(int, parts)), valid, expected, metavar="NUMBERS", help=about)


def _check_contenders(names: Names) -> Names:
    for name in names:
        if not installed(name):
            raise typer.BadParameter(f"{name} needs torchrl, and a checkout of aiosync's repository")
    return names


def _check_file(path: Path | None) -> Path | None:
    if path is None:
        return None
    folder = path.absolute().parent
    if path.is_dir() or not folder.is_dir():
        raise typer.BadParameter(f"expected a file in a folder that exists, got {str(path)!r}")
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise typer.BadParameter(f"expected a file that can be written, got {str(path)!r}")
    return path


def _check_picture(path: Path | None) -> Path | None:
    if path is not None:
        kinds = importlib.import_module("matplotlib.figure").Figure().canvas.get_supported_filetypes()
        if path.suffix.removeprefix(".") not in kinds:
            raise typer.BadParameter(f"expected a file named .{', .'.join(kinds)}, got {str(path)!r}")
    return _check_file(path)


ALL_MODELS = Names(MODELS)
UP_TO_FOUR = Numbers((1, 2, 4))
INSTALLED = Names(filter(installed, _CONTENDERS))
Apart = Annotated[bool, typer.Option("--apart", help="Share no memory, as between machines.")]
Check = Annotated[bool, typer.Option("--check", help="Exit with 1 if a target is missed.")]
Contenders = Annotated[Names, names_of(_CONTENDERS, _check_contenders)]
Deadline = Annotated[float, typer.Option(help="Seconds that one step may take.")]
Json = Annotated[Path | None, typer.Option(help="Write all figures there.", callback=_check_file)]
Models = Annotated[Names, names_of(MODELS)]
Png = Annotated[Path | None, typer.Option(help="Draw a picture there.", callback=_check_picture)]
Rounds = Annotated[int, typer.Option(min=0, help="Timed turns of each contender; 0: as suits the model.")]
Uvloop = Annotated[bool, typer.Option("--uvloop/--asyncio", help="Event loop.")]
Workers = Annotated[Numbers, numbers("How many workers, each.")]
