"""What a request holds, for those who must know what belongs together before they decode it: traces, sizes, keys."""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from spanmill import semconv as sc
from spanmill.adapters import keys, signal
from spanmill.collector.decode import decode
from spanmill.collector.index import Found, Key
from spanmill.collector.journal import Kind
from spanmill.triplets.records import Quarantined, Span

_TRACE: Final = re.compile("[0-9a-f]{32}")


def home(span: Span, span_keys: Sequence[Key]) -> str:
    """The trace that a span is indexed under: its own, or for a log record outside any trace one made of its first key.

    "" if it has no key either: nothing can tell what it belongs to.
    """
    return span.trace_id or min((f"log:{kind}:{value}" for kind, value in span_keys), default="")


def survey(kind: Kind, body: bytes) -> list[Found]:
    """What a request holds, by trace. Raises DecodeError if the body is no request of its kind."""
    decoded = decode(kind, body, arrays=False)
    share = len(body) // max(decoded.count, 1)
    sizes, joined, ends = dict[str, int](), dict[str, set[Key]](), set[str]()
    for span in decoded.spans:
        span_keys = keys(span)
        trace = home(span, span_keys)
        sizes[trace] = sizes.get(trace, 0) + share
        joined.setdefault(trace, set()).update(key for key in span_keys if key[0] != "trace")
        if signal(span) in ("end", "root") or sc.INFO in span.attributes:
            ends.add(trace)
    for bad in decoded.bad:
        sizes[bad.trace_id] = sizes.get(bad.trace_id, 0) + share
    return [Found(trace, size, frozenset(joined.get(trace, ())), trace in ends) for trace, size in sizes.items()]


def load(
    kind: Kind, body: bytes, received_ns: int, wanted: Mapping[str, int]
) -> Iterator[tuple[int, Span | Quarantined]]:
    """The spans of a request, and the rows of those that cannot be read, whose trace as `home` names it is in `wanted`.

    Each comes with the value that its trace has there.
    """
    # Log records outside any trace, and spans whose trace id is none, are all decoded as of the trace "".
    only = {trace if _TRACE.fullmatch(trace) and trace.strip("0") else "" for trace in wanted}
    decoded = decode(kind, body, received_ns, only=only)
    for span in decoded.spans:
        trace = span.trace_id or home(span, keys(span))
        if trace in wanted:
            yield wanted[trace], span
    for bad in decoded.bad:
        if bad.trace_id in wanted:
            yield wanted[bad.trace_id], bad
