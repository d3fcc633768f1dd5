"""Which traces belong together, found out for a whole input at once and in bounded memory.

Traces are told in any order, as often as they are met; what was told lies in SQLite tables that are only appended to
and then sorted, so that an input of any size costs disk, not memory: 8 bytes for each trace are held, no more. An input
of several units can be told in as many processes, each into a file of its own.
"""

import sqlite3
from array import array
from collections.abc import Iterable
from functools import lru_cache
from itertools import groupby, islice
from pathlib import Path
from typing import Final, NamedTuple

from spanmill.collector.index import LOOSE, MOST_SHARED, Found

_NAMED: Final = ("rollout", "conversation")
"""Kinds of keys whose value may be a rollout's id, as a trace's name may be: equal ones join, whatever the kind."""
_BATCH: Final = 20_000
"""Traces and keys held before they are appended."""
_TOLD: Final = """
PRAGMA journal_mode = OFF;
PRAGMA synchronous = OFF;
CREATE TABLE found (trace BLOB, bytes INTEGER);
CREATE TABLE edges (kind TEXT, value BLOB, trace BLOB);
"""
_TABLES: Final = """
CREATE TABLE traces (id INTEGER PRIMARY KEY, name BLOB UNIQUE, bytes INTEGER, root INTEGER);
CREATE TABLE keys (kind TEXT, value BLOB, first BLOB, last BLOB, PRIMARY KEY (kind, value)) WITHOUT ROWID;
CREATE TABLE names (value BLOB PRIMARY KEY, trace INTEGER) WITHOUT ROWID;
CREATE TABLE components (id INTEGER PRIMARY KEY, root INTEGER UNIQUE, bytes INTEGER, partition INTEGER);
"""
_TRACES: Final = """
INSERT INTO traces SELECT row_number() OVER (ORDER BY trace), trace, sum(bytes), row_number() OVER (ORDER BY trace)
FROM found GROUP BY trace ORDER BY trace"""
_KEYS: Final = """
INSERT INTO keys SELECT kind, value, min(trace), max(trace) FROM edges GROUP BY kind, value
HAVING kind = 'name' OR min(trace) < max(trace)"""
_NAMES: Final = "INSERT INTO names SELECT value, id FROM keys JOIN traces ON name = first WHERE kind = 'name'"
_SHARED: Final = """
SELECT kind, value, id FROM edges JOIN keys USING (kind, value) JOIN traces ON name = trace WHERE first < last
UNION SELECT kind, value, id FROM keys JOIN traces ON name IN (first, value)
WHERE kind = 'name' AND value IN (SELECT name FROM traces)
ORDER BY 1, 2, 3"""
"""Keys that more than one trace has, where the name of a trace counts as its own."""
_COMPONENTS: Final = """
WITH named AS (SELECT root, min(value) AS name FROM names JOIN traces ON id = trace GROUP BY root),
    held AS (SELECT root, min(name) AS trace, sum(bytes) AS bytes FROM traces GROUP BY root)
INSERT INTO components (root, bytes) SELECT held.root, bytes FROM held LEFT JOIN named USING (root)
ORDER BY coalesce(named.name, held.trace), held.trace"""
_PLACES: Final = """
SELECT trace, partition, components.id FROM (SELECT DISTINCT trace FROM told.found ORDER BY trace)
JOIN traces ON name = trace JOIN components USING (root)"""


class Place(NamedTuple):
    """Where the spans of a trace go."""

    partition: int
    """From 0."""
    component: int
    """From 1, in the order of their names; those of one partition follow each other."""


class Told:
    """Traces and their keys, in a file at `path` that is made anew and that no other process writes to."""

    def __init__(self, path: Path) -> None:
        # A lock would be of no use, and not every disk that several machines share has locks.
        self._db = sqlite3.connect(f"{_uri(path)}?nolock=1", uri=True, isolation_level=None)
        self._db.executescript(_TOLD)
        self._sizes = dict[str, int]()
        self._edges = set[tuple[str, str, str]]()

    def close(self) -> None:
        """Write what is still held, and close the file."""
        self._append()
        self._db.close()

    def add(self, found: Iterable[Found]) -> None:
        """Take in what a request holds."""
        for trace, size, keys, _ in found:
            self._sizes[trace] = self._sizes.get(trace, 0) + size
            for kind, value in keys:
                self._edges.add(("name" if kind in _NAMED else kind, value, trace))
        if len(self._sizes) + len(self._edges) > _BATCH:
            self._append()

    def _append(self) -> None:
        self._db.execute("BEGIN")
        self._db.executemany("INSERT INTO found VALUES (?, ?)", [(_blob(t), size) for t, size in self._sizes.items()])
        rows = [(kind, _blob(value), _blob(trace)) for kind, value, trace in self._edges]
        self._db.executemany("INSERT INTO edges VALUES (?, ?, ?)", rows)
        self._db.execute("COMMIT")
        self._sizes.clear()
        self._edges.clear()


class Components(Told):
    """What belongs together of that which was told; first `add` and `take`, then `resolve`, then the rest."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._db.executescript(_TABLES)
        self.place = lru_cache(1 << 16)(self._place)
        """The place of a trace; None if no request held it."""

    def take(self, told: Path) -> None:
        """Take in what another process was told, from its file."""
        _attach(self._db, told)
        self._db.execute("BEGIN")
        self._db.execute("INSERT INTO found SELECT * FROM told.found")
        self._db.execute("INSERT INTO edges SELECT * FROM told.edges")
        self._db.execute("COMMIT")
        self._db.execute("DETACH told")

    def resolve(self, partition_bytes: int) -> int:
        """Join the traces that share a key, and cut the components into partitions; how many of these there are.

        A loose key of more than MOST_SHARED traces is a constant and joins nothing. Components stand in the order of
        their first rollout or conversation id, those without one in that of their first trace; as many as make
        `partition_bytes` follow each other in one partition, a larger one has a partition of its own. So the order
        depends on what was told alone; the cutting also on how often.
        """
        self._append()
        self._db.execute("BEGIN")
        self._db.execute(_TRACES)
        roots = self._joined()
        moved = ((root, trace) for trace in range(1, len(roots)) if (root := _root(roots, trace)) != trace)
        self._db.executemany("UPDATE traces SET root = ? WHERE id = ?", moved)
        self._db.execute(_COMPONENTS)
        sizes = self._db.execute("SELECT id, bytes FROM components ORDER BY id")
        count, rows = 0, list[tuple[int, int]]()
        size = partition_bytes
        for ident, own in sizes.fetchall():
            if size + own > partition_bytes:
                count, size = count + 1, 0
            size += own
            rows.append((count - 1, ident))
        self._db.executemany("UPDATE components SET partition = ? WHERE id = ?", rows)
        self._db.execute("COMMIT")
        return count

    def _joined(self) -> "array[int]":
        """For every trace one that it is joined to, in the end the first of its component."""
        (count,) = self._db.execute("SELECT count(*) FROM traces").fetchone()
        roots = array("q", range(count + 1))
        self._db.execute(_KEYS)
        self._db.execute(_NAMES)
        for (kind, _), rows in groupby(self._db.execute(_SHARED), lambda row: row[:2]):
            traces = (row[2] for row in rows)
            if kind in LOOSE:
                few = list(islice(traces, MOST_SHARED + 1))
                if len(few) > MOST_SHARED:
                    continue
                traces = iter(few)
            first = next(traces)
            for trace in traces:
                _join(roots, first, trace)
        return roots

    def _place(self, trace: str) -> Place | None:
        row = self._db.execute(
            "SELECT partition, components.id FROM traces JOIN components USING (root) WHERE name = ?", (_blob(trace),)
        ).fetchone()
        return Place(*row) if row else None

    def of_rollout(self, rollout_id: str) -> Place | None:
        """Where a rollout would be that is called like this; None if no rollout, conversation or trace is."""
        row = self._db.execute(
            "SELECT partition, components.id FROM traces JOIN components USING (root)"
            " WHERE name = ?1 OR traces.id = (SELECT trace FROM names WHERE value = ?1) LIMIT 1",
            (_blob(rollout_id),),
        ).fetchone()
        return Place(*row) if row else None


def places(components: Path, told: Path) -> dict[str, Place]:
    """The places of all traces in the file `told`, from the closed file of the `Components` that took it in."""
    db = sqlite3.connect(f"{_uri(components)}?immutable=1", uri=True)
    try:
        _attach(db, told)
        return {_text(trace): Place(*place) for trace, *place in db.execute(_PLACES)}
    finally:
        db.close()


def _attach(db: sqlite3.Connection, told: Path) -> None:
    db.execute("ATTACH ? AS told", (f"{_uri(told)}?immutable=1",))


def _uri(path: Path) -> str:
    return path.absolute().as_uri()


def _blob(text: str) -> bytes:
    """JSON can spell half a surrogate pair, which SQLite's text cannot hold."""
    return text.encode("utf-8", "surrogatepass")


def _text(blob: bytes) -> str:
    return blob.decode("utf-8", "surrogatepass")


def _root(roots: "array[int]", trace: int) -> int:
    while roots[trace] != trace:
        roots[trace] = trace = roots[roots[trace]]
    return trace


def _join(roots: "array[int]", one: int, other: int) -> None:
    small, large = sorted((_root(roots, one), _root(roots, other)))
    roots[large] = small
