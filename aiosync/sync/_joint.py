"""The blocking twin of joint updates, written by hand: it takes twins and passes on their asyncio schemes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

import aiosync
from aiosync.errors import InvalidArgumentError
from aiosync.reports import SendReport
from aiosync.sync._generated_schemes import WeightSyncScheme
from aiosync.sync._portal import portal


class JointUpdate:
    """The blocking twin of :class:`aiosync.JointUpdate`: same arguments, same methods.

    ::

        with aiosync.sync.atomic(policy_scheme, value_scheme) as tx:
            tx.send(policy_scheme, policy)
            tx.send(value_scheme, value_net)
    """

    def __init__(
        self,
        schemes: tuple[WeightSyncScheme, ...],
        timeout: float | None,
        worker_ids: int | list[int] | None = None,
    ) -> None:
        for scheme in schemes:
            if not isinstance(scheme, WeightSyncScheme):
                raise InvalidArgumentError(f"atomic() takes schemes, got {type(scheme).__name__}")
        self._schemes = schemes
        self._async = aiosync.JointUpdate(tuple(scheme._async for scheme in schemes), timeout, worker_ids)

    @property
    def reports(self) -> Mapping[WeightSyncScheme, SendReport]:
        """Scheme -> its report, set when the body has ended."""
        found = self._async.reports
        return {scheme: found[scheme._async] for scheme in self._schemes if scheme._async in found}

    def send(self, scheme: WeightSyncScheme, weights: Any = None, *, strict: bool = True) -> None:
        """Set the weights that this scheme sends when the body ends."""
        self._async.send(scheme._async, weights, strict=strict)

    def __enter__(self) -> Self:
        portal().call(self._async.__aenter__)
        return self

    def __exit__(self, *exc: Any) -> None:
        portal().send(self._async.__aexit__, *exc)


def atomic(
    *schemes: WeightSyncScheme, timeout: float | None = None, worker_ids: int | list[int] | None = None
) -> JointUpdate:
    """Update several models jointly: ``with atomic(a, b) as tx``. See :class:`JointUpdate`."""
    return JointUpdate(schemes, timeout, worker_ids)
