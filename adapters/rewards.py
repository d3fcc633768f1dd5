"""Rewards: where they stand in spans, which of them count, and for what (design section 8)."""

import math
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, TypeAlias

import numpy as np

from spanmill import semconv as sc
from spanmill.adapters.joined import Joined
from spanmill.adapters.messages import as_object, unflatten
from spanmill.adapters.options import Options
from spanmill.adapters.spans import Tree
from spanmill.adapters.values import identifier
from spanmill.triplets.records import Attributes, Reward, RewardSeen, Span, Value

_OPENINFERENCE: Final = (("evaluations.", "evaluation"), ("annotations.", "annotation"))
_NAMES: Final = frozenset({sc.REWARD_VALUE, sc.GEN_AI_EVALUATION_SCORE})
_PREFIXES: Final = (sc.AGL_REWARD_PREFIX, *(prefix for prefix, _ in _OPENINFERENCE))

SpanKey: TypeAlias = tuple[str, str]
"""(trace id, span id)."""

NOT_JUDGED: Final = frozenset({"error", "empty_response", "superseded", "undelivered", "reward_call"})
"""Calls that never take a reward in another's place."""


@dataclass(frozen=True, slots=True)
class Seen:
    """A reward as a span, event, log record, request or table brought it."""

    name: str
    value: Value
    """What was recorded; a number if it can be used."""
    source: str
    time_ns: int
    span: Span | None
    """The span or log record that brought it; None for requests and tables."""
    call_id: str | None = None
    inside: bool = False
    """It is an event of the span itself, not a child of it."""
    counts: bool = True
    """False for a further dimension of a reward: it stands in the list only."""

    @property
    def number(self) -> float | None:
        """The value as a float; None if it is no number, NaN or infinite."""
        if not isinstance(self.value, bool | int | float | np.bool_) or not math.isfinite(self.value):
            return None
        return float(self.value)


def rewards_in(tree: Tree) -> Iterator[Seen]:
    """Every reward in the spans, their events and the log records, by time."""
    found: list[Seen] = []
    for span in (*tree.spans, *tree.logs):
        found += _on_span(span)
        if not span.is_log:
            found += _on_events(span)
    return iter(sorted(found, key=lambda r: r.time_ns))


@lru_cache(4096)
def _may_reward(names: tuple[str, ...]) -> bool:
    """Whether attributes of these names may hold a reward."""
    return any(name in _NAMES or name.startswith(_PREFIXES) for name in names)


def _on_span(span: Span) -> Iterator[Seen]:
    a = span.attributes
    if span.name != sc.REWARD and not _may_reward(tuple(a)):
        return
    source = "log" if span.is_log else "span"
    if span.name == sc.REWARD or sc.REWARD_VALUE in a:
        yield Seen(
            _name(a.get(sc.REWARD_NAME)),
            a.get(sc.REWARD_VALUE),
            source,
            span.start_ns,
            span,
            identifier(a.get(sc.REWARD_CALL_ID)),
        )
    if span.is_log and span.name == sc.GEN_AI_EVALUATION_RESULT and sc.GEN_AI_EVALUATION_SCORE in a:
        yield _evaluation(a, source, span.start_ns, span, inside=False)
    yield from _annotation(span)
    yield from _openinference(span)


def _on_events(span: Span) -> Iterator[Seen]:
    for event in span.events:
        a = event.attributes
        if "body" in a:
            continue  # a log record, which is read as such
        if event.name == sc.REWARD:
            yield Seen(
                _name(a.get(sc.REWARD_NAME)),
                a.get(sc.REWARD_VALUE),
                "event",
                event.time_ns,
                span,
                identifier(a.get(sc.REWARD_CALL_ID)),
                inside=True,
            )
        elif event.name == sc.GEN_AI_EVALUATION_RESULT and sc.GEN_AI_EVALUATION_SCORE in a:
            yield _evaluation(a, "event", event.time_ns, span, inside=True)


def _evaluation(a: Attributes, source: str, time_ns: int, span: Span, *, inside: bool) -> Seen:
    name, value = _name(a.get(sc.GEN_AI_EVALUATION_NAME)), a.get(sc.GEN_AI_EVALUATION_SCORE)
    return Seen(name, value, source, time_ns, span, identifier(a.get(sc.GEN_AI_RESPONSE_ID)), inside=inside)


def _annotation(span: Span) -> Iterator[Seen]:
    """Agent Lightning's annotations: of several dimensions index 0 is the candidate; `primary` there means `reward`."""
    links = (
        unflatten(span.attributes, sc.AGL_LINK_PREFIX)
        if any(k.startswith(sc.AGL_LINK_PREFIX) for k in span.attributes)
        else []
    )
    target = next(
        (identifier(k.get("value_match")) for k in links if k.get("key_match") == sc.GEN_AI_RESPONSE_ID), None
    )
    for index in range(len(span.attributes)):
        value = span.attributes.get(f"{sc.AGL_REWARD_PREFIX}{index}.value")
        if value is None:
            return
        name = _name(span.attributes.get(f"{sc.AGL_REWARD_PREFIX}{index}.name"))
        primary = "reward" if index == 0 and name == "primary" else name
        yield Seen(primary, value, "annotation", span.start_ns, span, target, counts=index == 0)


def _openinference(span: Span) -> Iterator[Seen]:
    for prefix, kind in _OPENINFERENCE:
        if not any(k.startswith(prefix) for k in span.attributes):
            continue
        for item in unflatten(span.attributes, prefix):
            of = as_object(item.get(kind)) or item
            if of.get("score") is not None:
                yield Seen(
                    _name(of.get("name")), of["score"], "annotation", max(span.end_ns, span.start_ns), span, inside=True
                )


def _name(value: Value) -> str:
    return value if isinstance(value, str) else ""


def given(rewards: Sequence[Reward]) -> list[Seen]:
    """Rewards that came apart from spans, later than all; one (attempt, call, name) is one write, the newest."""
    newest: dict[tuple[int | None, str | None, str], Reward] = {}
    for reward in rewards:
        key = reward.attempt, reward.call_id, reward.name
        newest.pop(key, None)
        newest[key] = reward
    return [Seen(r.name, r.value, r.source, 0, None, r.call_id) for r in newest.values()]


@dataclass(slots=True)
class Judged:
    """What a rollout's rewards come to."""

    final: float | None
    seen: list[RewardSeen]
    misses: list[Seen]
    """Rewards that name a call which the rollout does not have."""


def judge(rewards: Sequence[Seen], calls: Sequence[Joined], tree: Tree, options: Options) -> Judged:
    """Give every call its step reward and return the rollout's final one.

    `rewards` are in time order, those of requests and tables last. For one target the newest counts.
    """
    final: float | None = None
    final_named = False
    seen: list[RewardSeen] = []
    misses: list[Seen] = []
    places = _Places(calls, rewards, tree) if rewards else None
    for reward in rewards:
        number = reward.number
        if number is None or places is None:
            continue
        target = places.target(reward)
        seen.append(RewardSeen(reward.name, number, target.call_id if target else reward.call_id, reward.source))
        if reward.call_id is not None and target is None:
            misses.append(reward)
        if not (reward.counts and options.counts(reward.name)):
            continue
        if target is not None or reward.call_id is not None:
            if target is not None:
                target.reward = number
            continue
        step = places.last_before(reward)
        if step is not None:
            step.reward = number
        named = reward.name == "final" or reward.span is None
        if named or not final_named:
            final, final_named = number, named
    return Judged(final, seen, misses)


class _Places:
    """Where a rollout's rewards may belong."""

    def __init__(self, calls: Sequence[Joined], rewards: Sequence[Seen], tree: Tree) -> None:
        by_turn = sorted(calls, key=lambda c: (c.turn, c.choice))
        self._named: dict[str, Joined] = {}
        self._of_span: dict[SpanKey, Joined] = {}
        for call in by_turn:
            for source in call.sources:
                self._of_span.setdefault((source.span.trace_id, source.span.span_id), call)
        # The call's own id goes first, then any response id of its spans, then their span ids.
        kinds_of_name: tuple[Callable[[Joined], list[str]], ...] = (
            lambda c: [c.call_id],
            lambda c: [s.response_id for s in c.sources if s.response_id],
            lambda c: [s.span.span_id for s in c.sources],
        )
        for names in kinds_of_name:
            for call in by_turn:
                for name in names(call):
                    self._named.setdefault(name, call)
        ended = [c for c in by_turn if c.place.end_ns and not c.flags & NOT_JUDGED]
        # Of calls that ended together the later turn, and of its choices the lowest, stands last.
        ended.sort(key=lambda c: (c.place.end_ns, c.turn, -c.choice))
        asked = {_parent(r) for r in rewards if r.span is not None}
        self._below: dict[SpanKey, list[Joined]] = {key: [] for key in asked}
        for call in ended:
            for above in tree.ancestors(call.place) if asked else ():
                key = above.trace_id, above.span_id
                if key in asked:
                    self._below[key].append(call)
        self._ended = ended

    def target(self, reward: Seen) -> Joined | None:
        """The call that a reward names or links to, or whose event or child it is."""
        if reward.call_id is not None:
            return self._named.get(reward.call_id)
        if reward.span is None:
            return None
        linked = (self._of_span.get((k.trace_id, k.span_id)) for k in reward.span.links if not reward.inside)
        return next((c for c in linked if c is not None), self._of_span.get(_parent(reward)))

    def last_before(self, reward: Seen) -> Joined | None:
        """The last call that ended before the reward under the same parent span, else in the rollout."""
        if reward.span is None:
            return None
        for calls in (self._below[_parent(reward)], self._ended):
            at = bisect_right(calls, reward.time_ns, key=lambda c: c.place.end_ns)
            if at:
                return calls[at - 1]
        return None


def _parent(reward: Seen) -> SpanKey:
    """The span that a reward stands under: the one that has the event, else the parent of its own span."""
    span = reward.span
    if span is None:
        return "", ""
    return span.trace_id, span.span_id if reward.inside else span.parent_id
