"""List columns of tokens as numpy arrays and back: what the targets widen, cut and shift. No loop over tokens.

A ragged column is (values, lengths): all lists one after the other, and how long each is.
"""

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

Array = npt.NDArray[Any]
Ints = npt.NDArray[np.int64]


class Ragged(NamedTuple):
    """Lists of numbers, one per row."""

    values: Array
    lengths: Ints

    @property
    def starts(self) -> Ints:
        """Where each list begins in `values`."""
        return np.cumsum(self.lengths) - self.lengths

    def part(self, first: Array, last: Array) -> "Ragged":
        """Of each list the elements `[first, last)`, which must lie in it."""
        lengths = np.asarray(last - first, np.int64)
        return Ragged(self.values[ranges(self.starts + first, lengths)], lengths)

    def to_arrow(self, kind: Any) -> Any:
        """A list column with elements of an Arrow type."""
        ends = np.concatenate([np.zeros(1, np.int64), np.cumsum(self.lengths)])
        element = pa.field("element", kind, nullable=False)
        offsets = pa.array(ends).cast(pa.int32())
        return pa.ListArray.from_arrays(offsets, pa.array(self.values).cast(kind), type=pa.list_(element))


def ragged(rows: Any, name: str) -> Ragged:
    """A list column of numbers; a null list has no elements."""
    column = rows.column(name).combine_chunks()
    lengths = pc.fill_null(pc.list_value_length(column), 0).to_numpy().astype(np.int64)
    return Ragged(column.flatten().to_numpy(zero_copy_only=False), lengths)


def ranges(starts: Array, lengths: Array) -> Ints:
    """The indices `starts[i], starts[i] + 1, …`, `lengths[i]` of them, for one i after the other."""
    before = np.cumsum(lengths) - lengths
    return np.repeat(starts - before, lengths) + np.arange(int(np.sum(lengths)))


def numbers(rows: Any, name: str) -> Ints:
    """A column of whole numbers without nulls."""
    return rows.column(name).to_numpy().astype(np.int64)


def splits(rows: Any) -> tuple[Ints, Ints]:
    """(P, T) of each row: where its first prompt ends, and its length."""
    return numbers(rows, "prompt_length"), ragged(rows, "input_ids").lengths


def prompt_part(rows: Any, name: str, kind: Any) -> Any:
    """Of a column of length T the first P elements."""
    prompts, _ = splits(rows)
    return ragged(rows, name).part(np.zeros_like(prompts), prompts).to_arrow(kind)


def response_part(rows: Any, name: str, kind: Any) -> Any:
    """Of a column of length T the R = T - P elements after the first prompt."""
    return ragged(rows, name).part(*splits(rows)).to_arrow(kind)


def widened(rows: Any, runs: str, value: str, start: str, default: float, kind: type[Any]) -> Ragged:
    """Values of runs as one number per token: (T,), `default` where no run is.

    `runs` is a list column of structs; the run begins at their field `start` and has the field `length`, or ends at
    `response_end` if there is none. A run whose `value` is null leaves the default.
    """
    tokens = ragged(rows, "input_ids").lengths
    column = rows.column(runs).combine_chunks()
    each = pc.fill_null(pc.list_value_length(column), 0).to_numpy().astype(np.int64)
    fields = column.flatten()
    first = fields.field(start).to_numpy().astype(np.int64)
    names = [field.name for field in column.type.value_type]
    if "length" in names:
        length = fields.field("length").to_numpy().astype(np.int64)
    else:
        length = fields.field("response_end").to_numpy().astype(np.int64) - first
    found = fields.field(value)
    valid = pc.is_valid(found).to_numpy(zero_copy_only=False)
    offsets = np.repeat(np.cumsum(tokens) - tokens, each)
    widths = np.where(valid, length, 0)
    out = np.full(int(tokens.sum()), default, kind)
    values = np.where(valid, pc.fill_null(found.cast(pa.float64() if kind is np.float32 else pa.int64()), 0), 0)
    out[ranges(offsets + first, widths)] = np.repeat(values.astype(kind), widths)
    return Ragged(out, tokens)


def versions(rows: Any, default: int) -> Ragged:
    """The policy version that sampled each trained token, `default` if none is recorded; -1 on every other token."""
    found = widened(rows, "policy_versions", "version", "start", default, np.int64)
    mask = ragged(rows, "loss_mask").values
    return Ragged(np.where(mask == 1, found.values, -1), found.lengths)


def temperatures(rows: Any, default: float) -> Ragged:
    """The temperature that each trained token was sampled at, `default` if none is recorded; 1.0 on other tokens."""
    found = widened(rows, "turns", "temperature", "prompt_end", default, np.float32)
    mask = ragged(rows, "loss_mask").values
    return Ragged(np.where(mask == 1, found.values, np.float32(1.0)), found.lengths)


def version_span(rows: Any) -> tuple[Any, Any]:
    """(oldest, newest) policy version of each row's trained tokens; null where one is no whole number, or none is."""
    lists = rows.column("policy_versions").to_pylist()
    found = [[_whole(run["version"]) for run in runs] for runs in lists]
    known = [[] if None in row else [v for v in row if v is not None] for row in found]
    return (
        pa.array([min(row, default=None) for row in known], pa.int64()),
        pa.array([max(row, default=None) for row in known], pa.int64()),
    )


def _whole(text: str) -> int | None:
    return int(text) if text.removeprefix("-").isdecimal() and len(text) < 19 else None


def repeated(rows: Any, name: str, lengths: Ints) -> Ragged:
    """A column of numbers, each on every token of its row; NaN where it is null."""
    column = rows.column(name).to_numpy(zero_copy_only=False).astype(np.float32)
    return Ragged(np.repeat(column, lengths), lengths)
