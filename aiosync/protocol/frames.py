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

__all__ = [
    "MAX_NAMES",
    "MAX_TEXT",
    "PROTOCOL_VERSION",
    "Abort",
    "Accepted",
    "Ack",
    "Bye",
    "Challenge",
    "Chunk",
    "Cut",
    "End",
    "Fetch",
    "Frame",
    "Hello",
    "Join",
    "Joint",
    "Nack",
    "NackKind",
    "Notify",
    "Proof",
    "Refused",
    "Staged",
    "Update",
    "Welcome",
]

PROTOCOL_VERSION = 3
MAX_NAMES = 64
"""Entries that a refusal lists at most, of each kind."""
MAX_TEXT = 256
"""Characters of a name, or of another short text, in a refusal."""

_Name: TypeAlias = Annotated[str, Meta(max_length=MAX_TEXT)]
_Names: TypeAlias = Annotated[list[_Name], Meta(max_length=MAX_NAMES)]
_Index: TypeAlias = Annotated[int, Meta(ge=-1, lt=2**31)]
_Count: TypeAlias = Annotated[int, Meta(ge=-1, lt=2**62)]
_Seconds: TypeAlias = Annotated[float, Meta(ge=0, le=1e9)]
NackKind: TypeAlias = Literal["layout", "apply", "joint", "below"]
if TYPE_CHECKING:  # for the type checker any text: the keys of a dict are invariant
    _Measured: TypeAlias = str
else:
    _Measured = Literal["stage", "wait", "commit"]


class Hello(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="hello"):
    """A worker's first words.

    ``nonce`` is 16 random bytes; ``pid`` is 0 where it means nothing; ``worker`` is -1 if the sender is to
    choose: the index ``before``, which it chose the last time, if that is free; ``codecs`` are the
    encodings that it knows besides ``raw``; ``signature`` is that of the layout that it has, or "".
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
    """The sender's nonce, 16 random bytes. It proves nothing before the worker has."""

    nonce: bytes


class Proof(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="proof"):
    """The worker's HMAC-SHA256 over both nonces under the shared token.

    ``claim``: the same under the ticket that came with the worker's last welcome, if it has one. So it proves
    that an index is its own without showing the ticket.
    """

    proof: bytes
    claim: bytes = b""


class Accepted(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="accepted"):
    """The worker has proved itself; the sender's HMAC-SHA256 over both nonces, and its process id."""

    proof: bytes
    pid: int


class Join(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="join"):
    """The sender has proved itself too: the worker takes its welcome, which may be long."""


class Refused(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="refused"):
    """The sender will not serve this worker; the connection ends. ``retry``: it may a little later."""

    reason: str
    retry: bool = False


class Joint(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="joint"):
    """Marks an update as one part of a joint update of ``size`` models."""

    id: str
    size: int


class Update(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="type", tag="update"):
    """One version of the weights, and where it lies.

    ``round`` counts what was sent and is never used twice; ``version`` is what users see. ``names`` are
    the entries that changed against ``base`` where the sender gave a subset, None where it gave all.
    ``payload`` belongs to the carrier: the session hands it through.
    """

    round: int
    version: int
    payload: dict[str, Any]
    base: int = -1
    names: list[str] | None = None
    joint: Joint | None = None


class Welcome(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="welcome"):
    """The sender takes the worker in.

    ``layout`` is that of all updates to come, None if the worker said that it has the one of this
    ``signature``; ``device`` where the sender has them, ``version`` its newest.
    ``worker`` is the worker's index from now on. ``instance`` tells one sender from the next at the same
    address: versions count anew with it.
    ``eager``: the worker is to send its Fetch in advance, without waiting for a Notify.
    ``ticket`` is a secret of 16 bytes: as long as another connection has the worker's index, only a worker
    that holds the ticket may take its place. ``via`` are the senders that an update passes on its way, the
    trainer first and this one last.
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
    """There is something newer than what the worker has."""

    round: int


class Fetch(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="type", tag="fetch"):
    """The worker is ready to take the newest update.

    ``have`` is a version whose bytes it still holds, so that what differs from it is enough; -1: none.
    ``maps``: it can read the sender's memory, so blocks may be left where they are.
    """

    have: _Count = -1
    maps: bool = False


class Chunk(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="chunk"):
    """``size`` raw bytes follow this frame: those of block ``block`` of the update under way.

    ``encoding`` is how they stand for the block; ``checksum`` is the XXH3-64 of the block itself. A block
    that is ``shared`` has no bytes here: it lies in the sender's memory.
    """

    block: int
    size: int
    checksum: int
    encoding: str = "raw"


class End(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="end"):
    """The update under way is complete. ``digest`` is the XXH3-128 of all its blocks' checksums, in
    order, as unsigned 64-bit big-endian integers; also of the blocks that were not sent."""

    digest: bytes


class Cut(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="cut"):
    """The update under way is taken back; the Fetch is answered later."""


class Staged(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="staged"):
    """The worker holds the update in a back slot of its own and waits for the moment to commit."""

    round: _Count
    copied: bool


class Ack(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="type", tag="ack"):
    """The worker runs on this version now: the one that it was offered.

    ``seconds`` per phase as the worker measured them; ``fetch`` is its next Fetch, if it is ready for that.
    """

    round: _Count
    version: _Count
    seconds: dict[_Measured, _Seconds]
    fetch: Fetch | None = None


class Nack(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="nack"):
    """The worker refused an update, or the layout that it was welcomed with, and kept what it had.

    ``kind``: layout, apply or joint; or below, from a relay: it has the update, some of its workers have not.
    ``missing``, ``unexpected`` and ``differing`` name :data:`MAX_NAMES` entries each at most; ``omitted`` is
    how many more there are.
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
    """A joint update is cancelled. A worker that still holds a part of it drops that part."""

    joint: str


class Bye(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="bye"):
    """The last frame of an orderly end. ``dropped``: the sender goes on without this worker; ``replaced``:
    with another in its place, so it is not to come back. From a worker ``dropped`` says that it still reads
    what it was given."""

    reason: str = ""
    dropped: bool = False
    replaced: bool = False


Frame: TypeAlias = (
    Hello
    | Challenge
    | Proof
    | Accepted
    | Join
    | Refused
    | Welcome
    | Notify
    | Fetch
    | Update
    | Chunk
    | End
    | Cut
    | Staged
    | Ack
    | Nack
    | Abort
    | Bye
)
