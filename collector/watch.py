"""The receiver's eye on disk and indexer: when to refuse requests for a while, and figures for metrics."""

import logging
import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Final, NamedTuple

from spanmill.collector import journal
from spanmill.collector.config import ServeConfig
from spanmill.collector.index_file import INDEX_NAME, progress
from spanmill.collector.ingest import Ingest
from spanmill.collector.journal import Position
from spanmill.collector.retention import free_bytes
from spanmill.collector.segment import HEADER_BYTES
from spanmill.storage import Location

_LOOK_S: Final = 0.5
_ROOM: Final = 1.1
"""Requests are taken again when there is this much more room than the limit, so that it does not flutter."""

_log = logging.getLogger(__name__)


class State(NamedTuple):
    """How things stand."""

    journal_bytes: int = 0
    segments: int = 0
    lag_bytes: int = 0
    """In the journal and not indexed."""
    free_bytes: int = 0
    """Of the fuller disk of journal and dataset."""
    open_components: int = 0
    """Groups of traces with rollouts that are not written yet."""
    tallies: dict[str, int] | None = None
    """What the indexer has written, None if that is not known."""


class Watch:
    """Looks every half second, in a thread of its own."""

    def __init__(self, ingest: Ingest, config: ServeConfig) -> None:
        self._ingest = ingest
        self._config = config
        self._stop = threading.Event()
        self._failing = False
        self._thread = threading.Thread(target=self._run, name="spanmill-watch", daemon=True)
        self.state = State()
        self.look()

    def start(self) -> None:
        """Go on to look."""
        self._thread.start()

    def stop(self) -> None:
        """Look no more."""
        self._stop.set()
        self._thread.join()

    def look(self) -> None:
        """Take the figures, and have requests refused or taken again."""
        self.state = _state(self._ingest.journal.directory, self._config.out)
        before, reason = self._ingest.refusing, self._reason()
        self._ingest.refusing = reason
        if self._config.min_free_mib:
            self._ingest.room = (self.state.free_bytes - (self._config.min_free_mib << 20)) // self._config.workers
        if reason and not before:
            _log.warning("requests are refused: %s", reason)
        elif before and not reason:
            _log.warning("requests are taken again")

    def _reason(self) -> str | None:
        room = _ROOM if self._ingest.refusing else 1.0
        least = self._config.min_free_mib << 20
        if self.state.free_bytes < least * room:
            return f"the disk has less than --min-free-mib {self._config.min_free_mib} left"
        if self.state.lag_bytes * room > self._config.journal_max_gib * (1 << 30):
            return f"more than --journal-max-gib {self._config.journal_max_gib:g} waits to be indexed"
        return None

    def _run(self) -> None:
        while not self._stop.wait(_LOOK_S):
            try:
                self.look()
            except OSError as error:  # the folder has gone, say; the journal's own errors tell the senders
                if not self._failing:
                    _log.error("disk and journal cannot be watched: %s", error)
                self._failing = True
            else:
                self._failing = False


def _state(folder: Path, out: Location) -> State:
    sizes = dict[int, int]()
    for segment in journal.segments(folder):
        sizes[segment] = _size(journal.segment_path(folder, segment))
    found = progress(folder / INDEX_NAME)
    lag = sum(_waiting(segment, size, found.places if found else {}) for segment, size in sizes.items())
    free = min(free_bytes(folder), free_bytes(out) if isinstance(out, Path) and out.exists() else free_bytes(folder))
    return State(
        sum(sizes.values()),
        len(sizes),
        lag,
        free,
        found.open_components if found else 0,
        found.tallies if found else None,
    )


def _waiting(segment: int, size: int, places: Mapping[int, Position]) -> int:
    """How much of a segment is not indexed."""
    place = places.get(journal.worker_of(segment), Position(0, 0))
    if segment < place.segment:
        return 0
    # In front of the first record is a header that nobody waits for.
    return max(0, size - (place.offset if segment == place.segment else HEADER_BYTES))


def _size(path: Path) -> int:
    try:
        return os.stat(path).st_size
    except FileNotFoundError:  # removed since it was listed
        return 0
