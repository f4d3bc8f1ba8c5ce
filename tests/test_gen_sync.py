"""The generated twins are what the generator makes today."""

from __future__ import annotations

import pytest

from tools import gen_sync


def test_the_committed_files_are_current() -> None:
    assert gen_sync.SCHEMES.read_text() == gen_sync.generated()
    assert gen_sync.UPDATERS.read_text() == gen_sync.generated_updaters()


@pytest.mark.parametrize("which", ["SCHEMES", "UPDATERS"])
def test_check_tells_what_is_out_of_date(which, capsys, monkeypatch, tmp_path) -> None:  # type: ignore[no-untyped-def]
    for name in ("SCHEMES", "UPDATERS"):
        monkeypatch.setattr(gen_sync, name, tmp_path / name)
    monkeypatch.setattr(gen_sync, "ROOT", tmp_path)
    assert gen_sync.main([]) == 0
    (tmp_path / which).write_text("old\n")
    assert gen_sync.main(["--check"]) == 1
    assert "-old" in capsys.readouterr().out
    assert gen_sync.main([]) == 0
    assert gen_sync.main(["--check"]) == 0
