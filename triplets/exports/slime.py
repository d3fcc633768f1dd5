"""slime: Sample, in the form that `Sample.from_dict` reads."""

from typing import Any, Final

import numpy as np
import pyarrow as pa

from spanmill.triplets.exports.sinks import json_lines
from spanmill.triplets.exports.target import Fill, Target
from spanmill.triplets.exports.tokens import response_part, splits

_FAILED: Final = {"failed": "failed", "cancelled": "aborted"}


def _samples(rows: Any, fill: Fill) -> Any:
    """`tokens` is the whole sequence, masks and logprobs are response aligned, [R]."""
    prompts, tokens = splits(rows)
    ended = [
        _FAILED.get(status) or ("truncated" if cut else "completed")
        for status, cut in zip(rows.column("status").to_pylist(), rows.column("truncated").to_pylist(), strict=True)
    ]
    known = ("rollout_id", "attempt", "episode", "group_id", "task_id", "agent", "advantage", "rollout_tokens_trained")
    runs = rows.column("policy_versions").to_pylist()
    return pa.table(
        {
            "group_index": rows.column("group_index"),
            "index": rows.column("rollout_index"),
            "tokens": rows.column("input_ids"),
            "response_length": pa.array((tokens - prompts).astype(np.int64)),
            "loss_mask": response_part(rows, "loss_mask", pa.int8()),
            "rollout_log_probs": response_part(rows, "logprobs", pa.float32()),
            "reward": rows.column("reward"),
            "status": pa.array(ended),
            "weight_versions": pa.array([[run["version"] for run in row] for row in runs], pa.list_(pa.string())),
            "session_id": rows.column("rollout_id"),
            "metadata": pa.table({name: rows.column(name) for name in known}).to_struct_array(),
        }
    )


TARGETS: Final = (
    Target(
        "slime",
        "JSON lines, each a slime Sample",
        _samples,
        json_lines,
        needs=frozenset({"logprobs", "reward"}),
        optional_logprobs="rollout_log_probs",
    ),
)
