"""prime-rl: TrainingSample in msgpack. Its SFT trainer reads the target `sft`."""

from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from spanmill.triplets.exports.sinks import msgpack
from spanmill.triplets.exports.target import Fill, Target
from spanmill.triplets.exports.tokens import Ragged, ragged, repeated, temperatures


def _samples(rows: Any, fill: Fill) -> Any:
    """Sequence aligned, [T]; a column for each field, in the order of the struct, up to the last that is known."""
    mask = ragged(rows, "loss_mask")
    spread = repeated(rows, "advantage", mask.lengths)
    advantages = Ragged(spread.values * (mask.values == 1), mask.lengths).to_arrow(pa.float32())
    nothing = pa.nulls(rows.num_rows)
    return pa.table(
        {
            "token_ids": rows.column("input_ids"),
            "mask": Ragged(mask.values == 1, mask.lengths).to_arrow(pa.bool_()),
            "logprobs": rows.column("logprobs"),
            "temperatures": temperatures(rows, fill.temperature or 0.0).to_arrow(pa.float32()),
            "env_name": pc.fill_null(rows.column("agent"), "spanmill"),
            "ref_logprobs": nothing,
            "mm_refs": nothing,
            "routed_experts": nothing,
            "mm_token_type_ids": nothing,
            "rl_weights": nothing,
            "ce_weights": nothing,
            "ref_kl_weights": nothing,
            "advantages": pc.if_else(rows.column("advantage").is_valid(), advantages, pa.scalar(None, advantages.type)),
            "sampling_mask": nothing,
            "trace_id": rows.column("rollout_id"),
            "branch_index": rows.column("episode"),
        }
    )


TARGETS: Final = (
    Target(
        "prime-rl",
        "a folder of msgpack files, each a list of prime-rl TrainingSample",
        _samples,
        msgpack,
        needs=frozenset({"logprobs", "temperature"}),
    ),
)
