"""AReaL: the dictionary of tensors that its trainers take, with the policy version of each token."""

from typing import Any, Final

import numpy as np
import pyarrow as pa

from spanmill.triplets.exports.sinks import tensors
from spanmill.triplets.exports.target import Fill, Target
from spanmill.triplets.exports.tokens import Ragged, ragged, versions


def _batch(rows: Any, fill: Fill) -> Any:
    """Sequence aligned, [T]: the trainer shifts. Versions are -1 where no token was sampled."""
    ids = ragged(rows, "input_ids")
    ones = Ragged(np.ones(len(ids.values), np.bool_), ids.lengths)
    return pa.table(
        {
            "input_ids": ids.to_arrow(pa.int64()),
            "loss_mask": ragged(rows, "loss_mask").to_arrow(pa.int64()),
            "logprobs": rows.column("logprobs"),
            "versions": versions(rows, -1 if fill.policy_version is None else fill.policy_version).to_arrow(pa.int64()),
            "attention_mask": ones.to_arrow(pa.bool_()),
            "rewards": rows.column("reward").cast(pa.float32()),
            "rollout_id": rows.column("rollout_id"),
            "episode": rows.column("episode"),
        }
    )


TARGETS: Final = (
    Target(
        "areal",
        "a folder of safetensors files, each a padded batch of AReaL",
        _batch,
        tensors(ids=("input_ids",), texts=("rollout_id", "episode")),
        needs=frozenset({"logprobs", "reward", "policy_version"}),
    ),
)
