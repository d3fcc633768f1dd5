"""Real spans with some attributes dropped, cut, of another type or nested, as limits and odd emitters leave them."""

import functools
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from rows_of import spans_of

from spanmill.triplets.records import Event, Span, Value

TESTS = Path(__file__).parents[1]
ODD: tuple[Value, ...] = (
    None,
    True,
    -1,
    2**62,
    0.5,
    float("nan"),
    "",
    "[",
    '{"choices": [{"message": {"tool_calls": [[1]]}}]}',
    '[{"role": 1, "content": [null, 3, {"type": ["text"]}], "parts": "x"}]',
    "[" * 2000,
    '{"messages": [{"role": "user", "content": ' + "[" * 400 + "]" * 400 + '}], "model": "m\\ud800"}',
    "[" * 950 + "]" * 950,
    b"\xff\x00",
    [],
    {},
    ["a", None, 1, [2.5], {"id": 3}],
    {"id": ["x"], "choices": {"0": None}, "content": {"text": 1}},
    np.array([1, 2, 3], np.int64),
    np.array([0.5, float("nan")], np.float64),
)
"""Values that no attribute is expected to have."""


@functools.cache
def real_spans() -> tuple[Span, ...]:
    """Every real span of the test data, and those of the conformance cases."""
    files = sorted((TESTS / "data" / "dialects").glob("*/*.jsonl"))
    files += sorted((TESTS / "conformance" / "recorded" / "agentlightning").glob("client_*.jsonl"))
    cases = sorted((TESTS / "conformance" / "cases").glob("*/input.jsonl"))
    files += [path for path in cases if path.stat().st_size < 100_000]
    return tuple(span for path in files for span in spans_of(path))


def mutated(span: Span, rng: random.Random) -> Span:
    """The span with one to four of its values changed."""
    attributes: dict[str, Value] = dict(span.attributes)
    events = list(span.events)
    for _ in range(rng.randint(1, 4)):
        if events and rng.random() < 0.3:
            at = rng.randrange(len(events))
            inner = dict(events[at].attributes)
            _change(inner, rng)
            events[at] = Event(rng.choice([events[at].name, "gen_ai.choice"]), events[at].time_ns, inner)
        elif attributes:
            _change(attributes, rng)
    body = rng.choice(ODD) if span.is_log and rng.random() < 0.5 else span.body
    resource = dict(span.resource)
    if resource and rng.random() < 0.1:
        _change(resource, rng)
    return replace(span, attributes=attributes, events=tuple(events), body=body, resource=resource)


def _change(attributes: dict[str, Value], rng: random.Random) -> None:
    if not attributes:
        return
    name = rng.choice(sorted(attributes))
    value = attributes[name]
    kind = rng.randrange(6)
    if kind == 0:
        del attributes[name]
    elif kind == 1:
        attributes[name] = rng.choice(ODD)
    elif kind == 2 and isinstance(value, str | bytes | list) and len(value):
        attributes[name] = value[: rng.randrange(len(value))]
    elif kind == 3:
        attributes[name] = rng.choice([[value], {"value": value}, [[value, value]]])
    elif kind == 4:
        attributes[name] = attributes[rng.choice(sorted(attributes))]
    else:
        attributes[rng.choice([f"{name}.0.x", f"{name}.", f"{name}.²", name + ".9" * 12])] = value


def some_spans(rng: random.Random, most: int) -> list[Span]:
    """Up to `most` real spans, mutated or not, some of them twice."""
    pool: Sequence[Any] = real_spans()
    chosen = [rng.choice(pool) for _ in range(rng.randint(1, most))]
    spans = [mutated(s, rng) if rng.random() < 0.8 else s for s in chosen]
    return spans + [s for s in spans if rng.random() < 0.1]
