"""The event loops that tests run on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import uvloop

__all__ = ["ASYNCIO", "LOOPS", "LoopFactories"]

LoopFactories = dict[str, Callable[[], asyncio.AbstractEventLoop]]

ASYNCIO: LoopFactories = {"asyncio": asyncio.new_event_loop}
LOOPS: LoopFactories = {**ASYNCIO, "uvloop": uvloop.new_event_loop}
