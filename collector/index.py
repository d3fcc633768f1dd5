"""The index of the journal: which request holds which trace, and which traces belong together.

SQLite, and a cache: what it holds can be found again by reading the journal. The places up to which it is complete are
committed with its rows, so that no entry is indexed twice. One process uses it at a time.
"""

import math
import sqlite3
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass, field, replace
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeAlias

from spanmill.collector.assemble import Component, RolloutKey
from spanmill.collector.expired import Batch
from spanmill.collector.index_expired import ExpiredNames
from spanmill.collector.index_file import OF_PREFIX, holding, open_index, prefix_bounds, read_places
from spanmill.collector.journal import Kind, Position, worker_of
from spanmill.triplets.records import Reward

LOOSE: Final = ("response",)
"""Kinds of keys that some emitters fill with a constant."""
MOST_SHARED: Final = 16
"""A loose key of more traces than this is a constant such as `__fake_id__`: joining by it would make one component of
everything. A rollout or a conversation may well have thousands of traces, so these keys always join."""

Key: TypeAlias = tuple[str, str]
"""(kind, value) as `adapters.keys` gives them."""

_REWARD: Final = "SELECT rollout_id, value, attempt, call_id, name, source, received_ns FROM rewards"
_BY_AGE: Final = "ORDER BY received_ns, segment, id"
"""No two workers' parts of the journal have a common order; in each the ids are in its own."""
_COMPONENT: Final = """SELECT id, traces, bytes, newest_ns, opened_ns, signal_ns, ended, looked_ns, until_ns, flushed
    FROM components"""


class Found(NamedTuple):
    """What one request holds of one trace."""

    trace: str
    bytes: int
    keys: frozenset[Key]
    ends: bool
    """It has a span that carries the end of a rollout, or is a root."""


@dataclass(slots=True)
class Seen:
    """An entry of the journal as the index takes it in."""

    position: Position
    end: Position
    """Where reading goes on after it."""
    kind: Kind
    received_ns: int
    found: Sequence[Found] = ()
    rewards: Sequence[Reward] = ()
    prefix: str = ""
    """Of a flush: of the rollouts that it closes."""


@dataclass(slots=True)
class _Gathered:
    """What a batch of entries holds of one trace."""

    newest_ns: int
    oldest_ns: int
    ends: bool = False
    keys: set[Key] = field(default_factory=set[Key])
    held: dict[int, int] = field(default_factory=dict[int, int])
    """Request to bytes."""


class Index:
    """The index at `path`; one that is damaged or of another version is made anew, and `places` is empty.

    `due_at` says when a component must be looked at next; it is asked whenever one changes.
    """

    def __init__(self, path: Path, due_at: Callable[[Component], int | None] = lambda component: None) -> None:
        self._due_at = due_at
        self._db = open_index(path)
        self.expired = ExpiredNames(self._db)
        self._changed = dict[int, Component]()
        """The components that the transaction has come to; written at its end."""

    def close(self) -> None:
        """Close the file."""
        self._db.close()

    @property
    def places(self) -> dict[int, Position]:
        """Where reading goes on after the newest entry of each worker that was indexed."""
        return read_places(self._db)

    # Taking in

    def add(self, entries: Sequence[Seen], now_ns: int) -> None:
        """Index entries, each worker's in journal order, in one transaction. A receive time in the future counts as
        now.
        """
        if not entries:
            return
        with self._transaction():
            for name, trace in self._gathered(entries, now_ns).items():
                self._add_trace(name, trace)
            for entry in entries:
                received_ns = min(entry.received_ns, now_ns)
                for reward in entry.rewards:
                    self._add_reward(reward, received_ns, entry.position)
                if entry.kind is Kind.FLUSH:
                    self._flush(entry.prefix)
                self._db.execute(
                    "INSERT INTO segments VALUES (?1, ?2) ON CONFLICT DO UPDATE SET newest_ns = max(newest_ns, ?2)",
                    (entry.position.segment, received_ns),
                )
            ends = {worker_of(entry.end.segment): entry.end for entry in entries}
            self._db.executemany(
                "INSERT OR REPLACE INTO places VALUES (?, ?, ?)", [(worker, *end) for worker, end in ends.items()]
            )

    def flush(self) -> None:
        """Have every open component closed at the next look."""
        with self._transaction():
            self._flush("")

    def start(self, now_ns: int) -> None:
        """Reckon anew when open components are due. Times after now, of a clock that was put back, count as now."""
        with self._transaction():
            for row in self._db.execute(f"{_COMPONENT} WHERE opened_ns IS NOT NULL").fetchall():
                component = self._changed.setdefault(row[0], _component(row))
                component.newest_ns = min(component.newest_ns, now_ns)
                component.looked_ns = min(component.looked_ns, now_ns)
                component.opened_ns = _earliest(component.opened_ns, now_ns)
                if component.until_ns is not None:  # by other waits, perhaps: it is put together once more
                    component.signal_ns, component.until_ns = component.newest_ns, None
                elif component.signal_ns is not None:
                    component.signal_ns = min(component.signal_ns, now_ns)

    def _gathered(self, entries: Iterable[Seen], now_ns: int) -> dict[str, _Gathered]:
        traces = dict[str, _Gathered]()
        for entry in entries:
            new = [found for found in entry.found if not self.expired.written_before(found.trace, entry.position)]
            if not new:
                continue
            added = self._db.execute("INSERT INTO requests (segment, offset) VALUES (?, ?)", entry.position)
            received_ns = min(entry.received_ns, now_ns)
            for found in new:
                trace = traces.setdefault(found.trace, _Gathered(received_ns, received_ns))
                trace.newest_ns = max(trace.newest_ns, received_ns)
                trace.oldest_ns = min(trace.oldest_ns, received_ns)
                trace.ends |= found.ends
                trace.keys |= found.keys
                trace.held[_row_id(added)] = found.bytes
        return traces

    def _add_trace(self, name: str, seen: _Gathered) -> None:
        row = self._db.execute("SELECT id, component FROM traces WHERE name = ?", (name,)).fetchone()
        if row:
            trace, component = row[0], self._component(row[1])
        else:
            trace = _row_id(self._db.execute("INSERT INTO traces (name) VALUES (?)", (name,)))
            self._db.execute("UPDATE traces SET component = id WHERE id = ?", (trace,))
            component = self._changed[trace] = Component(trace)
        self._db.executemany(
            "INSERT INTO held VALUES (?, ?, ?)", [(trace, request, size) for request, size in seen.held.items()]
        )
        component.bytes += sum(seen.held.values())
        component.newest_ns = max(component.newest_ns, seen.newest_ns)
        component.opened_ns = seen.oldest_ns if component.opened_ns is None else component.opened_ns
        component.ended |= seen.ends
        if component.ended and component.signal_ns is None:
            component.signal_ns = seen.oldest_ns
        component.flushed = False
        # What still comes for a trace that has expired joins nothing: it is set aside.
        for kind, value in () if self.expired.trace(name) else sorted(seen.keys):
            self._add_edge(kind, value, trace)

    def _add_edge(self, kind: str, value: str, trace: int) -> None:
        others = self._sharing(kind, value)
        if trace in others or (kind in LOOSE and len(others) > MOST_SHARED):
            return
        added = self._db.execute("INSERT OR IGNORE INTO edges VALUES (?, ?, ?)", (kind, value, trace)).rowcount
        if not others or not added:
            return
        if kind in LOOSE and len(others) == MOST_SHARED:
            self._dissolve(self._component_of(others[0]))
        else:
            self._merge(self._component_of(trace), self._component_of(others[0]))

    def _sharing(self, kind: str, value: str) -> list[int]:
        """Traces that have a key: as many as it takes to see whether it is a constant."""
        select = "SELECT trace FROM edges WHERE kind = ? AND value = ? LIMIT ?"
        return [trace for (trace,) in self._db.execute(select, (kind, value, MOST_SHARED + 1))]

    def _merge(self, one: Component, other: Component) -> None:
        """Rename the component of fewer traces into the other: each trace is renamed at most log2(traces) times."""
        if one.id == other.id:
            return
        small, large = sorted((one, other), key=lambda component: (component.traces, component.id))
        self._db.execute("UPDATE traces SET component = ? WHERE component = ?", (large.id, small.id))
        self._db.execute("DELETE FROM components WHERE id = ?", (small.id,))
        del self._changed[small.id]
        large.traces += small.traces
        large.bytes += small.bytes
        large.newest_ns = max(large.newest_ns, small.newest_ns)
        large.looked_ns = max(large.looked_ns, small.looked_ns)
        large.opened_ns = _earliest(large.opened_ns, small.opened_ns)
        large.signal_ns = _earliest(large.signal_ns, small.signal_ns)
        large.until_ns = _earliest(large.until_ns, small.until_ns)
        large.ended |= small.ended
        large.flushed &= small.flushed

    def _dissolve(self, whole: Component) -> None:
        """Join the traces of a component again, without the key that has just turned out to be a constant.

        So the components are those of the set of edges, in whatever order these came.
        """
        rows = self._db.execute("SELECT id FROM traces WHERE component = ?", (whole.id,)).fetchall()
        self._db.execute("UPDATE traces SET component = id WHERE component = ?", (whole.id,))
        opened_ns = whole.newest_ns if whole.opened_ns is None else whole.opened_ns
        for (trace,) in rows:
            (size,) = self._db.execute("SELECT sum(bytes) FROM held WHERE trace = ?", (trace,)).fetchone()
            self._changed[trace] = replace(
                whole, id=trace, traces=1, bytes=size, opened_ns=opened_ns, signal_ns=opened_ns, until_ns=None
            )
        for (trace,) in rows:
            for kind, value in self._db.execute("SELECT kind, value FROM edges WHERE trace = ?", (trace,)).fetchall():
                others = self._sharing(kind, value)
                if kind not in LOOSE or len(others) <= MOST_SHARED:
                    self._merge(self._component_of(trace), self._component_of(others[0]))

    def _add_reward(self, reward: Reward, received_ns: int, position: Position) -> None:
        if self.expired.rewarded_before(reward, position):
            return
        write = (reward.rollout_id, reward.attempt, reward.call_id, reward.name)
        same = "rollout_id = ? AND attempt IS ? AND call_id IS ? AND name = ?"
        age = (reward.received_ns, position.segment)
        newer = f"SELECT 1 FROM rewards WHERE {same} AND (received_ns, segment) > (?, ?)"
        if self._db.execute(newer, (*write, *age)).fetchone():
            return  # of another worker, whose part of the journal was read first
        self._db.execute(f"DELETE FROM rewards WHERE {same}", write)
        self._db.execute(
            "INSERT INTO rewards (rollout_id, attempt, call_id, name, value, source, received_ns, segment)"
            " VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
            (*write, reward.value, reward.source, reward.received_ns, position.segment),
        )
        for ident in self.components_of_rollout(reward.rollout_id):
            component = self._component(ident)
            component.opened_ns = received_ns if component.opened_ns is None else component.opened_ns
            component.signal_ns = received_ns if component.signal_ns is None else component.signal_ns
            component.flushed = False

    def _flush(self, prefix: str) -> None:
        """Have the open components closed that hold a rollout with the prefix; with an empty one, all of them."""
        # What this transaction has come to may not stand in the table yet.
        self._save()
        rows = self._db.execute(
            f"{_COMPONENT} WHERE opened_ns IS NOT NULL AND id IN ({OF_PREFIX})", prefix_bounds(prefix)
        )
        for row in rows.fetchall():
            self._component(row[0]).flushed = True

    @contextmanager
    def _transaction(self) -> Generator[None]:
        """Around changes: commits them, with every component that was touched and the time when it is due."""
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._save()
        except BaseException:
            self._db.execute("ROLLBACK")
            raise
        finally:
            self._changed.clear()
        self._db.execute("COMMIT")

    def _save(self) -> None:
        rows = [(*astuple(component), self._due_at(component)) for component in self._changed.values()]
        self._db.executemany("INSERT OR REPLACE INTO components VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", rows)

    def _component(self, ident: int) -> Component:
        if ident not in self._changed:
            row = self._db.execute(f"{_COMPONENT} WHERE id = ?", (ident,)).fetchone()
            self._changed[ident] = _component(row)
        return self._changed[ident]

    def _component_of(self, trace: int) -> Component:
        return self._component(self._db.execute("SELECT component FROM traces WHERE id = ?", (trace,)).fetchone()[0])

    # Giving out

    def due(self, now_ns: int, most: int) -> list[Component]:
        """At most `most` components that must be looked at by now, those first that have waited longest."""
        rows = self._db.execute(f"{_COMPONENT} WHERE due_ns <= ? ORDER BY due_ns, id LIMIT ?", (now_ns, most))
        return [_component(row) for row in rows]

    def components(self) -> Iterator[tuple[int, str]]:
        """(id, alphabetically first trace) of every component; no order of arrival changes the trace."""
        return self._db.execute("SELECT component, min(name) FROM traces GROUP BY component")

    def component_of(self, trace: str) -> int | None:
        """The component of a trace, by name; None if no request held it."""
        row = self._db.execute("SELECT component FROM traces WHERE name = ?", (trace,)).fetchone()
        return row[0] if row else None

    def components_of_rollout(self, rollout_id: str) -> list[int]:
        """The components that may hold a rollout: its id is a rollout's, a conversation's or a trace's."""
        return holding(self._db, rollout_id)

    def traces(self, component: int) -> list[str]:
        """The names of a component's traces."""
        return [name for (name,) in self._db.execute("SELECT name FROM traces WHERE component = ?", (component,))]

    def requests(self, components: Iterable[int]) -> Iterator[tuple[Position, dict[str, int]]]:
        """Where the requests with spans of the components stand, in journal order, each with {trace: component}."""
        wanted = dict[int, dict[str, int]]()
        for component in components:
            select = "SELECT request, name FROM traces JOIN held ON trace = id WHERE component = ?"
            for request, name in self._db.execute(select, (component,)):
                wanted.setdefault(request, {})[name] = component
        for request in sorted(wanted):
            row = self._db.execute("SELECT segment, offset FROM requests WHERE id = ?", (request,)).fetchone()
            yield Position(*row), wanted[request]

    def rewards(self, component: int) -> list[Reward]:
        """The rewards that may be for rollouts of a component, by the time at which they were received."""
        rows = self._db.execute(
            f"{_REWARD} WHERE rollout_id IN ("
            "SELECT name FROM traces WHERE component = ?1 UNION SELECT value FROM edges JOIN traces ON id = trace"
            f" WHERE component = ?1 AND kind IN ('rollout', 'conversation')) {_BY_AGE}",
            (component,),
        )
        return [_reward(row) for row in rows]

    # What was written

    def intend(self, rows: Iterable[tuple[RolloutKey, str]]) -> None:
        """Note rollouts that are about to be written, each with a trace of its own: by it one is found that moves."""
        with self._transaction():
            self._db.executemany(
                "INSERT OR REPLACE INTO written SELECT ?, ?, id FROM traces WHERE name = ?",
                [(*key, trace) for key, trace in rows],
            )

    def written(self, component: int) -> set[RolloutKey]:
        """The (rollout, attempt) that were written, or were about to be, from a component's traces."""
        return set(
            self._db.execute(
                "SELECT rollout_id, attempt FROM written JOIN traces ON id = trace WHERE component = ?", (component,)
            )
        )

    def trace_of_rollout(self, rollout_id: str) -> str | None:
        """A trace that has a span with the rollout id on it, if one has."""
        select = "SELECT name FROM edges JOIN traces ON id = trace WHERE kind = 'rollout' AND value = ? LIMIT 1"
        row = self._db.execute(select, (rollout_id,)).fetchone()
        return row[0] if row else None

    def looked(self, open_until: Sequence[tuple[int, int | None]], gone: Iterable[RolloutKey], now_ns: int) -> None:
        """Note that components were put together now, each with the time when its first open rollout closes (None if
        all are written), and that rollouts are gone from where they were.
        """
        with self._transaction():
            for ident, until_ns in open_until:
                component = self._component(ident)
                component.signal_ns = None
                component.flushed = False
                component.looked_ns = now_ns
                component.until_ns = until_ns
                component.opened_ns = None if until_ns is None else component.opened_ns
            self._db.executemany("DELETE FROM written WHERE rollout_id = ? AND attempt = ?", list(gone))

    def tally(self, numbers: Mapping[str, int]) -> None:
        """Add to counters of what was written, which are gone when the index is made anew."""
        with self._transaction():
            self._db.executemany(
                "INSERT INTO tallies VALUES (?1, ?2) ON CONFLICT DO UPDATE SET value = value + ?2",
                list(numbers.items()),
            )

    # What is removed from the journal: collector/retention.py decides, collector/expired.py keeps the list

    def indexed_segments(self) -> dict[int, int]:
        """Segments with the receive time of their newest record that is indexed."""
        return dict(self._db.execute("SELECT segment, newest_ns FROM segments"))

    def components_in(self, segment: int) -> list[Component]:
        """The components with spans or rewards in a segment."""
        spans = """SELECT DISTINCT component FROM requests JOIN held ON request = requests.id
            JOIN traces ON traces.id = trace WHERE requests.segment = ?"""
        idents = {ident for (ident,) in self._db.execute(spans, (segment,))}
        for (rollout,) in self._db.execute("SELECT DISTINCT rollout_id FROM rewards WHERE segment = ?", (segment,)):
            idents.update(self.components_of_rollout(rollout))
        select = f"{_COMPONENT} WHERE id = ?"
        return [_component(self._db.execute(select, (ident,)).fetchone()) for ident in sorted(idents)]

    def waiting_rewards(self, segment: int) -> list[Reward]:
        """The rewards in a segment whose rollout nobody has named, in journal order."""
        rows = self._db.execute(f"{_REWARD} WHERE segment = ? ORDER BY id", (segment,)).fetchall()
        alone = [_reward(row) for row in rows if not self.components_of_rollout(row[0])]
        return [reward for reward in alone if self.expired.attempt(reward) is None]

    def force(self, components: Iterable[int]) -> None:
        """Have components closed at the next look, whatever they wait for."""
        with self._transaction():
            for ident in components:
                component = self._component(ident)
                component.flushed = component.opened_ns is not None

    def drop_rewards(self, rewards: Iterable[Reward]) -> None:
        """Forget rewards that were written."""
        with self._transaction():
            self._db.executemany(
                "DELETE FROM rewards WHERE rollout_id = ? AND attempt IS ? AND call_id IS ? AND name = ?",
                [(reward.rollout_id, reward.attempt, reward.call_id, reward.name) for reward in rewards],
            )

    def drop_segment(self, segment: int) -> None:
        """Forget a segment that was removed, and what else of it is known."""
        with self._transaction():
            self._db.execute(
                "DELETE FROM held WHERE request IN (SELECT id FROM requests WHERE segment = ?)", (segment,)
            )
            self._db.execute("DELETE FROM requests WHERE segment = ?", (segment,))
            self._db.execute("DELETE FROM segments WHERE segment = ?", (segment,))

    def expire(self, batches: Iterable[Batch], end: int) -> None:
        """Take in the list of what expired, up to byte `end`: such components are known no more, but by name."""
        with self._transaction():
            for batch in batches:
                for name in batch.traces:
                    self._forget_trace(name)
                for key in batch.rollouts:
                    self._db.execute("DELETE FROM written WHERE rollout_id = ? AND attempt = ?", key)
                    self._db.execute("DELETE FROM rewards WHERE rollout_id = ?1 AND coalesce(attempt, ?2) = ?2", key)
                self.expired.add(batch)
            self.expired.add_end(end)

    def _forget_trace(self, name: str) -> None:
        row = self._db.execute("SELECT id, component FROM traces WHERE name = ?", (name,)).fetchone()
        if row is None:
            return
        trace, component = row
        requests = self._db.execute("SELECT request FROM held WHERE trace = ?", (trace,)).fetchall()
        self._db.execute("DELETE FROM held WHERE trace = ?", (trace,))
        self._db.executemany(
            "DELETE FROM requests WHERE id = ?1 AND NOT EXISTS (SELECT 1 FROM held WHERE request = ?1)", requests
        )
        for table, column in (("edges", "trace"), ("written", "trace"), ("traces", "id"), ("components", "id")):
            self._db.execute(
                f"DELETE FROM {table} WHERE {column} = ?", (component if table == "components" else trace,)
            )

    def unlink(self, component: int) -> None:
        """Take a component's keys from it: what it held is set aside, and it stands for no rollout."""
        with self._transaction():
            self._db.execute(
                "DELETE FROM edges WHERE trace IN (SELECT id FROM traces WHERE component = ?)", (component,)
            )

    def is_expired(self, component: int) -> bool:
        """Whether a component holds what still came for a trace that has expired; such a trace stands alone."""
        return any(self.expired.trace(name) for name in self.traces(component))

    def rewards_of_expired(self, most: int) -> list[tuple[RolloutKey, Reward]]:
        """Rewards for rollouts that have expired, with the one that each is for, by the time of receiving."""
        rows = self._db.execute(
            f"{_REWARD} WHERE rollout_id IN (SELECT rollout_id FROM expired_rollouts) {_BY_AGE} LIMIT ?", (most,)
        )
        found = list[tuple[RolloutKey, Reward]]()
        for reward in map(_reward, rows.fetchall()):
            attempt = self.expired.attempt(reward)
            if attempt is not None and (
                reward.attempt is not None or not self.components_of_rollout(reward.rollout_id)
            ):
                found.append(((reward.rollout_id, attempt), reward))
        return found


def _component(row: Sequence[int]) -> Component:
    ident, traces, size, newest_ns, opened_ns, signal_ns, ended, looked_ns, until_ns, flushed = row
    return Component(
        ident, traces, size, newest_ns, opened_ns, signal_ns, bool(ended), looked_ns, until_ns, bool(flushed)
    )


def _reward(row: Sequence[Any]) -> Reward:
    rollout, value, *rest = row
    # SQLite keeps NaN as NULL.
    return Reward(rollout, math.nan if value is None else value, *rest)


def _earliest(one: int | None, other: int | None) -> int | None:
    return min((at for at in (one, other) if at is not None), default=None)


def _row_id(inserted: sqlite3.Cursor) -> int:
    if inserted.lastrowid is None:
        raise ValueError("only an INSERT has a row id")
    return inserted.lastrowid
