"""Rewards that come by HTTP: what a sender may post, and how they stand in the journal (JSON lines)."""

import json
from collections.abc import Sequence
from typing import Any, Final, cast

from spanmill.errors import DecodeError
from spanmill.triplets.records import Json, Reward

_FIELDS: Final = ("rollout_id", "value", "attempt", "call_id", "name", "source")
_SOURCES: Final = ("http", "cli")
_MOST_ATTEMPTS: Final = 1 << 31


def parse(body: bytes, received_ns: int) -> list[Reward]:
    """The rewards of a posted JSON body: one object, a list of them, or {"rewards": [...]}.

    An object has `rollout_id` and `value` (a number or boolean; NaN and infinity pass, they are quarantined later). It
    may have `attempt`, `call_id`, `name` and `source` (http or cli). Raises DecodeError naming the first wrong field.
    """
    try:
        found: Json = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise DecodeError(f"the body is no JSON: {error}") from error
    if isinstance(found, dict) and "rewards" in found:
        for key in cast("dict[str, Json]", found):
            if key != "rewards":
                raise DecodeError(f"unknown field {key!r} beside rewards")
        found = cast("Json", found["rewards"])
        if not isinstance(found, list):
            raise DecodeError("rewards: expected a list of objects")
    if isinstance(found, list):
        return [_reward(item, f"rewards[{i}]", received_ns) for i, item in enumerate(cast("list[Json]", found))]
    return [_reward(found, "", received_ns)]


def encode(rewards: Sequence[Reward]) -> bytes:
    """The body of a journal record of kind REWARDS: a line of JSON each, keys sorted, absent fields left out."""
    lines: list[str] = []
    for reward in rewards:
        fields = {name: getattr(reward, name) for name in (*_FIELDS, "received_ns")}
        present = {name: value for name, value in fields.items() if value is not None}
        lines.append(json.dumps(present, sort_keys=True, separators=(",", ":")))
    return "".join(f"{line}\n" for line in lines).encode()


def decode(body: bytes) -> list[Reward]:
    """The rewards of a journal record of kind REWARDS. DecodeError if it is none."""
    try:
        return [Reward(**json.loads(line)) for line in body.splitlines()]
    except (ValueError, TypeError) as error:
        raise DecodeError(f"a journal record of rewards does not parse: {error}") from error


def _reward(item: Json, where: str, received_ns: int) -> Reward:
    if not isinstance(item, dict):
        raise DecodeError(f"{where or 'the body'}: expected an object with rollout_id and value")
    fields = cast("dict[str, Any]", item)
    prefix = f"{where}." if where else ""
    for key in fields:
        if key not in _FIELDS:
            raise DecodeError(f"{prefix}{key}: unknown field; known are {', '.join(_FIELDS)}")
    return Reward(
        rollout_id=_text(fields, "rollout_id", prefix, required=True),
        value=_number(fields, prefix),
        attempt=_attempt(fields, prefix),
        call_id=_text(fields, "call_id", prefix) or None,
        name=_text(fields, "name", prefix),
        source=_source(fields, prefix),
        received_ns=received_ns,
    )


def _text(fields: dict[str, Any], name: str, prefix: str, *, required: bool = False) -> str:
    value = fields.get(name)
    if value is None and not required:
        return ""
    if not isinstance(value, str) or (required and not value):
        raise DecodeError(f"{prefix}{name}: expected a {'non-empty ' if required else ''}string, found {_shown(value)}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise DecodeError(f"{prefix}{name}: half of a surrogate pair is no text") from error
    return value


def _number(fields: dict[str, Any], prefix: str) -> float:
    value = fields.get("value")
    if not isinstance(value, int | float):
        raise DecodeError(f"{prefix}value: expected a number or boolean, found {_shown(value)}")
    try:
        return float(value)
    except OverflowError as error:
        raise DecodeError(f"{prefix}value: a whole number beyond the range of a double") from error


def _attempt(fields: dict[str, Any], prefix: str) -> int | None:
    value = fields.get("attempt")
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < _MOST_ATTEMPTS:
        raise DecodeError(f"{prefix}attempt: expected a whole number from 0, found {_shown(value)}")
    return value


def _source(fields: dict[str, Any], prefix: str) -> str:
    value = fields.get("source", "http")
    if value not in _SOURCES:
        raise DecodeError(f"{prefix}source: expected one of {', '.join(_SOURCES)}, found {_shown(value)}")
    return value


def _shown(value: Json) -> str:
    return "nothing" if value is None else json.dumps(value)[:100]
