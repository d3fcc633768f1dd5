"""The pure functions that `spanmill build` is made of, the same for every engine.

An engine reads requests and runs, in this order:

1. `survey(kind, body)` (collector/indexer.py) on every request, in any order and place: traces, sizes, keys.
2. All of that together tells which traces belong together: collector/components.py, `Components.resolve`, gives each
   trace a `Place`, the partition and component that it goes to.
3. `deal(request, place)` on every request again: its spans in pieces, each for one component.
4. `put_together(pieces, rewards, options)` on all pieces of one partition, in any order and place: the rows.

The rows of all partitions, by number, are the dataset: they stand in the order (component, rollout_id, attempt). No
function reads a clock, a file or a setting, and everything they take and return can be pickled, so where and how often
they run changes nothing. Memory: `put_together` holds its pieces, the rows, and one component's spans.
"""

import pickle
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, Final, NamedTuple, TypeAlias

import pyarrow as pa

from spanmill.adapters import Options, adapt, keys
from spanmill.collector.components import Place
from spanmill.collector.decode import decode
from spanmill.collector.decoded import TRACE_ID_BYTES, id_or_none
from spanmill.collector.indexer import home
from spanmill.collector.inputs import Request
from spanmill.collector.journal import Kind
from spanmill.collector.otlp_proto import LogRecord, Outline
from spanmill.collector.otlp_proto import Span as SpanMessage
from spanmill.triplets.records import Quarantined, Reward, Rollout, Span
from spanmill.triplets.table import rows_to_tables
from spanmill.triplets.writer import stray_key

_PROTO: Final = (Kind.TRACES_PROTO, Kind.LOGS_PROTO)

Decoded: TypeAlias = Span | Quarantined
"""A span, or the row that says why it cannot be read."""


class Piece(NamedTuple):
    """The spans that one request holds of one component."""

    place: Place
    kind: Kind | None
    """Of `body`, a request; None where that is a pickled list of what was decoded (JSON is parsed once only)."""
    body: bytes
    received_ns: int


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
    """The spans of a request in pieces, one for each component; `place` is asked for each trace.

    A trace without a place is left out: it was not there when the input was surveyed. A request that belongs to one
    component as a whole is its own piece. Raises DecodeError where `survey` does.
    """
    return (_deal_proto if request.kind in _PROTO else _deal_decoded)(request, place)


def _deal_decoded(request: Request, place: Callable[[str], Place | None]) -> list[Piece]:
    dealt = defaultdict[Place | None, list[Decoded]](list)
    spans, bad, _ = decode(*request)
    for one in chain(spans, bad):
        dealt[place(_home(one))].append(one)
    if len(dealt) == 1:
        (only,) = dealt
        return [Piece(only, *request)] if only else []
    return [
        Piece(to, None, pickle.dumps(own, pickle.HIGHEST_PROTOCOL), request.received_ns)
        for to, own in dealt.items()
        if to is not None
    ]


def _deal_proto(request: Request, place: Callable[[str], Place | None]) -> list[Piece]:
    kind, body, received_ns = request
    requests = dict[Place | None, Any]()
    item_type = SpanMessage if kind is Kind.TRACES_PROTO else LogRecord
    for group in Outline.FromString(body).groups:
        groups = dict[Place | None, Any]()
        for scope in group.scopes:
            scopes = dict[Place | None, Any]()
            for item in scope.items:
                to = place(_home_of_item(kind, item_type.FromString(item), group, scope, item))
                if to not in scopes:
                    if to not in groups:
                        groups[to] = requests.setdefault(to, Outline()).groups.add(resource=group.resource)
                    scopes[to] = groups[to].scopes.add(scope=scope.scope).items
                scopes[to].append(item)
    if len(requests) == 1:
        (only,) = requests
        return [Piece(only, *request)] if only else []
    return [Piece(to, kind, own.SerializeToString(), received_ns) for to, own in requests.items() if to is not None]


def _home(one: Decoded) -> str:
    return one.trace_id or (home(one, keys(one)) if isinstance(one, Span) else "")


def _home_of_item(kind: Kind, item: Any, group: Any, scope: Any, raw: bytes) -> str:
    """As `survey` names it. A log record outside any trace goes by its keys, for which it must be decoded."""
    if kind is Kind.TRACES_PROTO or id_or_none(item.trace_id, TRACE_ID_BYTES):
        return item.trace_id.hex()
    alone = Outline()
    alone.groups.add(resource=group.resource).scopes.add(scope=scope.scope, items=[raw])
    spans, bad, _ = decode(kind, alone.SerializeToString())
    return _home([*spans, *bad][0])


def put_together(pieces: Iterable[Piece], rewards: Mapping[int, Sequence[Reward]], options: Options) -> Partition:
    """The rows that the pieces of a partition make, each component for itself; `rewards` are given by component.

    `pieces` hold every span of each of their components, in any order, duplicates included. Raises DecodeError if a
    piece is none of `deal`.
    """
    waiting = defaultdict[int, list[Piece]](list)
    for piece in pieces:
        waiting[piece.place.component].append(piece)
    rollouts, strays, missed = list[Rollout](), dict[bytes, Quarantined](), list[bytes]()
    for component in sorted(waiting):
        found = list(_decoded(waiting.pop(component)))
        made, stray = adapt((one for one in found if isinstance(one, Span)), rewards.get(component, ()), options)
        rollouts += made
        for row in chain(stray, (one for one in found if isinstance(one, Quarantined))):
            if row.reason == "unknown_rollout":
                missed.append(key_of(row))
            else:
                strays[key_of(row)] = row
    return Partition(rows_to_tables(rollouts, list(strays.values())), len(strays), list(dict.fromkeys(missed)))


def _decoded(pieces: list[Piece]) -> Iterator[Decoded]:
    while pieces:
        piece = pieces.pop()
        if piece.kind is None:
            yield from pickle.loads(piece.body)
        else:
            spans, bad, _ = decode(piece.kind, piece.body, piece.received_ns)
            yield from spans
            yield from bad


def key_of(row: Quarantined) -> bytes:
    """The `stray_key` of a row."""
    return stray_key(row.trace_id, row.span_id, row.reason, row.detail, row.span)
