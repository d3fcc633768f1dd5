"""SkyRL: the lists of a GeneratorOutput, and tokenised SFT rows."""

from typing import Any, Final

import pyarrow as pa

from spanmill.triplets.exports.sinks import parquet
from spanmill.triplets.exports.target import Fill, Target
from spanmill.triplets.exports.tokens import prompt_part, response_part


def _generated(rows: Any, fill: Fill) -> Any:
    """Response aligned, [R]. A rollout's Episodes stand together; the last one is its last step."""
    ids = {"instance_id": rows.column("uid"), "repetition_id": rows.column("repetition")}
    return pa.table(
        {
            "prompt_token_ids": prompt_part(rows, "input_ids", pa.int32()),
            "response_ids": response_part(rows, "input_ids", pa.int32()),
            "rewards": rows.column("reward"),
            "loss_masks": response_part(rows, "loss_mask", pa.int8()),
            "stop_reasons": rows.column("finish_reason"),
            "rollout_logprobs": response_part(rows, "logprobs", pa.float32()),
            "trajectory_ids": pa.table(ids).to_struct_array(),
            "is_last_step": rows.column("last_episode"),
        }
    )


def _sft(rows: Any, fill: Fill) -> Any:
    """Sequence aligned, [T], as the dataset has them."""
    return rows.select(["input_ids", "loss_mask"])


TARGETS: Final = (
    Target(
        "skyrl",
        "Parquet with the lists of a SkyRL GeneratorOutput",
        _generated,
        parquet,
        needs=frozenset({"logprobs", "reward"}),
        optional_logprobs="rollout_logprobs",
    ),
    Target("skyrl-sft", "tokenised Parquet for SkyRL's SFT trainer", _sft, parquet, logprobs=False),
)
