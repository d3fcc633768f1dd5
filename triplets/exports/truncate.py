"""Cutting sequences at a length, where that is asked for."""

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from spanmill.triplets.exports.tokens import ragged
from spanmill.triplets.schema import EPISODES, arrow_schema

_SCHEMA = arrow_schema(EPISODES)


def truncated(rows: Any, most: int) -> Any:
    """Episodes of at most `most` tokens: the longer ones lose what comes later, and are marked `truncated`.

    A turn that is cut ends where the sequence does, one that begins later is gone.
    """
    tokens = ragged(rows, "input_ids").lengths
    long = tokens > most
    if not long.any():
        return rows
    for name in ("input_ids", "loss_mask", "logprobs"):
        column = rows.column(name).combine_chunks()
        cut = ragged(rows, name)
        lists = cut.part(np.zeros_like(cut.lengths), np.minimum(cut.lengths, most))
        kept = lists.to_arrow(_SCHEMA.field(name).type.value_type)
        rows = _replaced(rows, name, pc.if_else(column.is_valid(), kept, pa.scalar(None, kept.type)))
    turns = [_cut_turns(row, most) for row in rows.column("turns").to_pylist()]
    runs = [_cut_runs(row, most) for row in rows.column("policy_versions").to_pylist()]
    steps = rows.column("step_rewards").to_pylist()
    prompts = np.minimum(rows.column("prompt_length").to_numpy(), most)
    rows = _replaced(rows, "turns", turns)
    rows = _replaced(rows, "policy_versions", runs)
    rows = _replaced(rows, "step_rewards", [r[: len(t)] for r, t in zip(steps, turns, strict=True)])
    rows = _replaced(rows, "num_turns", [len(row) for row in turns])
    rows = _replaced(rows, "prompt_length", prompts)
    return _replaced(rows, "truncated", rows.column("truncated").to_numpy(zero_copy_only=False) | long)


def _replaced(rows: Any, name: str, values: Any) -> Any:
    at = rows.schema.get_field_index(name)
    field = _SCHEMA.field(name)
    return rows.set_column(at, field, pa.array(values, field.type) if isinstance(values, list | np.ndarray) else values)


def _cut_turns(turns: list[dict[str, Any]], most: int) -> list[dict[str, Any]]:
    return [{**turn, "response_end": min(turn["response_end"], most)} for turn in turns if turn["prompt_end"] < most]


def _cut_runs(runs: list[dict[str, Any]], most: int) -> list[dict[str, Any]]:
    return [{**run, "length": min(run["length"], most - run["start"])} for run in runs if run["start"] < most]
