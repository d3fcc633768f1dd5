"""The file of the index: its tables, how it is opened, and what other processes may read of it."""

import sqlite3
from collections.abc import Iterable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Final, NamedTuple

from spanmill.collector.journal import Position, worker_of

INDEX_NAME: Final = "index.sqlite"
"""In the folder of the journal."""

_VERSION: Final = 3
_TABLES: Final = """
CREATE TABLE places (worker INTEGER PRIMARY KEY, segment INTEGER, offset INTEGER);
CREATE TABLE segments (segment INTEGER PRIMARY KEY, newest_ns INTEGER);
CREATE TABLE requests (id INTEGER PRIMARY KEY, segment INTEGER, offset INTEGER);
CREATE INDEX requests_of_segment ON requests (segment);
CREATE TABLE traces (id INTEGER PRIMARY KEY, name TEXT UNIQUE, component INTEGER);
CREATE INDEX traces_of_component ON traces (component);
CREATE TABLE held (trace INTEGER, request INTEGER, bytes INTEGER, PRIMARY KEY (trace, request)) WITHOUT ROWID;
CREATE INDEX held_of_request ON held (request);
CREATE TABLE edges (kind TEXT, value TEXT, trace INTEGER, PRIMARY KEY (kind, value, trace)) WITHOUT ROWID;
CREATE INDEX edges_of_trace ON edges (trace);
CREATE TABLE components (id INTEGER PRIMARY KEY, traces INTEGER, bytes INTEGER, newest_ns INTEGER, opened_ns INTEGER,
    signal_ns INTEGER, ended INTEGER, looked_ns INTEGER, until_ns INTEGER, flushed INTEGER, due_ns INTEGER);
CREATE INDEX components_due ON components (due_ns) WHERE due_ns IS NOT NULL;
CREATE TABLE written (rollout_id TEXT, attempt INTEGER, trace INTEGER, PRIMARY KEY (rollout_id, attempt)) WITHOUT ROWID;
CREATE INDEX written_of_trace ON written (trace);
CREATE TABLE rewards (id INTEGER PRIMARY KEY, rollout_id TEXT, value REAL, attempt INTEGER, call_id TEXT, name TEXT,
    source TEXT, received_ns INTEGER, segment INTEGER);
CREATE INDEX rewards_of_rollout ON rewards (rollout_id);
CREATE INDEX rewards_of_segment ON rewards (segment);
CREATE TABLE expired_traces (name TEXT PRIMARY KEY, batch INTEGER) WITHOUT ROWID;
CREATE TABLE expired_rollouts (rollout_id TEXT, attempt INTEGER, batch INTEGER, PRIMARY KEY (rollout_id, attempt))
    WITHOUT ROWID;
CREATE TABLE expired_batches (batch INTEGER, worker INTEGER, segment INTEGER, offset INTEGER,
    PRIMARY KEY (batch, worker)) WITHOUT ROWID;
CREATE TABLE expired_read (bytes INTEGER);
CREATE TABLE tallies (name TEXT PRIMARY KEY, value INTEGER) WITHOUT ROWID;
"""


def open_index(path: Path) -> sqlite3.Connection:
    """The database at `path`; one that is damaged or of another version is made anew."""
    try:
        db = _connected(path)
        if db.execute("PRAGMA user_version").fetchone() == (_VERSION,):
            return db
        db.close()
    except sqlite3.OperationalError:
        raise  # no place, no right, no space: a new file would fare no better
    except sqlite3.DatabaseError:
        pass  # no database, or a damaged one
    discard(path)
    db = _connected(path)
    db.executescript(f"BEGIN; {_TABLES} PRAGMA user_version = {_VERSION}; COMMIT;")
    return db


def discard(path: Path) -> None:
    """Remove an index; the next one is made from the journal."""
    for suffix in ("", "-wal", "-shm"):
        path.with_name(path.name + suffix).unlink(missing_ok=True)


def _connected(path: Path) -> sqlite3.Connection:
    db = sqlite3.connect(path, isolation_level=None)
    db.execute("PRAGMA journal_mode = WAL")
    db.execute("PRAGMA synchronous = NORMAL")
    db.execute("PRAGMA cache_size = -65536")
    return db


def read_places(db: sqlite3.Connection) -> dict[int, Position]:
    """Where reading goes on after the newest entry of each worker that was indexed."""
    return {worker: Position(*place) for worker, *place in db.execute("SELECT worker, segment, offset FROM places")}


def holding(db: sqlite3.Connection, rollout_id: str) -> list[int]:
    """The components that may hold a rollout: its id is a rollout's, a conversation's or a trace's."""
    rows = db.execute(
        "SELECT component FROM traces WHERE name = ?1 UNION SELECT component FROM edges JOIN traces ON id = trace"
        " WHERE kind IN ('rollout', 'conversation') AND value = ?1",
        (rollout_id,),
    )
    return [component for (component,) in rows]


def unknown_rollouts(path: Path, rollout_ids: Iterable[str]) -> list[str] | None:
    """Those of the rollouts that no span has named, in the order given; None if the index cannot be read.

    For other processes than the one that uses the index: it is opened for reading alone, for this one question. What
    was received in the last moments may not be indexed yet.
    """
    try:
        with closing(_read_only(path)) as db:
            return [name for name in dict.fromkeys(rollout_ids) if not holding(db, name) and not _expired(db, name)]
    except sqlite3.Error:
        return None


def _expired(db: sqlite3.Connection, rollout_id: str) -> bool:
    """Whether spans named a rollout before they were removed from the journal."""
    found = db.execute("SELECT 1 FROM expired_rollouts WHERE rollout_id = ? LIMIT 1", (rollout_id,)).fetchone()
    return found is not None


OF_PREFIX: Final = """SELECT component FROM traces WHERE name >= ?1 AND name < ?2
    UNION SELECT component FROM edges JOIN traces ON traces.id = trace
    WHERE kind IN ('rollout', 'conversation') AND value >= ?1 AND value < ?2"""
"""The components that may hold a rollout with a prefix, by `prefix_bounds`."""


def prefix_bounds(prefix: str) -> tuple[str, str]:
    """The bounds (the second left out) of the texts that begin with a prefix."""
    return prefix, f"{prefix}\U0010ffff"


def open_rollouts(path: Path, prefix: str, after: str, most: int) -> list[str]:
    """At most `most` rollouts with a prefix, behind the id `after`, of which something is not written yet, by id.

    Raises sqlite3.Error if the index cannot be read.
    """
    select = """SELECT DISTINCT value FROM edges JOIN traces ON traces.id = trace JOIN components
        ON components.id = component WHERE kind = 'rollout' AND value >= ? AND value < ? AND value > ?
        AND due_ns IS NOT NULL ORDER BY value LIMIT ?"""
    with closing(_read_only(path)) as db:
        return [name for (name,) in db.execute(select, (*prefix_bounds(prefix), after, most))]


def is_flushed(path: Path, flush: Position, prefix: str) -> bool:
    """Whether all is written that was open under a prefix when a flush, the record at that position, came.

    Raises sqlite3.Error if the index cannot be read.
    """
    select = f"SELECT 1 FROM components WHERE flushed AND id IN ({OF_PREFIX}) LIMIT 1"
    with closing(_read_only(path)) as db:
        place = read_places(db).get(worker_of(flush.segment))
        return place is not None and place > flush and not db.execute(select, prefix_bounds(prefix)).fetchone()


class Progress(NamedTuple):
    """How far the work on a journal is."""

    places: Mapping[int, Position]
    """Up to where it is indexed, by worker."""
    open_components: int
    """With rollouts that are not written yet."""
    tallies: dict[str, int]
    """What was written since the index was made: `Index.tally`."""


def progress(path: Path) -> Progress | None:
    """What the index at `path` says, for other processes; None if it cannot be read."""
    try:
        with closing(_read_only(path)) as db:
            places = read_places(db)
            (count,) = db.execute("SELECT count(*) FROM components WHERE due_ns IS NOT NULL").fetchone()
            tallies = dict(db.execute("SELECT name, value FROM tallies"))
    except sqlite3.Error:
        return None
    return Progress(places, count, tallies)


def _read_only(path: Path) -> sqlite3.Connection:
    return sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, timeout=1)
