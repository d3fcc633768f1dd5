"""When a rollout is complete, and what becomes of rows that were written before: pure, the time is passed in.

All times are receive times in nanoseconds, of one clock. Clocks of the senders decide nothing here.
"""

import json
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import NamedTuple, TypeAlias

from spanmill.triplets.records import Json, Rollout

RolloutKey: TypeAlias = tuple[str, int]
"""(rollout_id, attempt)"""

SECOND = 1_000_000_000
HOLD_NS_PER_BYTE = 500
"""A component that was looked at rests for 1 s per 2 MB, so that one which ends in a thousand places, such as a trace
of many rollouts, does not keep the indexer busy with itself."""


class Timing(NamedTuple):
    """How long rollouts stay open: design section 9."""

    settle_ns: int = 10 * SECOND
    idle_ns: int = 600 * SECOND
    max_open_ns: int = 24 * 3600 * SECOND
    await_reward_ns: int = 0


@dataclass(slots=True)
class Component:
    """Traces that belong together, as the index knows them."""

    id: int
    traces: int = 1
    """How many."""
    bytes: int = 0
    """Of the requests that hold its spans, its share."""
    newest_ns: int = 0
    """When its newest span was received."""
    opened_ns: int | None = None
    """When the first span was received since all its rollouts were written; None while nothing is open."""
    signal_ns: int | None = None
    """When the first thing came, since it was last put together, that may complete a rollout or change written rows."""
    ended: bool = False
    """Some span has carried the end of a rollout, or was a root."""
    looked_ns: int = 0
    """When its spans were last put together; 0 if never."""
    until_ns: int | None = None
    """When, as far as was known then, the first open rollout closes."""
    flushed: bool = False
    """All that came before a flush is to be closed, and nothing has come since."""


class Closed(NamedTuple):
    """What the rollouts of a component come to at one moment."""

    rollouts: list[Rollout]
    """Those that are complete, `closed_by` filled in."""
    open_until: int | None
    """When the first of the others closes if nothing more comes; None if there are no others."""


def due_at(component: Component, timing: Timing) -> int | None:
    """When a component must be put together next, None while all its rows are written.

    Each wait starts anew with every span, up to twice its length: in a trace of many rollouts one is always at work.
    """
    if component.flushed:
        return 0
    if component.opened_ns is None:
        return None
    if component.until_ns is None:
        at = min(component.newest_ns + timing.idle_ns, component.opened_ns + 2 * timing.idle_ns)
    else:
        at = component.until_ns
    if component.signal_ns is not None:
        at = min(at, component.newest_ns + timing.settle_ns, component.signal_ns + 2 * timing.settle_ns)
    rested = component.looked_ns + component.bytes * HOLD_NS_PER_BYTE if component.looked_ns else 0
    return max(at, rested)


def closes_at(rollout: Rollout, newest_ns: int, component: Component, timing: Timing) -> int:
    """When a rollout whose newest span was received at `newest_ns` closes if nothing more comes.

    An announced one stays open up to `max_open`: its tools may run for an hour. One without a final reward is given
    `await_reward` for it.
    """
    opened_ns = newest_ns if component.opened_ns is None else component.opened_ns
    if rollout.closed_by != "batch":
        at = newest_ns + timing.settle_ns
    elif rollout.announced:
        at = opened_ns + timing.max_open_ns
    else:
        at = min(newest_ns + timing.idle_ns, opened_ns + timing.max_open_ns)
    return at if rollout.reward is not None else max(at, newest_ns + timing.await_reward_ns)


def close(
    rollouts: Iterable[Rollout], newest_ns: Mapping[RolloutKey, int], component: Component, now_ns: int, timing: Timing
) -> Closed:
    """Part the rollouts of a component into those that are complete by now and those that stay open.

    `newest_ns` says when the newest span of each was received.
    """
    closed = list[Rollout]()
    open_until = list[int]()
    for rollout in rollouts:
        at = closes_at(rollout, newest_ns[rollout.rollout_id, rollout.attempt], component, timing)
        if at <= now_ns or component.flushed:
            by = rollout.closed_by if rollout.closed_by != "batch" else "flush" if at > now_ns else "idle"
            closed.append(replace(rollout, closed_by=by))
        else:
            open_until.append(at)
    return Closed(closed, min(open_until, default=None))


def revised(rollout: Rollout, revision: int, calls_before: Iterable[str]) -> Rollout:
    """The rollout as a later revision: `late` stands on it, and on the triplets whose calls were not there before."""
    known = set(calls_before)
    triplets = [
        replace(triplet, revision=revision)
        if triplet.call_id in known
        else replace(triplet, revision=revision, flags=_with(triplet.flags, "late"))
        for triplet in rollout.triplets
    ]
    return replace(
        rollout,
        revision=revision,
        flags=_with(rollout.flags, "late"),
        triplets=triplets,
        episodes=[replace(episode, revision=revision) for episode in rollout.episodes],
    )


def moved(row: Mapping[str, Json], calls: Container[str], revision: int, now: Sequence[Rollout]) -> Rollout:
    """The last revision of a rollout that was written and whose spans turned out to belong to others.

    `row` is its row of `rollouts`, `calls` are the ids of its calls, `now` the rollouts that its component holds
    instead: those with one of the calls are named, or all of them if none has one.
    """
    to = {other.rollout_id for other in now if any(triplet.call_id in calls for triplet in other.triplets)}
    kept = (
        "rollout_id",
        "attempt",
        "identity_source",
        "status",
        "closed_by",
        "group_id",
        "task_id",
        "mode",
        "group_size",
    )
    return Rollout(
        **{name: row[name] for name in kept},
        started_at=_microseconds(row["started_at"]),
        ended_at=_microseconds(row["ended_at"]),
        revision=revision,
        flags=("moved",),
        metadata=json.dumps({"moved_to": sorted(to or {other.rollout_id for other in now})}),
    )


def _microseconds(time: datetime) -> int:
    return (time - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(microseconds=1)


def _with(flags: Iterable[str], flag: str) -> tuple[str, ...]:
    return tuple(sorted({*flags, flag}))
