"""`spanmill build`: recorded requests into a dataset, in bounded memory.

Inputs are read twice: first to find out which traces belong together, then to deal their spans out into partitions,
files that each fit into memory; processes of their own put them together. What fits into one partition is read once and
put together here. `collector/partition.py` has the pure functions that this is made of and says in what order the rows
stand: neither the order in which requests came nor the number of processes changes it.
"""

import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from itertools import chain, islice
from pathlib import Path
from shutil import rmtree
from tempfile import TemporaryDirectory
from typing import TypeVar

from rich.console import Console
from rich.progress import track

from spanmill.adapters import adapt
from spanmill.collector import build_ray
from spanmill.collector import rewards as posted
from spanmill.collector.components import Components, Place
from spanmill.collector.config import BuildConfig
from spanmill.collector.expired import LIST_NAME, Batch, read_expired
from spanmill.collector.index import Found
from spanmill.collector.indexer import options
from spanmill.collector.inputs import Request, read_requests, read_rewards
from spanmill.collector.journal import Kind
from spanmill.collector.partition import Known, Piece, deal, key_of, put_together
from spanmill.collector.spill import cores, spill, write_partitions
from spanmill.collector.stats import loss_report
from spanmill.collector.survey import survey
from spanmill.errors import DatasetError, DecodeError, InputError
from spanmill.storage import Location
from spanmill.triplets.parts import part_numbers
from spanmill.triplets.records import Reward
from spanmill.triplets.schema import ROLLOUTS, TABLES
from spanmill.triplets.writer import DatasetWriter, write_part

PARTITION_BYTES = 32 << 20
"""Of requests; put together they take about six times that in each process."""
LINE_S = 10.0

T = TypeVar("T")


def build(inputs: Sequence[Location], config: BuildConfig) -> int:
    """Write the dataset `config.out` from what the inputs hold, print its loss report, and return 0.

    Raises InputError if an input cannot be read, DatasetError if there is a dataset already or none can be written.
    """
    on_ray = config.engine == "ray"
    here = config.out if isinstance(config.out, Path) else None
    work = build_ray.work_folder(config) if on_ray else None
    _check_empty(config.out, goes_on=work is not None and work.is_dir())
    table = list(read_rewards(config.rewards)) if config.rewards else []
    with DatasetWriter(config.out) as dataset:
        for left in here.glob(".build-*") if here else ():  # by a build that was killed
            if left != work:
                rmtree(left)
        expired = _expired(inputs)
        if on_ray:
            _build_on_ray(inputs, table, expired, dataset, config)
        else:
            with TemporaryDirectory(prefix=".build-", dir=here) as folder:
                _build(_Recorded(inputs), table, expired, dataset, config, Path(folder))
    print(loss_report(config.out), end="")
    return 0


def _build(
    recorded: "_Recorded",
    table: Sequence[Reward],
    expired: Sequence[Batch],
    dataset: DatasetWriter,
    config: BuildConfig,
    folder: Path,
) -> None:
    with closing(Components(folder / "components.sqlite")) as components:
        held = _survey(recorded, components)
        recorded.check()
        count = components.resolve(PARTITION_BYTES)
        given = [*recorded.rewards(), *table]
        places = [components.of_rollout(reward.rollout_id) for reward in given]
        if held is None:
            again = _shown(recorded.again(), "sorting requests", recorded.count)
            spill(_dealt(recorded, again, components), folder)
            pieces = list[Piece]()
        else:
            pieces = list(_dealt(recorded, held, components))
        known = _known(count, given, places, expired, components)
    missed = set[bytes]()
    if held is None:
        workers = config.workers or cores()
        done = write_partitions(folder, known, options(config), workers)
        for written in _shown(done, "writing rows", count):
            missed.update(written.missed)
            if written.folder is not None:
                dataset.take(written.folder)
    elif pieces:
        made = put_together(pieces, known[0], options(config))
        missed.update(made.missed)
        if not made.empty:
            write_part(folder, made.tables, made.strays)
            dataset.take(folder)
    _write_nowhere(given, places, missed, dataset, config)


def _build_on_ray(
    inputs: Sequence[Location],
    table: Sequence[Reward],
    expired: Sequence[Batch],
    dataset: DatasetWriter,
    config: BuildConfig,
) -> None:
    work = build_ray.prepare(inputs, config, table, expired, PARTITION_BYTES)
    file = work.folder / build_ray.COMPONENTS
    file.unlink(missing_ok=True)
    with build_ray.cluster(config.workers) as data:
        with closing(Components(file)) as components:
            found = build_ray.survey_units(data, work, components, _shown)
            _check_readable(found.unreadable, found.requests, found.why)
            count = components.resolve(PARTITION_BYTES)
            given = [*found.rewards, *table]
            places = [components.of_rollout(reward.rollout_id) for reward in given]
            known = _known(count, given, places, expired, components)
        build_ray.write_partitions(data, work, known, _shown)
    missed = build_ray.commit(work, count, dataset)
    if not build_ray.finished(work, count):
        _write_nowhere(given, places, missed, dataset, config)
    rmtree(work.folder)


def _known(
    count: int,
    given: Sequence[Reward],
    places: Sequence[Place | None],
    expired: Sequence[Batch],
    components: Components,
) -> dict[int, Known]:
    """By partition, what is known of its rollouts."""
    known = {number: Known({}, set(), set()) for number in range(count)}
    for reward, place in zip(given, places, strict=True):
        if place is not None:
            known[place.partition].rewards.setdefault(place.component, []).append(reward)
    for batch in expired:
        for trace in batch.traces:
            if place := components.place(trace):
                known[place.partition].traces.add(trace)
        for key in batch.rollouts:
            if place := components.of_rollout(key[0]):
                known[place.partition].rollouts.add(key)
    return known


def _write_nowhere(
    given: Sequence[Reward],
    places: Sequence[Place | None],
    missed: set[bytes],
    dataset: DatasetWriter,
    config: BuildConfig,
) -> None:
    """Set the rewards aside whose rollout is nowhere."""
    alone = adapt([], given, options(config)).stray
    nowhere = {
        key_of(row): row for row, place in zip(alone, places, strict=True) if place is None or key_of(row) in missed
    }
    if nowhere:
        dataset.write([], list(nowhere.values()))


def _check_empty(out: Location, *, goes_on: bool = False) -> None:
    """Raises DatasetError unless `out` is missing, empty, or a dataset without rows, as a failed build leaves it.

    With `goes_on` it may also be what a build on Ray left that was cut off.
    """
    if goes_on or not out.exists():
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

    def __init__(self, inputs: Sequence[Location]) -> None:
        self._inputs = inputs
        self._rewards = list[Reward]()
        self.count = 0
        """Requests that were read."""
        self.size = 0
        """Their bytes."""
        self._unreadable = dict[int, str]()
        """Number of a request that is no OTLP, and why."""

    def requests(self) -> Iterator[Request]:
        """The requests that hold spans; to be read once, and numbered from 0 by whoever reads them."""
        for request in self._everything():
            if request.kind is Kind.REWARDS:
                self._rewards += posted.decode(request.body)
            elif request.kind is not Kind.FLUSH:
                self.count += 1
                self.size += len(request.body)
                yield request

    def again(self) -> Iterator[Request]:
        """The same requests a second time, without what an input got meanwhile."""
        spans = (request for request in self._everything() if request.kind not in (Kind.REWARDS, Kind.FLUSH))
        return islice(spans, self.count)

    def rewards(self) -> list[Reward]:
        """The rewards that stood between the requests, by the time at which they were received."""
        return sorted(self._rewards, key=lambda reward: reward.received_ns)

    def found(self, number: int, request: Request) -> list[Found]:
        """What a request holds; nothing if it cannot be read, which is noted."""
        try:
            return survey(request.kind, request.body)
        except DecodeError as error:
            self._unreadable[number] = str(error)
            return []

    def pieces(self, number: int, request: Request, components: Components) -> list[Piece]:
        """The pieces of a request, none if it cannot be read."""
        return [] if number in self._unreadable else deal(request, components.place)

    def check(self) -> None:
        """Say how many requests could not be read. Raises InputError if that goes for all of them."""
        _check_readable(len(self._unreadable), self.count, next(iter(self._unreadable.values()), ""))

    def _everything(self) -> Iterator[Request]:
        return chain.from_iterable(map(read_requests, self._inputs))


def _check_readable(unreadable: int, count: int, why: str) -> None:
    """Say how many requests could not be read, and why the first. Raises InputError if that goes for all of them."""
    if not unreadable:
        return
    line = f"{unreadable} of {count} requests cannot be read, the first of them: {why}"
    if unreadable == count:
        raise InputError(line)
    _say(line)


def _survey(recorded: _Recorded, components: Components) -> list[Request] | None:
    """Tell `components` what the requests hold; the requests themselves, unless they are more than one partition."""
    held: list[Request] | None = []
    for number, request in enumerate(_shown(recorded.requests(), "reading requests")):
        components.add(recorded.found(number, request))
        if held is not None:
            held.append(request)
            if recorded.size > PARTITION_BYTES:
                held = None
    return held


def _dealt(recorded: _Recorded, requests: Iterable[Request], components: Components) -> Iterator[Piece]:
    for number, request in enumerate(requests):
        yield from recorded.pieces(number, request, components)


# For people


def _expired(inputs: Sequence[Location]) -> list[Batch]:
    """What `spanmill serve` has removed from the inputs, which is said: they may hold parts of those rollouts."""
    lists = {str(path): path for found in inputs if found.is_dir() for path in _files(found) if path.name == LIST_NAME}
    expired = list[Batch]()
    for _, path in sorted(lists.items()):
        batches = read_expired(path.parent)[0]
        count = len({key for batch in batches for key in batch.rollouts})
        _say(
            f"{path.parent} no longer holds all spans of {count:,} rollouts, which were written and then removed; "
            "what is left of them, if anything, is set aside as expired"
        )
        expired += batches
    return expired


def _files(folder: Location) -> Iterable[Location]:
    return folder.rglob("*") if isinstance(folder, Path) else folder.below()


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
