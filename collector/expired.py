"""The list of what has expired: traces and rollouts whose spans were removed from the journal once their rows stood.

It is on disk before anything is removed, so that an index made anew does not take the rest of a component for all of
it. A line of JSON each batch; a last line that is torn was followed by no removal, and is cut off.
"""

import json
import os
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any, Final, NamedTuple, cast

from spanmill.collector.journal import Position
from spanmill.errors import JournalError
from spanmill.storage import Location

LIST_NAME: Final = "expired.jsonl"
"""In the folder of the journal."""


class Batch(NamedTuple):
    """What expired at one moment."""

    upto: Sequence[Position]
    """One for each worker: what stands before it is in the rows, what stands behind it came too late."""
    traces: Sequence[str]
    rollouts: Sequence[tuple[str, int]]
    """(rollout id, attempt)"""


def read_expired(folder: Location, start: int = 0) -> tuple[list[Batch], int]:
    """The batches from byte `start` on, and where the list ends. JournalError if it cannot be read, or is damaged."""
    path = folder / LIST_NAME
    try:
        with path.open("rb") as file:
            file.seek(start)
            lines = file.read().split(b"\n")[:-1]
    except FileNotFoundError:
        return [], 0
    except OSError as error:
        raise JournalError(f"{path} cannot be read: {error.strerror}") from error
    try:
        return [_batch(line) for line in lines], start + sum(len(line) + 1 for line in lines)
    except (ValueError, KeyError, TypeError) as error:
        raise JournalError(
            f"{path} is damaged: it says what was removed from the journal, and without it rows could be replaced by "
            "parts of them. Restore it from a copy, or remove the journal's folder to begin anew beside these rows"
        ) from error


def append_expired(folder: Path, batches: Sequence[Batch], end: int) -> int:
    """Add batches behind byte `end`, durably; where the list ends then. JournalError if that fails."""
    path = folder / LIST_NAME
    data = b"".join(_line(batch) for batch in batches)
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            os.ftruncate(fd, end)
            written = os.pwrite(fd, data, end)
            if written < len(data):
                raise OSError(0, "it was not written whole")
            os.fsync(fd)
        finally:
            os.close(fd)
        if end == 0:
            sync_folder(folder)
    except OSError as error:
        raise JournalError(f"{path} cannot be written: {error.strerror}") from error
    return end + len(data)


def sync_folder(folder: Path) -> None:
    """Make names in a folder durable."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _line(batch: Batch) -> bytes:
    found = {"upto": [*chain(*batch.upto)], "traces": batch.traces, "rollouts": batch.rollouts}
    return json.dumps(found, separators=(",", ":")).encode() + b"\n"


def _batch(line: bytes) -> Batch:
    found = cast("dict[str, Any]", json.loads(line))
    numbers = iter(found["upto"])
    upto = [Position(int(segment), int(offset)) for segment, offset in zip(numbers, numbers, strict=True)]
    rollouts = [(str(rollout_id), int(attempt)) for rollout_id, attempt in found["rollouts"]]
    return Batch(upto, [str(name) for name in found["traces"]], rollouts)
