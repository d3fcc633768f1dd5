"""Records into Arrow tables: token ids go from numpy to Arrow as offsets and values, never through a Python list."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from operator import attrgetter
from typing import Any, Final, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from spanmill.triplets.records import Quarantined, Rollout
from spanmill.triplets.schema import (
    EPISODES,
    LOGPROBS,
    MASK,
    QUARANTINE,
    ROLLOUTS,
    STRINGS,
    TABLES,
    TOKEN_IDS,
    TRIPLETS,
    TableSpec,
    arrow_schema,
)

NOT_CONTENT: Final = ("revision", "closed_by", "received_at")
"""Columns that depend on when spans came, so rows that differ only in them (or in the flag below) are the same rows."""
LATE: Final = "late"

STRAY_ORDER: Final = [
    (name, "ascending") for name in ("rollout_id", "attempt", "trace_id", "span_id", "reason", "detail", "span")
]

_NUMBERS = {TOKEN_IDS: np.int32, LOGPROBS: np.float32, MASK: np.int8}


def rows_to_tables(rollouts: Sequence[Rollout], stray: Sequence[Quarantined] = ()) -> dict[str, pa.Table]:
    """The rows of all four tables, by table name, in the order given; `stray` comes last in `quarantine`.

    `stray` is what stands under none of the rollouts; it is put in an order of its content, not of its arrival.
    Raises ValueError if a row names another rollout, attempt or revision than the rollout it stands under, and
    pyarrow's ArrowInvalid, OverflowError or TypeError if a value does not fit its column.
    """
    for rollout in rollouts:
        _check_keys(rollout)
    quarantined = [row for rollout in rollouts for row in rollout.quarantined]
    strays = _table(QUARANTINE, stray).sort_by(STRAY_ORDER)
    return {
        "rollouts": _table(ROLLOUTS, rollouts),
        "triplets": _table(TRIPLETS, [row for rollout in rollouts for row in rollout.triplets]),
        "episodes": _table(EPISODES, [row for rollout in rollouts for row in rollout.episodes]),
        "quarantine": pa.concat_tables([_table(QUARANTINE, quarantined), strays]),
    }


def same_content(rollout: Rollout, committed: Mapping[str, pa.Table]) -> bool:
    """Whether `rollout` makes the rows in `committed` (its rows by table name), whenever its spans came.

    Every value counts, floats exactly, but for the columns `revision`, `closed_by`, `received_at` and the flag `late`.
    """
    fresh = rows_to_tables([rollout])
    return all(_content(fresh[spec.name]).equals(_content(committed[spec.name])) for spec in TABLES)


def _content(table: pa.Table) -> pa.Table:
    kept = table.select([name for name in table.column_names if name not in NOT_CONTENT])
    if "flags" in kept.column_names:
        flags = [[flag for flag in row if flag != LATE] for row in kept.column("flags").to_pylist()]
        at = kept.schema.get_field_index("flags")
        kept = kept.set_column(at, kept.schema.field(at), pa.array(flags, STRINGS))
    return kept.replace_schema_metadata().combine_chunks()


def _check_keys(rollout: Rollout) -> None:
    key = (rollout.rollout_id, rollout.attempt, rollout.revision)
    for row in chain(rollout.triplets, rollout.episodes):
        if (row.rollout_id, row.attempt, row.revision) != key:
            raise ValueError(f"a row of {(row.rollout_id, row.attempt, row.revision)} stands under the rollout {key}")
    for row in rollout.quarantined:
        if (row.rollout_id, row.attempt) != key[:2]:
            raise ValueError(f"a quarantined row of {(row.rollout_id, row.attempt)} stands under the rollout {key}")


def _table(spec: TableSpec, rows: Sequence[Any]) -> pa.Table:
    schema = arrow_schema(spec)
    columns = [_column(field.type, list(map(attrgetter(field.name), rows))) for field in schema]
    return pa.Table.from_arrays(columns, schema=schema)


def _column(kind: pa.DataType, values: list[Any]) -> pa.Array:
    """The values of one column; which way they go depends on the Arrow type alone."""
    if kind in _NUMBERS:
        return _number_lists(kind, values)
    if pa.types.is_list(kind) and pa.types.is_struct(kind.value_type):
        return _struct_lists(kind, values)
    return _plain(kind, values)


def _number_lists(kind: pa.DataType, arrays: list[npt.NDArray[Any] | None]) -> pa.Array:
    """Numpy arrays as a list column; None is a null list, not an empty one."""
    dtype = _NUMBERS[kind]
    present = [a for a in arrays if a is not None]
    values = np.concatenate([np.empty(0, dtype), *present], dtype=dtype, casting="safe")
    return pa.ListArray.from_arrays(
        _offsets(0 if a is None else len(a) for a in arrays),
        pa.array(values),
        type=kind,
        mask=pa.array([a is None for a in arrays], pa.bool_()),
    )


def _struct_lists(kind: pa.DataType, rows: list[Sequence[Any]]) -> pa.Array:
    """Tuples of records (policy runs, turns, rewards) as a list column of structs."""
    elements = [element for row in rows for element in row]
    fields = list(kind.value_type)
    columns = [_plain(field.type, list(map(attrgetter(field.name), elements))) for field in fields]
    structs = pa.StructArray.from_arrays(columns, fields=fields)
    return pa.ListArray.from_arrays(_offsets(map(len, rows)), structs, type=kind)


def _offsets(lengths: Iterable[int]) -> pa.Array:
    """List offsets; a batch of more than 2^31 elements is refused, never wrapped."""
    ends = np.cumsum(np.fromiter(lengths, np.int64))
    return pa.array(np.concatenate([np.zeros(1, np.int64), ends])).cast(pa.int32())


def _plain(kind: pa.DataType, values: list[Any]) -> pa.Array:
    try:
        return pa.array(values, kind)
    except UnicodeEncodeError:
        return pa.array(list(map(_encodable, values)), kind)


def _encodable(value: Any) -> Any:
    """JSON can spell half a surrogate pair, UTF-8 cannot: pairs are joined, halves become U+FFFD."""
    if isinstance(value, tuple):
        return tuple(map(_encodable, cast(tuple[Any, ...], value)))
    return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace") if isinstance(value, str) else value
