"""What the transports to one remote object have in common."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

from aiosync.errors import InvalidArgumentError
from aiosync.schemes.base import WeightSyncScheme
from aiosync.schemes.standalone.base import StandaloneTransport
from aiosync.schemes.standalone.offers import Key, expect_no_offers, expect_offers, take_offer
from aiosync.transports.remote_calls import RemoteObject


class RemoteTransport(StandaloneTransport):
    """Sends to an object in another process. Without one, calls that send do nothing, and in that other
    process such a transport receives.

    A subclass's constructor calls :meth:`_expect` last.
    """

    @abstractmethod
    def _remote(self) -> RemoteObject | None:
        """Return the object to send to; None: there is none."""

    @property
    def offer_key(self) -> Key | None:
        """Under which the sender offers its address in this process; None: it does not receive."""
        return None

    def _expect(self) -> None:
        """Take the sender's offers from now on, if this transport receives."""
        if self.offer_key is not None and not self._may_send:
            expect_offers(self)

    @property
    def _may_send(self) -> bool:
        return self._remote() is not None

    @property
    def _may_receive(self) -> bool:
        return self.offer_key is not None

    @property
    def _finds_another(self) -> bool:
        return True

    async def _make_receiver(self) -> WeightSyncScheme:
        assert self.offer_key is not None
        return await take_offer(self.offer_key)

    async def call(self, method: str, *args: Any, timeout: float | None = None, **kwargs: Any) -> Any:
        """Call a method of the object and return its result. The remote process awaits a coroutine's result.

        Args:
            method: the method's name.
            args: positional arguments.
            timeout: seconds; None: the transport's.
            kwargs: keyword arguments.

        Raises:
            InvalidArgumentError: there is no object, or it has no such method.
            RemoteApplyError: the method raised. The error has the exception's type, message and traceback.
            WorkerLostError: the process is gone.
            SyncTimeoutError: no answer arrived in time.
        """
        remote = self._remote()
        if remote is None:
            raise InvalidArgumentError(f"this transport has no object whose {method}() could be called")
        return await remote.call(method, *args, timeout=self._deadline(timeout).seconds, **kwargs)

    async def aclose(self) -> None:
        expect_no_offers(self)
        await super().aclose()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._expect()
