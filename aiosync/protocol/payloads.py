"""The payload of an Update frame, a msgpack map: one struct for each way to transfer a version."""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from aiosync.errors import ProtocolError

_Index = Annotated[int, Meta(ge=0)]
_Rank = Annotated[int, Meta(ge=1, le=1 << 16)]

A = TypeVar("A", bound=msgspec.Struct)
B = TypeVar("B", bound=msgspec.Struct)


class MappedPayload(msgspec.Struct, frozen=True, omit_defaults=True):
    """The version lies in a slot of the sender's, which the worker maps.

    Attributes:
        slot: the slot's index.
        new: (index, handle) of the slots that were added since the last update over this connection.
        gone: indices of the slots that were removed since.
    """

    slot: _Index
    new: list[tuple[_Index, dict[str, Any]]] = []
    gone: list[_Index] = []


class StreamPayload(msgspec.Struct, frozen=True, omit_defaults=True):
    """The version follows in blocks over the connection.

    Attributes:
        base: the version that blocks are encoded against; -1: none.
        memory: the descriptor and the inode of the sender's memory, if the worker is to read blocks there.
    """

    base: int
    memory: tuple[int, int] | None = None


class ProcessGroupPayload(msgspec.Struct, frozen=True):
    """The version comes through a process group.

    Attributes:
        group: the group's key.
        rank: the worker's rank in it; the sender is rank 0.
        size: the number of ranks.
    """

    group: str
    rank: _Rank
    size: Annotated[int, Meta(ge=2, le=1 << 16)]


class ObjectPayload(msgspec.Struct, frozen=True):
    """The version lies in Ray's object store.

    Attributes:
        object: the name by which the reference is kept.
        number: which of the objects kept by that name it is.
    """

    object: str
    number: int


class InlinePayload(msgspec.Struct, frozen=True, rename={"data": "bytes"}):
    """The version itself, if it is small.

    Attributes:
        data: the weights, as the layout says.
    """

    data: bytes


def encode(payload: msgspec.Struct) -> dict[str, Any]:
    """Return the payload as the Update frame has it."""
    found: dict[str, Any] = msgspec.to_builtins(payload, builtin_types=(bytes,))
    return found


def decode(payload: dict[str, Any], kind: type[A]) -> A:
    """Return a payload as a struct.

    Raises:
        ProtocolError: a field is missing or has a wrong value.
    """
    try:
        return msgspec.convert(payload, kind)
    except msgspec.ValidationError as exc:
        raise ProtocolError(f"an update's payload cannot be used: {exc}: {payload!r:.80}") from exc


def decode_either(payload: dict[str, Any], one: type[A], other: type[B]) -> A | B:
    """Decode a payload as ``one`` if it has the first field of that, else as ``other``."""
    return decode(payload, one if one.__struct_encode_fields__[0] in payload else other)
