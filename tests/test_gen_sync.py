"""The generated twins are what the generator makes today."""

from __future__ import annotations

from tools import gen_sync


def test_the_committed_file_is_current() -> None:
    assert gen_sync.TARGET.read_text() == gen_sync.generated()


def test_check_tells_what_is_out_of_date(capsys, monkeypatch, tmp_path) -> None:  # type: ignore[no-untyped-def]
    stale = tmp_path / "stale.py"
    stale.write_text("old\n")
    monkeypatch.setattr(gen_sync, "TARGET", stale)
    monkeypatch.setattr(gen_sync, "ROOT", tmp_path)
    assert gen_sync.main(["--check"]) == 1
    assert "-old" in capsys.readouterr().out
    assert gen_sync.main([]) == 0
    assert gen_sync.main(["--check"]) == 0
