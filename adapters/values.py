"""Attribute values as what they should be; a value of another type is None, never a guess."""

import base64
import binascii
import json
import math
import re
from collections.abc import Mapping
from typing import Final, NamedTuple, cast

import numpy as np

from spanmill.triplets.records import Attributes, Json, Logprobs, TokenIds, Value

LOGPROB_NOISE: Final = 1e-5
"""A log probability may lie this much above 0: float noise, kept as it is."""
CONSTANT_IDS: Final = frozenset({"", "__fake_id__"})
"""What stands where an id was not known; openai-agents writes the second."""

_FLOAT32_MIN: Final = float(np.finfo(np.float32).min)

Fault = tuple[str, str]
"""(reason, detail): why numbers cannot be used."""

_JSON: Final = re.compile(r'\s*(\{\s*(["}]|\Z)|\[\s*(["\[{\]\d-]|\Z))')
"""How JSON text of an object or array begins; `[INST]` is text."""
_ESCAPED_SURROGATE: Final = re.compile(r"\\u[dD][89a-fA-F]")
_SURROGATE: Final = re.compile("[\ud800-\udfff]")


class Ids(NamedTuple):
    """Token ids as read: None if not recorded."""

    ids: TokenIds | None
    fault: Fault | None = None


class Probs(NamedTuple):
    """Log probabilities as read: None if not recorded, or if one is missing."""

    values: Logprobs | None
    fault: Fault | None = None


_NO_IDS: Final = Ids(None)
_NO_PROBS: Final = Probs(None)


def text(value: Value) -> str | None:
    """A string, or None for anything else."""
    return value if isinstance(value, str) else None


def identifier(value: Value) -> str | None:
    """A non-empty id that is no known constant; an int is its decimal text."""
    if isinstance(value, bool):
        return None
    if isinstance(value, int):
        return str(value)
    return value if isinstance(value, str) and value not in CONSTANT_IDS else None


def integer(value: Value, *, foreign: bool = False) -> int | None:
    """An int; in foreign dialects also an integral double or decimal text."""
    if isinstance(value, bool):
        return None
    if isinstance(value, int):
        return value
    if foreign and isinstance(value, float) and value.is_integer():
        return int(value)
    if foreign and isinstance(value, str):
        try:
            return int(value)
        except ValueError:
            return None
    return None


def number(value: Value, *, foreign: bool = False) -> float | None:
    """A finite float; in foreign dialects also decimal text."""
    if foreign and isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)


def strings(value: Value) -> list[str | None]:
    """The elements of an array of strings; [] for anything else. An element that is no string is None."""
    if isinstance(value, str):
        return [value]
    return [text(v) for v in value] if isinstance(value, list) else []


def parse_json(raw: str) -> Json:
    """The value of a JSON text, lone surrogates replaced by U+FFFD. Raises ValueError if it is no JSON."""
    try:
        value = json.loads(raw)
        return clean(value) if _ESCAPED_SURROGATE.search(raw) else value
    except RecursionError as e:
        raise ValueError("nested too deeply") from e


def clean(value: Json) -> Json:
    """The same JSON value without lone surrogates, which no UTF-8 can hold, and with plain lists for arrays."""
    if isinstance(value, str):
        return _SURROGATE.sub("\ufffd", value)
    if isinstance(value, np.ndarray):
        return cast("list[Json]", value.tolist())
    if isinstance(value, list):
        return [clean(v) for v in cast("list[Json]", value)]
    if isinstance(value, dict):
        return {clean(k): clean(v) for k, v in cast("dict[str, Json]", value).items()}
    return value


def dump_json(value: Json) -> str:
    """JSON text as it is stored in a column; NaN and infinity, which JSON lacks, become null."""
    if value == {}:
        return "{}"
    try:
        return _encode(value)
    except ValueError:
        return json.dumps(_finite(value), ensure_ascii=False, separators=(",", ":"), default=_plain)


def _plain(value: object) -> Json:
    if isinstance(value, np.ndarray):
        return cast("list[Json]", value.tolist())
    if isinstance(value, bytes):
        return base64.b64encode(value).decode("ascii")
    return str(value)


_encode: Final = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False, default=_plain).encode


def _finite(value: Json) -> Json:
    if isinstance(value, np.ndarray):
        value = cast("list[Json]", value.tolist())
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, list):
        return [_finite(v) for v in cast("list[Json]", value)]
    if isinstance(value, Mapping):
        return {k: _finite(v) for k, v in cast("Mapping[str, Json]", value).items()}
    return value


def structured(value: Value) -> Json:
    """A JSON-like attribute: JSON text is parsed, an AnyValue is taken as it is. Raises ValueError on cut JSON."""
    return parse_json(value) if isinstance(value, str) else clean(value)


def read_json(attributes: Attributes, name: str, damaged: list[str]) -> Json:
    """An attribute as a JSON-like value: JSON text is parsed, other text and an AnyValue come back as they are.

    JSON text that was cut on the way is None, and its name is added to `damaged`.
    """
    value = attributes.get(name)
    if not isinstance(value, str):
        return clean(value)
    try:
        return parse_json(value)
    except ValueError:
        if not _JSON.match(value):
            return value
        damaged.append(name)
        return None


def token_ids(value: Value, name: str, *, foreign: bool = False) -> Ids:
    """Token ids of any encoding (design section 3), as int32 of shape (n,).

    bytes are packed little-endian int32, a string is base64 of those; foreign dialects may send JSON text or doubles.
    """
    if value is None:
        return _NO_IDS
    if foreign:
        value, fault = _listed(value, name)
        if fault is not None:
            return Ids(None, fault)
    if isinstance(value, str | bytes):
        packed, fault = _unpack(value, name)
        return Ids(None, fault) if packed is None else _in_range(np.frombuffer(packed, "<i4"), name)
    if isinstance(value, list):
        if any(isinstance(v, bool) or not isinstance(v, int | float) or abs(v) >= 2**62 for v in value):
            return _unusable(len(value), f"{name}: expected token ids, found {_kinds(value)}")
        value = np.asarray(value) if value else np.zeros(0, np.int64)
    if not isinstance(value, np.ndarray):
        return Ids(None, ("bad_token_id", f"{name}: expected token ids, found {type(value).__name__}"))
    if value.dtype.kind == "f":
        if not foreign or not np.all(np.isfinite(value)) or np.any(value != np.floor(value)):
            return _unusable(value.size, f"{name}: expected integers, found doubles")
        value = np.clip(value, -1, 2**31).astype(np.int64)
    return _in_range(value, name)


def _unusable(length: int, why: str) -> Ids:
    """Ids of which only the number matters: the call's tokens are counted as quarantined."""
    return Ids(np.full(length, -1, np.int32), ("bad_token_id", why))


def _in_range(ids: np.ndarray, name: str) -> Ids:
    # One pass: a negative id, or one too large, sets a bit from 31 upward.
    if ids.size and int(np.bitwise_or.reduce(ids)) >> 31:
        at = int(np.flatnonzero((ids < 0) | (ids >= 2**31))[0])
        return _unusable(ids.size, f"{name}[{at}] is {int(ids[at])}")
    return Ids(ids.astype(np.int32, copy=False))


def logprobs(value: Value, name: str, *, foreign: bool = False) -> Probs:
    """Log probabilities of any encoding, as float32 of shape (n,); a list with a null is not a list."""
    if value is None:
        return _NO_PROBS
    if foreign:
        value, fault = _listed(value, name)
        if fault is not None:
            return Probs(None, fault)
    if isinstance(value, str | bytes):
        packed, fault = _unpack(value, name)
        return Probs(None, fault) if packed is None else _probable(np.frombuffer(packed, "<f4"), name)
    if isinstance(value, list):
        if any(v is None for v in value):
            return Probs(None)
        if any(isinstance(v, bool) or not isinstance(v, int | float) for v in value):
            return Probs(None, ("nonfinite_logprob", f"{name}: expected numbers, found {_kinds(value)}"))
        value = np.asarray(value, np.float64)
    if not isinstance(value, np.ndarray):
        return Probs(None, ("nonfinite_logprob", f"{name}: expected numbers, found {type(value).__name__}"))
    return _probable(value, name)


def _probable(values: np.ndarray, name: str) -> Probs:
    # A NaN is neither below the one bound nor above the other; what float32 cannot hold would become an infinity.
    if values.size and not (np.maximum.reduce(values) <= LOGPROB_NOISE and np.minimum.reduce(values) >= _FLOAT32_MIN):
        at = int(np.flatnonzero(~((values <= LOGPROB_NOISE) & (values >= _FLOAT32_MIN)))[0])
        fault = ("nonfinite_logprob", f"{name}[{at}] is {float(values[at])}")
        return Probs(np.full(values.shape, np.nan, np.float32), fault)
    return Probs(values.astype(np.float32, copy=False))


def _listed(value: Value, name: str) -> tuple[Value, Fault | None]:
    """The list that a JSON text of one holds, as foreign dialects write arrays; any other value as it is."""
    if not isinstance(value, str) or value.lstrip()[:1] != "[":
        return value, None
    try:
        return cast("Value", parse_json(value)), None
    except ValueError as e:
        return None, ("truncated_attribute", f"{name}: JSON that does not parse ({e})")


def _unpack(value: str | bytes, name: str) -> tuple[bytes | None, Fault | None]:
    if isinstance(value, str):
        try:
            value = base64.b64decode(value, validate=True)
        except (binascii.Error, ValueError):
            return None, ("truncated_attribute", f"{name}: {len(value)} characters that are no whole base64")
    if len(value) % 4:
        return None, ("truncated_attribute", f"{name}: {len(value)} bytes are no whole number of 4-byte elements")
    return value, None


def _kinds(values: list[Value]) -> str:
    return ", ".join(sorted({type(v).__name__ for v in values}))
