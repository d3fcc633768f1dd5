"""TRL: tokenised SFT rows, what GRPO's `rollout_func` returns, and samples of asynchronous GRPO."""

from typing import Any, Final

import pyarrow as pa

from spanmill.triplets.exports.sinks import parquet
from spanmill.triplets.exports.target import Fill, Target
from spanmill.triplets.exports.tokens import prompt_part, response_part, version_span


def _sft(rows: Any, fill: Fill) -> Any:
    """Sequence aligned, [T]. `assistant_masks` counts whatever the trainer's settings are."""
    return pa.table(
        {
            "input_ids": rows.column("input_ids"),
            "assistant_masks": rows.column("loss_mask"),
        }
    )


def _grpo(rows: Any, fill: Fill) -> Any:
    """Response aligned, [R]; `env_mask` is 1 where the model spoke."""
    return pa.table(
        {
            "prompt_ids": prompt_part(rows, "input_ids", pa.int32()),
            "completion_ids": response_part(rows, "input_ids", pa.int32()),
            "logprobs": response_part(rows, "logprobs", pa.float32()),
            "env_mask": response_part(rows, "loss_mask", pa.int8()),
            "reward": rows.column("reward"),
            "group_id": rows.column("uid"),
            "task_id": rows.column("task_id"),
            "rollout_id": rows.column("rollout_id"),
            "episode": rows.column("episode"),
        }
    )


def _samples(rows: Any, fill: Fill) -> Any:
    """Sequence aligned, [T]; the version is that of the oldest trained token."""
    oldest, _ = version_span(rows)
    return pa.table(
        {
            "input_ids": rows.column("input_ids"),
            "completion_mask": rows.column("loss_mask"),
            "old_log_probs": rows.column("logprobs"),
            "advantage": rows.column("advantage"),
            "reward": rows.column("reward"),
            "model_version": oldest if fill.policy_version is None else oldest.fill_null(fill.policy_version),
            "group_id": rows.column("group_index"),
            "rollout_id": rows.column("rollout_id"),
            "episode": rows.column("episode"),
        }
    )


TARGETS: Final = (
    Target(
        "trl-sft",
        "Parquet for TRL's SFTTrainer: token ids and which of them are trained",
        _sft,
        parquet,
        logprobs=False,
    ),
    Target(
        "trl-grpo",
        "Parquet with the lists that a rollout_func of TRL's GRPOTrainer returns",
        _grpo,
        parquet,
        needs=frozenset({"logprobs"}),
    ),
    Target(
        "trl-async",
        "Parquet with the fields of a RolloutSample of TRL's AsyncGRPOTrainer",
        _samples,
        parquet,
        needs=frozenset({"logprobs", "policy_version"}),
    ),
)
