"""Which rollout a span belongs to, and what decided it (design section 4)."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Final, NamedTuple, TypeVar

from spanmill import semconv as sc
from spanmill.adapters.dialects import agentlightning
from spanmill.adapters.spans import Tree
from spanmill.adapters.values import identifier, integer, text
from spanmill.triplets.records import Attributes, Span, Value

SOURCES: Final = ("span", "ancestor", "carrier", "resource", "foreign", "linked", "trace_peer", "conversation", "trace")
"""What may decide, strongest first. The first five stand in the spans themselves and always make a rollout row."""
RANK: Final = {source: rank for rank, source in enumerate(SOURCES)}


class Labels(NamedTuple):
    """What is read where the rollout id was read."""

    group_id: str | None = None
    task_id: str | None = None
    mode: str | None = None
    group_size: int | None = None
    resources_id: str | None = None


NO_LABELS: Final = Labels()


@dataclass(frozen=True, slots=True)
class Identity:
    """A span's or a call's rollout."""

    rollout_id: str
    source: str
    attempt: int | str = 0
    """A string is the name of a foreign attempt, to be numbered within its rollout."""
    carrier: int = 0
    """Rank of what a hook read the id from; 0 elsewhere."""
    labels: Labels = NO_LABELS

    @property
    def rank(self) -> tuple[int, int]:
        """Lower is stronger."""
        return RANK[self.source], self.carrier

    @property
    def explicit(self) -> bool:
        """Whether a span or resource carries the id itself."""
        return RANK[self.source] <= RANK["foreign"]


T = TypeVar("T", Identity, str)


_SAID: Final = frozenset({sc.ROLLOUT_ATTEMPT, sc.GROUP_ID, sc.TASK_ID, sc.MODE, sc.GROUP_SIZE, sc.RESOURCES_ID})
"""What may stand beside a rollout id."""


@lru_cache(4096)
def _bare(rollout_id: str, source: str, carrier: int) -> Identity:
    """An identity without anything beside it: one object for all spans of a rollout."""
    return Identity(rollout_id, source, 0, carrier)


def _read(rollout_id: str, source: str, places: tuple[Attributes, ...], carrier: int = 0) -> Identity:
    if all(_SAID.isdisjoint(place) for place in places):
        return _bare(rollout_id, source, carrier)

    def first(name: str) -> Value:
        said = (p.get(name) for p in places)
        return next((v for v in said if v is not None and not (isinstance(v, str) and not v)), None)

    recorded = first(sc.ROLLOUT_ATTEMPT)
    number = integer(recorded, foreign=True)
    # What is no attempt number is a name: runs that say something different of their attempt are never mixed.
    attempt = number if number is not None and 0 <= number < 2**31 else str(recorded) if recorded is not None else 0
    labels = Labels(
        identifier(first(sc.GROUP_ID)),
        identifier(first(sc.TASK_ID)),
        text(first(sc.MODE)),
        _size(integer(first(sc.GROUP_SIZE), foreign=True)),
        identifier(first(sc.RESOURCES_ID)),
    )
    return Identity(rollout_id, source, attempt, carrier, labels)


def _size(value: int | None) -> int | None:
    return value if value is not None and 0 < value < 2**31 else None


def _own(span: Span) -> Identity | None:
    """The id that stands on the span: source `span`, or `carrier` if a hook read it off a request."""
    rollout_id = identifier(span.attributes.get(sc.ROLLOUT_ID))
    if rollout_id is None:
        return None
    # The resource speaks for this rollout only if it names no other.
    speaks = sc.ROLLOUT_ID not in span.resource or identifier(span.resource[sc.ROLLOUT_ID]) in (None, rollout_id)
    places = (span.attributes, span.resource) if speaks else (span.attributes,)
    carrier = text(span.attributes.get(sc.ROLLOUT_CARRIER))
    if carrier is None:
        return _read(rollout_id, "span", places)
    rank = sc.CARRIERS.index(carrier) if carrier in sc.CARRIERS else len(sc.CARRIERS)
    return _read(rollout_id, "carrier", places, rank)


def _foreign(span: Span) -> Identity | None:
    for attributes in (span.attributes, span.resource):
        rollout_id = identifier(attributes.get(sc.AGL_ROLLOUT_ID))
        if rollout_id is not None:
            attempt = attributes.get(sc.AGL_ATTEMPT_ID, span.resource.get(sc.AGL_ATTEMPT_ID))
            number = integer(attempt)
            fits = number is not None and 0 <= number < 2**31
            return Identity(rollout_id, "foreign", number if number is not None and fits else identifier(attempt) or 0)
    proxied = agentlightning.proxied(span.attributes)
    return Identity(proxied[0], "foreign", identifier(proxied[1]) or 0) if proxied else None


class Identities:
    """The identity of every span of a component."""

    def __init__(self, tree: Tree) -> None:
        """Read what spans and resources carry; what only joins and traces tell is asked for later."""
        self._tree = tree
        self._inherited: dict[tuple[str, str], Identity | None] = {}
        self._explicit: dict[int, Identity | None] = {}
        for span in (*tree.spans, *tree.logs):
            self._explicit[id(span)] = self._of(span)
        self._peers = _only_one((s.trace_id, i) for s in (*tree.spans, *tree.logs) if (i := self.explicit(s)))
        self._conversations = {
            name: _only_one((s.trace_id, i) for s in tree.spans if (i := identifier(s.attributes.get(name))))
            for name in (sc.GEN_AI_CONVERSATION_ID, sc.SESSION_ID)
        }

    def explicit(self, span: Span) -> Identity | None:
        """What a span, its ancestors or its resource carry: sources 1 to 5."""
        return self._explicit[id(span)]

    def weak(self, span: Span) -> Identity | None:
        """What the rest of the trace tells: sources 7 to 9. None only for a log record outside any trace."""
        if not span.trace_id:
            return None
        peer = self._peers.get(span.trace_id)
        if peer is not None:
            return replace(peer, source="trace_peer", carrier=0)
        chain = [span, *self._tree.ancestors(span)]
        for name in (sc.GEN_AI_CONVERSATION_ID, sc.SESSION_ID):
            found = next((i for s in reversed(chain) if (i := identifier(s.attributes.get(name)))), None)
            found = found or self._conversations[name].get(span.trace_id)
            if found:
                return Identity(found, "conversation")
        return Identity(span.trace_id, "trace")

    def of(self, span: Span) -> Identity | None:
        """The identity of a span by itself."""
        return self.explicit(span) or self.weak(span)

    def _of(self, span: Span) -> Identity | None:
        own = _own(span)
        if own is not None and own.source == "span":
            return own
        inherited = self._above(span)
        if inherited is not None:
            return replace(inherited, source="ancestor")
        if own is not None:
            return own
        rollout_id = identifier(span.resource.get(sc.ROLLOUT_ID))
        if rollout_id is not None:
            return _read(rollout_id, "resource", (span.resource,))
        return _foreign(span)

    def _above(self, span: Span) -> Identity | None:
        """The id on the nearest ancestor that has one of its own; ids that a hook read are not handed down."""
        passed: list[tuple[str, str]] = []
        found: Identity | None = None
        for above in self._tree.ancestors(span):
            key = above.trace_id, above.span_id
            if key in self._inherited:
                found = self._inherited[key]
                break
            passed.append(key)
            own = _own(above)
            if own is not None and own.source == "span":
                found = own
                break
        for key in passed:
            self._inherited[key] = found
        return found


def _only_one(items: Iterable[tuple[str, T]]) -> dict[str, T]:
    """The one value of each trace; a trace with several has none. Of one rollout's attempts, or labels, the first."""
    seen: dict[str, T] = {}
    several: set[str] = set()
    for trace, value in items:
        other = seen.setdefault(trace, value)
        if _name(other) != _name(value):
            several.add(trace)
    return {trace: value for trace, value in seen.items() if trace not in several}


def _name(value: Identity | str) -> str:
    return value.rollout_id if isinstance(value, Identity) else value


def number_attempts(starts: Iterable[tuple[Identity, int]]) -> dict[tuple[str, int | str], int]:
    """Numbers for attempts: ints stand for themselves, foreign names count 0, 1, … by earliest start, ties by name.

    What stands in our own attribute and is no attempt number comes after all others, so that it is mixed with none.
    """
    earliest: dict[tuple[str, int | str], tuple[bool, int]] = {}
    starting: dict[int, tuple[Identity, int]] = {}
    for identity, start_ns in starts:
        known = starting.get(id(identity))
        if known is None or start_ns < known[1]:
            starting[id(identity)] = identity, start_ns
    for identity, start_ns in starting.values():
        key = identity.rollout_id, identity.attempt
        odd = isinstance(identity.attempt, str) and identity.source != "foreign"
        earliest[key] = min((odd, start_ns), earliest.get(key, (odd, start_ns)))
    numbers: dict[tuple[str, int | str], int] = {}
    given: dict[str, int] = {}
    highest: dict[str, int] = {}
    for rollout_id, attempt in sorted(earliest, key=lambda k: (k[0], earliest[k], str(k[1]))):
        key = rollout_id, attempt
        if isinstance(attempt, int):
            numbers[key] = attempt
        elif earliest[key][0]:
            numbers[key] = highest.get(rollout_id, -1) + 1
        else:
            numbers[key] = given.get(rollout_id, 0)
            given[rollout_id] = numbers[key] + 1
        highest[rollout_id] = max(numbers[key], highest.get(rollout_id, 0))
    return numbers
