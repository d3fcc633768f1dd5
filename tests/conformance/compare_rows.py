"""Compares the tables of a dataset with the rows that a conformance case expects; counts that nothing went missing.

An expected row names some columns. It is compared with the row of the same rollout, attempt and call id (triplets; else
span id, else turn and choice), episode number, or span id and reason (quarantine); without such a column, with the next
row in table order. How a column is compared:

    number          ints exactly, floats to 1e-6 relative; an int stands for a timestamp in microseconds
    list            element by element, same length
    struct          the keys that are named
    flags           every flag listed is there;  flags_exact: no other is;  flags_not: none of these is
    NAME@json       column NAME is JSON text and holds at least what is listed: a null matches an absent key, a text
                    matches one text part, argument texts are compared as the JSON they hold
    NAME@present    column NAME is not null (true) or null (false)

Every function returns its differences as sentences; an empty list means that all is as it should be.
"""

import json
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, TypeGuard

import polars as pl
from polars.testing import assert_frame_equal

Row = dict[str, Any]
Rows = dict[str, list[Row]]
Frames = dict[str, pl.DataFrame]

TABLE_ORDER = {
    "rollouts": ("rollout_id", "attempt"),
    "triplets": ("rollout_id", "attempt", "turn", "choice"),
    "episodes": ("rollout_id", "attempt", "episode"),
    "quarantine": ("rollout_id", "attempt", "trace_id", "span_id", "reason"),
}
"""The tables, and the columns by which an expected row without a key is told which row is next."""

ROW_KEYS = {
    "rollouts": [("rollout_id", "attempt")],
    "triplets": [
        ("rollout_id", "attempt", "call_id"),
        ("rollout_id", "attempt", "span_id"),
        ("rollout_id", "attempt", "choice", "turn"),
    ],
    "episodes": [("rollout_id", "attempt", "episode")],
    "quarantine": [("rollout_id", "span_id"), ("rollout_id", "reason"), ("rollout_id",)],
}
"""The keys by which an expected row is looked up: the first of them whose last column it names."""

CONSERVED = ("tokens_trained", "tokens_masked", "tokens_superseded", "tokens_quarantined")


def read_frames(dataset: Path) -> Frames:
    """Every table of a dataset as a trainer's plain glob would read it, part after part."""
    return {table: _read_frame(dataset / table) for table in TABLE_ORDER}


def _read_frame(folder: Path) -> pl.DataFrame:
    parts = sorted(folder.glob("*.parquet"))
    return pl.concat([pl.read_parquet(part) for part in parts]) if parts else pl.DataFrame()


def rows_of(frames: Frames) -> Rows:
    """The rows of every table, in table order."""
    return {table: sorted(frame.to_dicts(), key=_place(table)) for table, frame in frames.items()}


def _place(table: str) -> Callable[[Row], list[tuple[bool, Any]]]:
    return lambda row: [(row[c] is not None, row[c]) for c in TABLE_ORDER[table]]


def table_differences(table: str, expected: list[Row], rows: list[Row], exact: bool) -> Iterator[str]:
    """What of `expected` is not in `rows`, and with `exact` what is in `rows` beyond it."""
    left = list(rows)
    for want in expected:
        label, index = _find(table, want, left)
        if index is None:
            yield f"{label}: no such row among {[_name(table, row) for row in left]}"
            continue
        row = left.pop(index)
        for column, value in want.items():
            yield from column_differences(column, value, row, label)
    if exact:
        yield from (f"{table}: one row too many: {_name(table, row)}" for row in left)


def _find(table: str, want: Row, rows: list[Row]) -> tuple[str, int | None]:
    """What the expected row is looked up by, and the index of the row found."""
    columns = next((key for key in ROW_KEYS[table] if key[-1] in want), ())
    key = {column: want[column] for column in columns if column in want}
    hits = [i for i, row in enumerate(rows) if all(row[c] == v for c, v in key.items())]
    # A call may be quarantined beside others of its rollout: the reason then tells which row is meant.
    same_reason = [i for i in hits if "reason" in want and rows[i].get("reason") == want["reason"]]
    hits = same_reason or hits
    label = f"{table}({', '.join(f'{c}={v}' for c, v in key.items()) or 'next row'})"
    return label, hits[0] if hits else None


def _name(table: str, row: Row) -> Row:
    return {column: row[column] for column in (*TABLE_ORDER[table], "call_id", "flags") if column in row}


def column_differences(name: str, want: Any, row: Row, where: str) -> Iterator[str]:
    """Compare one column of an expected row, by the suffix of its name (see the module's docstring)."""
    column, _, how = name.partition("@")
    if column in ("flags", "flags_exact", "flags_not"):
        yield from _flag_differences(column, set(want), set(row["flags"]), where)
    elif column not in row:
        yield f"{where}: there is no column {column}"
    elif how == "present":
        if (row[column] is not None) is not want:
            yield f"{where}.{column}: expected {'a value' if want else 'null'}, got {_short(row[column])}"
    elif how == "json":
        got = None if row[column] is None else json.loads(row[column])
        yield from json_differences(want, got, f"{where}.{column}")
    else:
        yield from value_differences(want, row[column], f"{where}.{column}")


def _flag_differences(how: str, want: set[str], got: set[str], where: str) -> Iterator[str]:
    wrong = {"flags": want - got, "flags_exact": want ^ got, "flags_not": want & got}[how]
    if wrong:
        yield f"{where}.{how}: {sorted(wrong)} differ, expected {sorted(want)}, got {sorted(got)}"


def value_differences(want: Any, got: Any, where: str) -> Iterator[str]:
    """Where `got` is not what is wanted: lists by element, structs by the keys that are named."""
    if _is_struct(want) and _is_struct(got):
        for key, value in want.items():
            yield from value_differences(value, got.get(key), f"{where}.{key}")
    elif _is_list(want) and _is_list(got) and len(want) == len(got):
        for i, (wanted, found) in enumerate(zip(want, got, strict=True)):
            yield from value_differences(wanted, found, f"{where}[{i}]")
    elif not _equal(want, got):
        yield f"{where}: expected {_short(want)}, got {_short(got)}"


def _is_struct(value: object) -> TypeGuard[dict[str, Any]]:
    return isinstance(value, dict)


def _is_list(value: object) -> TypeGuard[list[Any]]:
    return isinstance(value, list)


def _equal(want: Any, got: Any) -> bool:
    if isinstance(got, datetime):
        got = (got.astimezone(UTC) - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(microseconds=1)
    if _is_number(want) and _is_number(got) and (isinstance(want, float) or isinstance(got, float)):
        return math.isclose(want, got, rel_tol=1e-6, abs_tol=1e-12)
    return type(want) is type(got) and want == got


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def json_differences(want: Any, got: Any, where: str) -> Iterator[str]:
    """As `value_differences` for JSON in OpenAI chat shape: what is wanted must be there, more may be."""
    if want is None and got in ("", []):
        return
    if _is_struct(want) and _is_struct(got):
        for key, value in want.items():
            yield from json_differences(value, got.get(key), f"{where}.{key}")
    elif _is_list(want) and _is_list(got) and len(want) == len(got):
        for i, (wanted, found) in enumerate(zip(want, got, strict=True)):
            yield from json_differences(wanted, found, f"{where}[{i}]")
    elif isinstance(want, str) and (text := _one_text(got)) is not None:
        arguments = _as_json(want)
        if want != text and arguments is not None:
            yield from json_differences(arguments, _as_json(text), where)
        else:
            yield from value_differences(want, text, where)
    else:
        yield from value_differences(want, got, where)


def _one_text(content: Any) -> str | None:
    """A message's content that is a text, or a list of one text part."""
    match content:
        case str(text) | [{"type": "text", "text": str(text)}]:
            return text
        case _:
            return None


def _as_json(text: str) -> Any:
    """The JSON object or list that a text holds; None if it holds none."""
    try:
        return json.loads(text) if text[:1] in ("{", "[") else None
    except ValueError:
        return None


def conservation_differences(tables: Rows) -> Iterator[str]:
    """Where sampled tokens or rows went missing: the counts that tables state of each other must agree."""
    trained: Counter[tuple[str, int]] = Counter()
    for row in tables["episodes"]:
        where = f"episodes({row['rollout_id']}, {row['episode']})"
        trained[_rollout(row)] += sum(row["loss_mask"])
        for column in ("loss_mask", "logprobs"):
            if row[column] is not None and len(row[column]) != len(row["input_ids"]):
                yield f"{where}: {len(row[column])} {column} for {len(row['input_ids'])} input_ids"
        for column in ("turns", "step_rewards"):
            if len(row[column]) != row["num_turns"]:
                yield f"{where}: {len(row[column])} {column} for {row['num_turns']} turns"
    counts = {table: Counter(_rollout(row) for row in tables[table]) for table in ("triplets", "episodes")}
    known = {_rollout(row): row for row in tables["rollouts"]}
    for key, row in known.items():
        where = f"rollouts{key}"
        if row["tokens_captured"] != sum(row[column] for column in CONSERVED):
            yield f"{where}: {row['tokens_captured']} tokens captured, but {[row[column] for column in CONSERVED]}"
        if row["tokens_trained"] != trained[key]:
            yield f"{where}: tokens_trained is {row['tokens_trained']}, the loss masks sum up to {trained[key]}"
        for table, count in counts.items():
            if row[f"num_{table}"] != count[key]:
                yield f"{where}: num_{table} is {row[f'num_{table}']}, there are {count[key]} rows"
    for table in ("triplets", "episodes"):
        for row in tables[table]:
            if _rollout(row) not in known:
                yield f"{table}: a row of {_rollout(row)}, which is not in rollouts"
            elif table == "episodes" and row["rollout_tokens_trained"] != known[_rollout(row)]["tokens_trained"]:
                yield f"episodes{_rollout(row)}: rollout_tokens_trained is {row['rollout_tokens_trained']}"


def _rollout(row: Row) -> tuple[str, int]:
    return row["rollout_id"], row["attempt"]


def frame_differences(first: Frames, again: Frames, label: str) -> Iterator[str]:
    """Where two builds of the same spans differ, in any value but the time of receiving, or in the order of rows."""
    for table in TABLE_ORDER:
        a, b = (frames[table].drop("received_at", strict=False) for frames in (first, again))
        try:
            assert_frame_equal(a, b, check_exact=True)
        except AssertionError as difference:
            yield f"{table} {label}: {difference}"


def dataset_differences(expect: Row, frames: Frames) -> Sequence[str]:
    """All differences of a dataset from a case's `expect.json`, and from the conservation rule."""
    tables = rows_of(frames)
    listed = (
        difference
        for table in TABLE_ORDER
        for difference in table_differences(table, expect[table], tables[table], table in expect["exact"])
    )
    return [*listed, *conservation_differences(tables)]


def _short(value: Any) -> str:
    text = json.dumps(value, default=str, ensure_ascii=False)
    return text if len(text) <= 160 else text[:157] + "..."
