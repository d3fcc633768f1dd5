"""Rewards: where they stand in spans, which of them count, and for what (design section 8)."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from spanmill import semconv as sc
from spanmill.adapters.joined import Joined
from spanmill.adapters.messages import as_object, unflatten
from spanmill.adapters.options import Options
from spanmill.adapters.spans import Tree
from spanmill.adapters.values import identifier
from spanmill.triplets.records import Attributes, Reward, RewardSeen, Span, Value

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


def _on_span(span: Span) -> Iterator[Seen]:
    a = span.attributes
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
    if span.is_log and span.name == sc.GEN_AI_EVALUATION_RESULT:
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
        elif event.name == sc.GEN_AI_EVALUATION_RESULT:
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
    for prefix, kind in (("evaluations.", "evaluation"), ("annotations.", "annotation")):
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

    `rewards` are usable numbers in time order, those of requests and tables last. For one target the newest counts.
    """
    final: float | None = None
    final_named = False
    seen: list[RewardSeen] = []
    misses: list[Seen] = []
    for reward in rewards:
        number = reward.number
        if number is None:
            continue
        counts = reward.counts and options.counts(reward.name)
        targets = _targets(reward, calls, tree)
        seen.append(RewardSeen(reward.name, number, targets[0].call_id if targets else reward.call_id, reward.source))
        if reward.call_id is not None and not targets:
            misses.append(reward)
        if not counts:
            continue
        for call in targets:
            call.reward = number
        if targets or reward.call_id is not None:
            continue
        if reward.span is not None:
            step = _last_before(reward, calls, tree)
            if step is not None:
                step.reward = number
        named = reward.name == "final" or reward.span is None
        if named or not final_named:
            final, final_named = number, named or final_named
    return Judged(final, seen, misses)


def _targets(reward: Seen, calls: Sequence[Joined], tree: Tree) -> list[Joined]:
    """The call that a reward names, or that it is an event or child of; without a choice in the name, the lowest."""
    if reward.call_id is not None:
        named = [c for c in calls if reward.call_id == c.call_id]
        named = named or [c for c in calls if reward.call_id in {s.response_id for s in c.sources}]
        return (named or [c for c in calls if reward.call_id in {s.span.span_id for s in c.sources}])[:1]
    if reward.span is None:
        return []
    own = [c for c in calls if any(s.span is reward.span for s in c.sources)] if reward.inside else []
    return (own or _called_above(reward.span, calls, tree))[:1]


def _called_above(span: Span, calls: Sequence[Joined], tree: Tree) -> list[Joined]:
    above = tree.parent(span)
    keys = {(above.trace_id, above.span_id)} if above is not None else set[tuple[str, str]]()
    return [c for c in calls if any((s.span.trace_id, s.span.span_id) in keys for s in c.sources)]


def _last_before(reward: Seen, calls: Sequence[Joined], tree: Tree) -> Joined | None:
    """The last call that ended before the reward under the same parent span, else in the rollout."""
    ended = [c for c in calls if c.place.end_ns and c.place.end_ns <= reward.time_ns and not c.flags & NOT_JUDGED]
    span = reward.span
    if span is None or not ended:
        return None
    parent = (span.trace_id, span.span_id) if reward.inside else (span.trace_id, span.parent_id)
    siblings = [c for c in ended if any((a.trace_id, a.span_id) == parent for a in tree.ancestors(c.place))]
    return max(siblings or ended, key=lambda c: (c.place.end_ns, c.turn, -c.choice))
