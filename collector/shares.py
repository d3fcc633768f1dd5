"""What the processes of a build do with a share of its input, the same for every engine: survey it, later deal it.

What a share holds of traces and keys goes into a file of its own, from which `Components` takes it in; when it is known
where each trace goes, the share is read a second time, with that file beside it.
"""

import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import NamedTuple, TypeAlias

from spanmill.collector import rewards as posted
from spanmill.collector.components import Told, places
from spanmill.collector.framing import UnknownFormatError
from spanmill.collector.input_files import listening
from spanmill.collector.inputs import Request, Unit, read_unit
from spanmill.collector.journal import Kind
from spanmill.collector.partition import Piece, deal
from spanmill.collector.survey import survey
from spanmill.errors import DecodeError, InputError
from spanmill.triplets.records import Reward

Shown: TypeAlias = Callable[[Iterator[Request]], Iterator[Request]]
"""Shows on its way how far the reading is."""


class Read(NamedTuple):
    """What was read of a unit."""

    requests: int
    """How many may hold spans."""
    unreadable: set[int]
    """Which of them, from 0, are no request of their kind."""
    checksum: int
    """Of all their bodies."""
    is_otlp: bool = True


class Surveyed(NamedTuple):
    """What a share holds, apart from traces and keys."""

    read: list[Read]
    """By unit."""
    why: str
    """Why the first request that is unreadable is; "" if none is."""
    rewards: list[Reward]
    warnings: list[str]
    """What was passed over."""


def shares(units: Iterable[tuple[Unit, int]], least_bytes: int) -> list[list[Unit]]:
    """The units, whose bytes stand beside them, in their order, cut so that each share but the last has so many bytes
    or more.
    """
    made, size = list[list[Unit]](), least_bytes
    for unit, own in units:
        if size >= least_bytes:
            made.append([])
            size = 0
        made[-1].append(unit)
        size += own
    return made


def survey_share(units: Iterable[Unit], path: Path, shown: Shown = iter) -> Surveyed:
    """What a share holds; `path` becomes its `Told`. Raises InputError if an input cannot be read."""
    surveyed = Surveyed([], "", [], [])
    with listening() as warnings, closing(Told(path)) as told:
        for unit in units:
            try:
                surveyed = _survey_unit(shown(read_unit(unit)), told, surveyed)
            except UnknownFormatError:
                if unit.is_meant:
                    raise
                surveyed.read.append(Read(0, set(), 0, is_otlp=False))
    surveyed.warnings.extend(dict.fromkeys(warnings))
    return surveyed


def _survey_unit(requests: Iterable[Request], told: Told, before: Surveyed) -> Surveyed:
    count, unreadable, checksum, why = 0, set[int](), 0, before.why
    for request in requests:
        if request.kind is Kind.REWARDS:
            before.rewards.extend(posted.decode(request.body))
        elif request.kind is not Kind.FLUSH:
            try:
                told.add(survey(request.kind, request.body))
            except DecodeError as error:
                unreadable.add(count)
                why = why or str(error)
            count += 1
            checksum = zlib.crc32(request.body, checksum)
    before.read.append(Read(count, unreadable, checksum))
    return before._replace(why=why)


def deal_share(
    units: Iterable[Unit], read: Iterable[Read], components: Path, told: Path, shown: Shown = iter
) -> Iterator[Piece]:
    """The pieces of a share, without what its inputs got since the survey, which says what was `read` of each unit.

    `components` is the closed file of the `Components` that took in `told`, the share's own. Raises InputError if the
    inputs hold something else than they did.
    """
    of_traces = places(components, told)
    for unit, before in zip(units, read, strict=True):
        count, checksum = 0, 0
        for number, request in enumerate(islice(_with_spans(shown(read_unit(unit))), before.requests)):
            count, checksum = count + 1, zlib.crc32(request.body, checksum)
            if number not in before.unreadable:
                yield from deal(request, of_traces.get)
        if (count, checksum) != (before.requests, before.checksum):
            raise InputError(f"{unit.file} changed while it was read")


def _with_spans(requests: Iterable[Request]) -> Iterator[Request]:
    return (request for request in requests if request.kind not in (Kind.REWARDS, Kind.FLUSH))
