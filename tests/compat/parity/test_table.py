"""Each public name of torchrl has its row in docs/migration.md, and each difference its reason."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torchrl")

from tools import parity


def test_the_table_is_complete(capsys: pytest.CaptureFixture[str]) -> None:
    assert parity.main(["--check"]) == 0, capsys.readouterr().out


def test_a_difference_without_a_reason(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(parity, "reasons", dict)
    assert parity.main(["--check"]) == 1
    assert "MultiCollector(track_policy_version): `track_policy_version` is True by default" in (
        capsys.readouterr().out
    )


def test_a_reason_for_nothing(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    why = parity.reasons() | {"MultiCollector.reset": "we like it better"}
    monkeypatch.setattr(parity, "reasons", lambda: why)
    assert parity.main(["--check"]) == 1
    assert "MultiCollector.reset: nothing is different there" in capsys.readouterr().out


def test_a_name_that_torchrl_adds(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from torchrl.collectors import MultiCollector

    monkeypatch.setattr(MultiCollector, "teleport", lambda self, where: None, raising=False)
    assert parity.main(["--check"]) == 1
    assert "MultiCollector.teleport: no `teleport`" in capsys.readouterr().out


def test_a_table_that_was_edited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "migration.md"
    page.write_text(parity.PAGE.read_text().replace("| same |", "| similar |", 1))
    monkeypatch.setattr(parity, "PAGE", page)
    assert parity.main(["--check"]) == 1
    assert "has another table: run python tools/parity.py" in capsys.readouterr().out


def test_an_unknown_argument(capsys: pytest.CaptureFixture[str]) -> None:
    assert parity.main(["--chekc"]) == 2
    assert "expected no argument or --check, got --chekc" in capsys.readouterr().out


class _Theirs:
    def __init__(self, first: int, second: str = "x", *, third: float | None = None) -> None: ...

    def plain(self, value: Any) -> None: ...

    def caught(self, *args: Any, **kwargs: Any) -> None: ...

    def _caught_impl(self, model: Any = None, **kwargs: Any) -> Any:
        return kwargs.get("hidden")


class _Ours:
    def __init__(self, second: str = "y", first: int = 0) -> None: ...

    def plain(self, value: Any, *, timeout: float | None = None) -> None: ...


def test_what_counts_as_a_difference() -> None:
    rows = {row.key: row for row in parity.rows_of("C", _Theirs, _Ours)}
    assert rows["C(first)"].differences == ("`first` is not positional argument 1",)
    assert rows["C(second)"].differences == (
        "`second` is 'y' by default",
        "`second` is not positional argument 2",
    )
    assert rows["C(third)"].differences == ("no `third`",)
    assert rows["C.plain"].differences == () and rows["C.plain"].wider
    assert rows["C.caught"].differences == ("no `caught`",)
    assert list(parity.parameters(_Theirs, "caught")) == ["hidden", "model"]


def test_more_that_must_be_given() -> None:
    found = parity.differences({}, dict(inspect.signature(lambda session: None).parameters))
    assert found == ["`session` must be given"]
