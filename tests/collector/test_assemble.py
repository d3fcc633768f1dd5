import json
from dataclasses import replace
from datetime import UTC, datetime

import numpy as np
import pytest

from spanmill.collector.assemble import SECOND, Component, Timing, close, closes_at, due_at, moved, revised
from spanmill.triplets.records import Episode, Rollout, Triplet

TIMING = Timing(settle_ns=10 * SECOND, idle_ns=600 * SECOND, max_open_ns=3600 * SECOND, await_reward_ns=0)
KEY = ("r", 0)


def component(**fields: int | bool | None) -> Component:
    """One whose only spans came at second 100."""
    return replace(Component(1, newest_ns=100 * SECOND, opened_ns=100 * SECOND), **fields)


def rollout(**fields: object) -> Rollout:
    """A rollout whose spans hold no signal."""
    given: dict[str, object] = {"closed_by": "batch", "reward": 1.0} | fields
    return Rollout("r", 0, "span", "unknown", started_at=0, ended_at=0, **given)  # pyright: ignore[reportArgumentType]


def triplet(call_id: str, **fields: object) -> Triplet:
    """A triplet that has nothing but its id."""
    return Triplet("r", 0, 0, 0, call_id, "", "", "none", 0, 0, "genai", False, **fields)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, 700),  # idle
        ({"signal_ns": 100 * SECOND}, 110),
        ({"signal_ns": 100 * SECOND, "newest_ns": 108 * SECOND}, 118),
        ({"signal_ns": 100 * SECOND, "newest_ns": 119 * SECOND}, 120),  # another rollout of the trace is at work
        ({"newest_ns": 1000 * SECOND}, 1300),
        ({"until_ns": 500 * SECOND}, 500),
        ({"until_ns": 500 * SECOND, "signal_ns": 100 * SECOND}, 110),
        ({"flushed": True}, 0),
        ({"opened_ns": None}, None),
        ({"opened_ns": None, "signal_ns": None, "looked_ns": 100 * SECOND}, None),
    ],
)
def test_a_component_is_looked_at_when_something_may_be_complete(
    fields: dict[str, int | bool | None], expected: int | None
) -> None:
    """Soon after a signal, after a long silence without one, at once after a flush, never while all is written."""
    assert (None if expected is None else expected * SECOND) == due_at(component(**fields), TIMING)


def test_a_large_component_rests_after_a_look() -> None:
    """A component of 40 MB is not put together again within 20 s, whatever signals come."""
    busy = component(bytes=40_000_000, looked_ns=100 * SECOND, signal_ns=101 * SECOND)
    assert 120 * SECOND == due_at(busy, TIMING)


@pytest.mark.parametrize(
    ("fields", "timing", "expected"),
    [
        ({"closed_by": "end"}, TIMING, 110),
        ({"closed_by": "root"}, TIMING, 110),
        ({}, TIMING, 700),
        ({"announced": True}, TIMING, 3700),
        ({}, TIMING._replace(idle_ns=7200 * SECOND), 3700),
        ({"closed_by": "end", "reward": None}, TIMING, 110),
        ({"closed_by": "end", "reward": None}, TIMING._replace(await_reward_ns=60 * SECOND), 160),
        ({"closed_by": "end", "reward": 0.0}, TIMING._replace(await_reward_ns=60 * SECOND), 110),
        ({"reward": None}, TIMING._replace(await_reward_ns=60 * SECOND), 700),
    ],
)
def test_a_rollout_closes_by_the_first_of_its_reasons(fields: dict[str, object], timing: Timing, expected: int) -> None:
    """After its end, after silence, or at the longest after `max_open`; a reward is waited for if that is asked for."""
    assert expected * SECOND == closes_at(rollout(**fields), 100 * SECOND, component(), timing)


@pytest.mark.parametrize(
    ("fields", "flushed", "now_s", "expected"),
    [
        ({"closed_by": "end"}, False, 110, "end"),
        ({"closed_by": "end"}, True, 101, "end"),
        ({"closed_by": "root"}, False, 111, "root"),
        ({}, False, 700, "idle"),
        ({}, True, 101, "flush"),
        ({}, True, 700, "idle"),
        ({"announced": True}, True, 101, "flush"),
        ({"announced": True}, False, 3700, "idle"),
    ],
)
def test_closed_by_says_what_closed_a_rollout(
    fields: dict[str, object], flushed: bool, now_s: int, expected: str
) -> None:
    """What the spans report stays; a rollout without a report is closed by silence or by a flush."""
    closed = close([rollout(**fields)], {KEY: 100 * SECOND}, component(flushed=flushed), now_s * SECOND, TIMING)
    assert ([expected], None) == ([one.closed_by for one in closed.rollouts], closed.open_until)


def test_rollouts_of_one_component_close_one_by_one() -> None:
    """A rollout that has ended is complete although another one of its trace is at work; that one stays open."""
    ended, other = rollout(closed_by="end"), replace(rollout(), rollout_id="s")
    newest_ns = {("r", 0): 100 * SECOND, ("s", 0): 112 * SECOND}
    closed = close([ended, other], newest_ns, component(newest_ns=112 * SECOND), 112 * SECOND, TIMING)
    assert ([ended], 712 * SECOND) == closed


def test_a_revision_marks_what_came_late() -> None:
    """Rollout and new calls get the flag `late`, calls that were there before do not; all rows have the revision."""
    episode = Episode("r", 0, 0, np.zeros(1, np.int32), np.zeros(1, np.int8), 1, (), (), False)
    before = rollout(flags=("x",), triplets=[triplet("a", flags=("orphan",)), triplet("b")], episodes=[episode])
    after = revised(before, 2, {"a"})
    assert (2, ("late", "x")) == (after.revision, after.flags)
    assert [(2, ("orphan",)), (2, ("late",))] == [(one.revision, one.flags) for one in after.triplets]
    assert [2] == [one.revision for one in after.episodes]


def test_a_moved_rollout_says_where_to() -> None:
    """The last revision of a rollout whose calls belong to another names that one, and has no calls."""
    row = {
        "rollout_id": "r",
        "attempt": 1,
        "identity_source": "trace",
        "status": "succeeded",
        "closed_by": "root",
        "group_id": "g",
        "task_id": None,
        "mode": "train",
        "group_size": 4,
        "started_at": datetime(2026, 1, 1, tzinfo=UTC),
        "ended_at": datetime(2026, 1, 1, 0, 0, 1, 5, tzinfo=UTC),
    }
    others = [replace(rollout(triplets=[triplet(call)]), rollout_id=name) for name, call in (("p", "a"), ("q", "b"))]
    last = moved(row, {"b"}, 3, others)
    expected = Rollout(
        rollout_id="r",
        attempt=1,
        identity_source="trace",
        status="succeeded",
        closed_by="root",
        group_id="g",
        mode="train",
        group_size=4,
        started_at=1_767_225_600_000_000,
        ended_at=1_767_225_601_000_005,
        revision=3,
        flags=("moved",),
        metadata=json.dumps({"moved_to": ["q"]}),
    )
    assert expected == last


def test_a_moved_rollout_without_calls_names_all_that_are_there() -> None:
    """Where no call tells, every rollout of the component is named, in order."""
    row = {
        name: None
        for name in ("rollout_id", "attempt", "identity_source", "status", "closed_by", "group_id", "task_id", "mode")
    } | {
        "group_size": None,
        "started_at": datetime(2026, 1, 1, tzinfo=UTC),
        "ended_at": datetime(2026, 1, 1, tzinfo=UTC),
    }
    last = moved(row, (), 1, [replace(rollout(), rollout_id=name) for name in ("q", "p")])
    assert {"moved_to": ["p", "q"]} == json.loads(last.metadata)
