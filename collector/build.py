"""`spanmill build`: recorded requests into a dataset, in bounded memory.

Inputs are read twice: first to find out which traces belong together, then to deal their spans out into partitions,
files that each fit into memory; after that each partition is put together. All three are done by processes of their
own, a share of the input or a partition each (`collector/shares.py`, `collector/spill.py`). `collector/partition.py`
has the pure functions that this is made of and says in what order the rows stand: neither the order in which requests
came nor the number of processes changes it.
"""

import signal
import sqlite3
import sys
import threading
import time
from collections.abc import Generator, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from functools import partial
from itertools import chain
from pathlib import Path
from shutil import copyfileobj, rmtree
from tempfile import TemporaryDirectory
from types import FrameType
from typing import Any, NamedTuple, TypeVar

from rich.console import Console
from rich.progress import track

from spanmill.adapters import adapt
from spanmill.collector import build_ray
from spanmill.collector.components import Components, Place
from spanmill.collector.config import BuildConfig
from spanmill.collector.expired import LIST_NAME, Batch, read_expired
from spanmill.collector.indexer import options
from spanmill.collector.input_files import warn_once
from spanmill.collector.inputs import Unit, nothing_in, read_rewards, units
from spanmill.collector.partition import Known, key_of, put_together
from spanmill.collector.shares import Surveyed, deal_share, shares, survey_share
from spanmill.collector.spill import Processes, cores, spill, write_partition
from spanmill.collector.stats import loss_report
from spanmill.errors import DatasetError, InputError
from spanmill.storage import Location
from spanmill.triplets.parts import BUILDING, part_numbers, unfinished_builds
from spanmill.triplets.records import Reward
from spanmill.triplets.schema import ROLLOUTS, TABLES
from spanmill.triplets.writer import DatasetWriter, write_part

PARTITION_BYTES = 32 << 20
"""Of requests; put together they take about six times that in each process."""
SHARE_BYTES = 32 << 20
"""Of files, that are surveyed and dealt at a time, or one file that is larger."""
REQUESTS = 32
"""To an object store at a time."""
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
    with _terminable(), DatasetWriter(config.out) as dataset:
        for left in here.glob(f"{BUILDING}*") if here else ():  # by a build that was killed
            if left != work:
                rmtree(left)
        expired = _expired(inputs)
        try:
            if on_ray:
                _build_on_ray(inputs, table, expired, dataset, config)
            else:
                with TemporaryDirectory(prefix=BUILDING, dir=here) as folder:
                    _build(inputs, table, expired, dataset, config, Path(folder))
        except sqlite3.Error as error:  # of what is known of traces
            raise DatasetError(f"cannot write to {work or config.out}: {error}") from error
    print(loss_report(config.out), end="")
    return 0


@contextmanager
def _terminable() -> Generator[None]:
    """SIGTERM ends what is done here as an interrupt does: workers and what is in between go, too."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(number: int, _: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


class _Input:
    """What is read: the units of each input, cut into shares."""

    def __init__(self, paths: Sequence[Location]) -> None:
        self._units = {path: units(path) for path in paths}
        every = [unit for path in paths for unit in self._units[path]]
        with ThreadPoolExecutor(REQUESTS) as threads:
            self.stamps = list(threads.map(Unit.stamp, every))
        """Which change when what is read does."""
        self.shares = shares(zip(every, (size for _, size, _ in self.stamps), strict=True), SHARE_BYTES)

    def check(self, surveyed: Sequence[Surveyed]) -> None:
        """Say what was passed over. Raises InputError if nothing can be read, or if an input holds nothing of OTLP."""
        for warning in chain.from_iterable(one.warnings for one in surveyed):
            warn_once(warning)
        every = chain.from_iterable(one.read for one in surveyed)
        read = dict(zip(chain.from_iterable(self.shares), every, strict=True))
        for path, of_path in self._units.items():
            others = [unit.path for unit in of_path if not read[unit].is_otlp]
            if len(others) == len(of_path):
                raise nothing_in(path)
            if others:
                warn_once(f"{len(others)} files in {path} are not OTLP and are passed over, the first is {others[0]}")
        count = sum(one.requests for one in read.values())
        unreadable = sum(len(one.unreadable) for one in read.values())
        if unreadable:
            why = next(one.why for one in surveyed if one.why)
            line = f"{unreadable} of {count} requests cannot be read, the first of them: {why}"
            if unreadable == count:
                raise InputError(line)
            _say(line)


class _Placed(NamedTuple):
    """What is known when the rows are about to be made."""

    given: list[Reward]
    """All rewards."""
    places: list[Place | None]
    """Theirs."""
    known: dict[int, Known]
    """By partition."""


def _placed(
    surveyed: Sequence[Surveyed], table: Sequence[Reward], expired: Sequence[Batch], components: Components
) -> _Placed:
    count = components.resolve(PARTITION_BYTES)
    rewards = chain.from_iterable(one.rewards for one in surveyed)
    given = [*sorted(rewards, key=lambda reward: reward.received_ns), *table]
    places = [components.of_rollout(reward.rollout_id) for reward in given]
    return _Placed(given, places, _known(count, given, places, expired, components))


def _build(
    inputs: Sequence[Location],
    table: Sequence[Reward],
    expired: Sequence[Batch],
    dataset: DatasetWriter,
    config: BuildConfig,
    folder: Path,
) -> None:
    found = _Input([_kept(path, folder / f"{number}.input") for number, path in enumerate(inputs)])
    told = [folder / f"{number}.told" for number in range(len(found.shares))]
    file = folder / "components.sqlite"
    # Of a large file alone its requests are shown, as they are read; of several shares those.
    shown, reading, sorting = _shown, iter, iter
    if len(told) == 1:
        shown, reading, sorting = _not_shown, partial(_shown, what="reading"), partial(_shown, what="sorting")
    with Processes(config.workers or cores()) as processes:
        with closing(Components(file)) as components:
            surveyed = list[Surveyed]()
            surveying = processes.map(survey_share, [(*job, reading) for job in zip(found.shares, told, strict=True)])
            for path, one in zip(told, shown(surveying, "surveying", len(told)), strict=True):
                components.take(path)
                surveyed.append(one)
            found.check(surveyed)
            given, places, known = _placed(surveyed, table, expired, components)
        every = zip(found.shares, surveyed, told, strict=True)
        dealing = [(units, one.read, file, path, sorting) for units, one, path in every]
        missed = set[bytes]()
        if len(known) == 1:
            made = put_together(chain.from_iterable(deal_share(*job) for job in dealing), known[0], options(config))
            missed.update(made.missed)
            if not made.empty:
                write_part(folder, made.tables, made.strays)
                dataset.take(folder)
        elif known:
            dealt = processes.map(_spill_share, [(folder, *job) for job in dealing])
            spilled = set(shown(dealt, "sorting", len(told)))
            jobs = [(folder, spilled, number, of_partition, options(config)) for number, of_partition in known.items()]
            for written in _shown(processes.map(write_partition, jobs), "writing rows", len(known)):
                missed.update(written.missed)
                if written.folder is not None:
                    dataset.take(written.folder)
    _write_nowhere(given, places, missed, dataset, config)


def _spill_share(folder: Path, *job: Any) -> int:
    return spill(deal_share(*job), folder)


def _kept(path: Location, copy: Path) -> Location:
    """An input that can be read twice: itself, or a copy of a pipe."""
    if isinstance(path, Path) and path.exists() and not (path.is_file() or path.is_dir()):
        with path.open("rb") as pipe, copy.open("wb") as file:
            copyfileobj(pipe, file)
        return copy
    return path


def _build_on_ray(
    inputs: Sequence[Location],
    table: Sequence[Reward],
    expired: Sequence[Batch],
    dataset: DatasetWriter,
    config: BuildConfig,
) -> None:
    found = _Input(inputs)
    work = build_ray.prepare(found.shares, config, (found.stamps, table, expired, PARTITION_BYTES))
    file = work.folder / build_ray.COMPONENTS
    file.unlink(missing_ok=True)
    with build_ray.cluster(config.workers) as data:
        with closing(Components(file)) as components:
            surveyed = build_ray.survey_shares(data, work, components, _shown)
            found.check(surveyed)
            given, places, known = _placed(surveyed, table, expired, components)
        build_ray.write_partitions(data, work, [one.read for one in surveyed], known, _shown)
    missed = build_ray.commit(work, len(known), dataset)
    if not build_ray.finished(work, len(known)):
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
        if unfinished_builds(out):
            raise DatasetError(
                f"{out} holds part of a build that was cut off or still runs; remove the folder, or choose an empty one"
            )
        raise DatasetError(f"{out} already holds a dataset; choose an empty folder")
    own = {".lock", ".old", *(table.name for table in TABLES)}
    others = sorted(path.name for path in out.iterdir() if path.name not in own and not path.name.startswith(BUILDING))
    if others:
        raise DatasetError(f"{out} is not empty, it has {others[0]}; choose an empty folder")


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


def _not_shown(items: Iterable[T], what: str, total: int | None = None) -> Iterator[T]:
    return iter(items)
