"""What a rollout's spans tell of the task it works on, for its metadata. Pure."""

from collections.abc import Iterable

from spanmill import semconv as sc
from spanmill.adapters.values import integer, parse_json, strings, text
from spanmill.triplets.records import Json, Span


def task_of(spans: Iterable[Span]) -> dict[str, Json]:
    """`{"task": {input?, claims?, claimed_at?}}`, or nothing if no span tells of a task.

    `input` is JSON as it was sent, text if it is none; `claims` how often the task was claimed so far, `claimed_at`
    when each time. Of several spans that tell the same thing the earliest counts.
    """
    found: dict[str, Json] = {}
    for span in sorted(spans, key=lambda s: (s.start_ns, s.span_id, s.trace_id)):
        told = (
            ("input", _input(text(span.attributes.get(sc.TASK_INPUT)))),
            ("claims", integer(span.attributes.get(sc.TASK_CLAIMS))),
            ("claimed_at", strings(span.attributes.get(sc.TASK_CLAIMED_AT)) or None),
        )
        for name, value in told:
            if value is not None:
                found.setdefault(name, value)
    return {"task": found} if found else {}


def _input(said: str | None) -> Json:
    if said is None:
        return None
    try:
        return parse_json(said)
    except ValueError:
        return said
