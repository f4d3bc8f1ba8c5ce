"""Frames: the messages of the protocol. :mod:`aiosync.protocol.framing` encodes and decodes them.

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
      Staged ---------------------------->        (only if the commit has to wait) the worker has the bytes
      Ack | Nack ------------------------>        an Ack may contain the next Fetch
            <----------------------------- Abort       a joint update is cancelled
      Bye  <----------------------------> Bye

A worker fetches an update when it is ready. So a slow or suspended worker keeps only one version in use, the
one that it runs on, and fetches the newest version when it resumes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

import msgspec
from msgspec import Meta

PROTOCOL_VERSION = 3
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
    """The worker's first frame.

    Attributes:
        protocol: the worker's :data:`PROTOCOL_VERSION`.
        worker: the worker's index; -1: the sender chooses one.
        pid: the worker's process id; 0: it has no meaning for the sender.
        nonce: 16 random bytes.
        model_id: the model that the worker wants; None: any.
        codecs: encodings that the worker can decode besides ``raw``.
        before: the index that the sender chose before, and should choose again if it is free; -1: none.
        signature: of the layout that the worker has; empty: none.
    """

    protocol: int
    worker: _Index
    pid: _Index
    nonce: bytes
    model_id: str | None = None
    codecs: Annotated[list[_Name], Meta(max_length=16)] = []
    before: _Index = -1
    signature: str = ""


class Challenge(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="challenge"):
    """The sender's nonce, 16 random bytes. The sender proves nothing until the worker has proved the
    token."""

    nonce: bytes


class Proof(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="proof"):
    """The worker's proof that it knows the token.

    Attributes:
        proof: HMAC-SHA256 over both nonces, under the token.
        claim: HMAC-SHA256 over both nonces, under the ticket of the worker's last Welcome; empty: it has
            none. It proves that an index belongs to this worker, without sending the ticket.
    """

    proof: bytes
    claim: bytes = b""


class Accepted(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="accepted"):
    """The worker's proof is valid; the sender's own proof.

    Attributes:
        proof: HMAC-SHA256 over both nonces, under the token.
        pid: the sender's process id; 0: it has no meaning for the worker.
    """

    proof: bytes
    pid: int


class Join(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="join"):
    """The sender's proof is valid: the worker now accepts a Welcome, which may be long."""


class Refused(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="refused"):
    """The sender does not serve this worker, and closes the connection. ``retry``: the worker may try
    again."""

    reason: str
    retry: bool = False


class Joint(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="joint"):
    """Marks an update as one part of a joint update of ``size`` models."""

    id: str
    size: int


class Update(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="type", tag="update"):
    """One version of the weights, and where its bytes are.

    Attributes:
        round: number of the publication. It is never used twice.
        version: the version that users see.
        payload: describes where the bytes are. Only the transfer reads it; sessions pass it through.
        base: the version that ``names`` refers to; -1: none.
        names: the entries that differ from ``base``; None: all entries may differ.
        joint: the joint update that this update is a part of.
    """

    round: int
    version: int
    payload: dict[str, Any]
    base: int = -1
    names: list[str] | None = None
    joint: Joint | None = None


class Welcome(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="welcome"):
    """The sender serves this worker from now on.

    Attributes:
        layout: the layout of all updates to come; None: the worker's own layout has the same ``signature``.
        version: the sender's newest version.
        worker: the worker's index.
        instance: name of this sender object. Versions of another instance at the same address are not
            comparable.
        signature: of the layout.
        device: the device of the sender's weights.
        eager: whether the worker should send its next Fetch without waiting for a Notify.
        ticket: a secret of 16 bytes. While another connection has the worker's index, only a worker that
            proves to hold the ticket may replace that connection.
        via: names of the senders that an update passes, the trainer first and this sender last.
    """

    layout: dict[str, Any] | None
    version: int
    worker: int
    instance: str
    signature: str = ""
    device: str = "cpu"
    eager: bool = False
    ticket: bytes = b""
    via: Annotated[list[_Name], Meta(max_length=64)] = []


class Notify(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="notify"):
    """A newer version than the worker's exists."""

    round: int


class Fetch(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="type", tag="fetch"):
    """The worker is ready for the newest update.

    Attributes:
        have: a version whose bytes the worker still has, so that the differences from it suffice; -1: none.
        maps: whether the worker can read the sender's memory, so that blocks need not be sent.
    """

    have: _Count = -1
    maps: bool = False


class Chunk(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="chunk"):
    """One block of the update that is being sent. ``size`` raw bytes follow this frame.

    Attributes:
        block: the block's number.
        size: number of raw bytes; 0 if the block is ``shared``.
        checksum: XXH3-64 of the decoded block.
        encoding: how the raw bytes encode the block. ``shared``: the worker reads the block in the sender's
            memory.
    """

    block: int
    size: int
    checksum: int
    encoding: str = "raw"


class End(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="end"):
    """All chunks of the update have been sent.

    ``digest`` is the XXH3-128 of the checksums of all blocks in order, each an unsigned 64-bit big-endian
    integer. It includes blocks that were not sent.
    """

    digest: bytes


class Cut(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="cut"):
    """The update that is being sent is cancelled. The sender answers the Fetch later."""


class Staged(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="staged"):
    """The worker has staged the update and waits to commit it. ``copied``: in its own memory."""

    round: _Count
    copied: bool


class Ack(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="type", tag="ack"):
    """The worker has committed the offered version.

    ``seconds`` has the time of each phase as the worker measured it. ``fetch`` is the worker's next Fetch, if
    the worker is ready for another update.
    """

    round: _Count
    version: _Count
    seconds: dict[_Measured, _Seconds]
    fetch: Fetch | None = None


class Nack(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="nack"):
    """The worker refused an update, or the layout of its Welcome, and kept its weights.

    ``kind`` is ``layout``, ``apply`` or ``joint``; or ``below``, from a relay that has the update while some
    of its workers do not. ``missing``, ``unexpected`` and ``differing`` list at most :data:`MAX_NAMES`
    entries each. ``omitted`` is the number of entries that they leave out.
    """

    round: _Count
    version: _Count
    kind: NackKind
    error_type: str
    message: str
    traceback: str = ""
    missing: _Names = []
    unexpected: _Names = []
    differing: Annotated[dict[_Name, tuple[_Name, _Name]], Meta(max_length=MAX_NAMES)] = {}
    omitted: Annotated[int, Meta(ge=0, lt=2**31)] = 0


class Abort(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="abort"):
    """A joint update is cancelled. A worker that has staged a part of it drops that part."""

    joint: str


class Bye(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="bye"):
    """The last frame of a connection that is closed in order.

    Attributes:
        reason: why, for messages.
        dropped: from a sender: the sender continues without this worker. From a worker: the worker still
            reads memory of the sender.
        replaced: another worker has this worker's index, so this worker must not reconnect.
    """

    reason: str = ""
    dropped: bool = False
    replaced: bool = False


Greeting: TypeAlias = Hello | Challenge | Proof | Accepted | Join | Refused | Bye
"""The frames of a peer that has not authenticated."""
FromWorker: TypeAlias = Fetch | Staged | Ack | Nack | Bye
"""The frames of an authenticated worker."""
FromSender: TypeAlias = Refused | Welcome | Notify | Update | Chunk | End | Cut | Abort | Bye
"""The frames of an authenticated sender."""
Frame: TypeAlias = Greeting | FromWorker | FromSender
