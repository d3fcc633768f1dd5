"""The pure functions that `spanmill build` is made of, the same for every engine.

An engine reads requests and runs, in this order:

1. `survey(kind, body)` (collector/survey.py) on every request, in any order and place: traces, sizes, keys.
2. All of that together tells which traces belong together: collector/components.py, `Components.resolve`, gives each
   trace a `Place`, the partition and component that it goes to.
3. `deal(request, place)` on every request again: its spans in pieces, each for one partition.
4. `put_together(pieces, known, options)` on all pieces of one partition, in any order and place: the rows.

The rows of all partitions, by number, are the dataset: they stand in the order (component, rollout_id, attempt). No
function reads a clock, a file or a setting, and everything they take and return can be pickled, so where and how often
they run changes nothing. Memory: `put_together` takes one piece at a time, and holds their spans and the rows.
"""

import pickle
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain
from typing import Any, Final, NamedTuple, TypeAlias

import pyarrow as pa

from spanmill.adapters import Options, adapt, keys
from spanmill.collector.assemble import RolloutKey
from spanmill.collector.components import Place
from spanmill.collector.decode import decode
from spanmill.collector.decoded import TRACE_ID_BYTES, id_or_none
from spanmill.collector.inputs import Request
from spanmill.collector.journal import Kind
from spanmill.collector.late import expired_row, without_expired
from spanmill.collector.otlp_proto import LogRecord, Outline, Traces
from spanmill.collector.survey import home
from spanmill.triplets.records import Quarantined, Reward, Rollout, Span
from spanmill.triplets.table import rows_to_tables
from spanmill.triplets.writer import stray_key

_PROTO: Final = (Kind.TRACES_PROTO, Kind.LOGS_PROTO)

Decoded: TypeAlias = Span | Quarantined
"""A span, or the row that says why it cannot be read."""


class Piece(NamedTuple):
    """The spans that one request holds of one partition."""

    partition: int
    components: dict[str, int]
    """Of each trace, as `home` names it."""
    kind: Kind | None
    """Of `body`, a request; None where that is a pickled list of what was decoded (JSON is parsed once only)."""
    body: bytes
    received_ns: int


class Known(NamedTuple):
    """What is known of the rollouts of one partition, apart from their spans."""

    rewards: dict[int, list[Reward]]
    """By component."""
    traces: set[str]
    """Those that have expired: `serve` removed spans of theirs from the journal."""
    rollouts: set[RolloutKey]
    """Likewise."""


class Partition(NamedTuple):
    """The rows of one partition."""

    tables: dict[str, pa.Table]
    """By table name, the rows in the order (component, rollout_id, attempt), strays last."""
    strays: int
    """Rows at the end of `quarantine` that stand under no rollout."""
    missed: list[bytes]
    """Of rewards whose rollout is not in the component that they were given for: `stray_key` of their rows, which are
    not in `tables`."""

    @property
    def empty(self) -> bool:
        """Whether there is nothing to write."""
        return not any(table.num_rows for table in self.tables.values())


def deal(request: Request, place: Callable[[str], Place | None]) -> list[Piece]:
    """The spans of a request in pieces, one for each partition; `place` is asked for each trace.

    A trace without a place is left out: it was not there when the input was surveyed. A request that belongs to one
    partition as a whole is its own piece. The request is one that `survey` could read.
    """
    if request.kind not in _PROTO:
        return _deal_decoded(request, place)
    places = {trace: place(trace) for trace in set(_homes(request))}
    if len({to and to.partition for to in places.values()}) > 1:
        return _deal_apart(request, places)
    return _pieces(request, places, lambda _: (request.kind, request.body))


def _pieces(
    request: Request, places: Mapping[str, Place | None], part: Callable[[int], tuple[Kind | None, bytes]]
) -> list[Piece]:
    """A piece for each partition among `places`; `part` gives its kind and body."""
    found = defaultdict[int, dict[str, int]](dict)
    for trace, to in places.items():
        if to is not None:
            found[to.partition][trace] = to.component
    return [Piece(number, components, *part(number), request.received_ns) for number, components in found.items()]


def _deal_decoded(request: Request, place: Callable[[str], Place | None]) -> list[Piece]:
    spans, bad, _ = decode(*request)
    places = dict[str, Place | None]()
    dealt = defaultdict[int | None, list[Decoded]](list)
    for one in chain(spans, bad):
        trace = _home(one)
        to = places[trace] = place(trace)
        dealt[to and to.partition].append(one)
    return _pieces(request, places, lambda number: (None, pickle.dumps(dealt[number], pickle.HIGHEST_PROTOCOL)))


def _homes(request: Request) -> Iterator[str]:
    """The trace of every span or log record, as `survey` names it."""
    if request.kind is Kind.TRACES_PROTO:
        for group in Traces.FromString(request.body).groups:
            for scope in group.scopes:
                yield from (item.trace_id.hex() for item in scope.items)
        return
    for group in Outline.FromString(request.body).groups:
        for scope in group.scopes:
            yield from (_home_of_record(group, scope, raw) for raw in scope.items)


def _home_of_record(group: Any, scope: Any, raw: bytes) -> str:
    """A log record outside any trace goes by its keys, for which it must be decoded."""
    trace_id = LogRecord.FromString(raw).trace_id
    if id_or_none(trace_id, TRACE_ID_BYTES):
        return trace_id.hex()
    alone = Outline()
    alone.groups.add(resource=group.resource).scopes.add(scope=scope.scope, items=[raw])
    spans, bad, _ = decode(Kind.LOGS_PROTO, alone.SerializeToString())
    return _home([*spans, *bad][0])


def _deal_apart(request: Request, places: Mapping[str, Place | None]) -> list[Piece]:
    """A request for each partition, with its spans."""
    requests = dict[int | None, Any]()
    homes = _homes(request)
    for group in Outline.FromString(request.body).groups:
        groups = dict[int | None, Any]()
        for scope in group.scopes:
            scopes = dict[int | None, Any]()
            for item in scope.items:
                to = places[next(homes)]
                number = to and to.partition
                if number not in scopes:
                    if number not in groups:
                        groups[number] = requests.setdefault(number, Outline()).groups.add(resource=group.resource)
                    scopes[number] = groups[number].scopes.add(scope=scope.scope).items
                scopes[number].append(item)
    return _pieces(request, places, lambda number: (request.kind, requests[number].SerializeToString()))


def _home(one: Decoded) -> str:
    return one.trace_id or (home(one, keys(one)) if isinstance(one, Span) else "")


def put_together(pieces: Iterable[Piece], known: Known, options: Options) -> Partition:
    """The rows that the pieces of a partition make, each component for itself. What is left of an expired rollout makes
    none, and is set aside.

    `pieces` hold every span of each of their components, in any order, duplicates included. Raises DecodeError if a
    piece is none of `deal`.
    """
    waiting = defaultdict[int, list[Decoded]](list)
    for piece in pieces:
        for one in _decoded(piece):
            waiting[piece.components[_home(one)]].append(one)
    rollouts, strays, missed = list[Rollout](), dict[bytes, Quarantined](), list[bytes]()
    for component in sorted(waiting):
        found = waiting.pop(component)
        spans, apart, unreadable = list[Span](), list[Span](), list[Quarantined]()
        for one in found:
            if isinstance(one, Quarantined):
                unreadable.append(one)
            else:
                (apart if _home(one) in known.traces else spans).append(one)
        adapted = adapt(spans, known.rewards.get(component, ()), options)
        kept, late = without_expired(spans, adapted, known.rollouts)
        rollouts += kept
        apart += late
        for row in chain(adapted.stray, map(expired_row, apart), unreadable):
            if row.reason == "unknown_rollout":
                missed.append(key_of(row))
            else:
                strays[key_of(row)] = row
    return Partition(rows_to_tables(rollouts, list(strays.values())), len(strays), list(dict.fromkeys(missed)))


def _decoded(piece: Piece) -> list[Decoded]:
    if piece.kind is None:
        return pickle.loads(piece.body)
    spans, bad, _ = decode(piece.kind, piece.body, piece.received_ns)
    return [*spans, *bad]


def key_of(row: Quarantined) -> bytes:
    """The `stray_key` of a row."""
    return stray_key(row.trace_id, row.span_id, row.reason, row.detail, row.span)
