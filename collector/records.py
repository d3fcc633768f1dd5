"""Finished rollouts by the prefix of their ids, and handing them over once: the dataset as a store for schedulers.

    DIR/.records/drains.sqlite              which drains there are, which revision of each rollout was handed over
    DIR/.records/<drain>/episodes.arrow     what a drain hands over (rollouts and triplets likewise), until acknowledged

For a dataset in an object store they lie beside the journal. Every process that serves the dataset may hand over: what
is known stands in these files. A drain is made, files first, in one transaction; until it is acknowledged, asking again
for its prefix gives the same drain, byte for byte.
"""

import json
import os
import secrets
import shutil
import sqlite3
from collections.abc import Collection, Generator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple

import polars as pl
import pyarrow as pa

from spanmill.collector.index_file import is_flushed, open_rollouts, prefix_bounds
from spanmill.collector.journal import Position
from spanmill.errors import DatasetError
from spanmill.storage import Location, sync
from spanmill.triplets.parquet import read_file
from spanmill.triplets.parts import KEY, active_parts, part_path, read_footers, rollout_index
from spanmill.triplets.reader import read_episodes, read_rollouts, read_triplets
from spanmill.triplets.schema import EPISODES, ROLLOUTS, TRIPLETS, TableSpec, arrow_schema

HANDED: Final = (ROLLOUTS, TRIPLETS, EPISODES)
MOST_NAMED: Final = 1000
"""Open rollouts that an answer names."""
BUSY_S: Final = 60.0
"""How long one drain waits for another to be made."""
TRIES: Final = 5
_TABLES: Final = """
CREATE TABLE IF NOT EXISTS drains (id TEXT PRIMARY KEY, prefix TEXT, rollouts INTEGER, acknowledged INTEGER);
CREATE TABLE IF NOT EXISTS handed (rollout_id TEXT, attempt INTEGER, revision INTEGER, drain TEXT,
    PRIMARY KEY (rollout_id, attempt)) WITHOUT ROWID;
"""
_HANDED: Final = "SELECT rollout_id, attempt, revision FROM handed WHERE rollout_id >= ? AND rollout_id < ?"


class Drain(NamedTuple):
    """What was handed over under one id."""

    id: str
    prefix: str
    rollouts: int
    """How many rows of `rollouts`."""
    again: bool = False
    """It was handed over before and not acknowledged."""


class Records:
    """The dataset at `out` whose journal has its index at `index`."""

    def __init__(self, out: Location, index: Path) -> None:
        self._out = out
        self._index = index
        self._folder = (out if isinstance(out, Path) else index.parent) / ".records"

    def listed(self, prefix: str, after: str, most: int) -> list[dict[str, Any]]:
        """At most `most` attempts with ids that begin with `prefix`, by id, those after the id `after`.

        `state` is open (spans came, no rows yet), ready (rows that nobody was handed), revised (a newer revision than
        the one handed over), handed (not acknowledged) or drained.
        """
        rows = _with_prefix(read_rollouts(self._out), prefix).filter(pl.col("rollout_id") > after)
        shown = (
            rows.select(*KEY, "revision", "status", "reward", "num_episodes", "flags").sort(KEY).head(most).collect()
        )
        found = shown.to_dicts()
        with self._db() as db:
            for row in found:
                row["state"] = _state(db, row)
        written = {row["rollout_id"] for row in found}
        last = found[-1]["rollout_id"] if len(found) == most else None
        for name in open_rollouts(self._index, prefix, after, most):
            if name not in written and (last is None or name < last):
                found.append({"rollout_id": name, "state": "open"})
        return sorted(found, key=lambda row: (row["rollout_id"], row.get("attempt", 0)))[:most]

    def rollout(self, rollout_id: str, attempt: int | None) -> dict[str, Any] | None:
        """The rows of an attempt (None: the highest), by table; `rollouts` is one row. None if there are none."""
        mine = pl.col("rollout_id") == rollout_id
        rows = read_rollouts(self._out).filter(mine).sort("attempt").collect().to_dicts()
        rows = [row for row in rows if attempt in (None, row["attempt"])]
        if not rows:
            return None
        mine &= pl.col("attempt") == rows[-1]["attempt"]
        triplets = read_triplets(self._out).filter(mine).collect().to_dicts()
        episodes = read_episodes(self._out).filter(mine).collect().to_dicts()
        return {"rollouts": rows[-1], "triplets": triplets, "episodes": episodes}

    def call_ids(self, rollout_id: str, attempt: int) -> set[str]:
        """The ids of an attempt's calls."""
        mine = (pl.col("rollout_id") == rollout_id) & (pl.col("attempt") == attempt)
        return set(read_triplets(self._out).filter(mine).select("call_id").collect()["call_id"])

    def flushed(self, flush: Position, prefix: str) -> bool:
        """Whether all is written that was open under a prefix when the flush at this position came."""
        return is_flushed(self._index, flush, prefix)

    def still_open(self, prefix: str) -> list[str]:
        """Rollouts with the prefix of which spans came and no rows are written yet, MOST_NAMED at most."""
        found = open_rollouts(self._index, prefix, "", MOST_NAMED)
        written = _with_prefix(read_rollouts(self._out), prefix).select("rollout_id").collect()["rollout_id"]
        return sorted(set(found) - set(written)) if found else []

    def drain(self, prefix: str) -> Drain | None:
        """Hand over the newest rows of all finished rollouts with `prefix` that were not handed over at that revision.

        A drain of the same prefix that was not acknowledged is handed over again, as it was. None if there is nothing.
        """
        with self._db() as db, _transaction(db):
            waiting = db.execute(
                "SELECT id, prefix, rollouts FROM drains WHERE prefix = ? AND NOT acknowledged", (prefix,)
            ).fetchone()
            if waiting:
                return Drain(*waiting, again=True)
            self._tidy(db)
            handed = {
                (name, attempt): revision for name, attempt, revision in db.execute(_HANDED, prefix_bounds(prefix))
            }
            drain = secrets.token_hex(8)
            rows = self._write(drain, prefix, handed)
            if not rows:
                return None
            db.execute("INSERT INTO drains VALUES (?, ?, ?, 0)", (drain, prefix, len(rows)))
            db.executemany("INSERT OR REPLACE INTO handed VALUES (?, ?, ?, ?)", [(*row, drain) for row in rows])
        return Drain(drain, prefix, len(rows))

    def waiting(self, prefix: str = "") -> list[Drain]:
        """Drains that were not acknowledged and may hold rollouts with the prefix."""
        with self._db() as db:
            rows = db.execute(
                "SELECT id, prefix, rollouts FROM drains WHERE NOT acknowledged ORDER BY prefix"
            ).fetchall()
        found = [Drain(*row, again=True) for row in rows]
        return [one for one in found if one.prefix.startswith(prefix) or prefix.startswith(one.prefix)]

    def file(self, drain: str, table: str) -> Path | None:
        """The Arrow stream of one of a drain's tables; None if there is none, or it was acknowledged."""
        with self._db() as db:
            known = db.execute("SELECT 1 FROM drains WHERE id = ? AND NOT acknowledged", (drain,)).fetchone()
        return self._folder / drain / f"{table}.arrow" if known and table in {spec.name for spec in HANDED} else None

    def acknowledge(self, drain: str) -> int | None:
        """Note that a drain has arrived, as often as that is said; how many rollouts, None for an unknown drain."""
        with self._db() as db, _transaction(db):
            row = db.execute("SELECT rollouts FROM drains WHERE id = ?", (drain,)).fetchone()
            db.execute("UPDATE drains SET acknowledged = 1 WHERE id = ?", (drain,))
        if row:
            shutil.rmtree(self._folder / drain, ignore_errors=True)
        return row[0] if row else None

    def _write(self, drain: str, prefix: str, handed: dict[tuple[str, int], int]) -> list[tuple[str, int, int]]:
        """Write a drain's files; (rollout_id, attempt, revision) of what is in it."""
        for _ in range(TRIES):
            folder = self._folder / f"{drain}.tmp"
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            try:
                rows = self._written(folder, prefix, handed)
            except FileNotFoundError:
                continue  # a part was rewritten meanwhile
            if rows:
                sync(folder)
                os.replace(folder, self._folder / drain)
                sync(self._folder)
            return rows
        raise DatasetError(f"{self._out} is rewritten all the time; try again")

    def _written(self, folder: Path, prefix: str, handed: dict[tuple[str, int], int]) -> list[tuple[str, int, int]]:
        index = rollout_index(self._out, active_parts(read_footers(self._out)))
        index = index.filter(pl.col("rollout_id").str.starts_with(prefix) & pl.col("newest"))
        # A rollout that moved elsewhere is taken back from those who were handed it, and nobody else needs it.
        chosen = [
            row
            for row in index.to_dicts()
            if handed.get((row["rollout_id"], row["attempt"]), -1) < row["revision"]
            and (not row["moved"] or (row["rollout_id"], row["attempt"]) in handed)
        ]
        for table in HANDED if chosen else ():
            with (folder / f"{table.name}.arrow").open("wb") as file:
                with pa.ipc.new_stream(file, arrow_schema(table)) as stream:
                    for part in dict.fromkeys(row["part"] for row in chosen):
                        keys = {(row["rollout_id"], row["attempt"]) for row in chosen if row["part"] == part}
                        stream.write_table(_rows(self._out, table, part, keys))
                file.flush()
                os.fsync(file.fileno())
        return [(row["rollout_id"], row["attempt"], row["revision"]) for row in chosen]

    def _tidy(self, db: sqlite3.Connection) -> None:
        """Remove what a process that was killed while it made a drain, or removed one, has left."""
        known = {drain for (drain,) in db.execute("SELECT id FROM drains WHERE NOT acknowledged")}
        for folder in self._folder.iterdir():
            if folder.is_dir() and folder.name not in known:
                shutil.rmtree(folder, ignore_errors=True)

    @contextmanager
    def _db(self) -> Generator[sqlite3.Connection]:
        self._folder.mkdir(parents=True, exist_ok=True)
        with closing(sqlite3.connect(self._folder / "drains.sqlite", isolation_level=None, timeout=BUSY_S)) as db:
            db.execute("PRAGMA journal_mode = WAL")
            db.execute("PRAGMA synchronous = FULL")
            db.executescript(_TABLES)
            yield db


@contextmanager
def _transaction(db: sqlite3.Connection) -> Generator[None]:
    db.execute("BEGIN IMMEDIATE")
    try:
        yield
    except BaseException:
        db.execute("ROLLBACK")
        raise
    db.execute("COMMIT")


def _rows(root: Location, table: TableSpec, part: int, keys: Collection[tuple[str, int]]) -> pa.Table:
    rows = read_file(part_path(root, table, part))
    pairs = zip(rows.column("rollout_id").to_pylist(), rows.column("attempt").to_pylist(), strict=True)
    return rows.filter(pa.array([pair in keys for pair in pairs], pa.bool_()))


def _state(db: sqlite3.Connection, row: dict[str, Any]) -> str:
    found = db.execute(
        "SELECT revision, acknowledged FROM handed JOIN drains ON drain = id WHERE rollout_id = ? AND attempt = ?",
        (row["rollout_id"], row["attempt"]),
    ).fetchone()
    if found is None:
        return "ready"
    revision, acknowledged = found
    if revision < row["revision"]:
        return "revised"
    return "drained" if acknowledged else "handed"


def _with_prefix(frame: pl.LazyFrame, prefix: str) -> pl.LazyFrame:
    return frame.filter(pl.col("rollout_id").str.starts_with(prefix))


def as_json(rows: Any) -> bytes:
    """Rows as JSON: times in ISO 8601, bytes as hex digits."""
    return json.dumps(
        rows, default=lambda value: value.hex() if isinstance(value, bytes) else value.isoformat()
    ).encode()
