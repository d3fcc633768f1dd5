"""The index of the journal: which request holds which trace, and which traces belong together.

SQLite, and a cache: what it holds can be found again by reading the journal. The place up to which it is complete is
committed with its rows, so that no entry is indexed twice. It is used by one process at a time.
"""

import math
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, TypeAlias

from spanmill.collector.assemble import Component, RolloutKey
from spanmill.collector.journal import Kind, Position
from spanmill.triplets.records import Reward

VERSION = 1
LOOSE = ("response", "tool_call")
"""Kinds of keys that some emitters fill with a constant."""
MOST_SHARED = 16
"""A loose key of more traces than this is a constant such as `__fake_id__`: joining by it would make one component of
everything. A rollout or a conversation may well have thousands of traces, so these keys always join."""

Key: TypeAlias = tuple[str, str]

TABLES = """
CREATE TABLE place (segment INTEGER NOT NULL, offset INTEGER NOT NULL);
CREATE TABLE requests (
    id INTEGER PRIMARY KEY, segment INTEGER NOT NULL, offset INTEGER NOT NULL, kind INTEGER NOT NULL, received_ns INTEGER NOT NULL
);
CREATE INDEX requests_of_segment ON requests (segment);
CREATE TABLE traces (id INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE, component INTEGER NOT NULL);
CREATE INDEX traces_of_component ON traces (component);
CREATE TABLE held (trace INTEGER, request INTEGER, bytes INTEGER NOT NULL, PRIMARY KEY (trace, request)) WITHOUT ROWID;
CREATE TABLE edges (kind TEXT, value TEXT, trace INTEGER, PRIMARY KEY (kind, value, trace)) WITHOUT ROWID;
CREATE INDEX edges_of_trace ON edges (trace);
CREATE TABLE components (
    id INTEGER PRIMARY KEY, traces INTEGER NOT NULL DEFAULT 1, bytes INTEGER NOT NULL DEFAULT 0,
    newest_ns INTEGER NOT NULL DEFAULT 0, opened_ns INTEGER, signal_ns INTEGER, ended INTEGER NOT NULL DEFAULT 0,
    looked_ns INTEGER NOT NULL DEFAULT 0, until_ns INTEGER, flushed INTEGER NOT NULL DEFAULT 0, due_ns INTEGER
);
CREATE INDEX components_due ON components (due_ns) WHERE due_ns IS NOT NULL;
CREATE TABLE written (rollout_id TEXT, attempt INTEGER, trace INTEGER NOT NULL, PRIMARY KEY (rollout_id, attempt)) WITHOUT ROWID;
CREATE INDEX written_of_trace ON written (trace);
CREATE TABLE rewards (
    id INTEGER PRIMARY KEY, rollout_id TEXT NOT NULL, attempt INTEGER, call_id TEXT, name TEXT NOT NULL, value REAL,
    source TEXT NOT NULL, received_ns INTEGER NOT NULL
);
CREATE INDEX rewards_of_rollout ON rewards (rollout_id);
"""


class Found(NamedTuple):
    """What one request holds of one trace."""

    trace: str
    bytes: int
    keys: frozenset[Key]
    signalled: bool
    """It carries the end of a rollout or a root."""


@dataclass(slots=True)
class Seen:
    """A journal entry as the index takes it in; entries of other sources than a journal count their positions themselves."""

    position: Position
    end: Position
    """Where reading goes on after it."""
    kind: Kind
    received_ns: int
    found: Sequence[Found] = ()
    rewards: Sequence[Reward] = ()


class Request(NamedTuple):
    """Where a request stands."""

    id: int
    position: Position
    kind: Kind
    received_ns: int


@dataclass(slots=True)
class _Trace:
    """What a batch of entries holds of one trace."""

    newest_ns: int = 0
    oldest_ns: int = 0
    signalled: bool = False
    keys: set[Key] = field(default_factory=set[Key])
    held: dict[int, int] = field(default_factory=dict[int, int])


class Index:
    """The index at `path`; one that is damaged, or of another version, is made anew and `position` is None."""

    def __init__(self, path: Path, due_at: Callable[[Component], int | None] = lambda component: None):
        """`due_at` says when a component must be looked at next; it is asked for each component that changes."""
        self._due_at = due_at
        self._db = _opened(path)
        self._touched = set[int]()

    def close(self) -> None:
        """Close the file."""
        self._db.close()

    @property
    def position(self) -> Position | None:
        """Where reading goes on after the newest entry that was indexed; None before the first."""
        row = self._db.execute("SELECT segment, offset FROM place").fetchone()
        return Position(*row) if row else None

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._schedule()
        except BaseException:
            self._touched.clear()
            self._db.execute("ROLLBACK")
            raise
        self._db.execute("COMMIT")

    # Taking in

    def add(self, entries: Sequence[Seen], now_ns: int) -> None:
        """Index entries in journal order, in one transaction. A receive time in the future counts as now."""
        if not entries:
            return
        with self._transaction():
            for name, trace in self._gathered(entries, now_ns).items():
                self._add_trace(name, trace)
            for entry in entries:
                for reward in entry.rewards:
                    self._add_reward(reward, entry.received_ns, now_ns)
                if entry.kind is Kind.FLUSH:
                    self._flush()
            self._db.execute("DELETE FROM place")
            self._db.execute("INSERT INTO place VALUES (?, ?)", tuple(entries[-1].end))

    def _gathered(self, entries: Iterable[Seen], now_ns: int) -> dict[str, _Trace]:
        traces = dict[str, _Trace]()
        for entry in entries:
            if not entry.found:
                continue
            row = (*entry.position, int(entry.kind), entry.received_ns)
            request = self._db.execute(
                "INSERT INTO requests (segment, offset, kind, received_ns) VALUES (?, ?, ?, ?)", row
            ).lastrowid
            received_ns = min(entry.received_ns, now_ns)
            for found in entry.found:
                trace = traces.setdefault(found.trace, _Trace(received_ns, received_ns))
                trace.newest_ns = max(trace.newest_ns, received_ns)
                trace.oldest_ns = min(trace.oldest_ns, received_ns)
                trace.signalled |= found.signalled
                trace.keys |= found.keys
                trace.held[int(request or 0)] = found.bytes
        return traces

    def _add_trace(self, name: str, seen: _Trace) -> None:
        row = self._db.execute("SELECT id, component FROM traces WHERE name = ?", (name,)).fetchone()
        if row:
            trace, component = row
        else:
            trace = component = self._db.execute(
                "INSERT INTO traces (name, component) VALUES (?, 0)", (name,)
            ).lastrowid
            self._db.execute("UPDATE traces SET component = id WHERE id = ?", (trace,))
            self._db.execute("INSERT INTO components (id) VALUES (?)", (component,))
        self._db.executemany(
            "INSERT INTO held VALUES (?, ?, ?)", [(trace, request, size) for request, size in seen.held.items()]
        )
        self._db.execute(
            "UPDATE components SET bytes = bytes + ?1, newest_ns = max(newest_ns, ?2), opened_ns = coalesce(opened_ns, ?3),"
            " ended = ended OR ?4, signal_ns = CASE WHEN ended OR ?4 THEN coalesce(signal_ns, ?3) END, flushed = 0 WHERE id = ?5",
            (sum(seen.held.values()), seen.newest_ns, seen.oldest_ns, seen.signalled, component),
        )
        self._touched.add(component)
        for kind, value in sorted(seen.keys):
            self._add_edge(kind, value, trace)

    def _add_edge(self, kind: str, value: str, trace: int) -> None:
        others = [
            other
            for (other,) in self._db.execute(
                "SELECT trace FROM edges WHERE kind = ? AND value = ? LIMIT ?", (kind, value, MOST_SHARED + 1)
            )
        ]
        if trace in others or (kind in LOOSE and len(others) > MOST_SHARED):
            return
        added = self._db.execute("INSERT OR IGNORE INTO edges VALUES (?, ?, ?)", (kind, value, trace)).rowcount
        if not others or not added:
            return
        if kind in LOOSE and len(others) == MOST_SHARED:
            self._dissolve(self._component_of(others[0]))
        else:
            self._merge(self._component_of(trace), self._component_of(others[0]))

    def _component_of(self, trace: int) -> int:
        return self._db.execute("SELECT component FROM traces WHERE id = ?", (trace,)).fetchone()[0]

    def _merge(self, one: int, other: int) -> None:
        """Rename the component of fewer traces into the other: each trace is renamed at most log2(traces) times."""
        if one == other:
            return
        sizes = dict(self._db.execute("SELECT id, traces FROM components WHERE id IN (?, ?)", (one, other)))
        small, large = sorted((one, other), key=lambda component: (sizes[component], component))
        self._db.execute("UPDATE traces SET component = ? WHERE component = ?", (large, small))
        self._db.execute(
            "UPDATE components SET traces = components.traces + s.traces, bytes = components.bytes + s.bytes,"
            " newest_ns = max(components.newest_ns, s.newest_ns), looked_ns = max(components.looked_ns, s.looked_ns),"
            " opened_ns = min(coalesce(components.opened_ns, s.opened_ns), coalesce(s.opened_ns, components.opened_ns)),"
            " signal_ns = min(coalesce(components.signal_ns, s.signal_ns), coalesce(s.signal_ns, components.signal_ns)),"
            " until_ns = min(coalesce(components.until_ns, s.until_ns), coalesce(s.until_ns, components.until_ns)),"
            " ended = components.ended OR s.ended, flushed = components.flushed AND s.flushed"
            " FROM (SELECT * FROM components WHERE id = ?) AS s WHERE components.id = ?",
            (small, large),
        )
        self._db.execute("DELETE FROM components WHERE id = ?", (small,))
        self._touched.discard(small)
        self._touched.add(large)

    def _dissolve(self, component: int) -> None:
        """Join the traces of a component again, without the key that has just turned out to be a constant.

        So the components are those of the set of edges, in whatever order these came.
        """
        traces = [trace for (trace,) in self._db.execute("SELECT id FROM traces WHERE component = ?", (component,))]
        for trace in traces:
            self._db.execute(
                "INSERT OR REPLACE INTO components (id, bytes, newest_ns, opened_ns, signal_ns, ended, looked_ns)"
                " SELECT ?1, (SELECT coalesce(sum(bytes), 0) FROM held WHERE trace = ?1), newest_ns, coalesce(opened_ns, newest_ns),"
                " coalesce(signal_ns, newest_ns), ended, looked_ns FROM components WHERE id = ?2",
                (trace, component),
            )
        self._db.execute("UPDATE traces SET component = id WHERE component = ?", (component,))
        self._touched.discard(component)
        self._touched.update(traces)
        for trace in traces:
            for kind, value in self._db.execute("SELECT kind, value FROM edges WHERE trace = ?", (trace,)).fetchall():
                rows = self._db.execute(
                    "SELECT trace FROM edges WHERE kind = ? AND value = ? LIMIT ?", (kind, value, MOST_SHARED + 1)
                ).fetchall()
                if kind not in LOOSE or len(rows) <= MOST_SHARED:
                    self._merge(self._component_of(trace), self._component_of(rows[0][0]))

    def _add_reward(self, reward: Reward, received_ns: int, now_ns: int) -> None:
        write = (reward.rollout_id, reward.attempt, reward.call_id, reward.name)
        self._db.execute(
            "DELETE FROM rewards WHERE rollout_id = ? AND attempt IS ? AND call_id IS ? AND name = ?", write
        )
        row = (*write, reward.value, reward.source, received_ns)
        self._db.execute(
            "INSERT INTO rewards (rollout_id, attempt, call_id, name, value, source, received_ns) VALUES (?, ?, ?, ?, ?, ?, ?)",
            row,
        )
        # A rollout whose rows are written takes its reward without waiting for more spans.
        for component in self.components_of_rollout(reward.rollout_id):
            self._db.execute(
                "UPDATE components SET opened_ns = coalesce(opened_ns, ?1), signal_ns = coalesce(signal_ns, ?1), flushed = 0 WHERE id = ?2",
                (min(received_ns, now_ns), component),
            )
            self._touched.add(component)

    def components_of_rollout(self, rollout_id: str) -> list[int]:
        """The components that may hold a rollout: its id is a rollout's, a conversation's or a trace's."""
        rows = self._db.execute(
            "SELECT DISTINCT component FROM traces WHERE name = ?1 OR id IN (SELECT trace FROM edges"
            " WHERE kind IN ('rollout', 'conversation') AND value = ?1)",
            (rollout_id,),
        )
        return [component for (component,) in rows]

    def _flush(self) -> None:
        rows = self._db.execute("UPDATE components SET flushed = 1 WHERE opened_ns IS NOT NULL RETURNING id").fetchall()
        self._touched.update(component for (component,) in rows)

    def flush(self) -> None:
        """Have every open component closed at the next look."""
        with self._transaction():
            self._flush()

    def start(self, now_ns: int) -> None:
        """Reckon anew when each open component is due; times after now, of a clock that was put back since, count as now."""
        with self._transaction():
            rows = self._db.execute(
                "UPDATE components SET newest_ns = min(newest_ns, ?1), opened_ns = min(opened_ns, ?1), signal_ns = min(signal_ns, ?1),"
                " looked_ns = min(looked_ns, ?1), until_ns = NULL WHERE opened_ns IS NOT NULL RETURNING id",
                (now_ns,),
            ).fetchall()
            self._touched.update(component for (component,) in rows)

    def _schedule(self) -> None:
        for component in self._touched:
            row = self._db.execute(f"{_SELECT_COMPONENT} WHERE id = ?", (component,)).fetchone()
            self._db.execute(
                "UPDATE components SET due_ns = ? WHERE id = ?", (self._due_at(_component(row)), component)
            )
        self._touched.clear()

    # Giving out

    def due(self, now_ns: int, most: int) -> list[Component]:
        """At most `most` components that must be looked at by now, those that have waited longest first."""
        rows = self._db.execute(f"{_SELECT_COMPONENT} WHERE due_ns <= ? ORDER BY due_ns, id LIMIT ?", (now_ns, most))
        return [_component(row) for row in rows]

    def next_due_ns(self) -> int | None:
        """When the next component must be looked at."""
        return self._db.execute("SELECT min(due_ns) FROM components WHERE due_ns IS NOT NULL").fetchone()[0]

    def components(self) -> Iterator[tuple[int, int, str]]:
        """(id, bytes, name of the alphabetically first trace) of every component; no order of arrival changes the name."""
        return self._db.execute(
            "SELECT c.id, c.bytes, min(name) FROM components c JOIN traces ON component = c.id GROUP BY c.id"
        )

    def component_of(self, trace: str) -> int | None:
        """The component of a trace, by name; None if no request held it."""
        row = self._db.execute("SELECT component FROM traces WHERE name = ?", (trace,)).fetchone()
        return row[0] if row else None

    def traces(self, component: int) -> list[str]:
        """The names of a component's traces."""
        return [name for (name,) in self._db.execute("SELECT name FROM traces WHERE component = ?", (component,))]

    def requests(self, components: Iterable[int]) -> Iterator[tuple[Request, dict[str, int]]]:
        """The requests that hold spans of the components, in journal order, each with {trace: component} of those it holds."""
        rows = list[tuple[int, str, int]]()
        for component in components:
            rows += self._db.execute(
                "SELECT request, name, component FROM traces JOIN held ON trace = traces.id WHERE component = ?",
                (component,),
            )
        wanted = dict[int, dict[str, int]]()
        for request, name, component in rows:
            wanted.setdefault(request, {})[name] = component
        for request in sorted(wanted):
            row = self._db.execute(
                "SELECT segment, offset, kind, received_ns FROM requests WHERE id = ?", (request,)
            ).fetchone()
            yield Request(request, Position(row[0], row[1]), Kind(row[2]), row[3]), wanted[request]

    def rewards(self, component: int) -> list[Reward]:
        """The rewards, in journal order, that may be for rollouts of a component."""
        rows = self._db.execute(
            "SELECT rollout_id, value, attempt, call_id, name, source, received_ns FROM rewards WHERE rollout_id IN ("
            "SELECT name FROM traces WHERE component = ?1 UNION SELECT value FROM edges JOIN traces ON id = trace"
            " WHERE component = ?1 AND kind IN ('rollout', 'conversation')) ORDER BY id",
            (component,),
        )
        # SQLite keeps NaN as NULL.
        return [Reward(rollout_id, math.nan if value is None else value, *rest) for rollout_id, value, *rest in rows]

    # What was written

    def written(self, component: int) -> set[RolloutKey]:
        """The (rollout, attempt) that were written, or were about to be, from a component's traces."""
        rows = self._db.execute(
            "SELECT rollout_id, attempt FROM written JOIN traces ON id = trace WHERE component = ?", (component,)
        )
        return {(rollout_id, attempt) for rollout_id, attempt in rows}

    def intend(self, rows: Iterable[tuple[RolloutKey, str]]) -> None:
        """Note, before they are written, rollouts each with a trace that it has: a rollout that later moves is found by it."""
        with self._transaction():
            self._db.executemany(
                "INSERT OR REPLACE INTO written SELECT ?, ?, id FROM traces WHERE name = ?",
                [(*key, trace) for key, trace in rows],
            )

    def forget(self, keys: Iterable[RolloutKey]) -> None:
        """Drop the notes of rollouts that have moved."""
        with self._transaction():
            self._db.executemany("DELETE FROM written WHERE rollout_id = ? AND attempt = ?", list(keys))

    def looked(self, rows: Sequence[tuple[int, int | None]], now_ns: int) -> None:
        """Note components as looked at now, each with the time when an open rollout of it closes; None if all are written."""
        with self._transaction():
            self._db.executemany(
                "UPDATE components SET signal_ns = NULL, flushed = 0, looked_ns = ?1, until_ns = ?2,"
                " opened_ns = CASE WHEN ?2 IS NOT NULL THEN opened_ns END WHERE id = ?3",
                [(now_ns, until, component) for component, until in rows],
            )
            self._touched.update(component for component, _ in rows)

    def traces_of_rollout(self, rollout_id: str) -> list[str]:
        """A trace that has a span with the rollout id on it, if one has."""
        rows = self._db.execute(
            "SELECT name FROM edges JOIN traces ON id = trace WHERE kind = 'rollout' AND value = ? LIMIT 1",
            (rollout_id,),
        )
        return [name for (name,) in rows]


_SELECT_COMPONENT = (
    "SELECT id, bytes, newest_ns, opened_ns, signal_ns, ended, looked_ns, until_ns, flushed FROM components"
)


def _component(row: Sequence[int]) -> Component:
    ident, size, newest_ns, opened_ns, signal_ns, ended, looked_ns, until_ns, flushed = row
    return Component(ident, size, newest_ns, opened_ns, signal_ns, bool(ended), looked_ns, until_ns, bool(flushed))


def _opened(path: Path) -> sqlite3.Connection:
    db = _connected(path)
    try:
        found = db.execute("PRAGMA user_version").fetchone()[0]
        whole = found == VERSION
    except sqlite3.DatabaseError:
        whole = False
    if whole:
        return db
    db.close()
    for suffix in ("", "-wal", "-shm"):
        path.with_name(path.name + suffix).unlink(missing_ok=True)
    db = _connected(path)
    db.executescript(f"BEGIN; {TABLES} PRAGMA user_version = {VERSION}; COMMIT;")
    return db


def _connected(path: Path) -> sqlite3.Connection:
    db = sqlite3.connect(path, isolation_level=None)
    try:
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("PRAGMA synchronous = NORMAL")
        db.execute("PRAGMA cache_size = -65536")
    except sqlite3.DatabaseError:
        pass
    return db
