"""Payloads of Update frames: what is not one is refused with a ProtocolError, whatever it is."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiosync.errors import ProtocolError
from aiosync.protocol import payloads as p

PAYLOADS: list[msgspec.Struct] = [
    p.MappedPayload(3),
    p.MappedPayload(3, [(1, {"name": "x"})], [0, 2]),
    p.StreamPayload(-1),
    p.StreamPayload(7, (4, 1234)),
    p.ProcessGroupPayload("key", 1, 3),
    p.ObjectPayload("name", 12),
    p.InlinePayload(b"weights"),
]

anything = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 2**64 - 1) | st.floats() | st.text() | st.binary(max_size=9),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
    max_leaves=8,
)
FIELDS = sorted({name for payload in PAYLOADS for name in type(payload).__struct_encode_fields__})


@pytest.mark.parametrize("payload", PAYLOADS, ids=repr)
def test_a_payload_survives_the_wire(payload: msgspec.Struct) -> None:
    wire = msgspec.msgpack.encode(p.encode(payload))
    assert p.decode(msgspec.msgpack.decode(wire), type(payload)) == payload


@given(st.dictionaries(st.sampled_from(FIELDS), anything), st.sampled_from(PAYLOADS))
def test_whatever_comes_is_a_payload_or_a_protocol_error(found: dict[str, Any], like: msgspec.Struct) -> None:
    try:
        payload = p.decode(found, type(like))
    except ProtocolError as exc:
        assert "payload" in str(exc)
    else:
        assert isinstance(payload, type(like))


def test_the_first_field_says_which_struct() -> None:
    either = p.ProcessGroupPayload, p.InlinePayload
    assert isinstance(p.decode_either({"bytes": b"w"}, *either), p.InlinePayload)
    assert isinstance(p.decode_either({"group": "k", "rank": 1, "size": 2}, *either), p.ProcessGroupPayload)
    with pytest.raises(ProtocolError, match="missing required field"):
        p.decode_either({}, *either)
    with pytest.raises(ProtocolError, match="rank"):
        p.decode_either({"group": "k", "rank": 0, "size": 2}, *either)
