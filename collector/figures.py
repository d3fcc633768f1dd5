"""Figures for metrics, which the workers of a service share: each adds to its own, and whoever is asked sums up.

They are integers in memory that all of them map, so a worker that is started again goes on with the figures of the one
before it, and no counter ever falls.
"""

import mmap
import os
import tempfile
import threading
from collections.abc import Sequence
from typing import Final

REFUSALS: Final = (
    "malformed",
    "too_large",
    "overloaded",
    "refused",
    "stalled",
    "cancelled",
    "unauthenticated",
    "unwritten",
    "unforeseen",
)
"""Requests that were not acknowledged, by reason."""
COUNTS: Final = ("requests", "spans", "log_records", "rewards", "rejected_spans", "ignored_metrics", *REFUSALS)
"""What came: requests that were acknowledged and what was in them, requests with metrics, and refusals."""
FORWARDED: Final = ("sent", "retried", "dropped_full", "dropped_refused", "dropped_stopped")
"""Requests that were passed on, by what became of them; `retried` counts times."""
SYNC_S: Final = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)
"""Upper bounds of the buckets of how long the disk took to sync."""
SYNCS: Final = tuple(f"syncs_to_{bound:g}" for bound in (*SYNC_S, float("inf")))
_GAUGES: Final = ("inflight_bytes",)
_NAMES: Final = (*COUNTS, "accepted_bytes", "sync_ns", *SYNCS, *(f"forward_{name}" for name in FORWARDED), *_GAUGES)
_PLACE: Final = {name: place for place, name in enumerate(_NAMES)}


def shared_memory(workers: int) -> int:
    """A file descriptor of memory for the figures of so many workers, to be handed on to their processes."""
    size = _size(workers)
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("spanmill-figures")
        os.ftruncate(fd, size)
        return fd
    with tempfile.TemporaryFile() as file:
        # Written, not cut to length: memory without a place on the disk could not be filled when that is full.
        file.write(bytes(size))
        file.flush()
        return os.dup(file.fileno())


class Figures:
    """The figures of a service, as worker number `worker` of `workers` sees them. Thread-safe."""

    def __init__(self, fd: int = -1, workers: int = 1, worker: int = 0) -> None:
        """`fd` is that of `shared_memory`; without one, the figures are this process's alone."""
        self.workers: Final = workers
        self._memory = mmap.mmap(fd, _size(workers))
        self._cells = memoryview(self._memory).cast("q")
        self._own = worker * len(_NAMES)
        self._lock = threading.Lock()
        for name in _GAUGES:  # of a worker before this one
            self.put(name, 0)

    def add(self, name: str, number: int = 1) -> None:
        """Add to a counter."""
        with self._lock:
            self._cells[self._own + _PLACE[name]] += number

    def put(self, name: str, number: int) -> None:
        """Set a gauge."""
        self._cells[self._own + _PLACE[name]] = number

    def synced(self, seconds: float) -> None:
        """Count a sync of the journal."""
        self.add("sync_ns", int(seconds * 1e9))
        self.add(next(name for name, bound in zip(SYNCS, (*SYNC_S, seconds), strict=True) if seconds <= bound))

    def own(self, names: Sequence[str]) -> dict[str, int]:
        """What this worker has of the figures."""
        return {name: self._cells[self._own + _PLACE[name]] for name in names}

    def total(self, name: str) -> int:
        """A figure, summed over all workers."""
        return sum(self._cells[place] for place in range(_PLACE[name], len(self._cells), len(_NAMES)))


def _size(workers: int) -> int:
    return 8 * len(_NAMES) * workers
