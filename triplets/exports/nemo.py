"""NeMo-RL: a message log of token segments. NeMo-Gym: a record for each trained call."""

import hashlib
import struct
from collections.abc import Iterator
from typing import Any, Final

import numpy as np
import pyarrow as pa

from spanmill.triplets.exports.sinks import json_lines, parquet
from spanmill.triplets.exports.target import Fill, Target
from spanmill.triplets.exports.tokens import Ints, Ragged, ragged

_MESSAGE: Final = pa.struct(
    [
        ("role", pa.string()),
        ("content", pa.string()),
        ("token_ids", pa.list_(pa.int64())),
        ("generation_logprobs", pa.list_(pa.float32())),
    ]
)

RECORD_VERSION: Final = 3
"""Of NeMo-Gym's TokenEntry."""
_DIGEST: Final = b"nemo-gym-tokens"
_DIGEST_VERSION: Final = 1


def _message_log(rows: Any, fill: Fill) -> Any:
    """Runs of trained tokens as messages of the assistant, what is between them as the user's. No text."""
    ids, logprobs, mask = (ragged(rows, name) for name in ("input_ids", "logprobs", "loss_mask"))
    first, lengths, per_row = segments(mask)
    trained = (mask.values[first] == 1) if len(first) else np.zeros(0, np.bool_)
    segment = Ragged(ids.values, lengths)
    sampled = Ragged(logprobs.values[np.repeat(trained, lengths)], np.where(trained, lengths, 0))
    roles = np.where(trained, "assistant", "user")
    messages = pa.StructArray.from_arrays(
        [
            pa.array(roles.tolist(), pa.string()),
            pa.array([""] * len(first), pa.string()),
            segment.to_arrow(pa.int64()).cast(pa.list_(pa.int64())),
            _null_where(~trained, sampled),
        ],
        fields=list(_MESSAGE),
    )
    ends = pa.array(np.concatenate([np.zeros(1, np.int64), np.cumsum(per_row)])).cast(pa.int32())
    return pa.table(
        {
            "message_log": pa.ListArray.from_arrays(ends, messages),
            "length": pa.array(ids.lengths),
            "loss_multiplier": pa.array(np.ones(rows.num_rows)),
            "idx": rows.column("rollout_index"),
            "task_name": rows.column("task_id"),
            "reward": rows.column("reward"),
            "group_id": rows.column("uid"),
            "rollout_id": rows.column("rollout_id"),
            "episode": rows.column("episode"),
        }
    )


def segments(mask: Ragged) -> tuple[Ints, Ints, Ints]:
    """(start, length) of each run of equal elements, none over a row's border, and how many runs each row has."""
    begins = np.zeros(len(mask.values), np.bool_)
    begins[1:] = mask.values[1:] != mask.values[:-1]
    begins[mask.starts[mask.lengths > 0]] = True
    first = np.flatnonzero(begins)
    lengths = np.diff(np.append(first, len(mask.values)))
    row = np.repeat(np.arange(len(mask.lengths)), mask.lengths)
    return first, lengths, np.bincount(row[first], minlength=len(mask.lengths)).astype(np.int64)


def _null_where(gone: Any, lists: Ragged) -> Any:
    offsets = pa.array(np.concatenate([np.zeros(1, np.int64), np.cumsum(lists.lengths)])).cast(pa.int32())
    return pa.ListArray.from_arrays(offsets, pa.array(lists.values, pa.float32()), mask=pa.array(gone))


def _entries(rows: Any, fill: Fill) -> Any:
    """Compact: of each trained call what its prompt was and what was sampled; other calls stand in prompts only."""
    found = [entry for row in _trained_calls(rows) for entry in row]
    names = list(_ENTRY.names)
    return pa.table([pa.array([entry[name] for entry in found], _ENTRY.field(name).type) for name in names], names)


_ENTRY: Final = pa.schema(
    [
        ("schema_version", pa.int32()),
        ("rollout_id", pa.string()),
        ("model_call_id", pa.string()),
        ("model", pa.string()),
        ("prompt_token_ids", pa.list_(pa.int32())),
        ("generation_token_ids", pa.list_(pa.int32())),
        ("generation_log_probs", pa.list_(pa.float32())),
        ("response_id", pa.string()),
        ("parent_call_id", pa.string()),
        ("cum_len", pa.int64()),
        ("digest", pa.string()),
        ("parent_resolution", pa.string()),
        ("created_at", pa.float64()),
        ("reward", pa.float64()),
        ("group_id", pa.string()),
    ]
)


def _trained_calls(rows: Any) -> Iterator[list[dict[str, Any]]]:
    """The entries of each Episode; a parent is the nearest call before it that some Episode of the rollout trains."""
    ids, logprobs = ragged(rows, "input_ids"), ragged(rows, "logprobs")
    names = ("rollout_id", "attempt", "model", "turns", "reward", "uid")
    columns = zip(*(rows.column(name).to_pylist() for name in names), strict=True)
    known = {
        (rollout, attempt, turn["call_id"], turn["response_end"])
        for rollout, attempt, turns in zip(*(rows.column(n).to_pylist() for n in names[:2] + names[3:4]), strict=True)
        for turn in turns
        if turn["trained"]
    }
    for start, (rollout, attempt, model, turns, reward, group) in zip(ids.starts.tolist(), columns, strict=True):
        entries: list[dict[str, Any]] = []
        parent: str | None = None
        for turn in turns:
            prompt_end, end = start + turn["prompt_end"], start + turn["response_end"]
            if turn["trained"]:
                entries.append(
                    {
                        "schema_version": RECORD_VERSION,
                        "rollout_id": rollout,
                        "model_call_id": turn["call_id"],
                        "model": model or "",
                        "prompt_token_ids": ids.values[start:prompt_end],
                        "generation_token_ids": ids.values[prompt_end:end],
                        "generation_log_probs": logprobs.values[prompt_end:end],
                        "response_id": turn["call_id"],
                        "parent_call_id": parent,
                        "cum_len": end - start,
                        "digest": digest(ids.values[start:end]),
                        "parent_resolution": "resolved" if parent else "root",
                        "created_at": 0.0,
                        "reward": reward,
                        "group_id": group,
                    }
                )
            if (rollout, attempt, turn["call_id"], turn["response_end"]) in known:
                parent = turn["call_id"]
        yield entries


def digest(token_ids: Any) -> str:
    """What NeMo-Gym checks a claimed parent's tokens against: SHA-256 of them as big-endian 64-bit numbers."""
    head = _DIGEST if not len(token_ids) else _DIGEST + struct.pack(">BQ", _DIGEST_VERSION, len(token_ids))
    return hashlib.sha256(head + np.asarray(token_ids).astype(">u8").tobytes()).hexdigest()


TARGETS: Final = (
    Target(
        "nemo-rl",
        "Parquet with the message log of a NeMo-RL DatumSpec",
        _message_log,
        parquet,
        needs=frozenset({"logprobs"}),
    ),
    Target(
        "nemo-gym",
        "JSON lines, each a NeMo-Gym TokenEntry",
        _entries,
        json_lines,
        needs=frozenset({"logprobs"}),
    ),
)
