"""The rendezvous by a call into the worker's process: the sender offers its recipe there.

If a transport in that process receives, it takes the offer. Else a receiver is started beside the object, as
the schemes do. An offer that neither takes, because the object has no such model, waits for a transport.
Offers come in threads of Ray or torch RPC, and transports take them on their event loops.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any, TypeAlias
from weakref import WeakSet

from aiosync.schemes.attach import enlist
from aiosync.schemes.distributed import ProcessGroupScheme
from aiosync.sender.worker_plan import model_of
from aiosync.transports._offload import handover

Key: TypeAlias = tuple[str, int]
"""The name of a connection, and the worker's index."""

_lock = threading.Lock()
# The transports of this process that receive.
_receivers: WeakSet[Any] = WeakSet()
# The newest offer that no transport has taken.
_offers: dict[Key, ProcessGroupScheme] = {}
# Gives an offer to the transport that waits for it.
_waiting: dict[Key, Callable[[Callable[[], ProcessGroupScheme]], None]] = {}


def expect_offers(transport: Any) -> None:
    """Let ``transport``, which has its key as ``offer_key``, take the offers that come for it."""
    _receivers.add(transport)


def expect_no_offers(transport: Any) -> None:
    """End what :func:`expect_offers` began."""
    _receivers.discard(transport)


def offer(target: Any, scheme: ProcessGroupScheme, key: Key, model_id: str) -> None:
    """Called by the sender in the worker's process: receive with ``scheme``, for the object ``target``."""
    if all(each.offer_key != key for each in list(_receivers)) and _has_model(target, model_id):
        enlist(target, scheme, model_id, 0)
        return
    with _lock:
        resolve = _waiting.pop(key, None)
        if resolve is None:
            _offers[key] = scheme
    if resolve is not None:
        resolve(lambda: scheme)


async def take_offer(key: Key) -> ProcessGroupScheme:
    """Wait for an offer, without a limit. Cancelled, it loses none."""
    future: asyncio.Future[ProcessGroupScheme]
    future, resolve = handover()
    with _lock:
        found = _offers.pop(key, None)
        if found is not None:
            return found
        _waiting[key] = resolve
    try:
        return await future
    except asyncio.CancelledError:
        with _lock:
            if _waiting.get(key) is resolve:
                del _waiting[key]
            elif future.done() and not future.cancelled():
                _offers[key] = future.result()
        raise


def _has_model(target: Any, model_id: str) -> bool:
    try:
        return model_of(target, model_id) is not None
    except (AttributeError, ValueError):
        return False
