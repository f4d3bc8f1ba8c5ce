"""Find a model or a method inside a context by a path such as ``env.transform[0].module``."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, Sequence
from typing import Any

from aiosync.errors import InvalidArgumentError

# A quoted key runs to the same quote and may hold dots, brackets and the other kind of quote.
_STEP = re.compile(
    r"""\.?(?P<name>[^.\[\]'"\s]+)"""
    r"""|\[\s*(?P<index>[+-]?\d+)\s*\]"""
    r"""|\[\s*(?P<quote>['"])(?P<key>.*?)(?P=quote)\s*\]"""
)


def resolve_model(context: Any, path: str) -> Any:
    """Follow a dotted path from ``context``.

    A part is an attribute, ``[0]`` or ``[-1]`` for an item of a sequence, or ``["key"]`` or
    ``['key']`` for an item of a mapping; a quoted key may contain dots and brackets. Several
    subscripts may follow one another, and a path may start with one. Nothing is evaluated.

    Args:
        context: where the path starts.
        path: such as ``policy``, ``env.transform[0].module`` or ``models["actor.net"]``.

    Returns:
        The object at the path.

    Raises:
        AttributeError: a part does not exist, or the path is malformed. The error names the part, the path
            before it, and the type of the object there.
    """
    reached, at = context, 0
    while at < len(path) or not path:
        match = _STEP.match(path, at)
        if match is None or (match["name"] is not None and (at > 0) != (path[at] == ".")):
            reason = 'expected .name, [0] or ["key"]' if path else "it is empty"
            raise AttributeError(f"cannot resolve {path!r}: malformed at position {at}: {reason}")
        reached = _step(reached, match, path)
        at = match.end()
    return reached


def _step(value: Any, match: re.Match[str], path: str) -> Any:
    try:
        if match["name"] is not None:
            return getattr(value, match["name"])
        return value[int(match["index"]) if match["index"] is not None else match["key"]]
    except (AttributeError, LookupError, TypeError) as error:
        part = match[0].removeprefix(".")
        so_far = path[: match.start()]
        where = f"{so_far!r}" if so_far else "the context"
        raise AttributeError(
            f"cannot resolve {path!r}: no {part!r} in {where}, "
            f"which is a {type(value).__qualname__} ({type(error).__name__}: {error})",
            name=part,
            obj=value,
        ) from error


async def call_by_path(start: Any, path: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Call what a path leads to from ``start``, or return it if it is no function; await a coroutine.

    Raises:
        AttributeError: a part of the path does not exist.
        InvalidArgumentError: there are arguments, and the path does not lead to a function.
    """
    found = resolve_model(start, path)
    if not callable(found):
        if args or kwargs:
            raise InvalidArgumentError(
                f"{path!r} is a {type(found).__name__}, which takes no arguments; got "
                f"{len(args) + len(kwargs)}"
            )
        return found
    result = found(*args, **kwargs)
    return await result if inspect.isawaitable(result) else result
