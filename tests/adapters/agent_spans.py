"""Spans as an agent and its engine would emit them, for the tests of the adapters."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from spanmill.triplets.records import Event, Span, Value

T0 = 1_780_000_000_000_000_000
"""The start of all tests, in nanoseconds."""


def span(
    number: int,
    attributes: Mapping[str, Value] | None = None,
    *,
    trace: int = 1,
    parent: int = 0,
    name: str = "",
    start: int = 0,
    end: int | None = None,
    resource: Mapping[str, Value] | None = None,
    **more: Any,
) -> Span:
    """A span; times in milliseconds after T0, `parent` 0 for a root."""
    return Span(
        trace_id=f"{trace:032x}",
        span_id=f"{number:016x}",
        parent_id=f"{parent:016x}" if parent else "",
        name=name,
        kind=1,
        start_ns=T0 + start * 1_000_000,
        end_ns=T0 + (start + 10 if end is None else end) * 1_000_000,
        attributes=dict(attributes or {}),
        resource=dict(resource or {}),
        **more,
    )


def call(
    number: int,
    prompt: Sequence[int] | None,
    response: Sequence[int] | None,
    *,
    response_id: str | None = None,
    logprobs: Sequence[float] | None = None,
    capture: str = "client",
    attributes: Mapping[str, Value] | None = None,
    **more: Any,
) -> Span:
    """Our own call span with ids as OTLP arrays, their counts, a finish reason and logprobs of -0.5 unless given."""
    a: dict[str, Value] = {"gen_ai.operation.name": "chat", "gen_ai.request.model": "m", "spanmill.capture": capture}
    a["gen_ai.response.id"] = f"r{number}" if response_id is None else response_id
    a["gen_ai.response.finish_reasons"] = ["stop"]
    if prompt is not None:
        a["spanmill.prompt.token_ids"] = np.array(prompt, np.int64)
        a["spanmill.prompt.token_count"] = len(prompt)
    if response is not None:
        a["spanmill.response.token_ids"] = np.array(response, np.int64)
        a["spanmill.response.token_count"] = len(response)
        a["spanmill.response.logprobs"] = np.array([-0.5] * len(response) if logprobs is None else logprobs, np.float64)
    return span(number, {**a, **(attributes or {})}, **more)


def rollout(number: int, rollout_id: str, *, status: str | None = None, **more: Any) -> Span:
    """The span of a rollout."""
    reported: dict[str, Value] = {"spanmill.rollout.status": status} if status else {}
    return span(number, {"spanmill.rollout.id": rollout_id, **reported}, name="rollout", end=1000, **more)


def reward(
    number: int,
    value: Value,
    *,
    reward_name: str | None = None,
    call_id: str | None = None,
    start: int = 0,
    **more: Any,
) -> Span:
    """A reward span."""
    a: dict[str, Value] = {"spanmill.reward.value": value}
    if reward_name is not None:
        a["spanmill.reward.name"] = reward_name
    if call_id is not None:
        a["spanmill.reward.call_id"] = call_id
    return span(number, a, name="spanmill.reward", start=start, end=start + 1, **more)


def event(name: str, attributes: Mapping[str, Value], *, at: int = 0) -> Event:
    """A span event, milliseconds after T0."""
    return Event(name, T0 + at * 1_000_000, dict(attributes))
