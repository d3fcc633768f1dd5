"""What decoding a request gives, whichever encoding it came in."""

import json
from dataclasses import replace
from typing import Final, NamedTuple

from spanmill.triplets.records import Attributes, Json, Quarantined, Span, received_at
from spanmill.triplets.span_json import span_json

TRACE_ID_BYTES: Final = 16
SPAN_ID_BYTES: Final = 8
EVENT_NAME: Final = "event.name"


class Decoded(NamedTuple):
    """The spans of one request."""

    spans: list[Span]
    bad: list[Quarantined]
    """Spans that can never be used: `bad_span_id`, `undecodable_span`."""
    count: int  # pyright: ignore[reportIncompatibleMethodOverride]  # nobody counts equal members of this tuple
    """How many spans or log records the request has, whether decoded, bad or not asked for."""


class Checked(NamedTuple):
    """What a request holds, as far as a receiver has to know before it answers."""

    spans: int
    """Spans or log records, rejected ones included."""
    rejected: int
    """Those that can never be stored as they have no valid ids; they end in quarantine."""


def id_or_none(raw: bytes, length: int) -> str:
    """The id in hex, or "" if it is no valid one: another length, or all zero."""
    return raw.hex() if len(raw) == length and raw.count(0) < length else ""


def event_name(attributes: Attributes) -> str:
    """The event name of a log record that has it as an attribute, as before OTLP had a field for it; else ""."""
    name = attributes.get(EVENT_NAME)
    return name if isinstance(name, str) else ""


def bad_span_id(span: Span) -> Quarantined:
    """The quarantine row of a span without valid ids."""
    # A span without an id would be taken for a log record; all zero is OTLP's way to write "none".
    written = replace(span, span_id=span.span_id or "0" * 2 * SPAN_ID_BYTES)
    detail = (
        f"trace id {span.trace_id or 'missing'}, span id {span.span_id or 'missing'}; "
        f"expected {2 * TRACE_ID_BYTES} and {2 * SPAN_ID_BYTES} hex digits, not all zero"
    )
    return Quarantined(
        "bad_span_id", detail, span.trace_id, span.span_id, span_json(written), received_at(span.received_ns)
    )


def undecodable(trace_id: str, span_id: str, why: object, raw: Json, received_ns: int) -> Quarantined:
    """The quarantine row of a span or log record that does not parse inside; `raw` is what there is of it."""
    detail = f"{type(why).__name__}: {why}"
    return Quarantined("undecodable_span", detail, trace_id, span_id, json.dumps(raw), received_at(received_ns))
