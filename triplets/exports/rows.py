"""Reading what is selected, part by part and in whole rollouts: memory does not depend on the dataset's size."""

from collections.abc import Iterator, Sequence
from typing import Any, Final

import polars as pl
import pyarrow as pa
import pyarrow.compute as pc

from spanmill.errors import DatasetError
from spanmill.storage import Location
from spanmill.triplets.parts import KEY, old_path, open_parquet, part_path
from spanmill.triplets.schema import TableSpec

BATCH_BYTES: Final = 16 << 20
"""Of rows that are read at a time, about; what is made of them takes some ten times that. A rollout may be larger."""


def batches(
    root: Location, table: TableSpec, wanted: pl.DataFrame, on: Sequence[str], columns: Sequence[str]
) -> Iterator[Any]:
    """The wanted rows of a table, as Arrow tables of whole rollouts.

    `wanted` has the columns `part`, `on` and more, which are appended to the rows; a rollout's rows come in the order
    that it has them in. Raises DatasetError if a part was removed meanwhile.
    """
    for (number,), part in sorted(wanted.partition_by("part", as_dict=True).items()):
        extra = part.drop("part").with_row_index("place")
        file = _open(root, table, int(str(number)))
        for rows in _whole_rollouts(file, columns):
            yield from _picked(rows, extra, on)


def _open(root: Location, table: TableSpec, number: int) -> Any:
    """A part's file, also after a running `spanmill serve` has moved it away."""
    for path in (part_path(root, table, number), old_path(root, table, number)):
        try:
            return open_parquet(path)
        except FileNotFoundError:
            continue
    raise DatasetError(f"part {number} of {root} was rewritten meanwhile; export again")


def _whole_rollouts(file: Any, columns: Sequence[str]) -> Iterator[Any]:
    groups = [file.metadata.row_group(i) for i in range(file.metadata.num_row_groups)]
    size = max(1, sum(group.total_byte_size for group in groups))
    left = file.metadata.num_rows
    rest: Any = None
    for batch in file.iter_batches(max(1, file.metadata.num_rows * BATCH_BYTES // size), columns=list(columns)):
        rows = pa.Table.from_batches([batch])
        left -= rows.num_rows
        rows = rows if rest is None else pa.concat_tables([rest, rows])
        end = _last_rollout(rows) if left else rows.num_rows
        if end:
            yield rows.slice(0, end)
        rest = rows.slice(end)


def _last_rollout(rows: Any) -> int:
    """Where the rows of the last rollout begin."""
    if not rows.num_rows:
        return 0
    last = [pc.equal(rows.column(name), rows.column(name)[-1]) for name in KEY]
    others = pc.invert(pc.and_(*last)).to_numpy()
    return int(others.nonzero()[0][-1]) + 1 if others.any() else 0


def _picked(rows: Any, extra: pl.DataFrame, on: Sequence[str]) -> Iterator[Any]:
    found = pl.DataFrame(rows.select(list(on))).with_row_index("row").join(extra, on=on, how="inner")
    if found.is_empty():
        return
    found = found.sort("place")
    taken = rows.take(pa.array(found["row"].to_numpy()))
    for name in extra.columns:
        if name not in on and name != "place":
            column = found[name].to_arrow()
            taken = taken.append_column(
                name, column.cast(pa.string()) if pa.types.is_large_string(column.type) else column
            )
    yield taken.combine_chunks()
