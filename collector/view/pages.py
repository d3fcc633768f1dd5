"""What each page says: from the address to the values that its template shows."""

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

from spanmill.collector.stats import FATES
from spanmill.collector.view import plots
from spanmill.collector.view.data import PAGE_ROWS, SORTS, Data, Listed, Row, Wanted, spread
from spanmill.collector.view.strips import WINDOW, TextOf, call_strip, episode_strip
from spanmill.collector.view.talk import messages_of
from spanmill.collector.view.waterfall import waterfall
from spanmill.triplets.flags import in_words

Query = Mapping[str, str]
Page = dict[str, Any]

_EPISODES: Final = 8
"""Strips on a rollout's page; each Episode has a page of its own."""
_QUARANTINED: Final = 50


class NotThere(Exception):
    """What an address names is not in the dataset; the message says so."""


class BadAddress(Exception):
    """A value in an address cannot be meant; the message names it."""


def dataset(data: Data, query: Query) -> Page:
    """The dataset as a whole."""
    curves = data.curves()
    drawn = {
        "Mean reward over time": plots.rewards_over_time(curves["over_time"]),
        "Mean reward by policy version": plots.rewards_by_version(curves["by_version"]),
        "Rewards": plots.bars("rollouts by reward", curves["rewards"]),
        "Tokens in an Episode": plots.bars("Episodes by length", curves["lengths"]),
        "Turns in an Episode": plots.bars("Episodes by turns", curves["turns"]),
    }
    return {"summary": data.summary(), "plots": {name: plot for name, plot in drawn.items() if plot}, "fates": FATES}


def rollouts(data: Data, query: Query) -> Page:
    """The table of rollouts."""
    wanted = Wanted(
        prefix=query.get("q", ""),
        status=query.get("status", ""),
        group=query.get("group", ""),
        task=query.get("task", ""),
        mode=query.get("mode", ""),
        agent=query.get("agent", ""),
        flag=query.get("flag", ""),
        version=query.get("version", ""),
        least=_number(query, "least"),
        most=_number(query, "most"),
        sort=_one_of(query, "sort", SORTS, "started"),
        descending=_one_of(query, "order", ("desc", "asc"), "desc") == "desc",
        page=_count(query, "page", 1, least=1),
    )
    found = data.listed(wanted)
    return {"wanted": wanted, "choices": data.choices(), "sorts": SORTS, **_paged(found, wanted.page)}


def rollout(data: Data, query: Query, text_of: TextOf | None) -> Page:
    """One attempt in full."""
    rows, attempts = _rows(data, query)
    row = rows["rollouts"][0]
    episodes = rows["episodes"]
    lines, left_out = waterfall(row, rows["triplets"])
    flags = {flag for table in ("rollouts", "triplets", "episodes") for one in rows[table] for flag in one["flags"]}
    flags |= {one["reason"] for one in rows["quarantine"]}
    return {
        "row": row,
        "attempts": attempts,
        "triplets": rows["triplets"],
        "divergences": {one["call_id"]: _divergence(one) for one in rows["triplets"]},
        "episodes": [(one, list(episode_strip(one, text_of))) for one in episodes[:_EPISODES]],
        "all_episodes": episodes,
        "quarantine": rows["quarantine"][:_QUARANTINED],
        "quarantined": len(rows["quarantine"]),
        "lines": lines,
        "left_out": left_out,
        "words": {flag: in_words(flag) for flag in sorted(flags)},
        "fates": FATES,
        "metadata": _metadata(row),
    }


def episode(data: Data, query: Query, text_of: TextOf | None) -> Page:
    """One Episode, token by token, a window at a time."""
    rows, _ = _rows(data, query)
    number = _count(query, "episode", 0)
    found = [row for row in rows["episodes"] if row["episode"] == number]
    if not found:
        raise NotThere(f"Rollout {query['id']} has no Episode {number}; it has {len(rows['episodes'])}.")
    (row,) = found
    length = len(row["input_ids"])
    start = min(_count(query, "from", 0), max(0, length - 1))
    return {
        "row": row,
        "strip": list(episode_strip(row, text_of, (start, start + WINDOW))),
        "start": start,
        "end": min(length, start + WINDOW),
        "length": length,
        "window": WINDOW,
        "words": {flag: in_words(flag) for flag in sorted(row["flags"])},
        "messages": messages_of(row["messages"]),
    }


def call(data: Data, query: Query, text_of: TextOf | None) -> Page:
    """One call: what was asked, what was answered, and its tokens."""
    rows, _ = _rows(data, query)
    found = [row for row in rows["triplets"] if row["call_id"] == query.get("call")]
    if not found:
        raise NotThere(f"Rollout {query['id']} has no call {query.get('call', '')}.")
    (row,) = found
    return {
        "row": row,
        "number": rows["triplets"].index(row),
        "strip": call_strip(row, text_of),
        "messages": messages_of(row["messages"]),
        "response": messages_of(row["response"]),
        "tools": None if row["tools"] is None else json.dumps(json.loads(row["tools"]), indent=1, ensure_ascii=False),
        "divergence": _divergence(row),
        "children": [one for one in rows["triplets"] if one["parent_call_id"] == row["call_id"]],
        "in_episodes": [
            one["episode"] for one in rows["episodes"] if any(t["call_id"] == row["call_id"] for t in one["turns"])
        ],
        "words": {flag: in_words(flag) for flag in sorted(row["flags"])},
    }


def group(data: Data, query: Query) -> Page:
    """The rollouts that are compared with each other."""
    group_id = query.get("id", "")
    found = data.group(group_id)
    if not found:
        raise NotThere(f"There is no group {group_id}.")
    size = max((row["group_size"] or 0 for row in found), default=0)
    rewards = [row["reward"] for row in found]
    members = len({row["rollout_id"] for row in found})
    return {
        "group_id": group_id,
        "rows": found,
        "spread": spread(rewards),
        "plot": plots.group_rewards([(f"{row['rollout_id']} ({row['attempt']})", row["reward"]) for row in found]),
        "missing": max(0, size - members),
        "size": size,
        "trainable": sum(1 for row in found if row["tokens_trained"] and row["reward"] is not None),
    }


def quarantine(data: Data, query: Query) -> Page:
    """What was set aside."""
    page = _count(query, "page", 1, least=1)
    reason = query.get("reason", "")
    found = data.quarantine(reason, page)
    reasons = [(name, times, in_words(name)) for name, times in data.summary()["quarantine"]]
    return {"reason": reason, "reasons": reasons, **_paged(found, page)}


def row_json(data: Data, query: Query) -> Any:
    """The row of a table as it is stored: `table` and, of several rows, `n`."""
    rows, _ = _rows(data, query)
    table = _one_of(query, "table", tuple(rows), "rollouts")
    number = _count(query, "n", 0)
    if number >= len(rows[table]):
        raise NotThere(f"Rollout {query['id']} has {len(rows[table])} rows in {table}.")
    return rows[table][number]


def _rows(data: Data, query: Query) -> tuple[dict[str, list[dict[str, Any]]], list[int]]:
    """The rows of the attempt that an address names, the last one if it names none, and all attempts there are."""
    rollout_id = query.get("id", "")
    attempts = data.attempts(rollout_id)
    attempt = _count(query, "attempt", attempts[-1] if attempts else 0)
    rows = data.rollout(rollout_id, attempt) if attempt in attempts else {}
    if not rows.get("rollouts"):
        known = f"; there are attempts {', '.join(map(str, attempts))}" if attempts else ""
        which = f" with attempt {attempt}" if attempts else ""
        raise NotThere(f"There is no rollout {rollout_id}{which}{known}.")
    return rows, attempts


def _divergence(row: Row) -> Row | None:
    found: dict[str, Any] = json.loads(row["metadata"])
    return found.get("divergence")


def _metadata(row: Row) -> Mapping[str, Any]:
    """What a rollout's metadata say beside the outline, which is drawn."""
    found: dict[str, Any] = json.loads(row["metadata"])
    return {name: value for name, value in found.items() if name not in ("spans", "spans_left_out")}


def _paged(found: Listed, page: int) -> Page:
    pages = max(1, math.ceil(found.total / PAGE_ROWS))
    return {"rows": found.rows, "total": found.total, "page": page, "pages": pages}


def _number(query: Query, name: str) -> float | None:
    given = query.get(name, "")
    if not given:
        return None
    try:
        number = float(given)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise BadAddress(f"{name} is {given!r}: expected a number.")
    return number


def _count(query: Query, name: str, default: int, least: int = 0) -> int:
    given = query.get(name, "")
    if not given:
        return default
    if not (given.isascii() and given.isdecimal() and len(given) < 10 and int(given) >= least):
        raise BadAddress(f"{name} is {given!r}: expected a whole number from {least}.")
    return int(given)


def _one_of(query: Query, name: str, known: Sequence[str] | Mapping[str, Any], default: str) -> str:
    given = query.get(name, "") or default
    if given not in known:
        raise BadAddress(f"{name} is {given!r}: expected one of {', '.join(known)}.")
    return given
