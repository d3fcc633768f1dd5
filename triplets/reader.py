"""Reading a dataset: the newest rows of each table as a polars LazyFrame."""

from collections.abc import Callable
from itertools import groupby
from typing import TypeVar

import polars as pl

from spanmill.errors import DatasetError
from spanmill.storage import Location, Where, locate
from spanmill.triplets.parts import (
    KEY,
    MOVED,
    active_parts,
    file_metadata,
    is_dataset,
    part_path,
    read_footers,
    rollout_index,
    scan,
    stray_rows,
)
from spanmill.triplets.schema import EPISODES, QUARANTINE, ROLLOUTS, TABLES, TRIPLETS, TableSpec, polars_schema

_T = TypeVar("_T")


def read_rollouts(path: Where) -> pl.LazyFrame:
    """The newest row of every rollout attempt in the dataset at `path`; columns as in `schema.ROLLOUTS`.

    As for the other tables: rows of older revisions and of rollouts that moved elsewhere are left out, filters and
    column choices reach the Parquet files, and parts come in the order in which they were written. The frame names the
    files that count now: collect it before a running `spanmill serve` has removed parts that it rewrote.

    `path` is a folder, or a URL in an object store, as text: `s3://BUCKET/data`, `gs://BUCKET/data`.

    Raises DatasetError if there is no dataset, SchemaVersionError if a newer spanmill wrote it.
    """
    return _read(locate(path), ROLLOUTS)


def read_triplets(path: Where) -> pl.LazyFrame:
    """The calls of the dataset, columns as in `schema.TRIPLETS`; otherwise as `read_rollouts`."""
    return _read(locate(path), TRIPLETS)


def read_episodes(path: Where) -> pl.LazyFrame:
    """The training sequences of the dataset, columns as in `schema.EPISODES`; otherwise as `read_rollouts`."""
    return _read(locate(path), EPISODES)


def read_quarantine(path: Where) -> pl.LazyFrame:
    """What was set aside, columns as in `schema.QUARANTINE`; otherwise as `read_rollouts`."""
    return _read(locate(path), QUARANTINE)


def read_rollout(path: Where, rollout_id: str, attempt: int) -> dict[str, pl.DataFrame]:
    """The newest rows of one rollout attempt by table name, in the order of writing; all empty if it is not there.

    Reads only the pages that hold them: the way to look at one rollout of a large dataset. Raises as `read_rollouts`.
    """
    return _tried(locate(path), lambda root: _one_rollout(root, rollout_id, attempt))


def _read(root: Location, table: TableSpec) -> pl.LazyFrame:
    return _tried(root, lambda root: _newest_rows(root, table))


def _tried(root: Location, read: Callable[[Location], _T], tries: int = 5) -> _T:
    """What `read` finds; again, where a part was replaced between listing and reading it."""
    if not is_dataset(root):
        raise DatasetError(f"{root} is no dataset: expected a folder with {', '.join(t.name for t in TABLES)} in it")
    try:
        return read(root)
    except FileNotFoundError as error:
        if tries == 1:
            raise DatasetError(f"{root} lacks a file, or is rewritten all the time ({error}); try again") from error
        return _tried(root, read, tries - 1)


def _one_rollout(root: Location, rollout_id: str, attempt: int) -> dict[str, pl.DataFrame]:
    own = (pl.col("rollout_id") == rollout_id) & (pl.col("attempt") == attempt)
    found: dict[str, pl.DataFrame] = {table.name: pl.DataFrame(schema=polars_schema(table)) for table in TABLES}
    parts = active_parts(read_footers(root))
    paths = [part_path(root, ROLLOUTS, number) for number in parts]
    if not paths:
        return found
    revisions = scan(paths, "path").filter(own).select("revision", "path", "num_calls", "flags").collect()
    if revisions.is_empty():
        return found
    newest = revisions.with_row_index().sort("revision", "index").row(-1, named=True)
    if newest["num_calls"] == 0 and MOVED in newest["flags"]:
        return found
    number = parts[[str(path) for path in paths].index(newest["path"])]
    for table in (ROLLOUTS, TRIPLETS, EPISODES):
        rows = scan([part_path(root, table, number)])
        at = rows.select(own.arg_true()).collect().to_series()
        if len(at):
            first, last = at[0], at[-1]
            found[table.name] = rows.slice(first, last - first + 1).collect().filter(own)
    # What came too late for its rollout stands in a part of its own.
    found[QUARANTINE.name] = _newest_rows(root, QUARANTINE).filter(own).collect()
    return found


def _newest_rows(root: Location, table: TableSpec) -> pl.LazyFrame:
    """Raises FileNotFoundError if a part was replaced between listing and reading it."""
    parts = active_parts(read_footers(root))
    index = rollout_index(root, parts)
    gone = index.filter(~pl.col("newest") | pl.col("moved"))
    unclean = set(gone.get_column("part").to_list())
    frames: list[pl.LazyFrame] = []
    for clean, run in groupby(parts, lambda number: number not in unclean):
        if clean:
            frames.append(scan([part_path(root, table, number) for number in run]))
            continue
        for number in run:
            frames += _without(root, table, number, gone.filter(pl.col("part") == number).select(KEY).lazy())
    return pl.concat(frames) if frames else pl.LazyFrame(schema=polars_schema(table))


def _without(root: Location, table: TableSpec, number: int, keys: pl.LazyFrame) -> list[pl.LazyFrame]:
    """A part without the rows of some rollouts; its stray rows, at the end, belong to none and all stay."""
    path = part_path(root, table, number)
    strays = stray_rows(root, number) if table is QUARANTINE else 0
    if not strays:
        return [scan([path]).join(keys, on=KEY, how="anti", maintain_order="left")]
    end = file_metadata(path).num_rows - strays
    rows = scan([path])
    return [rows.head(end).join(keys, on=KEY, how="anti", maintain_order="left"), rows.slice(end)]
