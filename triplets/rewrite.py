"""Which parts to rewrite into a larger one, and what rows it then holds."""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np
import pyarrow as pa

from spanmill.triplets.table import STRAY_ORDER

Key: TypeAlias = tuple[str, int]
"""(rollout_id, attempt)"""

FAN: Final = 8
"""Parts of about equal size (within this factor) wait until there are so many of them: so each row is rewritten
log8(parts) times at most, and the small files that stand around stay few."""
_SMALLEST: Final = 64 << 10


@dataclass(frozen=True)
class Part:
    """What the choice of parts goes by."""

    number: int
    size: int
    """Uncompressed bytes over all tables."""
    dirty: bool
    """Holds rows that are to go: superseded ones, or those of a rollout that moved away."""


def choose_parts(parts: Sequence[Part], max_bytes: int) -> list[int]:
    """The parts (ascending) to be rewritten into one of about `max_bytes`; none if all is well as it is.

    Dirty parts first, the oldest first: so when the last row of a moved rollout goes, the older rows that it hides, all
    in earlier parts, have gone before or go with it.
    """
    dirty = _fill([part for part in parts if part.dirty], max_bytes)
    if dirty:
        return dirty
    tiers: dict[int, list[Part]] = {}
    for part in parts:
        if part.size * 2 <= max_bytes:
            tiers.setdefault(int(math.log(max(part.size, _SMALLEST), FAN)), []).append(part)
    full = [tier for _, tier in sorted(tiers.items()) if len(tier) >= FAN]
    return _fill(full[0], max_bytes) if full else []


def _fill(parts: Sequence[Part], max_bytes: int) -> list[int]:
    """As many of the first parts as fit, at least one."""
    ends = np.cumsum([part.size for part in parts])
    return [part.number for part, end in zip(parts, ends, strict=True) if end <= max_bytes or part is parts[0]]


def merge_rows(tables: Sequence[pa.Table], dropped: Sequence[Collection[Key]]) -> pa.Table:
    """The rows of several parts of one table, without the keys dropped from each, by (rollout_id, attempt)."""
    kept = pa.concat_tables([drop_keys(table, keys) for table, keys in zip(tables, dropped, strict=True)])
    if len(tables) == 1:
        return kept
    row = pa.array(np.arange(kept.num_rows))
    order = kept.select(["rollout_id", "attempt"]).append_column("row", row)
    return kept.take(order.sort_by([(name, "ascending") for name in order.column_names]).column("row"))


def merge_strays(tables: Sequence[pa.Table]) -> pa.Table:
    """The stray quarantine rows of several parts, in the order of their content."""
    return pa.concat_tables(tables).sort_by(STRAY_ORDER)


def drop_keys(table: pa.Table, keys: Collection[Key]) -> pa.Table:
    """The rows whose (rollout_id, attempt) is not among `keys`."""
    if not keys:
        return table
    return table.filter(pa.array([key not in keys for key in row_keys(table)], pa.bool_()))


def split_by_key(table: pa.Table, keys: Collection[Key]) -> Mapping[Key, pa.Table]:
    """The rows of each of `keys`, in their order; a key without rows has an empty table."""
    rows: dict[Key, list[int]] = {key: [] for key in keys}
    for row, key in enumerate(row_keys(table)):
        if key in rows:
            rows[key].append(row)
    return {key: table.take(pa.array(at, pa.int64())) for key, at in rows.items()}


def row_keys(table: pa.Table) -> list[Key]:
    """(rollout_id, attempt) of every row."""
    return list(zip(table.column("rollout_id").to_pylist(), table.column("attempt").to_pylist(), strict=True))
