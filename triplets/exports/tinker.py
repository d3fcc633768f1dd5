"""Tinker: the parts of a Datum, shifted by one as its losses take them."""

from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from spanmill.triplets.exports.sinks import parquet
from spanmill.triplets.exports.target import Fill, Target
from spanmill.triplets.exports.tokens import Ragged, ragged, repeated


def _datums(rows: Any, fill: Fill) -> Any:
    """Shifted, [T-1]: the model reads token t, the target, its logprob and its mask are those of token t+1.

    sequence     5 6 7 8      mask 0 0 1 1
    model_input  5 6 7
    targets        6 7 8      mask   0 1 1
    """
    ids, mask = ragged(rows, "input_ids"), ragged(rows, "loss_mask")
    zero, one, end = np.zeros_like(ids.lengths), np.ones_like(ids.lengths), ids.lengths
    shifted = mask.part(one, end)
    spread = repeated(rows, "advantage", shifted.lengths)
    advantages = Ragged(spread.values * (shifted.values == 1), shifted.lengths).to_arrow(pa.float32())
    return pa.table(
        {
            "model_input": ids.part(zero, end - 1).to_arrow(pa.int32()),
            "target_tokens": ids.part(one, end).to_arrow(pa.int64()),
            "logprobs": ragged(rows, "logprobs").part(one, end).to_arrow(pa.float32()),
            "mask": shifted.to_arrow(pa.float32()),
            "advantages": pc.if_else(rows.column("advantage").is_valid(), advantages, pa.scalar(None, advantages.type)),
            "reward": rows.column("reward"),
            "group_id": rows.column("uid"),
            "rollout_id": rows.column("rollout_id"),
            "episode": rows.column("episode"),
        }
    )


TARGETS: Final = (
    Target(
        "tinker",
        "Parquet with the model input and the loss inputs of a Tinker Datum",
        _datums,
        parquet,
        needs=frozenset({"logprobs"}),
        optional_logprobs="logprobs",
    ),
)
