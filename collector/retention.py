"""What of the journal may go: the oldest first, and never before its rollouts are written.

A component whose spans are removed in part is forgotten as a whole: it has expired. What still comes for it is set
aside, and a reward revises the rows as they stand.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from spanmill.collector import journal
from spanmill.collector.assemble import Component
from spanmill.collector.expired import Batch, append_expired, read_expired, sync_folder
from spanmill.collector.index import Index
from spanmill.collector.journal import Position
from spanmill.errors import JournalError
from spanmill.triplets.records import Reward

_MANY: Final = 1 << 62


class Keep(NamedTuple):
    """How much of the journal is kept."""

    max_bytes: int = _MANY
    max_age_ns: int = _MANY
    min_free_bytes: int = 0
    """While the disk has less left, the journal gives up what it can."""


EVERYTHING: Final = Keep()


class Retired(NamedTuple):
    """What a round of retention came to."""

    removed: int = 0
    """Segments."""
    forced: int = 0
    """Components that were too old to wait for, and are to be closed now."""
    waited: Sequence[Reward] = ()
    """Rewards too old to wait for a rollout; to be set aside, and then dropped from the index."""


def take_in(folder: Path, index: Index) -> None:
    """Tell an index what has expired since it last read the list."""
    batches, end = read_expired(folder, index.expired.read)
    if batches:
        index.expire(batches, end)


def retire(folder: Path, index: Index, keep: Keep, now_ns: int, damage: Mapping[Position, int]) -> Retired:
    """Remove segments that are too old, or too much, from the journal; raises JournalError if that fails.

    Of those that are too old, what is open is closed first: the next round removes them. `damage` is what reading
    passed over, as of `journal.read`.
    """
    sizes = _sizes(folder)
    indexed = index.indexed_segments()
    over = sum(sizes.values()) - keep.max_bytes
    over = max(over, keep.min_free_bytes - free_bytes(folder))
    removed, forced = 0, dict[int, Component]()
    waited = list[Reward]()
    for segment in sorted(_done(sizes, index.places, damage), key=lambda number: (indexed.get(number, 0), number)):
        old = now_ns - indexed.get(segment, now_ns) > keep.max_age_ns
        empty = segment not in indexed
        if not (old or empty or over > 0):
            continue
        components = index.components_in(segment)
        waiting = index.waiting_rewards(segment)
        open_components = {component.id: component for component in components if component.opened_ns is not None}
        if old:
            forced |= open_components
            waited += waiting
        if open_components or waiting:
            continue
        _remove(folder, index, segment, components)
        over -= sizes[segment]
        removed += 1
    index.force(forced)
    return Retired(removed, len(forced), waited)


def _remove(folder: Path, index: Index, segment: int, components: Sequence[Component]) -> None:
    """First the list, then the index, then the file: wherever this is cut off, the next start goes on from the list."""
    if components:
        traces = [name for component in components for name in index.traces(component.id) if name]
        rollouts = sorted({key for component in components for key in index.written(component.id)})
        batch = Batch(sorted(index.places.values()), sorted(traces), rollouts)
        index.expire([batch], append_expired(folder, [batch], index.expired.read))
    index.drop_segment(segment)
    try:
        journal.segment_path(folder, segment).unlink(missing_ok=True)
        sync_folder(folder)
    except OSError as error:
        raise JournalError(f"segment {segment} of {folder} cannot be removed: {error.strerror}") from error


def _done(sizes: Mapping[int, int], places: Mapping[int, Position], damage: Mapping[Position, int]) -> Iterator[int]:
    """The segments that have a successor of the same worker, and from which all is indexed that can be."""
    newest = {journal.worker_of(segment): segment for segment in sorted(sizes)}
    for segment, size in sizes.items():
        place = places.get(journal.worker_of(segment))
        if place is None or segment == newest[journal.worker_of(segment)]:
            continue
        if segment < place.segment or (segment == place.segment and place.offset + damage.get(place, 0) >= size):
            yield segment


def _sizes(folder: Path) -> dict[int, int]:
    """Segments to bytes."""
    found = dict[int, int]()
    for segment in journal.segments(folder):
        found[segment] = os.stat(journal.segment_path(folder, segment)).st_size
    return found


def free_bytes(folder: Path) -> int:
    """What the disk of a folder has left for us."""
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize
