"""Messages, tools and answers as JSON attribute values."""

import json
import os
from typing import Any, Final

from spanmill.instrument.reports import report

MAX_TEXT: Final = 2**20
"""The longest JSON text that a span carries, in characters; a longer one is left out, since cut JSON is none."""

CAPTURE_TEXT: Final = "SPANMILL_CAPTURE_TEXT"


def captures_text() -> bool:
    """Whether messages, answers and tools are recorded: unless `SPANMILL_CAPTURE_TEXT` is 0."""
    return os.environ.get(CAPTURE_TEXT, "1") != "0"


def plain(value: Any) -> Any:
    """What a client library's object says of itself, as a dict: only what was set in it."""
    if hasattr(value, "model_dump"):
        return value.model_dump(mode="json", exclude_unset=True)
    raise TypeError(f"{type(value).__name__} is neither JSON nor an object with model_dump")


def to_json(value: object, what: str) -> str | None:
    """`value` as JSON in ASCII; None if there is none, or if it is no JSON or too long (reported)."""
    if value is None:
        return None
    try:
        text = json.dumps(value, default=plain)
    except (TypeError, ValueError, RecursionError) as error:
        report(f"json {what}", f"{what}: no JSON ({error}); not recorded")
        return None
    if len(text) > MAX_TEXT:
        report(f"long {what}", f"{what}: {len(text)} characters of JSON, more than {MAX_TEXT}; not recorded")
        return None
    return text


def json_text(value: object, what: str) -> str | None:
    """`value`, which holds what people or models wrote, as JSON like `to_json`, unless text is not recorded."""
    return to_json(value, what) if captures_text() else None
