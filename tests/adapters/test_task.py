from typing import Any

import numpy as np
import pytest

from spanmill.adapters.task import task_of
from spanmill.triplets.records import Span


def span(start_ns: int, **attributes: Any) -> Span:
    """A span that tells this of its task."""
    named = {f"spanmill.task.{name}": value for name, value in attributes.items()}
    return Span("0" * 31 + "1", f"{start_ns:016x}", "", "s", 1, start_ns, start_ns, named, {})


def test_what_spans_tell_of_a_task() -> None:
    """The earliest span counts for each thing that is told; in any order of arrival."""
    spans = [span(2, input='"later"', claims=9), span(1, input='{"q": 1}'), span(3, claimed_at=["a", "b"]), span(4)]
    expected = {"task": {"input": {"q": 1}, "claims": 9, "claimed_at": ["a", "b"]}}
    assert expected == task_of(spans) == task_of(spans[::-1])


@pytest.mark.parametrize(
    ("attributes", "expected"),
    [
        ({}, {}),
        ({"input": "plain text"}, {"task": {"input": "plain text"}}),
        ({"input": '{"cut": '}, {"task": {"input": '{"cut": '}}),
        ({"input": "null"}, {}),
        ({"input": "0"}, {"task": {"input": 0}}),
        ({"input": "[" * 100_000}, {"task": {"input": "[" * 100_000}}),
        ({"input": 5, "claims": "5", "claimed_at": 5}, {}),
        ({"claims": True}, {}),
        ({"claimed_at": np.array([1, 2])}, {}),
        ({"claimed_at": "once"}, {"task": {"claimed_at": ["once"]}}),
    ],
    ids=str,
)
def test_odd_values(attributes: dict[str, Any], expected: dict[str, Any]) -> None:
    """Text that is no JSON is text; what is of another type is not recorded."""
    assert expected == task_of([span(1, **attributes)])
