import struct
from typing import Any

import numpy as np
import pytest
from google.protobuf.message import DecodeError as ProtobufError
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from opentelemetry.proto.common.v1 import common_pb2

from spanmill.collector.values import decode_attributes, decode_value, lighten
from spanmill.triplets.records import Value

UNTIMED = settings(suppress_health_check=[HealthCheck.too_slow])
INT64 = st.integers(-(1 << 63), (1 << 63) - 1)
IDS = st.integers(0, 200_000)
DOUBLES = st.floats(allow_nan=True, allow_infinity=True)


def varint(number: int) -> bytes:
    """The base-128 varint of a number, negative ones as protobuf writes them."""
    number &= (1 << 64) - 1
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


def framed(tag: int, body: bytes) -> bytes:
    """A length-delimited field."""
    return bytes([tag]) + varint(len(body)) + body


def int_value(number: int) -> bytes:
    """An AnyValue of an int."""
    return b"\x18" + varint(number)


def double_value(number: float) -> bytes:
    """An AnyValue of a double."""
    return b"\x21" + struct.pack("<d", number)


def array_value(elements: list[bytes]) -> bytes:
    """An AnyValue of an array of AnyValues."""
    return framed(0x2A, b"".join(framed(0x0A, element) for element in elements))


def kvlist_value(pairs: list[tuple[str, bytes]]) -> bytes:
    """An AnyValue of a key-value list."""
    return framed(0x32, b"".join(framed(0x0A, key_value(key, value)) for key, value in pairs))


def key_value(key: str, value: bytes) -> bytes:
    """A KeyValue."""
    return framed(0x0A, key.encode()) + framed(0x12, value)


TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=200)
SCALARS = st.one_of(
    TEXTS.map(lambda text: framed(0x0A, text.encode())),
    st.booleans().map(lambda flag: bytes([0x10, flag])),
    INT64.map(int_value),
    IDS.map(int_value),
    DOUBLES.map(double_value),
    st.binary(max_size=200).map(lambda raw: framed(0x3A, raw)),
)
ODDITIES = st.one_of(
    st.just(b""),  # a null
    st.tuples(SCALARS, SCALARS).map(b"".join),  # a oneof written twice
    SCALARS.map(lambda one: one + b"\x78\x01"),  # an unknown field
    SCALARS.map(lambda one: b"\xa2\x06\x02hi" + one),
    IDS.map(lambda number: b"\x18" + varint(number | 1 << 20)[:-1] + b"\xc0\x00"),  # a varint longer than needed
    st.lists(IDS).map(lambda numbers: framed(0x1A, b"".join(map(varint, numbers)))),  # packed: another wire type
    st.just(b"\x10\x02"),
    st.just(b"\x40\x05"),  # an index into a table of strings
)
"""Legal protobuf that no exporter writes."""
NESTED = st.recursive(
    SCALARS | ODDITIES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=6).map(array_value),
        st.lists(st.tuples(TEXTS, inner), max_size=4).map(kvlist_value),
        st.tuples(inner, inner).map(
            lambda two: array_value([two[0]]) + array_value([two[1]])
        ),  # a message written twice
    ),
    max_leaves=12,
)


def long_arrays(usual: st.SearchStrategy[bytes]) -> st.SearchStrategy[bytes]:
    """Arrays long enough for numpy, all of the usual form or with a few elements that are not."""
    many = st.lists(usual, min_size=70, max_size=100)
    mixed = st.tuples(many, st.lists(st.tuples(st.integers(0, 70), ODDITIES | SCALARS), max_size=3))
    return st.one_of(many, mixed.map(lambda pair: spliced(*pair))).map(array_value)


def spliced(elements: list[bytes], odd: list[tuple[int, bytes]]) -> list[bytes]:
    """The elements with others put in between."""
    for at, element in odd:
        elements.insert(at, element)
    return elements


VALUES = NESTED | long_arrays((IDS | INT64).map(int_value)) | long_arrays(DOUBLES.map(double_value))


def ordinary(value: Any) -> Value:
    """What the generated parser of opentelemetry-proto sees, in the form of the records."""
    kind = value.WhichOneof("value")
    if kind is None or kind == "string_value_strindex":
        return None
    if kind == "kvlist_value":
        return {pair.key: ordinary(pair.value) for pair in value.kvlist_value.values}
    if kind != "array_value":
        return getattr(value, kind)
    elements = [ordinary(element) for element in value.array_value.values]
    if elements and all(type(element) is int for element in elements):
        whole = np.array(elements, np.int64)
        return whole.astype(np.int32) if 0 <= whole.min() and whole.max() < 1 << 28 else whole
    if elements and all(type(element) is float for element in elements):
        return np.array(elements, np.float64)
    return elements


def exact(value: Value) -> object:
    """The value in a form whose `==` tells int from bool and -0.0 from 0.0, and where NaN equals NaN."""
    if isinstance(value, np.ndarray):
        return (str(value.dtype), value.shape, value.tobytes())
    if isinstance(value, list):
        return [exact(element) for element in value]
    if isinstance(value, dict):
        return {key: exact(element) for key, element in value.items()}
    return struct.pack("<d", value) if isinstance(value, float) else (type(value).__name__, value)


@UNTIMED
@given(VALUES)
@example(array_value([int_value(7)] * 80 + [int_value((1 << 28) - 1)]))
@example(array_value([int_value(7)] * 80 + [int_value(1 << 28)]))
@example(array_value([int_value(7)] * 80 + [int_value(1 << 32 | 1 << 27)]))
@example(array_value([int_value(7)] * 80 + [int_value(-1)]))
@example(array_value([framed(0x1A, b"\x01") * 2, *[int_value(7)] * 80]))
@example(array_value([b"\x18\x01\x18\x02", b"", *[int_value(7)] * 80]))
@example(array_value([framed(0x1A, b"\x01\x02\x03"), b"\xa2\x06\x04four", *[int_value(7)] * 80]))
def test_a_value_is_what_the_ordinary_parser_sees(raw: bytes) -> None:
    """Whatever AnyValue is on the wire, the fast decoder gives what opentelemetry-proto gives."""
    expected = ordinary(common_pb2.AnyValue.FromString(raw))

    assert exact(expected) == exact(decode_value(raw))


@UNTIMED
@given(st.lists(st.tuples(TEXTS, VALUES), max_size=6), st.data())
def test_attributes_are_what_the_ordinary_parser_sees(pairs: list[tuple[str, bytes]], data: st.DataObject) -> None:
    """Keys and values of attributes are those of opentelemetry-proto, the last one of a repeated key."""
    raws = [key_value(key, value) for key, value in pairs]
    raws = [data.draw(st.sampled_from([raw, raw[len(raw) :], raw + b"\x78\x01", raw + raw])) for raw in raws]
    parsed = [common_pb2.KeyValue.FromString(raw) for raw in raws]

    assert exact({pair.key: ordinary(pair.value) for pair in parsed}) == exact(decode_attributes(raws))


@UNTIMED
@given(VALUES)
def test_without_arrays_the_small_values_are_the_same(raw: bytes) -> None:
    """Without arrays a value is None if it begins with a number or is long bytes, and else the same as with arrays."""
    pair = key_value("key", raw)

    assert exact(lighten(decode_value(raw))) == exact(decode_attributes([pair], arrays=False)["key"])


@UNTIMED
@given(VALUES, st.data())
def test_a_value_that_was_cut_is_never_guessed(raw: bytes, data: st.DataObject) -> None:
    """A value cut anywhere raises, or is what the ordinary parser makes of it."""
    cut = raw[: data.draw(st.integers(0, len(raw)))]
    try:
        expected = exact(ordinary(common_pb2.AnyValue.FromString(cut)))
    except ProtobufError:
        with pytest.raises(ProtobufError):
            decode_value(cut)
    else:
        assert expected == exact(decode_value(cut))


@pytest.mark.parametrize("size", [5, 300])
def test_arrays_of_numbers_are_numpy_arrays(size: int) -> None:
    """Token ids become int32, doubles float64, however long the array is."""
    ids = [token * 77 % 150_000 for token in range(size)]
    logprobs = [-token / 8 for token in range(size)]

    values = decode_attributes(
        [
            key_value("ids", array_value([int_value(token) for token in ids])),
            key_value("logprobs", array_value([double_value(logprob) for logprob in logprobs])),
        ]
    )

    expected: dict[str, Value] = {"ids": np.array(ids, np.int32), "logprobs": np.array(logprobs, np.float64)}
    assert exact(expected) == exact(values)


@pytest.mark.parametrize(
    ("elements", "expected"),
    [
        ([], []),
        ([framed(0x0A, b"stop"), framed(0x0A, b"length")], ["stop", "length"]),
        ([int_value(1), b"", int_value(2)], [1, None, 2]),
        ([int_value(-1), double_value(-0.5)], [-1, -0.5]),
        ([b"\x10\x01", int_value(1)], [True, 1]),
    ],
)
def test_other_arrays_are_lists(elements: list[bytes], expected: list[Value]) -> None:
    """An array that is empty, of text, with a null or of mixed kinds stays a list."""
    assert exact(expected) == exact(decode_value(array_value(elements)))


def test_text_that_is_not_utf8_is_replaced() -> None:
    """Invalid UTF-8 costs a character of a key or value, not the span."""
    raw = framed(0x0A, b"k\xff") + framed(0x12, framed(0x0A, b"a\xc3(\xed\xa0\x80"))
    listed = key_value("list", array_value([framed(0x0A, b"\xfe"), kvlist_value([("ok", framed(0x0A, b"\xf0\x9f"))])]))

    expected = {"k\ufffd": "a\ufffd(\ufffd\ufffd\ufffd", "list": ["\ufffd", {"ok": "\ufffd"}]}
    assert expected == decode_attributes([raw, listed])


def test_long_bytes_and_numbers_are_left_out_without_arrays() -> None:
    """Without arrays, text of any length, short bytes and lists of text stay; numbers and long bytes are None."""
    raws = [
        key_value("ids", array_value([int_value(1)])),
        key_value("packed", framed(0x3A, bytes(65))),
        key_value("hash", framed(0x3A, bytes(64))),
        key_value("base64", framed(0x0A, b"A" * 500)),
        key_value("reasons", array_value([framed(0x0A, b"stop")])),
        key_value("empty", array_value([])),
    ]

    expected = {"ids": None, "packed": None, "hash": bytes(64), "base64": "A" * 500, "reasons": ["stop"], "empty": []}
    assert expected == decode_attributes(raws, arrays=False)
