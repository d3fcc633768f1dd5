"""The rows of a dataset in a form that two datasets can be compared in."""

from pathlib import Path
from typing import Any

from spanmill.triplets.reader import read_episodes, read_quarantine, read_rollouts, read_triplets

Rows = dict[str, list[dict[str, Any]]]

TABLES = {
    "rollouts": (read_rollouts, ("rollout_id", "attempt")),
    "triplets": (read_triplets, ("rollout_id", "attempt", "turn", "choice")),
    "episodes": (read_episodes, ("rollout_id", "attempt", "episode")),
    "quarantine": (read_quarantine, ("rollout_id", "attempt", "trace_id", "span_id", "reason", "detail", "span")),
}
DEPENDS_ON_TIME = ("revision", "closed_by", "received_at")


def newest_rows(dataset: Path) -> Rows:
    """The newest rows of every table in one order, without what depends on when spans came."""
    found: Rows = {}
    for table, (read, order) in TABLES.items():
        frame = read(dataset).drop(DEPENDS_ON_TIME, strict=False).collect().sort(order, nulls_last=False)
        found[table] = [row | _without_late(row) for row in frame.to_dicts()]
    return found


def _without_late(row: dict[str, Any]) -> dict[str, Any]:
    return {"flags": [flag for flag in row["flags"] if flag != "late"]} if "flags" in row else {}


def rollouts(dataset: Path, *columns: str) -> list[tuple[Any, ...]]:
    """The named columns of the newest rows of `rollouts`, by rollout and attempt."""
    return read_rollouts(dataset).sort("rollout_id", "attempt").select(columns).collect().rows()
