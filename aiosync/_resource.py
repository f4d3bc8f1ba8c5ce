"""What ``async with`` does with the objects that users connect and close."""

from __future__ import annotations

from abc import ABC, abstractmethod
from types import TracebackType
from typing import Self

__all__ = ["AsyncResource"]


class AsyncResource(ABC):
    """An object that lives from :meth:`connect` to :meth:`aclose`. ``async with`` calls both.

    If :meth:`connect` raises, the object has released all that it took.
    """

    @abstractmethod
    async def connect(self) -> object:
        """Begin to live."""

    @abstractmethod
    async def aclose(self) -> None:
        """End, and release everything. Idempotent."""

    async def __aenter__(self) -> Self:
        await self.connect()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.aclose()
