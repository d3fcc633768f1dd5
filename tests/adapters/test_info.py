import json

import pytest
from agent_spans import span

from spanmill.adapters.info import infos_of
from spanmill.triplets.records import Span, Value


def _info(number: int, text: str, at: int, *call_ids: str) -> Span:
    more: dict[str, Value] = {"spanmill.info.call_ids": list[Value](call_ids)} if call_ids else {}
    return span(number, {"spanmill.info": text, "spanmill.info.at": at, **more})


@pytest.mark.parametrize("reverse", [False, True])
def test_the_newest_value_of_a_name_counts(reverse: bool):
    """Info is joined name by name in the order of its own times, in whatever order it came."""
    told = [_info(1, '{"a": 1, "b": 2}', 10), _info(2, '{"a": 3}', 20), _info(3, '{"c": 4}', 5, "x", "y")]
    expected = {None: {"a": 3, "b": 2}, "x": {"c": 4}, "y": {"c": 4}}
    assert expected == infos_of(reversed(told) if reverse else told)


@pytest.mark.parametrize("text", ["", "{", "[1]", json.dumps("a")])
def test_what_is_no_object_is_left_out(text: str):
    """Info that is no JSON object adds nothing."""
    assert {} == infos_of([_info(1, text, 1), span(2)])
