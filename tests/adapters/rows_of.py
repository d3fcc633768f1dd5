"""Spans of a file of OTLP JSON lines, and the rows that they become, as JSON values."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from spanmill.adapters import adapt
from spanmill.collector.decode_json import decode_logs_json, decode_traces_json
from spanmill.triplets.records import Rollout, Span, Triplet

TEXTS = ("messages", "response", "tools", "metadata")


def spans_of(path: Path) -> list[Span]:
    """Every span and log record of a file; ValueError if one of them cannot be read."""
    spans: list[Span] = []
    for line in path.read_bytes().splitlines():
        decoded = decode_logs_json(line) if b'"resourceLogs"' in line else decode_traces_json(line)
        if decoded.bad:
            raise ValueError(decoded.bad[0].detail)
        spans += decoded.spans
    return spans


def rollouts_of(path: Path) -> list[Rollout]:
    """The rollouts of a file."""
    return adapt(spans_of(path)).rollouts


def row(triplet: Triplet) -> dict[str, Any]:
    """A whole Triplet, columns that hold JSON as what they hold."""
    columns = asdict(triplet)
    for name in TEXTS:
        columns[name] = None if columns[name] is None else json.loads(columns[name])
    return {name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in columns.items()}


def rows_of(path: Path) -> list[dict[str, Any]]:
    """All Triplets of a file, as JSON would give them back."""
    rows = [row(triplet) for rollout in rollouts_of(path) for triplet in rollout.triplets]
    return json.loads(json.dumps(rows))
