"""Partitions on disk: pieces go into a file for each, from which processes of their own make parts of the dataset."""

import gc
import os
import pickle
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from pathlib import Path
from typing import Final, NamedTuple

from spanmill.adapters import Options
from spanmill.collector.partition import Known, Piece, put_together
from spanmill.errors import DatasetError
from spanmill.triplets.writer import write_part

SPILL_BYTES: Final = 64 << 20
"""Of pieces, held until they are written."""


class Written(NamedTuple):
    """What became of one partition."""

    folder: Path | None
    """With the files of its part, for `DatasetWriter.take`; None if it has no rows."""
    missed: list[bytes]
    """As `Partition.missed`."""


def cores() -> int:
    """How many processes can run at once here."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def rest_collector() -> None:
    """Have the garbage collector look seldom: spans and rows go by reference counts, and it took 6 % of the time."""
    gc.freeze()
    gc.set_threshold(200_000, 20, 100)


def spill(pieces: Iterable[Piece], folder: Path) -> None:
    """Add pieces to the files of their partitions."""
    waiting, size = defaultdict[int, list[Piece]](list), 0
    for piece in pieces:
        waiting[piece.partition].append(piece)
        size += len(piece.body)
        if size >= SPILL_BYTES:
            _append(waiting, folder)
            size = 0
    _append(waiting, folder)


def _append(waiting: dict[int, list[Piece]], folder: Path) -> None:
    for partition, pieces in waiting.items():
        with _path(folder, partition).open("ab") as file:
            pickle.dump(pieces, file, pickle.HIGHEST_PROTOCOL)
    waiting.clear()


def _path(folder: Path, partition: int) -> Path:
    return folder / f"{partition}.pieces"


def _spilled(folder: Path, partition: int) -> Iterator[Piece]:
    path = _path(folder, partition)
    size = path.stat().st_size
    with path.open("rb") as file:
        while file.tell() < size:
            yield from pickle.load(file)


def write_partitions(folder: Path, known: Mapping[int, Known], options: Options, workers: int) -> Iterator[Written]:
    """Write what was spilled to `folder`, in at most `workers` processes; what came of each partition, in order.

    `known` has the partitions by number, from 0.

    Raises DatasetError if a process ends before its time.
    """
    jobs = [(folder, number, of_partition, options) for number, of_partition in sorted(known.items())]
    if min(workers, len(jobs)) == 1:
        yield from (write_partition(*job) for job in jobs)
        return
    # Not by fork alone, which would copy the locks of threads; one process is prepared and all workers are its forks.
    context = get_context("forkserver")
    context.set_forkserver_preload([__name__])
    with ProcessPoolExecutor(min(workers, len(jobs)), context, rest_collector) as pool:
        try:
            yield from pool.map(write_partition, *zip(*jobs, strict=True))
        except BrokenProcessPool as error:
            raise DatasetError("a process that puts rollouts together was killed; too little memory?") from error
        finally:
            pool.shutdown(cancel_futures=True)


def write_partition(folder: Path, number: int, known: Known, options: Options) -> Written:
    """Put a partition together and write the files of its part beside it. Raises DatasetError if that fails."""
    made = put_together(_spilled(folder, number), known, options)
    _path(folder, number).unlink()
    if made.empty:
        return Written(None, made.missed)
    part = folder / f"{number}.part"
    try:
        part.mkdir()
        write_part(part, made.tables, made.strays)
    except OSError as error:
        raise DatasetError(f"cannot write to {folder.parent}: {error}") from error
    return Written(part, made.missed)
