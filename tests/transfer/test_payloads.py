"""Payloads of Update frames: what is not one is refused with a ProtocolError, whatever it is."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiosync.errors import ProtocolError
from aiosync.protocol.frames import Update
from aiosync.protocol.framing import decode_either, decode_payload, encode_payload
from aiosync.transfer.broadcast import ProcessGroupPayload
from aiosync.transfer.encoded_version import StreamPayload
from aiosync.transfer.mapped import MappedPayload
from aiosync.transfer.object_store import ObjectPayload
from aiosync.transfer.process_group import InlinePayload

PAYLOADS: list[msgspec.Struct] = [
    MappedPayload(3),
    MappedPayload(3, [(1, {"name": "x"})], [0, 2]),
    MappedPayload(3, [(1, {"name": "x"})], yields={"name": "y"}),
    StreamPayload(-1),
    StreamPayload(7, (4, 1234)),
    ProcessGroupPayload("key", 1, 3),
    ObjectPayload("name", 12),
    InlinePayload(b"weights"),
]

anything = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 2**64 - 1) | st.floats() | st.text() | st.binary(max_size=9),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
    max_leaves=8,
)
FIELDS = sorted({name for payload in PAYLOADS for name in type(payload).__struct_encode_fields__})


def _update(payload: dict[str, Any]) -> Update:
    return Update(round=0, version=0, payload=payload)


@pytest.mark.parametrize("payload", PAYLOADS, ids=repr)
def test_a_payload_survives_the_wire(payload: msgspec.Struct) -> None:
    wire = msgspec.msgpack.encode(encode_payload(payload))
    assert decode_payload(_update(msgspec.msgpack.decode(wire)), type(payload)) == payload


@given(st.dictionaries(st.sampled_from(FIELDS), anything), st.sampled_from(PAYLOADS))
def test_whatever_comes_is_a_payload_or_a_protocol_error(found: dict[str, Any], like: msgspec.Struct) -> None:
    try:
        payload = decode_payload(_update(found), type(like))
    except ProtocolError as exc:
        assert "payload" in str(exc)
    else:
        assert isinstance(payload, type(like))


def test_the_first_field_says_which_struct() -> None:
    either = ProcessGroupPayload, InlinePayload
    assert isinstance(decode_either(_update({"bytes": b"w"}), *either), InlinePayload)
    group = _update({"group": "k", "rank": 1, "size": 2})
    assert isinstance(decode_either(group, *either), ProcessGroupPayload)
    with pytest.raises(ProtocolError, match="missing required field"):
        decode_either(_update({}), *either)
    with pytest.raises(ProtocolError, match="rank"):
        decode_either(_update({"group": "k", "rank": 0, "size": 2}), *either)
