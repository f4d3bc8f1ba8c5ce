"""The test vectors of docs/protocol.md: a reader without aiosync reads them, and aiosync still sends them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from aiosync.protocol.stream import StreamDecoder
from aiosync.weights.codec import decode
from tests.kit.raw_peer import ANY
from tools.gen_vectors import vectors

FOLDER = Path(__file__).parent / "vectors"


def test_the_reader_reads_them_without_aiosync() -> None:
    reader = FOLDER / "reader.py"
    source = reader.read_text()
    assert "import aiosync" not in source and "from aiosync" not in source
    assert len(source.splitlines()) <= 100
    ran = subprocess.run([sys.executable, "-I", str(reader)], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.count(": good") == len(list(FOLDER.glob("*.json")))


@pytest.mark.parametrize("name", sorted(path.stem for path in FOLDER.glob("*.json")))
def test_they_are_what_is_sent_today(name: str) -> None:
    known, now = json.loads((FOLDER / f"{name}.json").read_text()), vectors()[name]
    if name in ("compressed", "delta"):  # another release of zstd may compress otherwise
        known = {key: value for key, value in known.items() if key != "stream"}
        now = {key: value for key, value in now.items() if key != "stream"}
    assert known == json.loads(json.dumps(now))


def test_aiosync_reads_them_too() -> None:
    vector = json.loads((FOLDER / "delta.json").read_text())
    base = bytes.fromhex(vector["base"])
    got = bytearray(len(base))

    class Sink:
        raw = bytearray()
        encoding = ""

        def begin(self, update: object) -> None:
            pass

        def place(self, chunk: object) -> memoryview:
            self.raw = bytearray(chunk.size)  # type: ignore[attr-defined]
            self.encoding = chunk.encoding  # type: ignore[attr-defined]
            return memoryview(self.raw)

        def placed(self, chunk: object) -> None:
            decode(self.encoding, memoryview(self.raw), memoryview(got), memoryview(base))

        def finish(self, end: object) -> None:
            pass

        def abandon(self) -> None:
            pass

    decoder = StreamDecoder(ANY)
    decoder.sink = Sink()
    decoder.feed(bytes.fromhex(vector["stream"]))
    assert bytes(got) == bytes.fromhex(vector["buffer"])
