"""From the journal to the dataset: index what came, put together what is complete, write its rows.

This is the second process of `spanmill serve`. It may be killed at any moment: what it had not written is found again
in the journal, what it had is found in the dataset, so nothing is lost and nothing is written twice.
"""

import fcntl
import json
import logging
import os
import select
import signal as signals
import sqlite3
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import NamedTuple

from spanmill.adapters import Options, adapt, keys
from spanmill.collector import journal, rewards
from spanmill.collector.assemble import SECOND, Closed, Component, RolloutKey, Timing, close, due_at, moved, revised
from spanmill.collector.child import read_setup
from spanmill.collector.config import RowConfig, ServeConfig
from spanmill.collector.index import Index, Seen
from spanmill.collector.index_file import INDEX_NAME, discard
from spanmill.collector.journal import Entry, Kind, Position
from spanmill.collector.late import aside, expired_row, rewarded, without_expired
from spanmill.collector.logs import logging_to_stderr
from spanmill.collector.retention import EVERYTHING, Keep, retire, take_in
from spanmill.collector.segment import HEAD_BYTES
from spanmill.collector.survey import load, survey
from spanmill.errors import DecodeError, JournalError, SpanmillError
from spanmill.storage import Location
from spanmill.triplets.from_tables import rollout_from_tables
from spanmill.triplets.reader import read_triplets
from spanmill.triplets.records import Quarantined, Reward, Rollout, Span
from spanmill.triplets.table import same_content
from spanmill.triplets.writer import DatasetWriter, stray_key

_log = logging.getLogger(__name__)

INDEX_BYTES = 8 << 20
"""Requests are indexed in transactions of about this size."""
LOAD_BYTES = 64 << 20
"""Components are put together in batches of about this size; a larger one makes a batch of its own."""
REWARDS_AT_ONCE = 1000
"""For rollouts whose spans are gone."""
REWRITE_S = 30.0
"""Superseded rows stay under the table folders about this long."""
RETIRE_S = 5.0
"""The journal is above its limit about this long."""
KEEP_OLD_S = 60.0
"""Replaced files stay this long for readers that have them open."""
POLL_S = 0.1
LOCK_S = 60.0
"""How long an indexer whose service was killed may take to notice and go."""


def options(config: RowConfig) -> Options:
    """The choices about rows that a configuration holds."""
    return Options(config.merge, config.realign_tokens, frozenset(config.reward_names), config.train_failed)


def timing(config: ServeConfig) -> Timing:
    """The waits that a configuration holds."""
    seconds = (config.settle, config.idle_timeout, config.max_open, config.await_reward)
    return Timing(*(int(wait * SECOND) for wait in seconds))


def keep(config: ServeConfig) -> Keep:
    """How much of the journal a configuration keeps. It gives way before requests are refused."""
    return Keep(
        int(config.journal_max_gib * (1 << 30)), int(config.journal_max_age * SECOND), 2 * config.min_free_mib << 20
    )


def newest_spans(rollouts: Sequence[Rollout], spans: Sequence[Span], component: Component) -> dict[RolloutKey, int]:
    """When the newest span of each rollout was received: of those that name it and of its calls.

    A rollout alone in its component has all of its spans.
    """
    if len(rollouts) == 1:
        return {(rollouts[0].rollout_id, rollouts[0].attempt): component.newest_ns}
    named, single = dict[str, int](), dict[tuple[str, str], int]()
    for span in spans:
        received_ns = min(span.received_ns, component.newest_ns)
        single[span.trace_id, span.span_id] = max(received_ns, single.get((span.trace_id, span.span_id), 0))
        for kind, value in keys(span):
            if kind == "rollout":
                named[value] = max(received_ns, named.get(value, 0))
    newest = dict[RolloutKey, int]()
    for rollout in rollouts:
        of_calls = (single.get((row.trace_id, row.span_id), 0) for row in (*rollout.triplets, *rollout.quarantined))
        known = max(named.get(rollout.rollout_id, 0), *of_calls, 0)
        newest[rollout.rollout_id, rollout.attempt] = known or component.newest_ns
    return newest


def changes(
    dataset: DatasetWriter, closed: Iterable[Rollout], gone: Mapping[RolloutKey, Sequence[Rollout]]
) -> list[Rollout]:
    """What to write so that the dataset holds the closed rollouts, and no longer those that are gone.

    `gone` has for each of the latter what its component holds now. Rows that stand there already are left as they are.
    """
    fresh = {(rollout.rollout_id, rollout.attempt): rollout for rollout in closed}
    committed = dataset.newest({*fresh, *gone})
    before = dataset.read_rows(committed)
    found = [rollout for key, rollout in fresh.items() if key not in before]
    for key, rows in before.items():
        revision = committed[key][0] + 1
        row = rows["rollouts"].to_pylist()[0]
        calls = rows["triplets"].select(["call_id", "flags"]).to_pylist()
        if key in gone:
            if "moved" not in row["flags"]:
                found.append(moved(row, {call["call_id"] for call in calls}, revision, gone[key]))
        elif not same_content(fresh[key], rows):
            in_time = {call["call_id"] for call in calls if "late" not in call["flags"]}
            found.append(revised(fresh[key], revision, in_time))
    return sorted(found, key=lambda rollout: (rollout.rollout_id, rollout.attempt))


class _Outcome(NamedTuple):
    """What a component comes to."""

    component: Component
    rollouts: list[Rollout]
    closed: Closed
    gone: set[RolloutKey]
    """Rollouts that were written from its traces and are no longer in it."""
    stray: list[Quarantined]
    apart: bool = False
    """All of it came too late and is set aside."""


class Indexer:
    """Carries the journal in `folder` over into the dataset at `out`, step by step.

    `clock` gives nanoseconds since 1970, by the clock that receive times are taken from; `report` gets lines for
    people.
    """

    def __init__(
        self,
        folder: Path,
        out: Location,
        choices: Options,
        timing: Timing,
        *,
        keep: Keep = EVERYTHING,
        clock: Callable[[], int] = time.time_ns,
        report: Callable[[str], None] = _log.warning,
    ) -> None:
        """Raises DatasetError if the dataset cannot be opened, JournalError if the index cannot."""
        self._folder = folder
        self._out = out
        self._options = choices
        self._timing = timing
        self._keep = keep
        self._clock = clock
        self._report = report
        self._dataset = DatasetWriter(out)
        self._index = Index(folder / INDEX_NAME, lambda component: due_at(component, timing))
        self._fresh = not self._index.places
        self._flush_at: Position | None = None
        """Where the flush stands that is next."""
        try:
            take_in(folder, self._index)
        except JournalError:
            self.close()
            raise
        self._damage = dict[Position, int]()
        self._strays = self._dataset.stray_rows()
        self._started_ns = self._newest_ns = clock()
        self._index.start(self._started_ns)
        self.caught_up = False
        """All that stood in the journal at the start is indexed. Nothing is closed before: there may be more of it."""
        self.behind = True
        """More may stand in the journal than is indexed."""

    def close(self) -> None:
        """Let go of index and dataset."""
        self._index.close()
        self._dataset.close()

    def step(self, *, complete: bool = False) -> bool:
        """Index the next requests; `complete`: nobody writes the journal. True if a flush came: look at once."""
        damaged = len(self._damage)
        entries = list(self._next_entries(complete))
        for position in list(self._damage)[damaged:]:
            size = self._damage[position]
            self._report(f"journal: {size} bytes of segment {position.segment} at {position.offset} are damaged")
        self._index.add([self._seen(entry) for entry in entries], self._clock())
        self.behind = bool(entries)
        if entries:
            self._newest_ns = entries[-1].received_ns
        if not self.caught_up and (not entries or self._newest_ns >= self._started_ns):
            self.caught_up = True
            if self._fresh:
                self._recall()
        return bool(entries) and entries[-1].kind is Kind.FLUSH

    def _next_entries(self, complete: bool) -> Iterator[Entry]:
        """What stands next in the journal, up to about INDEX_BYTES or to a flush, which closes what came before it.

        That is also what came to other workers. When a flush is met, the reading of those may have ended before it was
        written, so it is taken only when it is met again.
        """
        size = 0
        for entry in journal.read_all(self._folder, self._index.places, complete=complete, damage=self._damage):
            if entry.kind is Kind.FLUSH and entry.position != self._flush_at:
                self._flush_at = entry.position
                if not size:
                    yield from self._next_entries(complete)
                return
            yield entry
            size += HEAD_BYTES + len(entry.body)
            if size >= INDEX_BYTES or entry.kind is Kind.FLUSH:
                return

    def _seen(self, entry: Entry) -> Seen:
        seen = Seen(entry.position, entry.end, entry.kind, entry.received_ns)
        try:
            if entry.kind is Kind.REWARDS:
                seen.rewards = rewards.decode(entry.body)
            elif entry.kind is Kind.FLUSH:
                seen.prefix = entry.body.decode()
            else:
                seen.found = survey(entry.kind, entry.body)
        except DecodeError as error:
            segment, offset = entry.position
            self._report(f"journal: the record of segment {segment} at {offset} cannot be read: {error}")
        return seen

    def _recall(self) -> None:
        """Tell a new index which traces the rollouts of the dataset came from."""
        if not self._dataset.is_empty:
            rows = read_triplets(self._out).select("rollout_id", "attempt", "trace_id").unique().collect()
            self._index.intend(((rollout_id, attempt), trace) for rollout_id, attempt, trace in rows.iter_rows())

    def look(self, *, flush: bool = False) -> int:
        """Put together what is due (with `flush`, all that is open) and write what is complete; how many rollouts.

        While the journal is ahead of the index, the time is that of the newest indexed request: of what came later
        nothing is known yet.
        """
        if flush:
            self._index.flush()
        now_ns = min(self._newest_ns, self._clock()) if self.behind else self._clock()
        written = 0
        while batch := self._batch(now_ns):
            written += self._write(batch, now_ns)
        return written + self._reward_expired()

    def _reward_expired(self) -> int:
        """Revise the rows of rollouts whose spans are gone by rewards that came for them; how many rollouts."""
        written = 0
        while found := self._index.rewards_of_expired(REWARDS_AT_ONCE):
            given = dict[RolloutKey, list[Reward]]()
            for key, reward in found:
                given.setdefault(key, []).append(reward)
            rows, stray = list[Rollout](), list[Quarantined]()
            for key, before in self._dataset.read_rows(given).items():
                rollout, refused = rewarded(rollout_from_tables(before), given.pop(key), self._options.counts)
                stray += [
                    aside(reward, why, _reward_json(reward), reward.received_ns // 1000) for reward, why in refused
                ]
                if not same_content(rollout, before):
                    known = {row.call_id for row in rollout.triplets}
                    rows.append(revised(rollout, rollout.revision + 1, known))
            # The rest names rows that are no longer in the dataset.
            stray += adapt([], [reward for rest in given.values() for reward in rest], self._options).stray
            self._commit(sorted(rows, key=lambda row: (row.rollout_id, row.attempt)), self._new_strays(stray))
            self._index.drop_rewards(reward for _, reward in found)
            written += len(rows)
        return written

    def _commit(self, rows: Sequence[Rollout], strays: Mapping[bytes, Quarantined]) -> None:
        if not rows and not strays:
            return
        self._dataset.write(rows, list(strays.values()))
        self._strays.update(strays)
        tally = Counter(quarantined.reason for row in rows for quarantined in row.quarantined)
        tally.update(quarantined.reason for quarantined in strays.values())
        numbers = {f"quarantined:{reason}": number for reason, number in tally.items()}
        numbers["rows:rollouts"] = len(rows)
        numbers["rows:triplets"] = sum(len(row.triplets) for row in rows)
        numbers["rows:episodes"] = sum(len(row.episodes) for row in rows)
        numbers["rows:quarantine"] = sum(tally.values())
        self._index.tally(numbers)

    def _batch(self, now_ns: int) -> list[Component]:
        batch, size = list[Component](), 0
        for component in self._index.due(now_ns, 1000):
            size += component.bytes
            if batch and size > LOAD_BYTES:
                break
            batch.append(component)
        return batch

    def _write(self, batch: Sequence[Component], now_ns: int) -> int:
        found = self._load(batch)
        outcomes = [self._outcome(component, found[component.id], now_ns) for component in batch]
        gone = {key: outcome.rollouts for outcome in outcomes for key in outcome.gone}
        rows = changes(self._dataset, (rollout for outcome in outcomes for rollout in outcome.closed.rollouts), gone)
        strays = self._new_strays(
            row for outcome in outcomes if outcome.closed.open_until is None for row in outcome.stray
        )
        self._index.intend(origin for outcome in outcomes for origin in self._origins(outcome))
        self._commit(rows, strays)
        for outcome in outcomes:
            if outcome.apart:
                self._index.unlink(outcome.component.id)
        self._index.looked([(outcome.component.id, outcome.closed.open_until) for outcome in outcomes], gone, now_ns)
        return len(rows)

    def _load(self, batch: Sequence[Component]) -> dict[int, list[Span | Quarantined]]:
        found: dict[int, list[Span | Quarantined]] = {component.id: [] for component in batch}
        for position, wanted in self._index.requests(component.id for component in batch):
            try:
                entry = journal.read_at(self._folder, position)
            except JournalError as error:
                self._report(f"a request is passed over: {error}")
                continue
            for component, one in load(entry.kind, entry.body, entry.received_ns, wanted):
                found[component].append(one)
        return found

    def _outcome(self, component: Component, found: Sequence[Span | Quarantined], now_ns: int) -> _Outcome:
        spans = [one for one in found if isinstance(one, Span)]
        unreadable = [one for one in found if isinstance(one, Quarantined)]
        if self._index.is_expired(component.id):
            return _Outcome(component, [], Closed([], None), set(), [*map(expired_row, spans), *unreadable], apart=True)
        try:
            adapted = adapt(spans, self._index.rewards(component.id), self._options)
        except Exception as error:
            # One component that the rules choke on must not hold up all others; its spans stay in the journal.
            traces = ", ".join(self._index.traces(component.id)[:3])
            # Without its message, which may hold a piece of a span.
            where = "".join(traceback.format_tb(error.__traceback__))
            self._report(
                f"the spans of {traces} could not be put together, later tried again: {type(error).__name__}\n{where}"
            )
            return _Outcome(component, [], Closed([], now_ns + max(self._timing.idle_ns, SECOND)), set(), [])
        # A reward for a rollout that is not here waits in the index.
        stray = [row for row in adapted.stray if row.reason != "unknown_rollout"]
        expired = self._index.expired.rollouts((row.rollout_id, row.attempt) for row in adapted.rollouts)
        rollouts, apart = without_expired(spans, adapted, expired)
        closed = close(rollouts, newest_spans(rollouts, spans, component), component, now_ns, self._timing)
        # Where a part of it has expired, that is in traces of its own: nothing else has moved.
        now = {(row.rollout_id, row.attempt) for row in rollouts}
        gone = set[RolloutKey]() if expired else self._index.written(component.id) - now
        stray += [*map(expired_row, apart), *unreadable]
        return _Outcome(component, rollouts, closed, gone, stray, apart=bool(expired) and not rollouts)

    def _new_strays(self, rows: Iterable[Quarantined]) -> dict[bytes, Quarantined]:
        found = {stray_key(row.trace_id, row.span_id, row.reason, row.detail, row.span): row for row in rows}
        return {key: row for key, row in found.items() if key not in self._strays}

    def _origins(self, outcome: _Outcome) -> Iterator[tuple[RolloutKey, str]]:
        """A trace of each rollout that is about to be written."""
        for rollout in outcome.closed.rollouts:
            of_calls = (row.trace_id for row in (*rollout.triplets, *rollout.quarantined))
            trace = self._index.trace_of_rollout(rollout.rollout_id) or next(of_calls, None)
            yield (rollout.rollout_id, rollout.attempt), trace or self._index.traces(outcome.component.id)[0]

    def retire(self) -> int:
        """Remove from the journal what is too old or too much, and have closed what is too old; how many segments."""
        if not self.caught_up:
            return 0
        retired = retire(self._folder, self._index, self._keep, self._clock(), self._damage)
        if retired.waited:
            stray = adapt([], retired.waited, self._options).stray
            self._commit([], self._new_strays(stray))
            self._index.drop_rewards(retired.waited)
        return retired.removed

    def tidy(self) -> None:
        """Rewrite small parts and parts with superseded rows, and remove what was replaced a while ago."""
        while self._dataset.rewrite() is not None:
            pass
        self._dataset.purge_old(KEEP_OLD_S, self._clock() / SECOND)


def _reward_json(reward: Reward) -> str:
    names = ("rollout_id", "attempt", "call_id", "name", "value", "source")
    return json.dumps({name: getattr(reward, name) for name in names})


# The process


def run(config: ServeConfig, control: int, ready: Callable[[], None]) -> None:
    """Index and write until `control`, a pipe's file descriptor, says "drain", or closes because the service is gone.

    Calls `ready` once journal and dataset are open. Raises SpanmillError if they cannot be opened or written.
    """
    folder = config.journal_folder
    with logging_to_stderr(config.log_format), _alone(folder), closing(_opened(folder, config)) as indexer:
        ready()
        looked = tidied = retired = time.monotonic()
        while True:
            flushed = indexer.step()
            now = time.monotonic()
            if indexer.caught_up and (flushed or now - looked >= config.flush_interval):
                indexer.look()
                looked = now
            if now - tidied >= REWRITE_S:
                indexer.tidy()
                tidied = now
            if now - retired >= RETIRE_S:
                indexer.retire()
                retired = now
            message = _received(control, 0 if indexer.behind else POLL_S)
            if message is not None:
                break
        if message:
            while indexer.behind:
                indexer.step(complete=True)
            indexer.look(flush=config.flush_on_exit)
            indexer.tidy()


def _opened(folder: Path, config: ServeConfig) -> Indexer:
    return Indexer(folder, config.out, options(config), timing(config), keep=keep(config))


@contextmanager
def _alone(folder: Path) -> Generator[None]:
    """Wait for the indexer of a service that was killed to notice that and go."""
    with (folder / "indexer.lock").open("w") as lock:
        last_try = time.monotonic() + LOCK_S
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                if time.monotonic() > last_try:
                    raise JournalError(f"another indexer is at work on {folder} and does not end") from error
                time.sleep(POLL_S)
            else:
                break
        yield


def _received(control: int, wait_s: float) -> bytes | None:
    """What was sent down the pipe: None for nothing, empty if the other end is gone."""
    readable, _, _ = select.select([control], [], [], wait_s)
    return os.read(control, 64) if readable else None


def main() -> int:
    """The child process of `spanmill serve`: configuration and commands on stdin, "ready" or an error on stdout."""
    for number in (signals.SIGINT, signals.SIGTERM):
        signals.signal(number, signals.SIG_IGN)  # the service decides, over the pipe, and drains first
    control = sys.stdin.fileno()
    try:
        config: ServeConfig = read_setup(control)
    except BrokenPipeError:
        return 1
    try:
        run(config, control, lambda: print("ready", flush=True))
    except BrokenPipeError:
        return 1  # the service was killed while this process came up
    except SpanmillError as error:
        print(error, flush=True)
        return 1
    except sqlite3.DatabaseError as error:
        print(f"the index: {error}", flush=True)
        if not isinstance(error, sqlite3.OperationalError):  # it is damaged, not out of space
            discard(config.journal_folder / INDEX_NAME)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
