"""What was added to a rollout or its calls apart from their spans, for their metadata. Pure."""

from collections.abc import Iterable
from typing import Any, cast

from spanmill import semconv as sc
from spanmill.adapters.values import integer, parse_json, strings, text
from spanmill.triplets.records import Json, Span


def infos_of(spans: Iterable[Span]) -> dict[str | None, dict[str, Json]]:
    """By call id (None: the rollout itself) the names and values that were added; of one name the newest counts.

    A span or log record adds with `spanmill.info`, a JSON object; what is none is left out.
    """
    found: dict[str | None, dict[str, Json]] = {}
    told = [span for span in spans if sc.INFO in span.attributes]
    for span in sorted(
        told, key=lambda s: (integer(s.attributes.get(sc.INFO_AT)) or 0, text(s.attributes[sc.INFO]) or "")
    ):
        try:
            info: Json = parse_json(text(span.attributes[sc.INFO]) or "")
        except ValueError:
            continue
        if isinstance(info, dict):
            for call_id in strings(span.attributes.get(sc.INFO_CALL_IDS)) or [None]:
                found.setdefault(call_id, {}).update(cast("dict[str, Any]", info))
    return found
