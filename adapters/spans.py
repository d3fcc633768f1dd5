"""What a span is, by its attributes: agent, reward, container; and the tree that spans make."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Final

import numpy as np

from spanmill import semconv as sc
from spanmill.adapters.values import clean
from spanmill.triplets.records import Attributes, Event, Json, Span, Value

CONTAINER_OPERATIONS: Final = frozenset(
    {
        "invoke_agent",
        "create_agent",
        "invoke_workflow",
        "execute_tool",
        "plan",
        "retrieval",
        "embeddings",
        "rerank",
        "fetch_response",
        "create_memory",
        "search_memory",
        "update_memory",
        "delete_memory",
    }
)
LLM_KINDS: Final = frozenset({"llm", "generation", "completion", "chat", "chat_model"})

KIND_ATTRIBUTES: Final = (
    sc.OPENINFERENCE_SPAN_KIND,
    sc.TRACELOOP_SPAN_KIND,
    sc.LANGFUSE_TYPE,
    sc.AGENTOPS_SPAN_KIND,
    sc.LANGSMITH_SPAN_KIND,
    sc.MLFLOW_SPAN_TYPE,
)
"""Where the instrumentations say what kind of thing a span is."""
KINDS: Final = frozenset(KIND_ATTRIBUTES)


_TELLING: Final = frozenset(
    {*KIND_ATTRIBUTES, sc.VERCEL_OPERATION, sc.LOGFIRE_SPAN_TYPE, sc.LITELLM_CALL_ID, sc.LITELLM_HIDDEN}
)
"""Without any of these a span's operation alone says whether it is a container."""


def kinds(span: Span) -> Iterator[str]:
    """What the span's instrumentation calls it, in lower case."""
    if KINDS.isdisjoint(span.attributes):
        return
    for name in KIND_ATTRIBUTES:
        value = span.attributes.get(name)
        if isinstance(value, str):
            yield value.strip('"').lower()  # MLflow's values are JSON texts


def is_container(span: Span) -> bool:
    """Whether the span is an agent, chain, workflow, tool or other step around LLM calls."""
    return _operation(span) in CONTAINER_OPERATIONS or (
        not _TELLING.isdisjoint(span.attributes)
        and (any(k not in LLM_KINDS for k in kinds(span)) or _is_outer(span.attributes) or _is_written_on(span))
    )


def _operation(span: Span) -> str:
    operation = span.attributes.get(sc.GEN_AI_OPERATION)
    return operation if isinstance(operation, str) else ""


def _is_outer(attributes: Attributes) -> bool:
    """Whether a span announces another, or is the AI SDK's span around the one that makes the request."""
    operation = attributes.get(sc.VERCEL_OPERATION)
    pending = attributes.get(sc.LOGFIRE_SPAN_TYPE)
    around = isinstance(operation, str) and not operation.endswith((".doGenerate", ".doStream"))
    return around or (isinstance(pending, str) and pending == "pending_span")


def _is_written_on(span: Span) -> bool:
    """Whether LiteLLM wrote its last request on a span that was open around it, an agent's say, instead of its own.

    A span that is an LLM call anyway, by another instrumentation's names, stays one.
    """
    a = span.attributes
    if sc.LITELLM_CALL_ID not in a and not (sc.LITELLM_HIDDEN in a and sc.LLM_REQUEST_TYPE in a):
        return False
    own = span.scope == "litellm" or span.name in ("litellm_request", "Received Proxy Server Request")
    return not own and not any(name in a for name in (*KIND_ATTRIBUTES, sc.LOGFIRE_SCHEMA, sc.GEN_AI_PROVIDER))


def agent_name(span: Span) -> str | None:
    """The agent's name if this is an agent's span: as recorded, else the span's name."""
    if _operation(span) not in ("invoke_agent", "create_agent") and "agent" not in kinds(span):
        return None
    return recorded_agent(span.attributes) or span.name


def recorded_agent(attributes: Attributes) -> str | None:
    """The agent's name that stands on a span."""
    for name in (sc.GEN_AI_AGENT_NAME, sc.AGENT_NAME):
        value = attributes.get(name)
        if isinstance(value, str) and value:
            return value
    return None


def is_reward(span: Span) -> bool:
    """Whether the span computes or reports a reward: an LLM call under it is a judge's."""
    return (
        span.name in (sc.REWARD, sc.AGL_ANNOTATION) or sc.REWARD_VALUE in span.attributes or "evaluator" in kinds(span)
    )


def same_value(a: Value, b: Value) -> bool:
    """Whether two attribute values are the same, NaN being itself."""
    if isinstance(a, np.ndarray) or isinstance(b, np.ndarray):
        if not (isinstance(a, np.ndarray) and isinstance(b, np.ndarray)) or a.dtype != b.dtype:
            return False
        return np.array_equal(a, b, equal_nan=a.dtype.kind == "f")
    if type(a) is not type(b):
        return False
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same_value(a[k], b[k]) for k in a)
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(same_value(x, y) for x, y in zip(a, b, strict=True))
    return a == b or (a != a and b != b)


def same_span(a: Span, b: Span) -> bool:
    """Whether two copies of a span have the same contents; when each was received does not matter."""
    return (
        (a.name, a.parent_id, a.kind, a.start_ns, a.end_ns, a.status, a.status_message, a.dropped_attributes)
        == (b.name, b.parent_id, b.kind, b.start_ns, b.end_ns, b.status, b.status_message, b.dropped_attributes)
        and same_value(dict(a.attributes), dict(b.attributes))
        and same_value(dict(a.resource), dict(b.resource))
        and same_value(a.body, b.body)
        and [(e.name, e.time_ns) for e in a.events] == [(e.name, e.time_ns) for e in b.events]
        and all(same_value(dict(x.attributes), dict(y.attributes)) for x, y in zip(a.events, b.events, strict=True))
        and len(a.links) == len(b.links)
    )


def _completeness(span: Span) -> tuple[bool, int, int, str]:
    """Order of copies: ended, status, attributes, then contents, so that the choice never depends on arrival."""
    return bool(span.end_ns), {0: 1, 1: 2, 2: 0}.get(span.status, 0), len(span.attributes), _digest(span)


def _digest(span: Span) -> str:
    events = [(e.name, e.time_ns, _items(e.attributes)) for e in span.events]
    told = (span.start_ns, span.end_ns, span.name, span.parent_id, span.kind, span.status_message, len(span.links))
    return repr((told, _items(span.attributes), _items(span.resource), events, clean(span.body)))


def _items(attributes: Attributes) -> list[tuple[str, Json]]:
    return sorted((name, repr(clean(value))) for name, value in attributes.items())


class Tree:
    """The spans of a component, each once, by trace and span id, and the way up from each."""

    def __init__(self, spans: Iterable[Span]) -> None:
        """Drop duplicates by (trace id, span id); of differing copies the more complete one stays."""
        self.conflicting: set[tuple[str, str]] = set()
        """Spans that were sent twice with different contents."""
        by_id: dict[tuple[str, str], Span] = {}
        logs: dict[tuple[str, str, int, str], list[Span]] = {}
        for span in spans:
            if span.is_log:
                alike = logs.setdefault((span.trace_id, span.parent_id, span.start_ns, span.name), [])
                if not any(same_span(span, other) for other in alike):
                    alike.append(span)
                continue
            key = span.trace_id, span.span_id
            other = by_id.setdefault(key, span)
            if other is not span and not same_span(other, span):
                self.conflicting.add(key)
                by_id[key] = max(other, span, key=_completeness)
        self._by_id = by_id
        self.logs: list[Span] = [s for k in sorted(logs) for s in sorted(logs[k], key=_digest)]
        """Log records, each once."""
        self._rewards = {key for key, span in by_id.items() if is_reward(span)}
        for log in self.logs:
            self._attach(log)
        self.spans: list[Span] = sorted(by_id.values(), key=lambda s: (s.start_ns, s.span_id, s.trace_id))

    def _attach(self, log: Span) -> None:
        """Let a log record be read like an event of its span."""
        span = self._by_id.get((log.trace_id, log.parent_id))
        if span is not None:
            # The body tells it from an event of the span's own, so it stands there even if the record has none.
            attributes: Mapping[str, Value] = {**log.attributes, "body": log.body}
            event = Event(log.name, log.start_ns, attributes)
            self._by_id[span.trace_id, span.span_id] = replace(span, events=(*span.events, event))

    def parent(self, span: Span) -> Span | None:
        """The span's parent, if it is here."""
        return self._by_id.get((span.trace_id, span.parent_id)) if span.parent_id else None

    def ancestors(self, span: Span) -> Iterator[Span]:
        """The spans above, nearest first; a cycle ends where it closes."""
        seen = {span.span_id}
        above = self.parent(span)
        while above is not None and above.span_id not in seen:
            yield above
            seen.add(above.span_id)
            above = self.parent(above)

    def under_reward(self, span: Span) -> bool:
        """Whether the span stands below one that computes a reward, so that a call there is a judge's."""
        return bool(self._rewards) and any((a.trace_id, a.span_id) in self._rewards for a in self.ancestors(span))

    def is_orphan(self, span: Span) -> bool:
        """Whether the span's parent is of this process by its flags, or of unknown place, and never came."""
        remote = span.flags & 0x300 == 0x300
        return bool(span.parent_id) and not remote and self.parent(span) is None
