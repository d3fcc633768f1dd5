"""Rows as JSON: as they are stored, with what JSON has no word for told as text."""

import base64
import json
import math
from collections.abc import Mapping
from datetime import datetime
from typing import Any, cast


def json_text(value: Any) -> str:
    """Rows, lists of them or tables of them in one line.

    Times as ISO 8601, bytes as base64, a float that is no finite number as its name.
    """
    return json.dumps(_plain(value), ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _plain(part) for name, part in cast("Mapping[str, Any]", value).items()}
    if isinstance(value, list):
        return [_plain(part) for part in cast("list[Any]", value)]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, datetime):
        return value.isoformat()
    return base64.b64encode(value).decode() if isinstance(value, bytes) else value
