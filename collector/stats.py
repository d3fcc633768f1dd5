"""The loss report: what became of every call and every sampled token of a dataset, told from the dataset alone."""

import json
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

import polars as pl

from spanmill.storage import Where, locate
from spanmill.triplets.parts import unfinished_builds
from spanmill.triplets.reader import read_episodes, read_quarantine, read_rollouts, read_triplets

FATES: Final = ("trained", "masked", "superseded", "quarantined")
"""What may become of a sampled token; `tokens_captured` is their sum, always."""

_ROLLOUT = ("rollout_id", "attempt")


class _Line(NamedTuple):
    label: str = ""
    value: int | str = ""
    share: float | None = None
    """Of the total that the line is a part of."""


def loss_report(dataset: Where, *, as_json: bool = False) -> str:
    """The report as aligned plain text; the same dataset gives the same text.

    `as_json` gives one object instead: each line as `{"value": ..., "share": ...?, "parts": {...}?}` under its label.
    Raises DatasetError if there is no dataset, SchemaVersionError if a newer spanmill wrote it.
    """
    lines = _lines(dataset)
    return f"{json.dumps(_nested(lines))}\n" if as_json else _aligned(lines)


def _lines(dataset: Where) -> list[_Line]:
    rollouts = read_rollouts(dataset).collect()
    triplets = read_triplets(dataset).select("trainable", "flags").collect()
    mask = pl.col("loss_mask").list  # as long as input_ids, in a quarter of the memory
    tokens, trained = mask.len(), mask.sum().cast(pl.Int64)
    columns = (*_ROLLOUT, "num_turns", "truncated", "flags")
    episodes = read_episodes(dataset).select(*columns, tokens=tokens, trained=trained).collect()
    reasons = read_quarantine(dataset).select("reason").collect()["reason"]
    unfinished = unfinished_builds(locate(dataset))
    return [
        *([_Line("unfinished builds", unfinished), _Line()] if unfinished else []),
        *_rollouts(rollouts),
        _Line(),
        *_calls(rollouts, triplets),
        _Line(),
        *_tokens(rollouts),
        *_conservation(rollouts, episodes),
        _Line(),
        *_episodes(episodes),
        _Line(),
        _Line("rows in quarantine", reasons.len()),
        *_counts(reasons),
    ]


def _rollouts(rollouts: pl.DataFrame) -> Iterator[_Line]:
    total = rollouts.height
    yield _Line("rollouts", total)
    for column, label in (("status", "status "), ("closed_by", "closed by ")):
        yield from _counts(rollouts[column], total, label)
    yield _part("without a reward", rollouts["reward"].null_count(), total)
    yield from _counts(rollouts["flags"].explode().drop_nulls(), total, "flag ")


def _calls(rollouts: pl.DataFrame, triplets: pl.DataFrame) -> Iterator[_Line]:
    """A call may have several flags, so the lines under a line may add up to more than it has."""
    total = int(rollouts["num_calls"].sum())
    kept = triplets.partition_by("trainable", as_dict=True)
    yield _Line("calls seen", total)
    for trainable, label in ((True, "trained"), (False, "kept, not trained")):
        rows = kept.get((trainable,), triplets.clear())
        yield _part(label, rows.height, total)
        yield from _counts(rows["flags"].explode().drop_nulls(), total, "  flag ")
    yield _part("quarantined", total - triplets.height, total)


def _tokens(rollouts: pl.DataFrame) -> Iterator[_Line]:
    captured = int(rollouts["tokens_captured"].sum())
    yield _Line("tokens sampled", captured)
    yield from (_part(fate, int(rollouts[f"tokens_{fate}"].sum()), captured) for fate in FATES)


def _conservation(rollouts: pl.DataFrame, episodes: pl.DataFrame) -> Iterator[_Line]:
    """Whether every sampled token is accounted for, and each that counts as trained is in a loss mask once."""
    masks = episodes.group_by(_ROLLOUT).agg(pl.col("trained").sum())
    wrong = rollouts.join(masks, on=_ROLLOUT, how="left").filter(
        (pl.col("tokens_captured") != pl.sum_horizontal(f"tokens_{fate}" for fate in FATES))
        | (pl.col("tokens_trained") != pl.col("trained").fill_null(0))
    )
    if wrong.is_empty():
        yield _Line("  conserved", f"in all {rollouts.height:,} rollouts")
    else:
        first = wrong.sort(_ROLLOUT).row(0, named=True)
        where = f"{first['rollout_id']}, attempt {first['attempt']}"
        yield _Line("  NOT CONSERVED", f"in {wrong.height:,} of {rollouts.height:,} rollouts, first {where}")


def _episodes(episodes: pl.DataFrame) -> Iterator[_Line]:
    total = episodes.height
    yield _Line("episodes", total)
    if total == 0:
        return
    for column, label in (("num_turns", "turns"), ("tokens", "tokens"), ("trained", "trained tokens")):
        least, median, most = episodes[column].min(), episodes[column].median(), episodes[column].max()
        yield _Line(f"  {label} each", f"{least:,} to {most:,}, median {median:,.0f}")
    yield _part("truncated", int(episodes["truncated"].sum()), total)
    yield from _counts(episodes["flags"].explode().drop_nulls(), total, "flag ")


def _counts(values: pl.Series, total: int | None = None, label: str = "") -> Iterator[_Line]:
    """A line per distinct value, the most frequent first, ties by name."""
    yield from (_part(f"{label}{value}", times, total or values.len()) for value, times in counted(values))


def counted(values: pl.Series) -> list[tuple[str, int]]:
    """(value, times) of every distinct value, the most frequent first, ties by name; nulls are left out."""
    counts = values.drop_nulls().value_counts(name="times")
    return counts.sort("times", values.name, descending=[True, False]).rows()


def _part(label: str, part: int, total: int) -> _Line:
    return _Line(f"  {label}", part, part / total if total else None)


def _aligned(lines: list[_Line]) -> str:
    """Labels on the left, numbers right-aligned in one column, shares beside them; text starts where numbers do."""
    width = max(len(line.label) for line in lines)
    digits = max(len(f"{line.value:,}") for line in lines if isinstance(line.value, int))
    return "".join(f"{_text(line, width, digits)}".rstrip() + "\n" for line in lines)


def _text(line: _Line, width: int, digits: int) -> str:
    value = f"{line.value:>{digits},}" if isinstance(line.value, int) else line.value
    share = "" if line.share is None else f"{line.share:>8.1%}"
    return f"{line.label:<{width}}  {value}{share}"


def _nested(lines: list[_Line]) -> dict[str, Any]:
    """The lines by label; those that are indented under another are its parts."""
    whole: dict[str, Any] = {}
    above = [whole]
    for line in lines:
        if not line.label:
            continue
        label = line.label.strip()
        depth = (len(line.label) - len(line.label.lstrip())) // 2
        told: dict[str, Any] = {"value": line.value} | ({} if line.share is None else {"share": line.share})
        del above[depth + 1 :]
        place = above[depth] if depth == 0 else above[depth].setdefault("parts", {})
        place[label] = told
        above.append(told)
    return whole
