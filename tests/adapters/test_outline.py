import json
from typing import Any

from agent_spans import call, rollout, span

from spanmill.adapters import adapt
from spanmill.adapters.outline import MOST_SPANS
from spanmill.triplets.records import Span


def outline_of(*spans: Span) -> dict[str, Any]:
    """The metadata of the one rollout that spans make."""
    (found,) = adapt(spans).rollouts
    return json.loads(found.metadata)


def test_a_rollout_keeps_its_spans_in_outline() -> None:
    """Agents, tools and calls stand there with their place in the tree and their times; a call with its id."""
    tool = span(3, {"gen_ai.operation.name": "execute_tool"}, parent=1)
    asked = call(2, [1], [2], response_id="x", parent=1)
    spans = outline_of(tool, asked, rollout(1, "r"))["spans"]
    told = [(s["span_id"][-1], s.get("parent_id", "")[-1:], s.get("kind"), s.get("call_id")) for s in spans]
    assert [("1", "", None, None), ("2", "1", "chat", "x"), ("3", "1", "execute_tool", None)] == told


def test_an_outline_is_bounded() -> None:
    """Of a rollout of very many spans the earliest stand there, and how many do not is said."""
    many = [span(n, {}, parent=1) for n in range(2, MOST_SPANS + 4)]
    kept = outline_of(rollout(1, "r"), *many)
    assert (MOST_SPANS, 3) == (len(kept["spans"]), kept["spans_left_out"])
