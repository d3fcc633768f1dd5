"""A build's processes, and partitions on disk: pieces go into files for each, from which its rows are made."""

import gc
import os
import pickle
import signal
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context, parent_process
from multiprocessing.connection import wait
from pathlib import Path
from types import TracebackType
from typing import Any, Final, NamedTuple, Self, TypeVar

from spanmill.adapters import Options
from spanmill.collector.input_files import keep_quiet
from spanmill.collector.partition import Known, Piece, put_together
from spanmill.errors import DatasetError
from spanmill.triplets.writer import write_part

SPILL_BYTES: Final = 32 << 20
"""Of pieces, held until they are written."""

T = TypeVar("T")


def cores() -> int:
    """How many processes can run at once here."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def rest_collector() -> None:
    """Have the garbage collector look seldom: spans and rows go by reference counts, and it took 6 % of the time."""
    gc.freeze()
    gc.set_threshold(200_000, 20, 100)


class Processes:
    """At most `workers` processes, started when there is work for more than one; a context manager."""

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self._pool: ProcessPoolExecutor | None = None

    def map(self, function: Callable[..., T], jobs: Sequence[tuple[Any, ...]]) -> Iterator[T]:
        """What `function` makes of each job's arguments, in their order. Raises what it raises, and DatasetError if a
        process ends before its time.
        """
        if min(self._workers, len(jobs)) <= 1:
            yield from (function(*job) for job in jobs)
            return
        if self._pool is None:
            # Not by fork alone, which would copy the locks of threads; one process is prepared and all are its forks.
            context = get_context("forkserver")
            context.set_forkserver_preload([__name__])
            self._pool = ProcessPoolExecutor(self._workers, context, _begin)
        try:
            # They are born with the interrupt blocked: it is for this process to end them.
            before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
            try:
                made = self._pool.map(function, *zip(*jobs, strict=True))
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)
            yield from made
        except BrokenProcessPool as error:
            raise DatasetError("a process of this build was killed; too little memory?") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)


def _begin() -> None:
    rest_collector()
    keep_quiet()
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """End this process when the one that it works for is gone, killed: nothing else does."""
    if (parent := parent_process()) is not None:
        wait([parent.sentinel])
        os._exit(1)


class Written(NamedTuple):
    """What became of one partition."""

    folder: Path | None
    """With the files of its part, for `DatasetWriter.take`; None if it has no rows."""
    missed: list[bytes]
    """As `Partition.missed`."""


def spill(pieces: Iterable[Piece], folder: Path) -> int:
    """Add pieces to the files that this process has for each partition; its number, for `write_partition`.

    Raises DatasetError if they cannot be written.
    """
    waiting, size = defaultdict[int, list[Piece]](list), 0
    for piece in pieces:
        waiting[piece.partition].append(piece)
        size += len(piece.body)
        if size >= SPILL_BYTES:
            _append(waiting, folder)
            size = 0
    _append(waiting, folder)
    return os.getpid()


def _append(waiting: dict[int, list[Piece]], folder: Path) -> None:
    try:
        for partition, pieces in waiting.items():
            with _path(folder, partition, os.getpid()).open("ab") as file:
                pickle.dump(pieces, file, pickle.HIGHEST_PROTOCOL)
    except OSError as error:
        raise DatasetError(f"cannot write to {folder.parent}: {error}") from error
    waiting.clear()


def _path(folder: Path, partition: int, process: int) -> Path:
    return folder / f"{partition}.{process}.pieces"


def _spilled(path: Path) -> Iterator[Piece]:
    size = path.stat().st_size
    with path.open("rb") as file:
        while file.tell() < size:
            yield from pickle.load(file)
    path.unlink()


def write_partition(folder: Path, processes: Iterable[int], number: int, known: Known, options: Options) -> Written:
    """Put together what these processes spilled of a partition, and write the files of its part beside it.

    Raises DatasetError if that fails.
    """
    spilled = [path for process in processes if (path := _path(folder, number, process)).exists()]
    made = put_together((piece for path in spilled for piece in _spilled(path)), known, options)
    if made.empty:
        return Written(None, made.missed)
    part = folder / f"{number}.part"
    try:
        part.mkdir()
        write_part(part, made.tables, made.strays)
    except OSError as error:
        raise DatasetError(f"cannot write to {folder.parent}: {error}") from error
    return Written(part, made.missed)
