"""Frames: the messages of the protocol, and which of them a peer may send.

:mod:`aiosync.protocol.framing` encodes and decodes them.

One update, from the connection of a worker to its answer::

    worker                              sender
      Hello ----------------------------->        the worker's identity, and a nonce
            <----------------------------- Challenge   a nonce
      Proof ----------------------------->        proves that the worker knows the token
            <----------------------------- Accepted | Refused   proves that the sender knows the token
      Join ------------------------------>        the worker accepts longer frames from now on
            <----------------------------- Welcome | Refused    the layout of all updates to come
            <----------------------------- Notify      a newer version exists
      Fetch ----------------------------->        the worker is ready for the newest version
            <----------------------------- Update      where the version lies; it stays valid until the answer
            <----------------------------- Chunk* End  (if the connection carries the bytes) the bytes
      Staged ---------------------------->        (only if the commit waits for long) the worker has the bytes
      Ack | Nack ------------------------>        an Ack may contain the next Fetch
            <----------------------------- Abort       a joint update is cancelled
            <----------------------------- Interrupt   the bytes will not come: the worker fetches again
      Bye  <----------------------------> Bye

A worker fetches an update when it is ready. So a slow or suspended worker keeps only one version in use, the
one that it runs on, and fetches the newest version when it resumes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

import msgspec
from msgspec import Meta

PROTOCOL_VERSION = 5
MAX_NAMES = 64
"""Most entries that a Nack lists, of each kind."""
MAX_TEXT = 256
"""Most characters of a name, or of another short text, in a Nack."""

_Name: TypeAlias = Annotated[str, Meta(max_length=MAX_TEXT)]
_Names: TypeAlias = Annotated[list[_Name], Meta(max_length=MAX_NAMES)]
_Index: TypeAlias = Annotated[int, Meta(ge=-1, lt=2**31)]
_Count: TypeAlias = Annotated[int, Meta(ge=-1, lt=2**62)]
_Seconds: TypeAlias = Annotated[float, Meta(ge=0, le=1e9)]
NackKind: TypeAlias = Literal["layout", "apply", "joint", "below"]
if TYPE_CHECKING:  # type checkers see str, because the keys of a dict are invariant
    _Measured: TypeAlias = str
else:
    _Measured = Literal["stage", "wait", "commit"]


class Hello(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="hello"):
    """The worker's first frame."""

    protocol: int  # the worker's PROTOCOL_VERSION
    worker: _Index  # the worker's index; -1: the sender chooses one
    pid: _Index  # the worker's process id; 0: it has no meaning for the sender
    nonce: bytes  # 16 random bytes
    model_id: str | None = None  # the model that the worker wants; None: any
    codecs: Annotated[list[_Name], Meta(max_length=16)] = []  # besides ``raw``, that the worker can decode
    before: _Index = -1  # the index that the sender chose before, to choose again if it is free; -1: none
    signature: str = ""  # of the layout that the worker has; empty: none


class Challenge(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="challenge"):
    """The sender's nonce, 16 random bytes. The sender proves nothing before the worker has."""

    nonce: bytes


class Proof(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="proof"):
    """The worker's proof that it knows the token."""

    proof: bytes  # HMAC-SHA256 over both nonces, under the token
    # HMAC-SHA256 over both nonces, under the ticket of the worker's last Welcome; empty: it has none. It
    # proves that an index belongs to this worker, without sending the ticket.
    claim: bytes = b""


class Accepted(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="accepted"):
    """The worker's proof is valid; the sender's own proof."""

    proof: bytes  # HMAC-SHA256 over both nonces, under the token
    pid: int  # the sender's process id; 0: it has no meaning for the worker


class Join(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="join"):
    """The sender's proof is valid: the worker now accepts a Welcome, which may be long."""


class Refused(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="refused"):
    """The sender does not serve this worker, and closes the connection."""

    reason: str
    retry: bool = False  # whether the worker may try again


class Joint(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="joint"):
    """Marks an update as one part of a joint update of ``size`` models."""

    id: str
    size: int


class Update(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="type", tag="update"):
    """One version of the weights, and where its bytes are."""

    round: int  # number of the publication, which is never used twice
    version: int  # the version that users see
    payload: dict[str, Any]  # where the bytes are. Only the transfer reads it; sessions pass it through.
    base: int = -1  # the version that ``names`` refers to; -1: none
    names: list[str] | None = None  # the entries that differ from ``base``; None: all entries may differ
    joint: Joint | None = None  # the joint update that this update is a part of


class Welcome(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="welcome"):
    """The sender serves this worker from now on."""

    # The layout of all updates to come; None: the worker's own layout has the same ``signature``.
    layout: dict[str, Any] | None
    version: int  # the sender's newest version
    worker: int  # the worker's index
    instance: str  # name of this sender object. Versions of another instance are not comparable.
    signature: str = ""  # of the layout
    device: str = "cpu"  # of the sender's weights
    eager: bool = False  # whether the worker should send its next Fetch without waiting for a Notify
    # A secret of 16 bytes. While another connection has the worker's index, only a worker that proves to hold
    # the ticket may replace that connection.
    ticket: bytes = b""
    # Names of the senders that an update passes, the trainer first and this sender last.
    via: Annotated[list[_Name], Meta(max_length=64)] = []


class Notify(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="notify"):
    """A newer version than the worker's exists."""

    round: int


class Fetch(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="type", tag="fetch"):
    """The worker is ready for the newest update."""

    have: _Count = -1  # a version that the worker still has, so that the differences suffice; -1: none
    maps: bool = False  # whether the worker can read the sender's memory, so that blocks need not be sent


class Chunk(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="chunk"):
    """One block of the update that is being sent. ``size`` raw bytes follow this frame."""

    block: int  # the block's number
    size: int  # number of raw bytes; 0 if the block is ``shared``
    checksum: int  # XXH3-64 of the decoded block
    encoding: str = "raw"  # of the raw bytes. ``shared``: the worker reads the block in the sender's memory.


class End(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="end"):
    """All chunks of the update have been sent."""

    # The XXH3-128 of the checksums of all blocks in order, each an unsigned 64-bit big-endian integer. It
    # includes blocks that were not sent.
    digest: bytes


class Cut(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="cut"):
    """The update that is being sent is cancelled. The sender answers the Fetch later."""


class Staged(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="staged"):
    """The worker has staged the update and waits to commit it."""

    round: _Count
    copied: bool  # whether the update is in the worker's own memory


class Ack(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="type", tag="ack"):
    """The worker has committed the offered version."""

    round: _Count
    version: _Count
    seconds: dict[_Measured, _Seconds]  # the time of each phase as the worker measured it
    fetch: Fetch | None = None  # the worker's next Fetch, if the worker is ready for another update


class Nack(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="nack"):
    """The worker refused an update, or the layout of its Welcome, and kept its weights."""

    round: _Count
    version: _Count
    kind: NackKind  # ``below``: of a relay that has the update while some of its workers do not
    error_type: str
    message: str
    traceback: str = ""
    missing: _Names = []
    unexpected: _Names = []
    differing: Annotated[dict[_Name, tuple[_Name, _Name]], Meta(max_length=MAX_NAMES)] = {}
    omitted: Annotated[int, Meta(ge=0, lt=2**31)] = 0  # number of entries that these three leave out


class Abort(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="abort"):
    """A joint update is cancelled. A worker that has staged a part of it drops that part."""

    joint: str


class Interrupt(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="interrupt"):
    """The bytes of an update will not arrive, because another worker's loss broke the process group that
    brings them. A worker that does not have them all gives the update back."""

    round: int  # of the update


class Bye(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="bye"):
    """The last frame of a connection that is closed in order."""

    reason: str = ""  # why, for messages
    # From a sender: the sender continues without this worker. From a worker: it still reads memory of the
    # sender, and sends another Bye when it no longer does.
    dropped: bool = False
    replaced: bool = False  # another worker has this worker's index, so this worker must not reconnect


Greeting: TypeAlias = Hello | Challenge | Proof | Accepted | Join | Refused | Bye
"""The frames of a peer that has not authenticated."""
FromWorker: TypeAlias = Fetch | Staged | Ack | Nack | Bye
"""The frames of an authenticated worker."""
FromSender: TypeAlias = Refused | Welcome | Notify | Update | Chunk | End | Cut | Abort | Interrupt | Bye
"""The frames of an authenticated sender."""
Frame: TypeAlias = Greeting | FromWorker | FromSender

MAX_FRAME = 256 * 1024 * 1024
"""Largest body in bytes from an authenticated sender: a layout of a million entries."""
MAX_ANSWER = 512 * 1024
"""Largest body in bytes from an authenticated worker: a Nack."""
MAX_GREETING = 4096
"""Largest body in bytes from a peer that has not authenticated."""


class Inbound(msgspec.Struct, frozen=True):
    """The frames that a peer may send, of at most ``limit`` bytes before and after decompression.

    They depend on the peer's side and on whether the peer has authenticated. Other kinds are not decoded, so
    that a few bytes never decode into much memory.
    """

    limit: int
    decoder: msgspec.msgpack.Decoder[Any]


GREETING = Inbound(MAX_GREETING, msgspec.msgpack.Decoder(Greeting))
FROM_WORKER = Inbound(MAX_ANSWER, msgspec.msgpack.Decoder(FromWorker))
FROM_SENDER = Inbound(MAX_FRAME, msgspec.msgpack.Decoder(FromSender))
