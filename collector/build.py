"""`spanmill build`: recorded requests into a dataset, in one go and in bounded memory.

Inputs of up to BUCKET_BYTES are put together at once. Larger ones are read twice: first to find out which traces belong
together, then to deal their spans out into buckets, files that each fit into memory. Rows stand in the order (bucket,
rollout_id, attempt). A bucket follows from the alphabetically first trace of a component, the number of buckets from
the size of the input, so the order of arrival changes nothing.
"""

import pickle
import sys
import time
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from functools import lru_cache
from itertools import chain, islice
from pathlib import Path
from shutil import rmtree
from tempfile import TemporaryDirectory
from typing import TypeAlias, TypeVar

from rich.console import Console
from rich.progress import track

from spanmill.adapters import Options, adapt, keys
from spanmill.collector import rewards as posted
from spanmill.collector.config import BuildConfig
from spanmill.collector.decode import decode
from spanmill.collector.expired import LIST_NAME, read_expired
from spanmill.collector.index import Index, Seen
from spanmill.collector.indexer import INDEX_BYTES, home, options, survey
from spanmill.collector.inputs import read_requests, read_rewards
from spanmill.collector.journal import Kind, Position
from spanmill.collector.stats import loss_report
from spanmill.errors import DatasetError, DecodeError, InputError
from spanmill.triplets.parts import part_numbers
from spanmill.triplets.records import Quarantined, Reward, Rollout, Span
from spanmill.triplets.schema import ROLLOUTS, TABLES
from spanmill.triplets.writer import DatasetWriter, stray_key

BUCKET_BYTES = 64 << 20
"""Of requests; put together they take about ten times that."""
LINE_S = 10.0

Found: TypeAlias = Span | Quarantined
"""A span, or the row that says why it cannot be read."""
Request: TypeAlias = tuple[Kind, bytes]
T = TypeVar("T")


def build(inputs: Sequence[Path], config: BuildConfig) -> int:
    """Write the dataset `config.out` from what the inputs hold, print its loss report, and return 0.

    Raises InputError if an input cannot be read, DatasetError if there is a dataset already or none can be written.
    """
    _check_empty(config.out)
    table = list(read_rewards(config.rewards)) if config.rewards else []
    with DatasetWriter(config.out) as dataset:
        for left in config.out.glob(".build-*"):  # by a build that was killed
            rmtree(left)
        _say_what_expired(inputs)
        recorded = _Recorded(inputs)
        requests = recorded.requests()
        first = list[Request]()
        for request in requests:
            first.append(request)
            if recorded.size > BUCKET_BYTES:
                break
        if recorded.size <= BUCKET_BYTES:
            found = [one for number, request in enumerate(first) for one in recorded.decoded(number, *request)]
            recorded.check()
            rollouts, stray = _put_together(found, [*recorded.rewards(), *table], options(config))
            if rollouts or stray:
                dataset.write(rollouts, list(stray.values()))
        else:
            with TemporaryDirectory(prefix=".build-", dir=config.out) as folder:
                every = chain(first, requests)
                _build_in_buckets(recorded, every, table, dataset, options(config), Path(folder))
    print(loss_report(config.out), end="")
    return 0


def _check_empty(out: Path) -> None:
    """Raises DatasetError unless `out` is missing, empty, or a dataset without rows, as a failed build leaves it."""
    if not out.exists():
        return
    if not out.is_dir():
        raise DatasetError(f"{out} is no folder")
    if (out / ROLLOUTS.name).is_dir() and part_numbers(out, ROLLOUTS):
        raise DatasetError(f"{out} already holds a dataset; choose an empty folder")
    own = {".lock", ".old", *(table.name for table in TABLES)}
    others = sorted(path.name for path in out.iterdir() if path.name not in own and not path.name.startswith(".build-"))
    if others:
        raise DatasetError(f"{out} is not empty, it has {others[0]}; choose an empty folder")


class _Recorded:
    """What the inputs hold."""

    def __init__(self, inputs: Sequence[Path]) -> None:
        self._inputs = inputs
        self._rewards = list[Reward]()
        self.count = 0
        """Requests that were read."""
        self.size = 0
        """Their bytes."""
        self._unreadable = dict[int, str]()
        """Number of a request that is no OTLP, and why."""

    def requests(self) -> Iterator[Request]:
        """The requests that hold spans; to be read once, and numbered from 0 by the reader."""
        for kind, body in self._everything():
            if kind is Kind.REWARDS:
                self._rewards += posted.decode(body)
            elif kind is not Kind.FLUSH:
                self.count += 1
                self.size += len(body)
                yield kind, body

    def again(self) -> Iterator[Request]:
        """The same requests a second time, without what an input got meanwhile."""
        spans = (request for request in self._everything() if request[0] not in (Kind.REWARDS, Kind.FLUSH))
        return islice(spans, self.count)

    def rewards(self) -> list[Reward]:
        """The rewards that stood between the requests, by the time at which they were received."""
        return sorted(self._rewards, key=lambda reward: reward.received_ns)

    def decoded(self, number: int, kind: Kind, body: bytes) -> Iterator[Found]:
        """The spans of a request; none if it cannot be read, which is noted."""
        try:
            spans, bad, _ = decode(kind, body)
        except DecodeError as error:
            self._unreadable[number] = str(error)
            return
        yield from spans
        yield from bad

    def seen(self, number: int, kind: Kind, body: bytes) -> Seen:
        """A request as the index takes it; empty if it cannot be read, which is noted."""
        place = Position(0, number)
        try:
            return Seen(place, place, kind, 0, survey(kind, body))
        except DecodeError as error:
            self._unreadable[number] = str(error)
            return Seen(place, place, kind, 0)

    def check(self) -> None:
        """Say how many requests could not be read. Raises InputError if that goes for all of them."""
        if not self._unreadable:
            return
        number, why = next(iter(self._unreadable.items()))
        line = f"{len(self._unreadable)} of {self.count} requests cannot be read, the first is number {number}: {why}"
        if len(self._unreadable) == self.count:
            raise InputError(line)
        _say(line)

    def _everything(self) -> Iterator[Request]:
        return chain.from_iterable(map(read_requests, self._inputs))


def _put_together(
    found: Sequence[Found], rewards: Sequence[Reward], choices: Options
) -> tuple[list[Rollout], dict[bytes, Quarantined]]:
    """The rollouts of whole components, and what stands under none of them, each row once."""
    rollouts, stray = adapt((one for one in found if isinstance(one, Span)), rewards, choices)
    rows = chain(stray, (one for one in found if isinstance(one, Quarantined)))
    return rollouts, {_key(row): row for row in rows}


def _key(row: Quarantined) -> bytes:
    return stray_key(row.trace_id, row.span_id, row.reason, row.detail, row.span)


# Larger inputs


def _build_in_buckets(
    recorded: _Recorded,
    requests: Iterable[Request],
    table: Sequence[Reward],
    dataset: DatasetWriter,
    choices: Options,
    folder: Path,
) -> None:
    with closing(Index(folder / "index.sqlite")) as index:
        _index(recorded, requests, index)
        recorded.check()
        count, bucket_of = _buckets(index, recorded.size)
        _deal_out(recorded, index, bucket_of, folder)
        rewards = [*recorded.rewards(), *table]
        places = [{bucket_of[i] for i in index.components_of_rollout(reward.rollout_id)} for reward in rewards]
    alone = [(_key(row), row) for row in adapt([], rewards, choices).stray]
    missed = Counter[bytes]()
    for bucket in _shown(range(count), "writing rows", count):
        own = [reward for reward, place in zip(rewards, places, strict=True) if bucket in place]
        rollouts, stray = _put_together(list(_spilled(folder, bucket)), own, choices)
        unknown = [key for key, row in stray.items() if row.reason == "unknown_rollout"]
        missed.update(unknown)
        for key in unknown:
            del stray[key]
        if rollouts or stray:
            dataset.write(rollouts, list(stray.values()))
    nowhere = {key: row for (key, row), place in zip(alone, places, strict=True) if missed[key] == len(place)}
    if nowhere:
        dataset.write([], list(nowhere.values()))


def _index(recorded: _Recorded, requests: Iterable[Request], index: Index) -> None:
    batch, size = list[Seen](), 0
    for number, (kind, body) in enumerate(_shown(requests, "reading requests")):
        batch.append(recorded.seen(number, kind, body))
        size += len(body)
        if size >= INDEX_BYTES:
            index.add(batch, 0)
            batch, size = [], 0
    index.add(batch, 0)


def _buckets(index: Index, size: int) -> tuple[int, dict[int, int]]:
    """(number of buckets, bucket of each component) for requests of `size` bytes."""
    bits = (size // BUCKET_BYTES).bit_length()
    return 1 << bits, {ident: zlib.crc32(trace.encode()) >> (32 - bits) for ident, trace in index.components()}


def _deal_out(recorded: _Recorded, index: Index, bucket_of: Mapping[int, int], folder: Path) -> None:
    """Write the spans of every request into the files of their buckets, decoded, so that each is decoded once."""

    @lru_cache(1 << 16)
    def bucket(trace: str) -> int | None:
        component = index.component_of(trace)
        return None if component is None else bucket_of[component]

    waiting, size = defaultdict[int, list[Found]](list), 0
    for number, (kind, body) in enumerate(_shown(recorded.again(), "sorting requests", recorded.count)):
        for one in recorded.decoded(number, kind, body):
            trace = one.trace_id or (home(one, keys(one)) if isinstance(one, Span) else "")
            place = bucket(trace)
            if place is not None:  # else it was not there when the input was read first
                waiting[place].append(one)
        size += len(body)
        if size >= BUCKET_BYTES:
            _spill(waiting, folder)
            size = 0
    _spill(waiting, folder)


def _spill(waiting: dict[int, list[Found]], folder: Path) -> None:
    for bucket, found in waiting.items():
        with (folder / f"{bucket}.spans").open("ab") as file:
            pickle.dump(found, file, pickle.HIGHEST_PROTOCOL)
    waiting.clear()


def _spilled(folder: Path, bucket: int) -> Iterator[Found]:
    path = folder / f"{bucket}.spans"
    if not path.exists():
        return
    size = path.stat().st_size
    with path.open("rb") as file:
        while file.tell() < size:
            yield from pickle.load(file)
    path.unlink()


# For people


def _say_what_expired(inputs: Sequence[Path]) -> None:
    """Say of which journals `spanmill serve` has removed something: they may hold parts of rollouts."""
    lists = {path for found in inputs if found.is_dir() for path in found.rglob(LIST_NAME)}
    for path in sorted(lists):
        count = len({key for batch in read_expired(path.parent)[0] for key in batch.rollouts})
        _say(
            f"{path.parent} no longer holds all spans of {count:,} rollouts, which were written and then removed; "
            "what is left of them, if anything, makes parts of rollouts"
        )


def _say(line: str) -> None:
    print(f"spanmill: {line}", file=sys.stderr, flush=True)


def _shown(items: Iterable[T], what: str, total: int | None = None) -> Iterator[T]:
    """The items, with a bar on a terminal and a plain line now and then elsewhere."""
    if sys.stderr.isatty():
        yield from track(items, what, total, console=Console(stderr=True), transient=True)
        return
    said = time.monotonic()
    for number, item in enumerate(items):
        if time.monotonic() - said > LINE_S:
            said = time.monotonic()
            _say(f"{what}: {number:,}" + (f" of {total:,}" if total else ""))
        yield item
