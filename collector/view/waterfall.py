"""The spans of a rollout as a waterfall: a tree of lines with a bar each, calls told apart from what is around them."""

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

Row = Mapping[str, Any]

WIDTH: Final = 1000.0
"""Units from the first span's start to the last one's end."""
_LEAST: Final = 3.0
"""The shortest bar that can be seen."""
_DEEPEST: Final = 12


@dataclass(frozen=True)
class Line:
    """One span, or a call without a span in the outline."""

    name: str
    kind: str
    """call, or what the span's instrumentation calls it, or ""."""
    depth: int
    left: float
    width: float
    seconds: float | None
    """None for a span that never ended."""
    error: bool
    call: Row | None
    """The Triplet that it is a witness of."""


def waterfall(rollout: Row, triplets: Sequence[Row]) -> tuple[list[Line], int]:
    """The lines in order of the tree, and how many spans the outline left out.

    Rows of an older spanmill have no outline: then the calls stand alone.
    """
    metadata: dict[str, Any] = json.loads(rollout["metadata"])
    spans: list[Row] = metadata.get("spans", [])
    left_out: int = metadata.get("spans_left_out", 0)
    calls = {row["call_id"]: row for row in triplets}
    witnessed = {span.get("call_id") for span in spans}
    loose = [_of_call(row) for row in triplets if row["call_id"] not in witnessed]
    spans = [*spans, *loose]
    if not spans:
        return [], left_out
    first = min(span["start_us"] for span in spans)
    scale = WIDTH / max(1, max(max(span.get("end_us", 0), span["start_us"]) for span in spans) - first)
    lines: list[Line] = []
    for span, depth in _in_tree_order(spans):
        start, end = span["start_us"], span.get("end_us")
        width = max(_LEAST, ((end or start) - start) * scale)
        left = min((start - first) * scale, WIDTH - _LEAST)
        call = calls.get(span.get("call_id", ""))
        kind = "call" if "call_id" in span else str(span.get("kind", ""))
        seconds = None if end is None else max(0, end - start) / 1e6
        name, error = str(span["name"]), bool(span.get("error"))
        lines.append(Line(name, kind, min(depth, _DEEPEST), left, min(width, WIDTH - left), seconds, error, call))
    return lines, left_out


def _of_call(row: Row) -> Row:
    return {
        "trace_id": row["trace_id"],
        "span_id": row["span_id"],
        "name": row["call_id"],
        "start_us": _us(row["started_at"]),
        "end_us": _us(row["ended_at"]),
        "call_id": row["call_id"],
    }


def _us(time: datetime) -> int:
    return round(time.timestamp() * 1e6)


def _in_tree_order(spans: Sequence[Row]) -> list[tuple[Row, int]]:
    """(span, depth): under each span its children by start; spans whose parent is not here are roots."""
    known = {(span["trace_id"], span["span_id"]) for span in spans}
    children: defaultdict[tuple[str, str] | None, list[Row]] = defaultdict(list)
    for span in sorted(spans, key=lambda s: (s["start_us"], s["span_id"])):
        parent = (span["trace_id"], span.get("parent_id", ""))
        children[parent if parent in known else None].append(span)
    ordered: list[tuple[Row, int]] = []
    seen: set[tuple[str, str]] = set()
    waiting = [(span, 0) for span in reversed(children[None])]
    while waiting:
        span, depth = waiting.pop()
        key = span["trace_id"], span["span_id"]
        if key in seen and "parent_id" in span:
            continue
        seen.add(key)
        ordered.append((span, depth))
        waiting += [(child, depth + 1) for child in reversed(children.pop(key, []))]
    # Spans that are each other's ancestors hang on no root.
    ordered += [
        (span, 0) for rest in children.values() for span in rest if (span["trace_id"], span["span_id"]) not in seen
    ]
    return ordered
