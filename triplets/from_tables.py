"""The reverse of `table.py`: a rollout's rows as records again."""

from collections.abc import Mapping
from dataclasses import fields
from datetime import UTC, datetime, timedelta
from typing import Any, Final, TypeVar

import pyarrow as pa

from spanmill.triplets.records import Episode, PolicyRun, Quarantined, RewardSeen, Rollout, Triplet, Turn
from spanmill.triplets.schema import LOGPROBS, MASK, TOKEN_IDS

T = TypeVar("T")

_STRUCTS: Final[Mapping[str, Any]] = {"rewards": RewardSeen, "policy_versions": PolicyRun, "turns": Turn}
_TUPLES: Final = ("flags", "step_rewards")


def rollout_from_tables(rows: Mapping[str, pa.Table]) -> Rollout:
    """The rollout whose rows, by table name, these are: `rows_to_tables` makes the same of it."""
    (rollout,) = _records(Rollout, rows["rollouts"])
    rollout.triplets = _records(Triplet, rows["triplets"])
    rollout.episodes = _records(Episode, rows["episodes"])
    rollout.quarantined = _records(Quarantined, rows["quarantine"])
    return rollout


def _records(cls: type[T], table: pa.Table) -> list[T]:
    known = {field.name for field in fields(cls)}  # pyright: ignore[reportArgumentType]
    columns = {name: _values(name, table.column(name)) for name in table.column_names if name in known}
    return [cls(**dict(zip(columns, row, strict=True))) for row in zip(*columns.values(), strict=True)]


def _values(name: str, column: pa.ChunkedArray) -> list[Any]:
    if column.type in (TOKEN_IDS, LOGPROBS, MASK):
        return [row.values.to_numpy() if row.is_valid else None for row in column]
    values: list[Any] = column.to_pylist()
    if name in _STRUCTS:
        return [tuple(_STRUCTS[name](**element) for element in row) for row in values]
    if name in _TUPLES:
        return [tuple(row) for row in values]
    if pa.types.is_timestamp(column.type):
        return [None if at is None else _microseconds(at) for at in values]
    return values


def _microseconds(time: datetime) -> int:
    return (time - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(microseconds=1)
