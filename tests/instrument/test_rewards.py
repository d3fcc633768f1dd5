import math
from collections.abc import Callable
from decimal import Decimal
from typing import Any

import numpy as np
import pytest
from opentelemetry.sdk.trace import ReadableSpan

from spanmill.instrument import counters, reward, rollout

Spans = Callable[[], list[ReadableSpan]]


def attributes(span: ReadableSpan) -> dict[str, Any]:
    """A span's attributes."""
    return dict(span.attributes or {})


@pytest.mark.parametrize(
    ("value", "expected"),
    [(1, 1.0), (0.5, 0.5), (True, 1.0), (False, 0.0), (np.float32(0.25), 0.25), (np.array(2), 2.0), (Decimal(3), 3.0)],
    ids=repr,
)
def test_numbers_are_sent_as_doubles(value: Any, expected: float, emitted: Spans) -> None:
    """int, float, bool and what else has a `float()`."""
    reward(value)
    (span,) = emitted()
    assert ("spanmill.reward", {"spanmill.reward.value": expected}) == (span.name, attributes(span))
    assert isinstance(attributes(span)["spanmill.reward.value"], float)
    assert span.start_time == span.end_time


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_sent_as_it_is(value: float, emitted: Spans) -> None:
    """The collector quarantines it where it can be seen; it is neither hidden nor turned into 0."""
    reward(value)
    assert [repr(value)] == [repr(attributes(s)["spanmill.reward.value"]) for s in emitted()]


@pytest.mark.parametrize("value", ["1.0", b"1", None, [1], np.array([1, 2]), 10**400, {}], ids=repr)
def test_what_is_no_number_is_counted_and_raises_nothing(value: Any, emitted: Spans) -> None:
    """A grader that returns text must not end the agent; nothing is sent for it."""
    before = counters().ignored
    reward(value)
    assert ([], before + 1) == (emitted(), counters().ignored)


def test_name_and_call_stand_on_the_span(emitted: Spans) -> None:
    """A reward says what it measures and which call it is for."""
    with rollout("r", attempt=1):
        reward(1, name="final")
        reward(2, call_id="chatcmpl-1")
    own = {"spanmill.rollout.id": "r", "spanmill.rollout.attempt": 1}
    assert [
        {"spanmill.reward.value": 1.0, "spanmill.reward.name": "final", **own},
        {"spanmill.reward.value": 2.0, "spanmill.reward.call_id": "chatcmpl-1", **own},
    ] == [attributes(s) for s in emitted() if s.name == "spanmill.reward"]


def test_a_reward_for_another_rollout_is_not_the_current_ones(emitted: Spans) -> None:
    """Only what was said of the other rollout stands on it, and it is no part of the current tree."""
    with rollout("here", attempt=2, group_id="g"):
        reward(1, rollout_id="there")
        reward(2, rollout_id="there", attempt=5)
    there, again = (s for s in emitted() if s.name == "spanmill.reward")
    assert [None, None] == [there.parent, again.parent]
    assert [
        {"spanmill.reward.value": 1.0, "spanmill.rollout.id": "there"},
        {"spanmill.reward.value": 2.0, "spanmill.rollout.id": "there", "spanmill.rollout.attempt": 5},
    ] == [attributes(there), attributes(again)]


def test_a_handle_rewards_its_rollout_also_after_its_end(emitted: Spans) -> None:
    """A grader that runs later, or elsewhere, rewards through the handle."""
    with rollout("r", attempt=1) as r:
        pass
    with rollout("other"):
        r.reward(0.5, name="final")
    spans = emitted()
    (given,) = (s for s in spans if s.name == "spanmill.reward")
    (end,) = (s for s in spans if s.name == "rollout" and attributes(s)["spanmill.rollout.id"] == "r")
    assert given.parent is not None and end.context is not None
    assert end.context.span_id == given.parent.span_id
    assert {
        "spanmill.reward.value": 0.5,
        "spanmill.reward.name": "final",
        "spanmill.rollout.id": "r",
        "spanmill.rollout.attempt": 1,
    } == attributes(given)
