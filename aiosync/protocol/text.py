"""Cut the text that a peer sends to a length, and make it safe to print."""

from __future__ import annotations


def cut(text: str, limit: int, *, keep_end: bool = False) -> str:
    """Return at most ``limit`` characters of ``text``, with a note of how many are omitted.

    The note counts too, so ``limit`` is at least 40. ``keep_end``: keep the text's end, not its beginning.
    """
    if len(text) <= limit:
        return text
    note = f"[{len(text) - limit} more characters]"
    kept = limit - len(note)
    return f"{note}{text[-kept:]}" if keep_end else f"{text[:kept]}{note}"


def clean(text: str, limit: int, *, lines: bool = False, keep_end: bool = False) -> str:
    """Return ``text`` cut, and with control characters escaped, for a log or a terminal.

    A newline could forge a line of a log, and an escape sequence could control the reader's terminal. They
    are escaped as in a Python string literal.

    ``limit`` counts characters before they are escaped. ``lines``: newlines and tabs stay, as in a traceback.
    """
    text = cut(text, limit, keep_end=keep_end)
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or (lines and c in "\n\t") else _escaped(c) for c in text)


def _escaped(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")
