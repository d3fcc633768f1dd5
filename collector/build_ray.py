"""`spanmill build --engine ray`: the same functions on Ray Data, which schedules, shuffles and starts again.

    shares of the input ─ survey ──> components, on the driver's disk
                       ── deal ──> pieces ── Ray's shuffle by partition ── put together ──> a folder for each partition
                                                                             the driver commits them in their order

The folder `.build-ray` in OUT, or in --work, is seen by the driver and every worker. It holds what belongs
together and the partitions that are done, so a run that was killed is gone on with by the same command: what is done is
left out before the shuffle. Neither the number of workers nor a run that was cut off changes a byte of the dataset.
"""

import hashlib
import logging
import os
import pickle
import shutil
import sqlite3
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, Final, NamedTuple, cast

from spanmill.adapters import Options
from spanmill.collector.components import Components
from spanmill.collector.config import BuildConfig
from spanmill.collector.indexer import options
from spanmill.collector.inputs import Unit
from spanmill.collector.partition import Known, Piece, put_together
from spanmill.collector.shares import Read, Surveyed, deal_share, survey_share
from spanmill.collector.spill import cores, rest_collector
from spanmill.errors import ConfigError, DatasetError, InputError
from spanmill.storage import Location, sync
from spanmill.triplets.parts import BUILDING, part_numbers
from spanmill.triplets.schema import ROLLOUTS, TABLES
from spanmill.triplets.writer import DatasetWriter, write_part

FOLDER: Final = f"{BUILDING}ray"
COMPONENTS: Final = "components.sqlite"

Shown = Callable[[Iterable[Any], str, int | None], Iterator[Any]]


class Work(NamedTuple):
    """What the driver knows before the rows are made."""

    out: Location
    folder: Path
    """What is in between; seen by the driver and every worker."""
    shares: list[list[Unit]]
    options: Options


@contextmanager
def cluster(workers: int | None) -> Generator[Any]:
    """`ray.data` on the cluster that RAY_ADDRESS names, else on one of `workers` processes that ends with this one."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    # Where it is not installed a type checker finds neither of them.
    ray, data = cast("Any", import_module("ray")), cast("Any", import_module("ray.data"))
    own = not ray.is_initialized()
    if own:
        address = os.environ.get("RAY_ADDRESS")
        local: dict[str, Any] = {} if address else {"num_cpus": workers or cores(), "include_dashboard": False}
        ray.init(address=address, log_to_driver=False, logging_level=logging.WARNING, **local)
    for name in ("ray.data", "ray.data.context"):
        logging.getLogger(name).setLevel(logging.ERROR)  # what it does is said by our own lines
    context: Any = data.DataContext.get_current()
    context.enable_progress_bars = False
    # Tasks alone, no actors: what a killed worker held is made again from what it was made of.
    context.shuffle_strategy = data.context.ShuffleStrategy.SORT_SHUFFLE_PULL_BASED
    try:
        yield data
    finally:
        if own:
            ray.shutdown()


def prepare(shares: list[list[Unit]], config: BuildConfig, told: object) -> Work:
    """The work folder of this input and these options: that of a run which was cut off, if it was the same, else a new
    one. `told` is what else the rows depend on.

    Raises DatasetError if rows of another run are committed already, and ConfigError if nothing says where the folder
    is.
    """
    folder = work_folder(config)
    if folder is None:
        raise ConfigError(f"--out {config.out} is no folder: --work names one that all workers of Ray share")
    chosen = options(config)
    all_told = repr((str(config.out), shares, chosen, told))
    fingerprint = hashlib.sha256(all_told.encode("utf-8", "surrogatepass")).hexdigest()
    mark = folder / "fingerprint"
    if not (mark.is_file() and mark.read_text() == fingerprint):
        if folder.is_dir() and part_numbers(config.out, ROLLOUTS):
            raise DatasetError(
                f"{config.out} holds part of a build of other inputs or options that was cut off; "
                "give those again to go on with it, or choose an empty folder"
            )
        shutil.rmtree(folder, ignore_errors=True)
        for name in ("told", "parts", "known"):
            (folder / name).mkdir(parents=True)
        mark.write_text(fingerprint)
    return Work(config.out, folder, shares, chosen)


def work_folder(config: BuildConfig) -> Path | None:
    """Where a build on Ray has what is in between; None if it has nowhere."""
    parent = config.work or (config.out if isinstance(config.out, Path) else None)
    return parent and parent / FOLDER


# Pass 1: what belongs together


def survey_shares(data: Any, work: Work, components: Components, shown: Shown) -> list[Surveyed]:
    """What the shares hold; `components` is told of traces and keys. Raises InputError if an input cannot be read."""
    rows = _numbered(data, work.shares).map(_survey_share, fn_kwargs={"folder": work.folder})
    surveyed = dict[int, Surveyed]()
    for row in shown(rows.iter_rows(), "surveying", len(work.shares)):
        if row["failed"]:
            raise InputError(row["failed"])
        components.take(_told(work.folder, row["number"]))
        surveyed[row["number"]] = pickle.loads(row["surveyed"])
    return [surveyed[number] for number in range(len(work.shares))]


def _numbered(data: Any, items: Sequence[Any]) -> Any:
    """A task for each item."""
    rows = [{"number": number, "item": pickle.dumps(item)} for number, item in enumerate(items)]
    return data.from_items(rows, override_num_blocks=len(rows))


def _told(folder: Path, share: int) -> Path:
    """What a share holds; the driver reads it, and then the task that deals the share."""
    return folder / "told" / str(share)


def _survey_share(row: dict[str, Any], folder: Path) -> dict[str, Any]:
    rest_collector()
    path = _told(folder, row["number"])
    writing = path.with_suffix(f".{os.getpid()}")
    writing.unlink(missing_ok=True)
    surveyed, failed = b"", ""
    try:
        surveyed = pickle.dumps(survey_share(pickle.loads(row["item"]), writing))
        writing.rename(path)
    except (InputError, sqlite3.Error) as error:  # Ray would wrap it into an error of its own
        failed = str(error)
    return {"number": row["number"], "surveyed": surveyed, "failed": failed}


# Pass 2: rows


def write_partitions(
    data: Any, work: Work, read: Sequence[Sequence[Read]], known: Mapping[int, Known], shown: Shown
) -> None:
    """Have the workers write every partition that is not there yet; `known` has them by number.

    `read` is that of each share's `Surveyed`.
    """
    done = {number for number in known if _part(work.folder, number).is_dir()}
    for number, of_partition in known.items():
        (work.folder / "known" / str(number)).write_bytes(pickle.dumps(of_partition))
    if len(done) == len(known):
        return
    dealing = list(zip(work.shares, read, strict=True))
    pieces = _numbered(data, dealing).flat_map(_deal_share, fn_kwargs={"folder": work.folder, "done": done})
    folder, chosen = work.folder, work.options

    def put(group: Any) -> Any:
        return _put_partition(group, folder, chosen)

    made = pieces.groupby("partition").map_groups(put, batch_format="pyarrow")
    try:
        for _ in shown(made.iter_rows(), "writing rows", len(known) - len(done)):
            pass
    except InputError as error:  # of a worker: Ray has put lines of its own around it
        raise InputError(str(getattr(error, "cause", error)).partition("\n")[0]) from error


def _deal_share(row: dict[str, Any], folder: Path, done: set[int]) -> Iterator[dict[str, Any]]:
    rest_collector()
    units, read = pickle.loads(row["item"])
    for piece in deal_share(units, read, folder / COMPONENTS, _told(folder, row["number"])):
        if piece.partition not in done:
            yield {"partition": piece.partition, "piece": pickle.dumps(piece, pickle.HIGHEST_PROTOCOL)}


def _put_partition(group: Any, folder: Path, chosen: Options) -> Any:
    """The rows of a partition, written under its name; a worker that is killed leaves nothing under that name."""
    import pyarrow as pa

    rest_collector()
    number: int = group.column("partition")[0].as_py()
    known: Known = pickle.loads((folder / "known" / str(number)).read_bytes())
    made = put_together(_unpickled(group.column("piece")), known, chosen)
    part = _part(folder, number)
    if not part.is_dir():
        writing = part.with_suffix(f".{os.getpid()}")
        shutil.rmtree(writing, ignore_errors=True)
        writing.mkdir()
        (writing / "missed").write_bytes(pickle.dumps(made.missed))
        if not made.empty:
            write_part(writing, made.tables, made.strays)
        try:
            writing.rename(part)
        except OSError:  # Ray ran the task twice, and the other was faster with the same
            shutil.rmtree(writing)
    return pa.table({"partition": [number]})


def _unpickled(column: Any) -> Iterator[Piece]:
    for chunk in column.chunks:
        for value in chunk:
            yield pickle.loads(value.as_buffer())


def _part(folder: Path, number: int) -> Path:
    return folder / "parts" / f"{number}.part"


def commit(work: Work, count: int, dataset: DatasetWriter) -> set[bytes]:
    """Commit the partitions that are not committed yet, in their order; `Partition.missed` of all of them.

    Each makes one part, so as many as the dataset has are committed.
    """
    committed = len(part_numbers(work.out, ROLLOUTS))
    missed = set[bytes]()
    filled = 0
    for number in range(count):
        part = _part(work.folder, number)
        missed.update(pickle.loads((part / "missed").read_bytes()))
        if not (part / f"{ROLLOUTS.name}.parquet").exists():
            continue
        filled += 1
        if filled <= committed:
            continue
        with _copied(part, work.out if isinstance(work.out, Path) else part.parent) as taken:
            dataset.take(taken)
    return missed


@contextmanager
def _copied(part: Path, near: Path) -> Generator[Path]:
    """The files of a part in a folder, in `near`, from which they may be taken: a run that is killed has them still."""
    folder = near / f"{BUILDING}take"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for table in TABLES:
        name = f"{table.name}.parquet"
        try:
            os.link(part / name, folder / name)
        except OSError:  # --work is on another disk
            shutil.copyfile(part / name, folder / name)
            sync(folder / name)
    yield folder
    shutil.rmtree(folder)


def finished(work: Work, count: int) -> bool:
    """Whether a run that was cut off had committed everything, the last rows included."""
    filled = sum((_part(work.folder, n) / f"{ROLLOUTS.name}.parquet").exists() for n in range(count))
    return len(part_numbers(work.out, ROLLOUTS)) > filled
