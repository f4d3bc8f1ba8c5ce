"""docs/architecture.md names each module of the package, in the section of the module's folder."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "aiosync"


def test_each_module_has_a_line() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    sections = re.split(r"^###? ", page, flags=re.M)
    named: set[str] = set()
    for section in sections:
        title = re.match(r"`([\w/]+)/`", section)
        if title is None:
            continue
        folder = "" if title[1] == "aiosync" else f"{title[1]}/"
        rows = [row.split("|")[1] for row in section.splitlines() if row.startswith("| `")]
        named |= {folder + name for row in rows for name in re.findall(r"`([\w/]+\.py)`", row)}
    there = {
        str(module.relative_to(PACKAGE))
        for module in PACKAGE.rglob("*.py")
        if module.name != "__init__.py" and "_bundled" not in module.parts
    }
    assert named - there == set(), "named, but not there"
    assert there - named == set(), "there, but not named"
