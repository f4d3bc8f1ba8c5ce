"""The handler of one update, between a session and an applier that are stand-ins."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from aiosync.events import EventSource
from aiosync.protocol.frames import Update
from aiosync.receiver.update_handler import UpdateHandler


class Session:
    """A newer update has always been announced."""

    superseded = True
    wanting = have = maps = 0

    def __init__(self) -> None:
        self.skipped = self.acknowledged = 0

    def skip(self) -> None:
        self.skipped += 1

    def applied(self, version: int, seconds: dict[str, float], *, wanting: bool) -> None:
        self.acknowledged += 1


class Applier:
    """Applies in one step."""

    version, have, may_fetch, inbound, layout = 0, -1, True, None, None

    def has_staged(self, pending: Any) -> bool:
        return False

    def forget(self) -> None:
        return

    async def stage(self, pending: Any) -> None:
        pending.staged = object()

    async def commit(self, pending: Any, on_wait: Any) -> None:
        self.version, pending.committed = pending.update.version, True

    async def settle(self) -> None:
        return


async def test_updates_that_come_fast_are_not_all_skipped() -> None:
    session, applier = Session(), Applier()
    transport = SimpleNamespace(flush=lambda session: None)
    connection: Any = SimpleNamespace(
        session=session, down="", worker=0, transport=transport, flush=lambda: None
    )
    reporter: Any = SimpleNamespace(emit=lambda *args, **more: None)
    handler = UpdateHandler(applier, connection, reporter, EventSource())  # type: ignore[arg-type]
    for version in range(1, 21):
        handler.arrived(Update(version=version, round=version, payload={}))
        await handler.advance()
    assert (session.skipped, session.acknowledged) == (10, 10)
    assert applier.version == 20
