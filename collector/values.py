"""OTLP attributes and AnyValues from their bytes: by slicing where the bytes have the usual form, else by protobuf.

Every fast path accepts exact forms only: one field of the expected type that fills the message to its last byte.
Anything else (a oneof written twice, unknown fields, nested values) goes to the parser, so both ways give one result.
"""

import struct
from collections.abc import Iterable
from typing import Any, Final

import numpy as np
from google.protobuf.message import DecodeError as ProtobufError

from spanmill.collector.otlp_proto import AnyValue, KeyValue, MergedArray
from spanmill.triplets.records import IntArray, Value

MAX_LIGHT_BYTES: Final = 64
"""Longer bytes values are left out where arrays are not wanted."""
MAX_DEPTH: Final = 32
"""Arrays and key-value lists within each other; protobuf itself gives up at 33 lists, or 50 arrays."""

# First bytes of fields, as (field number << 3 | wire type). KeyValue:
_KEY: Final = 0x0A
_VALUE: Final = 0x12
# AnyValue:
_STRING: Final = 0x0A
_BOOL: Final = 0x10
_INT: Final = 0x18
_DOUBLE: Final = 0x21
_ARRAY: Final = 0x2A
_BYTES: Final = 0x3A
# ArrayValue:
_ELEMENT: Final = 0x0A

_DOUBLE_RECORD: Final = 11
"""An element of an array of doubles: element tag, length 9, double tag, 8 bytes."""
_SMALL_ARRAY: Final = 256
"""Below so many bytes the parser is faster than numpy."""
_SHORT: Final = 96
"""Longest KeyValue that is remembered; longer ones, with texts, ids and numbers, hardly repeat."""
_REMEMBERED: Final = 4096
"""How many."""

_DOUBLE_HEAD: Final = np.array([_ELEMENT, 9, _DOUBLE], np.uint8)
_LARGE: Final = 1 << 28
"""From here on, and below 0, a varint is longer than four bytes; such arrays are left to the parser."""

_unpack_double = struct.Struct("<d").unpack_from


def text(raw: bytes) -> str:
    """UTF-8 as text; what is not UTF-8 becomes U+FFFD."""
    return str(raw, "utf-8", "replace")


class _Keys(dict[bytes, str]):
    """Attribute names by their bytes, so that each is decoded once."""

    def __missing__(self, raw: bytes) -> str:
        if len(self) >= _REMEMBERED:
            self.clear()
        self[raw] = name = text(raw)
        return name


_keys: Final = _Keys()
_short: Final = dict[bytes, tuple[str, Value, Value]]()
"""Short attributes as decoded before: most of them (model, operation, finish reasons) repeat span after span."""


def decode_attributes(pairs: Iterable[bytes], arrays: bool = True) -> dict[str, Value]:
    """The attributes whose KeyValue messages are given; of a repeated key the last value.

    Values are not to be changed: equal ones may be one object. With `arrays` false what only the trainer needs is None:
    an array that begins with a number, and bytes longer than `MAX_LIGHT_BYTES`. Raises protobuf's DecodeError.
    """
    found: dict[str, Value] = {}
    for raw in pairs:
        if len(raw) > _SHORT:
            key, value = _pair(raw, arrays)
        else:
            known = _short.get(raw)
            key, value, light = known or _remembered(raw)
            if not arrays:
                value = light
        found[key] = value
    return found


def _remembered(raw: bytes) -> tuple[str, Value, Value]:
    """Key, value, and the value without arrays."""
    key, value = _pair(raw, True)
    if len(_short) >= _REMEMBERED:
        _short.clear()
    known = _short[raw] = key, value, lighten(value)
    return known


def _pair(raw: bytes, arrays: bool) -> tuple[str, Value]:
    """Key and value of a KeyValue."""
    end = start = 0
    try:
        end = raw[1] + 2
        length, start = _length(raw, end + 1)
        usual = raw[0] == _KEY and end < 130 and raw[end] == _VALUE and start + length == len(raw)
    except IndexError:
        usual = False
    if usual:
        return _keys[raw[2:end]], _value(raw, start, arrays)
    pair = KeyValue.FromString(raw)
    value = _parsed(pair.value)
    return text(pair.key), value if arrays else lighten(value)


def decode_value(raw: bytes, arrays: bool = True) -> Value:
    """The AnyValue whose message is given; `arrays` as in `decode_attributes`. Raises protobuf's DecodeError."""
    return _value(raw, 0, arrays)


def gather(elements: list[Value]) -> Value:
    """An array of these elements: ints if all are ints, float64 if all are doubles, else (or if empty) the list."""
    kinds = set(map(type, elements))
    if kinds == {int}:
        return narrowed(np.array(elements, np.int64))
    if kinds == {float}:
        return np.array(elements, np.float64)
    return elements


def narrowed(numbers: IntArray) -> IntArray:
    """The numbers as int32 if all are token ids or the like (not negative, below 2**28), else as they are."""
    return numbers.astype(np.int32) if numbers.size and numbers.min() >= 0 and numbers.max() < _LARGE else numbers


def lighten(value: Value) -> Value:
    """The value, or None if `decode_attributes` without arrays leaves it out."""
    if isinstance(value, np.ndarray):
        return None
    if isinstance(value, bytes):
        return value if len(value) <= MAX_LIGHT_BYTES else None
    if isinstance(value, list) and value and type(value[0]) in (int, float):
        return None
    return value


def _value(raw: bytes, at: int, arrays: bool) -> Value:
    """The AnyValue that fills `raw` from `at` to its end."""
    size = len(raw) - at
    if not size:
        return None
    kind = raw[at]
    if kind in (_STRING, _BYTES, _ARRAY):
        try:
            length, start = _length(raw, at + 1)
        except IndexError:
            length = start = -1
        if start + length == len(raw):
            if kind == _STRING:
                return str(raw[start:], "utf-8", "replace")
            if kind == _BYTES:
                return raw[start:] if arrays or length <= MAX_LIGHT_BYTES else None
            if not arrays and _begins_with_number(raw, start):
                return None
            if length >= _SMALL_ARRAY:
                numbers = _numbers(raw[start:])
                if numbers is not None:
                    return numbers
    elif kind == _INT:
        if size == 2 and raw[at + 1] < 0x80:
            return raw[at + 1]
        if size == 3 and raw[at + 1] >= 0x80 and raw[at + 2] < 0x80:
            return raw[at + 1] & 0x7F | raw[at + 2] << 7
    elif kind == _DOUBLE:
        if size == 9:
            return _unpack_double(raw, at + 1)[0]
    elif kind == _BOOL and size == 2 and raw[at + 1] < 2:
        return raw[at + 1] == 1
    value = _parsed(AnyValue.FromString(raw[at:]))
    return value if arrays else lighten(value)


def _length(raw: bytes, at: int) -> tuple[int, int]:
    """The length whose varint begins at `at`, and where the varint ends; raises IndexError past the end."""
    byte = raw[at]
    if byte < 0x80:
        return byte, at + 1
    length = 0
    for shift in range(0, 35, 7):
        byte = raw[at]
        at += 1
        length |= (byte & 0x7F) << shift
        if byte < 0x80:
            return length, at
    return -1, 0


def _begins_with_number(raw: bytes, start: int) -> bool:
    """Whether the first element of the ArrayValue at `start` is an int or a double."""
    if len(raw) < start + 2 or raw[start] != _ELEMENT or raw[start + 1] > 0x7F:
        return False
    element = AnyValue.FromString(raw[start + 2 : start + 2 + raw[start + 1]])
    return element.WhichOneof("value") in ("int_value", "double_value")


def _numbers(body: bytes) -> Value:
    """The array of an ArrayValue of ints alone or doubles alone in their usual form; None if it is anything else."""
    kind = body[2]
    if kind == _DOUBLE and len(body) % _DOUBLE_RECORD == 0:
        records = np.frombuffer(body, np.uint8).reshape(-1, _DOUBLE_RECORD)
        if (records[:, :3] == _DOUBLE_HEAD).all():
            return records[:, 3:].copy().view("<f8")[:, 0].astype(np.float64, copy=False)
    elif kind == _INT:
        numbers = np.array(MergedArray.FromString(body).values.int_value)
        if _is_int_array(body, numbers):
            return numbers
    return None


def _is_int_array(body: bytes, numbers: Any) -> bool:
    """Whether the body is one record per number and nothing else, which merging alone can not tell.

    A record is element tag, length, int tag, varint. The numbers give the varints' lengths, and so the place of each
    record; if each has its three leading bytes there, and the last one ends with the body, no byte is left for a null,
    a second value or another kind. Numbers that may have lost bits above the 32nd have longer varints than they show.
    """
    if not len(numbers):
        return False
    longest = int(numbers.view(np.uint32).max())
    if longest >= _LARGE:
        return False
    size = (numbers > 0x7F).view(np.uint8)
    if longest > 0x3FFF:
        size += numbers > 0x3FFF
        if longest > 0x1F_FFFF:
            size += numbers > 0x1F_FFFF
    size += 4
    starts = size.cumsum(dtype=np.intp)
    if starts[-1] != len(body):
        return False
    starts -= size
    raw = np.frombuffer(body, np.uint8)
    size -= 2
    return bool((raw[starts] == _ELEMENT).all() and (raw[1:][starts] == size).all() and (raw[2:][starts] == _INT).all())


def _parsed(value: Any, depth: int = 0) -> Value:
    """The value of a parsed AnyValue."""
    if depth > MAX_DEPTH:
        raise ProtobufError(f"a value is nested more than {MAX_DEPTH} deep")
    kind = value.WhichOneof("value")
    if kind is None or kind == "string_value_strindex":  # an index into a table that only profiles have
        return None
    if kind == "string_value":
        return text(value.string_value)
    if kind == "array_value":
        return gather([_parsed(element, depth + 1) for element in value.array_value.values])
    if kind == "kvlist_value":
        return {text(pair.key): _parsed(pair.value, depth + 1) for pair in value.kvlist_value.values}
    return getattr(value, kind)
