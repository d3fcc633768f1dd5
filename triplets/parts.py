"""Where the parts of a dataset lie, which of them count, and which of their rows are the newest.

    DIR/rollouts/part-00000001.parquet      renamed last: with it part 1 is committed, in every table
    DIR/triplets/part-00000001.parquet      (episodes/ and quarantine/ likewise)
    DIR/rollouts/.part-00000002.parquet.tmp being written; no glob for *.parquet finds it
    DIR/.old/rollouts/part-00000001.parquet replaced by a part whose footer names it, removed later
    DIR/.lock                               held by the one writer
    DIR/.build-*                            what a `build` that has not ended has in between

DIR may be a prefix in an object store: there a part's objects are put in this order, whole, and none is temporary.
A part holds at most one row of `rollouts` per (rollout, attempt).
"""

import json
import re
from base64 import b64decode, b64encode
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from zlib import compress, decompress

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq

from spanmill.errors import DatasetError, SchemaVersionError
from spanmill.storage import Location, scan_options
from spanmill.triplets.schema import QUARANTINE, ROLLOUTS, SCHEMA_VERSION, TABLES, TableSpec

VERSION_KEY: Final = b"spanmill.schema_version"
REPLACES_KEY: Final = b"spanmill.replaces"
"""On the file in `rollouts`: JSON list of the parts whose newest rows this part holds."""
ORIGINS_KEY: Final = b"spanmill.origins"
"""On the file in `rollouts` of a part that replaces others: for each row the part in which it was first committed."""
STRAY_KEY: Final = b"spanmill.stray_rows"
"""On the file in `quarantine`: how many rows at its end stand under no rollout of the part."""
MOVED: Final = "moved"
LOCK_NAME: Final = ".lock"
BUILDING: Final = ".build-"
_AT_ONCE: Final = 32
"""Footers that are asked of a store together: each is a few requests that mostly wait."""

KEY: Final = ("rollout_id", "attempt")

_INDEX = {
    "rollout_id": pl.String,
    "attempt": pl.Int32,
    "revision": pl.Int32,
    "part": pl.Int64,
    "newest": pl.Boolean,
    "moved": pl.Boolean,
}
_PART = re.compile(r"part-(\d{8,})\.parquet")


@dataclass(frozen=True)
class Footer:
    """What the footer of a part's file in `rollouts` says."""

    number: int
    replaces: frozenset[int]


def part_path(root: Location, table: TableSpec, number: int) -> Location:
    """The file of a committed part in one table."""
    return root / table.name / f"part-{number:08d}.parquet"


def temporary_path(root: Path, table: TableSpec, number: int) -> Path:
    """The file of a part in one table while it is written."""
    return root / table.name / f".part-{number:08d}.parquet.tmp"


def old_path(root: Location, table: TableSpec, number: int) -> Location:
    """Where the file of a replaced part waits for its removal."""
    return root / ".old" / table.name / f"part-{number:08d}.parquet"


def is_dataset(root: Location) -> bool:
    """Whether a writer has been at work there, if only to open it."""
    if isinstance(root, Path):
        return all((root / table.name).is_dir() for table in TABLES)
    return (root / LOCK_NAME).is_file() or bool(part_numbers(root, ROLLOUTS))


def unfinished_builds(root: Location) -> int:
    """How many builds into this folder run or were cut off: then it need not hold all that it should."""
    return len(list(root.glob(f"{BUILDING}*"))) if isinstance(root, Path) else 0


def part_numbers(root: Location, table: TableSpec) -> list[int]:
    """Numbers of the parts that have a file in one table, ascending."""
    matches = (_PART.fullmatch(path.name) for path in (root / table.name).iterdir())
    return sorted(int(match[1]) for match in matches if match)


def read_footers(root: Location, after: int = 0) -> list[Footer]:
    """The committed parts, or those with a number higher than `after`, ascending, those that were replaced included.

    A listing may miss both a part that is moved away meanwhile and the later one that replaces it: then that one is in
    the next listing.

    Raises SchemaVersionError if one was written by a newer spanmill, DatasetError if one is no part of a dataset,
    FileNotFoundError if one was replaced meanwhile.
    """
    listed = part_numbers(root, ROLLOUTS)
    while (again := part_numbers(root, ROLLOUTS))[-1:] != listed[-1:]:
        listed = again
    wanted = [(part_path(root, ROLLOUTS, number), number) for number in listed if number > after]
    if isinstance(root, Path):
        return [_read_footer(*one) for one in wanted]
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        return list(pool.map(_read_footer, *zip(*wanted, strict=True))) if wanted else []


def open_parquet(path: Location) -> pq.ParquetFile:
    """A Parquet file, with no guesses about what `=` in its path might mean."""
    return pq.ParquetFile(path) if isinstance(path, Path) else pq.ParquetFile(path.random(), pre_buffer=True)


def file_metadata(path: Location) -> pq.FileMetaData:
    """The footer of a Parquet file; raises DatasetError if it has none."""
    try:
        return pq.read_metadata(path) if isinstance(path, Path) else open_parquet(path).metadata
    except pa.ArrowInvalid as error:
        raise DatasetError(f"{path} is no whole Parquet file ({error}); move it away") from error


def _key_values(path: Location) -> dict[bytes, bytes]:
    return file_metadata(path).metadata or {}


def _read_footer(path: Location, number: int) -> Footer:
    metadata = _key_values(path)
    version = metadata.get(VERSION_KEY, b"").decode()
    if not version.isdecimal():
        raise DatasetError(f"{path} was not written by spanmill: it has no {VERSION_KEY.decode()}")
    if int(version) > int(SCHEMA_VERSION):
        raise SchemaVersionError(
            f"{path} has schema version {version}, this spanmill understands up to {SCHEMA_VERSION}; upgrade spanmill"
        )
    return Footer(number, frozenset(json.loads(metadata.get(REPLACES_KEY, b"[]"))))


def active_parts(footers: Sequence[Footer]) -> list[int]:
    """The parts that count, ascending: committed, and not replaced by a later one."""
    replaced = frozenset[int]().union(*(footer.replaces for footer in footers))
    return [footer.number for footer in footers if footer.number not in replaced]


def stray_rows(root: Location, number: int) -> int:
    """How many rows at the end of a part's file in `quarantine` stand under no rollout of the part."""
    return int(_key_values(part_path(root, QUARANTINE, number)).get(STRAY_KEY, b"0"))


def origins_of(root: Location, number: int) -> list[int]:
    """For each row of a part's file in `rollouts`, the part in which it was first committed."""
    path = part_path(root, ROLLOUTS, number)
    packed = _key_values(path).get(ORIGINS_KEY)
    if packed is None:
        return [number] * file_metadata(path).num_rows
    return np.frombuffer(decompress(b64decode(packed)), "<u4").tolist()


def packed_origins(origins: Sequence[int]) -> bytes:
    """What stands under ORIGINS_KEY: little-endian uint32, compressed, as text."""
    return b64encode(compress(np.array(origins, "<u4").tobytes()))


def scan(paths: Sequence[Location], path_column: str | None = None) -> pl.LazyFrame:
    """A lazy scan of Parquet files, all in folders or all in one store, whatever characters their paths contain."""
    return pl.scan_parquet(
        [str(path) for path in paths],
        glob=False,
        hive_partitioning=False,
        include_file_paths=path_column,
        **scan_options(paths[0]),
    )


def rollout_index(root: Location, parts: Sequence[int]) -> pl.DataFrame:
    """A row per rollout row of `parts`, in their order: rollout_id, attempt, revision, part, newest, moved.

    `newest` holds for the highest revision of a (rollout, attempt), and among equal revisions for the last part;
    `moved` for a newest row which says that the rollout's rows stand under another rollout now.
    """
    if not parts:
        return pl.DataFrame(schema=_INDEX)
    rows = scan([part_path(root, ROLLOUTS, number) for number in parts], "path").select(
        *KEY,
        "revision",
        pl.col("path").str.extract(_PART.pattern + "$").cast(pl.Int64).alias("part"),
        ((pl.col("num_calls") == 0) & pl.col("flags").list.contains(MOVED)).alias("moved"),
    )
    # One number of both: a window over structs would take 100 times as long.
    rank = pl.col("revision").cast(pl.Int64) * 2**32 + pl.col("part")
    newest = rank == rank.max().over(KEY)
    return rows.collect().with_columns(newest.alias("newest"), moved=pl.col("moved") & newest).select(list(_INDEX))
