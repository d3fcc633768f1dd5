"""Reading a dataset: the newest rows of each table as a polars LazyFrame."""

from itertools import groupby
from pathlib import Path

import polars as pl

from spanmill.errors import DatasetError
from spanmill.triplets.parts import (
    KEY,
    active_parts,
    file_metadata,
    part_path,
    read_footers,
    rollout_index,
    scan,
    stray_rows,
)
from spanmill.triplets.schema import EPISODES, QUARANTINE, ROLLOUTS, TABLES, TRIPLETS, TableSpec, polars_schema


def read_rollouts(path: str | Path) -> pl.LazyFrame:
    """The newest row of every rollout attempt in the dataset at `path`; columns as in `schema.ROLLOUTS`.

    As for the other tables: rows of older revisions and of rollouts that moved elsewhere are left out, filters and
    column choices reach the Parquet files, and parts come in the order in which they were written. The frame names the
    files that count now: collect it before a running `spanmill serve` has removed parts that it rewrote.

    Raises DatasetError if there is no dataset, SchemaVersionError if a newer spanmill wrote it.
    """
    return _read(Path(path), ROLLOUTS)


def read_triplets(path: str | Path) -> pl.LazyFrame:
    """The calls of the dataset, columns as in `schema.TRIPLETS`; otherwise as `read_rollouts`."""
    return _read(Path(path), TRIPLETS)


def read_episodes(path: str | Path) -> pl.LazyFrame:
    """The training sequences of the dataset, columns as in `schema.EPISODES`; otherwise as `read_rollouts`."""
    return _read(Path(path), EPISODES)


def read_quarantine(path: str | Path) -> pl.LazyFrame:
    """What was set aside, columns as in `schema.QUARANTINE`; otherwise as `read_rollouts`."""
    return _read(Path(path), QUARANTINE)


def _read(root: Path, table: TableSpec, tries: int = 5) -> pl.LazyFrame:
    if not all((root / table.name).is_dir() for table in TABLES):
        raise DatasetError(f"{root} is no dataset: expected a folder with {', '.join(t.name for t in TABLES)} in it")
    try:
        return _newest_rows(root, table)
    except FileNotFoundError as error:
        if tries == 1:
            raise DatasetError(f"{root} lacks a file, or is rewritten all the time ({error}); try again") from error
        return _read(root, table, tries - 1)


def _newest_rows(root: Path, table: TableSpec) -> pl.LazyFrame:
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


def _without(root: Path, table: TableSpec, number: int, keys: pl.LazyFrame) -> list[pl.LazyFrame]:
    """A part without the rows of some rollouts; its stray rows, at the end, belong to none and all stay."""
    path = part_path(root, table, number)
    strays = stray_rows(root, number) if table is QUARANTINE else 0
    if not strays:
        return [scan([path]).join(keys, on=KEY, how="anti", maintain_order="left")]
    end = file_metadata(path).num_rows - strays
    rows = scan([path])
    return [rows.head(end).join(keys, on=KEY, how="anti", maintain_order="left"), rows.slice(end)]
