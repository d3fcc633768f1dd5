"""The spans of a rollout in outline: what stood around the calls, and when. For people who look, not for training."""

from collections.abc import Iterable
from typing import Final

from spanmill import semconv as sc
from spanmill.adapters.joined import Joined
from spanmill.adapters.spans import kinds
from spanmill.adapters.values import identifier
from spanmill.triplets.records import Json, Span

MOST_SPANS: Final = 1000
"""A rollout's earliest; how many more there are is said beside them."""


def outline(spans: Iterable[Span], calls: Iterable[Joined]) -> dict[str, Json]:
    """`spans`, a list in order of (start, span id), and `spans_left_out` where a rollout has more than MOST_SPANS.

    Each is `{trace_id, span_id, parent_id?, name, kind?, start_us, end_us?, error?, call_id?}`: `start_us` and `end_us`
    are microseconds since 1970 UTC, `end_us` is absent on a span that never ended; `kind` is what its instrumentation
    calls it; `call_id` names the Triplet that the span is a witness of. Log records are not in it.
    """
    call_ids = {id(source.span): call.call_id for call in calls for source in call.sources}
    placed = sorted((s for s in spans if not s.is_log), key=lambda s: (s.start_ns, s.span_id, s.trace_id))
    made: dict[str, Json] = {"spans": [_line(s, call_ids.get(id(s))) for s in placed[:MOST_SPANS]]} if placed else {}
    if len(placed) > MOST_SPANS:
        made["spans_left_out"] = len(placed) - MOST_SPANS
    return made


def _line(span: Span, call_id: str | None) -> dict[str, Json]:
    line: dict[str, Json] = {"trace_id": span.trace_id, "span_id": span.span_id}
    if span.parent_id:
        line["parent_id"] = span.parent_id
    line["name"] = span.name
    kind = next(kinds(span), None) or identifier(span.attributes.get(sc.GEN_AI_OPERATION))
    if kind is not None:
        line["kind"] = kind
    line["start_us"] = span.start_ns // 1000
    if span.end_ns:
        line["end_us"] = span.end_ns // 1000
    if span.status == 2:
        line["error"] = True
    if call_id is not None:
        line["call_id"] = call_id
    return line
