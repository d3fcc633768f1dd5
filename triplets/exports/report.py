"""The loss report of an export: every rollout, call and sampled token of the dataset, and why it was not exported."""

from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

import polars as pl

from spanmill.triplets.parts import KEY
from spanmill.triplets.select import LEFT_OUT, Decided

EXPORTED = "exported"
CUT = "cut at max_tokens"


class Report(NamedTuple):
    """Numbers by what became of them: `exported`, or the reason. Of each, they add up to what the dataset has.

    An export of prompts alone has no calls and no tokens.
    """

    rows: int
    """Rows that were written."""
    rollouts: dict[str, int]
    calls: dict[str, int]
    tokens: dict[str, int]
    """Sampled tokens."""

    @property
    def text(self) -> str:
        """The report as aligned lines."""
        lines = [("rows written", self.rows, "")]
        for name, found in (("rollouts", self.rollouts), ("calls", self.calls), ("sampled tokens", self.tokens)):
            if not found:
                continue
            total = sum(found.values())
            lines.append((name, total, ""))
            lines += [(f"  {reason}", n, f"{n / max(1, total):8.1%}") for reason, n in _sorted(found)]
        width = max(len(name) for name, _, _ in lines)
        digits = max(len(f"{number:,}") for _, number, _ in lines)
        return "".join(f"{name:<{width}}  {number:>{digits},}{share}".rstrip() + "\n" for name, number, share in lines)


def _sorted(found: dict[str, int]) -> list[tuple[str, int]]:
    """What was exported first, then the reasons, the most frequent first, without those that left nothing out."""
    reasons = sorted(found.items(), key=lambda item: (item[0] != EXPORTED, -item[1], item[0]))
    return [(reason, number) for reason, number in reasons if number or reason == EXPORTED]


def account(decided: Decided, rows: int) -> Report:
    """What became of everything that `decided` was decided of."""
    sequences = decided.episodes.with_columns(pl.col(LEFT_OUT).fill_null(EXPORTED))
    return Report(
        rows, _of_rollouts(decided, sequences), _of(_calls(decided, sequences)), _of(_tokens(decided, sequences))
    )


def _of_rollouts(decided: Decided, sequences: pl.DataFrame) -> dict[str, int]:
    """A rollout is exported if any of its Episodes is, else it goes by why its first one is not."""
    first = sequences.sort(pl.col(LEFT_OUT) != EXPORTED, maintain_order=True).unique(KEY, keep="first")
    joined = decided.rollouts.join(first.select(*KEY, below=LEFT_OUT), on=KEY, how="left")
    return _of(
        (reason, 1) for reason in joined.select(pl.coalesce(LEFT_OUT, "below", pl.lit("no_episode"))).to_series()
    )


def _calls(decided: Decided, sequences: pl.DataFrame) -> Iterator[tuple[str, int]]:
    trained = sequences.group_by(KEY).agg(pl.col("calls").sum())
    rollouts = decided.rollouts.join(trained, on=KEY, how="left").with_columns(pl.col("calls").fill_null(0))
    yield from _left(rollouts, pl.col("num_calls"))
    kept = rollouts.filter(pl.col(LEFT_OUT).is_null())
    yield "quarantined", int(kept.select(pl.col("num_calls") - pl.col("num_triplets")).to_series().sum())
    yield "not trained", int(kept.select(pl.col("num_triplets") - pl.col("calls")).to_series().sum())
    yield from _in_kept(kept, sequences, "calls")


def _tokens(decided: Decided, sequences: pl.DataFrame) -> Iterator[tuple[str, int]]:
    yield from _left(decided.rollouts, pl.col("tokens_captured"))
    kept = decided.rollouts.filter(pl.col(LEFT_OUT).is_null())
    for name, column in (("not trained", "masked"), ("superseded", "superseded"), ("quarantined", "quarantined")):
        yield name, int(kept[f"tokens_{column}"].sum())
    yield from _in_kept(kept, sequences, "trained")


def _left(rollouts: pl.DataFrame, number: pl.Expr) -> list[tuple[str, int]]:
    left = rollouts.filter(pl.col(LEFT_OUT).is_not_null())
    return left.group_by(LEFT_OUT).agg(number.cast(pl.Int64).sum().alias("n")).rows()


def _in_kept(kept: pl.DataFrame, sequences: pl.DataFrame, column: str) -> list[tuple[str, int]]:
    """Of the rollouts that are not left out as a whole, by what became of the Episode."""
    own = sequences.join(kept.select(KEY), on=KEY, how="semi")
    exported = own.filter(pl.col(LEFT_OUT) == EXPORTED)
    left = int(exported[f"{column}_left"].sum())
    others = own.filter(pl.col(LEFT_OUT) != EXPORTED).group_by(LEFT_OUT).agg(pl.col(column).sum()).rows()
    return [(EXPORTED, left), (CUT, int(exported[column].sum()) - left), *others]


def _of(found: "Iterator[tuple[str, int]]") -> dict[str, int]:
    counted = Counter[str]()
    for reason, number in found:
        counted[reason] += number
    return {reason: number for reason, number in counted.items() if number or reason == EXPORTED}
