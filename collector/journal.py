"""The journal: every acknowledged request in the order of its arrival, in segment files `NNNNNNNN.journal`.

Each worker of a service has segments of its own in the same folder: those of worker 0 are numbered from 1, those of
worker 1 from 100,000,001 and so on. A worker's segments have one writer at a time (a lock file sees to that), and any
number of readers. Every start begins a new segment, so nothing is ever written behind a torn tail. Whoever removes old
segments leaves a worker's newest, whose number the next one goes on from. `segment.py` says what stands in a file.
"""

import fcntl
import heapq
import logging
import os
import re
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Final, NamedTuple, Self

from spanmill.collector.segment import (
    HEAD_BYTES,
    HEADER_BYTES,
    MAX_BODY_BYTES,
    Entry,
    Kind,
    Position,
    head,
    header,
    record_at,
    records,
    size_of,
)
from spanmill.errors import JournalError

__all__ = [
    "SEGMENT_BYTES",
    "Entry",
    "JournalWriter",
    "Kind",
    "Position",
    "is_written",
    "read",
    "read_all",
    "read_at",
    "seal",
    "segment_path",
    "segments",
    "worker_of",
    "workers",
]

SEGMENT_BYTES: Final = 256 << 20
"""A segment grows no larger, but for a single record that is."""
SEGMENT_S: Final = 6 * 3600.0
"""Nor older, so that what is old can be removed where little is received."""

_NAME: Final = re.compile(r"(\d{8,})\.journal")
_SEGMENTS: Final = 100_000_000
"""The numbers of a worker's segments; 256 MiB each, it never gets there."""
LOCK_S: Final = 10.0
"""How long a worker whose service was killed may take to notice and go."""
_GROUP_RECORDS: Final = 500
"""Records in one writev: two buffers each, IOV_MAX is 1024."""

_log = logging.getLogger(__name__)
_sync = getattr(os, "fdatasync", os.fsync)
"""fdatasync where there is one: of the metadata it also writes the file's length, and no more is needed."""


def segments(directory: Path) -> list[int]:
    """The numbers of the segments in `directory`, ascending. JournalError if it cannot be listed."""
    try:
        names = os.listdir(directory)
    except OSError as error:
        raise JournalError(f"journal {directory} cannot be read: {error.strerror}") from error
    return sorted(int(match[1]) for name in names if (match := _NAME.fullmatch(name)))


def worker_of(segment: int) -> int:
    """The worker that writes, or wrote, a segment."""
    return segment // _SEGMENTS


def workers(directory: Path) -> list[int]:
    """The workers that have segments in `directory`, ascending. JournalError if it cannot be listed."""
    return sorted({worker_of(number) for number in segments(directory)})


def segment_path(directory: Path, segment: int) -> Path:
    """The file of a segment."""
    return directory / f"{segment:08}.journal"


def read_all(
    directory: Path,
    after: Mapping[int, Position],
    *,
    complete: bool = False,
    damage: dict[Position, int] | None = None,
) -> Iterator[Entry]:
    """As `read`, the records of all workers, each worker's from its place in `after` on: the earliest received is next,
    of those that are next of their worker.

    What one worker was sent after another had acknowledged something stands behind that, if both are on disk by now.
    """
    every = [
        read(directory, after.get(worker), worker=worker, complete=complete, damage=damage)
        for worker in workers(directory)
    ]
    return every[0] if len(every) == 1 else heapq.merge(*every, key=lambda entry: entry.received_ns)


def read(
    directory: Path,
    after: Position | None = None,
    *,
    worker: int = 0,
    complete: bool = False,
    damage: dict[Position, int] | None = None,
) -> Iterator[Entry]:
    """The records of a worker from `after` (None: from the start) that are whole by now, in order.

    To go on, call again with the last `end`: that also finds new segments.

    `damage` gets what was passed over, position to bytes: a torn tail of a segment that has a successor, and records
    whose checksum does not hold. Reading again adds nothing twice. What is not whole at the end of the newest segment
    may be on its way and is left for the next call, unless `complete` says that no writer is at work.

    A record may be seen before it is synced. That breaks no promise: what is read and then lost with the power was not
    acknowledged, so its sender sends it again. But its position may then lead nowhere, see `read_at`.

    Raises JournalError if the journal cannot be read or was written by a newer spanmill.
    """
    damage = {} if damage is None else damage
    position = after
    while True:
        # Listed before the segment is read: one that has a successor by then gets no further record.
        own = (number for number in segments(directory) if worker_of(number) == worker)
        later = [number for number in own if position is None or number >= position.segment]
        if not later:
            return
        if position is None or position.segment != later[0]:
            position = Position(later[0], 0)
        closed = complete or len(later) > 1
        try:
            fd = _open(directory, later[0])
        except FileNotFoundError:
            # Removed since it was listed: by retention, or as a new segment whose header found no room.
            position = Position(later[0] + 1, 0)
            continue
        try:
            yield from records(fd, position, closed, damage)
        except OSError as error:
            raise _unreadable(segment_path(directory, later[0]), error) from error
        finally:
            os.close(fd)
        if len(later) == 1:
            return
        position = Position(later[1], 0)


def read_at(directory: Path, position: Position) -> Entry:
    """The record at `position`. JournalError if none is there: its segment was removed, it is damaged, or it was read
    before it was synced and the power failed (then it was never acknowledged).
    """
    path = segment_path(directory, position.segment)
    try:
        fd = _open(directory, position.segment)
        try:
            entry = record_at(fd, position, size_of(fd))
        finally:
            os.close(fd)
    except OSError as error:
        raise _unreadable(path, error) from error
    if entry is None:
        raise JournalError(f"{path} has no whole record at offset {position.offset}")
    return entry


def _open(directory: Path, segment: int) -> int:
    return os.open(segment_path(directory, segment), os.O_RDONLY | os.O_CLOEXEC)


def _unreadable(path: Path, error: OSError) -> JournalError:
    return JournalError(f"{path} cannot be read: {error.strerror or error}")


def seal(directory: Path, kept: int) -> None:
    """Begin an empty segment for each worker from number `kept` on that wrote here once and does no longer, so that its
    last full one counts as ended, and can be removed.
    """
    for worker in workers(directory):
        newest = max(number for number in segments(directory) if worker_of(number) == worker)
        if worker >= kept and os.stat(segment_path(directory, newest)).st_size > HEADER_BYTES:
            JournalWriter(directory, worker=worker, wait_s=LOCK_S).close()


class Record(NamedTuple):
    """A record to be written."""

    kind: Kind
    received_ns: int
    body: bytes
    then: Callable[[Position | JournalError], object]
    """Is told, in the journal's thread, where it stands on the disk, or why it does not; must not wait or raise."""


class _Pending(NamedTuple):
    record: Record
    body_crc: int

    @property
    def size(self) -> int:
        return HEAD_BYTES + len(self.record.body)


@dataclass(slots=True)
class _Segment:
    number: int
    fd: int
    """Opened to append."""
    end: int
    """Where the next record goes."""
    begun: float
    """When, on the monotonic clock."""


class JournalWriter:
    """The one writer of a worker's part of the journal in `directory`, which is made if missing. Thread-safe; a context
    manager.

    Group commit: one thread writes whatever waits with one writev and one fdatasync, and so many senders share the
    price of a sync. Raises JournalError if the directory cannot be written, or if another process writes this part
    and still does after `wait_s`.

    The lock lives as long as any process has the file open: start child processes by spawn, not by fork.
    """

    def __init__(
        self, directory: Path, *, worker: int = 0, segment_bytes: int = SEGMENT_BYTES, wait_s: float = 0.0
    ) -> None:
        self.on_sync: Callable[[float], object] = _ignored
        """Gets the seconds that each sync took, in the writer's thread."""
        self.directory = directory
        self._segment_bytes = segment_bytes
        self._waiting: deque[_Pending] = deque()
        self._wake = threading.Condition()
        self._closing = False
        self._failing = False
        self._lock = lock(directory, _lock_name(worker), wait_s)
        try:
            own = (number for number in segments(directory) if worker_of(number) == worker)
            self._number = max(own, default=worker * _SEGMENTS)
            self._segment: _Segment | None = self._new_segment()
        except OSError as error:
            os.close(self._lock)
            raise _unwritable(directory, error) from error
        self._thread = threading.Thread(target=self._run, name="spanmill-journal", daemon=True)
        self._thread.start()

    def append(self, kind: Kind, body: bytes, received_ns: int) -> Position:
        """Returns once the record is on disk. JournalError if it is not; then nothing of it counts as acknowledged."""
        return self.append_async(kind, body, received_ns).result()

    def append_async(self, kind: Kind, body: bytes, received_ns: int) -> "Future[Position]":
        """As `append`, without waiting: the future has the position, or the JournalError."""
        done: Future[Position] = Future()

        def then(outcome: Position | JournalError) -> None:
            if not done.set_running_or_notify_cancel():
                return  # nobody waits any longer
            if isinstance(outcome, JournalError):
                done.set_exception(outcome)
            else:
                done.set_result(outcome)

        self.submit([Record(kind, received_ns, body, then)])
        return done

    def submit(self, records: Sequence[Record]) -> None:
        """As `append`, without waiting: each record's `then` is told what came of it."""
        # Here, not in the writer's thread: crc32 lets other threads run meanwhile.
        pending = [_Pending(record, zlib.crc32(record.body)) for record in records]
        with self._wake:
            closed = self._closing
            if not closed:
                self._waiting.extend(pending)
                self._wake.notify()
        if closed:
            for record in records:
                record.then(JournalError("the journal is closed"))

    def close(self) -> None:
        """Writes what waits, then lets go of the journal. Later appends fail."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        self._thread.join()
        self._leave_segment()
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _run(self) -> None:
        while group := self._next_group():
            try:
                positions = self._commit(group)
            except Exception as error:
                if not self._failing:
                    _log.error("%s; every append fails until it can", _unwritable(self.directory, error))
                self._failing = True
                for pending in group:
                    # One each: an exception that several threads raise mixes up their tracebacks.
                    pending.record.then(_unwritable(self.directory, error))
                continue
            if self._failing:
                _log.warning("journal %s can be written again", self.directory)
            self._failing = False
            for pending, position in zip(group, positions, strict=True):
                pending.record.then(position)

    def _next_group(self) -> list[_Pending]:
        """At least one record, and what else waits and fits into one segment and one writev; none once all is done."""
        group: list[_Pending] = []
        size = HEADER_BYTES
        with self._wake:
            while not group:
                if not self._waiting:
                    if self._closing:
                        break
                    self._wake.wait()
                while self._waiting and len(group) < _GROUP_RECORDS:
                    if group and size + self._waiting[0].size > self._segment_bytes:
                        break
                    group.append(self._waiting.popleft())
                    size += group[-1].size
        return group

    def _commit(self, group: Sequence[_Pending]) -> list[Position]:
        """Writes and syncs a group; the positions of its records. After an error nothing of it is acknowledged, and the
        next group can be tried.
        """
        size = sum(pending.size for pending in group)
        if size - HEAD_BYTES > MAX_BODY_BYTES and len(group) == 1:
            raise JournalError(f"a record has {size - HEAD_BYTES} bytes, the most is {MAX_BODY_BYTES}")
        if self._segment and self._segment.end > HEADER_BYTES and self._is_full(self._segment, size):
            self._leave_segment()
        segment = self._segment = self._segment or self._new_segment()
        ends = [segment.end]
        buffers: list[bytes] = []
        for (kind, received_ns, body, _), body_crc in group:
            buffers += (head(ends[-1], kind, received_ns, len(body), body_crc), body)
            ends.append(ends[-1] + HEAD_BYTES + len(body))
        written = False
        try:
            _write_all(segment.fd, buffers)
            written = True
            begun = time.perf_counter()
            _sync(segment.fd)
            self.on_sync(time.perf_counter() - begun)
        except Exception:
            # What a failed sync left on the disk cannot be known, and the next sync of this file would not tell.
            if written or not _cut(segment, ends):
                self._leave_segment()
            raise
        segment.end = ends[-1]
        return [Position(segment.number, offset) for offset in ends[:-1]]

    def _is_full(self, segment: _Segment, size: int) -> bool:
        return segment.end + size > self._segment_bytes or time.monotonic() - segment.begun > SEGMENT_S

    def _leave_segment(self) -> None:
        if self._segment is not None:
            os.close(self._segment.fd)
            self._segment = None

    def _new_segment(self) -> _Segment:
        """A segment with its header, both on disk. A number whose file could not be made is not used again."""
        self._number += 1
        path = segment_path(self.directory, self._number)
        fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        try:
            _write_all(fd, [header()])
            _sync(fd)
            _sync_directory(self.directory)
        except OSError:
            os.close(fd)
            path.unlink()
            raise
        return _Segment(self._number, fd, HEADER_BYTES, time.monotonic())


def _ignored(seconds: float) -> None:
    pass


def _write_all(fd: int, buffers: Sequence[bytes]) -> None:
    views = deque(memoryview(buffer) for buffer in buffers)
    while views:
        written = os.writev(fd, views)
        while views and written >= len(views[0]):
            written -= len(views.popleft())
        if written:
            views[0] = views[0][written:]


def _cut(segment: _Segment, ends: Sequence[int]) -> bool:
    """Takes a torn record off the end, so that the segment can be written on; whether that worked.

    Records that were written whole stay, although nobody was told so: a reader may have seen them.
    """
    try:
        whole = [end for end in ends if end <= size_of(segment.fd)]
        os.ftruncate(segment.fd, whole[-1])
    except (OSError, IndexError):
        return False
    segment.end = whole[-1]
    return True


def _unwritable(directory: Path, error: Exception) -> JournalError:
    cause = (error.strerror if isinstance(error, OSError) else None) or f"{type(error).__name__} {error}"
    return JournalError(f"journal {directory} cannot be written: {cause}")


def _lock_name(worker: int) -> str:
    return f"writer-{worker}.lock" if worker else "writer.lock"


def is_written(directory: Path, worker: int) -> bool:
    """Whether a process writes a worker's part of a journal, or may: then a record at its end may be on its way."""
    try:
        fd = os.open(directory / _lock_name(worker), os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(fd)
    return False


def lock(directory: Path, name: str, wait_s: float = 0.0) -> int:
    """The open file `name` of a journal's folder, which is made if missing, locked until it is closed.

    Raises JournalError if the folder cannot be written, or if another process has the lock and keeps it for `wait_s`.
    """
    missing = [folder for folder in (directory, *directory.parents) if not folder.exists()]
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for folder in missing:
            _sync_directory(folder.parent)
        fd = os.open(directory / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise _unwritable(directory, error) from error
    try:
        _locked(fd, time.monotonic() + wait_s)
    except OSError as error:
        holder = os.pread(fd, 32, 0).decode(errors="replace").strip() or "unknown"
        os.close(fd)
        if isinstance(error, BlockingIOError):
            raise JournalError(f"journal {directory} is written by another spanmill (process {holder})") from error
        raise _unwritable(directory, error) from error
    os.ftruncate(fd, 0)
    os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
    return fd


def _locked(fd: int, last_try: float) -> None:
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= last_try:
                raise
            time.sleep(0.05)
        else:
            return


def _sync_directory(directory: Path) -> None:
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
