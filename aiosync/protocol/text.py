"""Text that a peer sends: made safe to print, and cut to a length."""

from __future__ import annotations

__all__ = ["clean", "cut"]


def cut(text: str, limit: int, *, keep_end: bool = False) -> str:
    """At most ``limit`` characters of ``text``, with a note of how many are left out.

    Args:
        text: any text.
        limit: characters, note included; at least 40.
        keep_end: whether to keep the end of the text rather than its beginning.
    """
    if len(text) <= limit:
        return text
    note = f"[{len(text) - limit} more characters]"
    kept = limit - len(note)
    return f"{note}{text[-kept:]}" if keep_end else f"{text[:kept]}{note}"


def clean(text: str, limit: int, *, lines: bool = False, keep_end: bool = False) -> str:
    """``text`` as it can be written to a log or a terminal: cut, and without control characters.

    A newline would forge a line of the log, and an escape sequence would run in the reader's terminal. They
    are written as in a Python string literal.

    Args:
        text: what a peer sent.
        limit: characters, before they are escaped.
        lines: whether newlines and tabs stay, as in a traceback.
        keep_end: whether to keep the end of the text rather than its beginning.
    """
    text = cut(text, limit, keep_end=keep_end)
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or (lines and c in "\n\t") else _escaped(c) for c in text)


def _escaped(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")
