"""TCP and Unix sockets, used alone."""

from __future__ import annotations

from torch import nn

from aiosync.schemes.base import WeightSyncScheme
from aiosync.schemes.standalone.base import StandaloneTransport, init_sender
from aiosync.schemes.tcp import TCPWeightSyncScheme
from aiosync.transports.tcp.tls import TLSConfig
from aiosync.weights.codec import Codec


class TCPTransport(StandaloneTransport):
    """Sends weights to one worker over TCP or a Unix socket, without a scheme.

    The sender listens at the address, the worker dials it. Both give the same token.

    Args:
        address: ``tcp://host:port`` or ``unix:///path``. On the sender port 0 is any free port; see
            :attr:`address` after ``setup_connection_and_weights_on_sender``.
        token: a secret of 16 characters or more, see :class:`~aiosync.TCPWeightSyncScheme`.
        tls: certificates.
        codec: how weights are encoded: ``"full"``, ``"zstd"`` or ``"delta"``.
        reconnect_for: seconds for which a worker that has lost the sender tries to find it again.
        insecure: listen to other machines with neither a token nor mutual TLS.
        timeout: seconds that a call may take by default.

    Raises:
        InvalidArgumentError: an invalid address or argument, or a token that is too short.
    """

    def __init__(
        self,
        address: str = "tcp://127.0.0.1:0",
        *,
        token: str | bytes | None = None,
        tls: TLSConfig | None = None,
        codec: Codec = "full",
        reconnect_for: float = 60.0,
        insecure: bool = False,
        timeout: float | None = None,
    ) -> None:
        super().__init__(timeout)
        # A recipe: each side of the connection is a copy of it.
        self._recipe = TCPWeightSyncScheme(
            address, token=token, tls=tls, codec=codec, reconnect_for=reconnect_for, insecure=insecure
        )

    @property
    def address(self) -> str:
        """The sender's address; on the sender with the real port, once it listens."""
        side = self._here._side
        scheme = None if side is None else side.scheme
        return scheme.address if isinstance(scheme, TCPWeightSyncScheme) else self._recipe.address

    def _make_sender(self, model: nn.Module | None) -> WeightSyncScheme:
        return init_sender(self._recipe.__copy__(), model)

    async def _make_receiver(self) -> WeightSyncScheme:
        return self._recipe.__copy__()
