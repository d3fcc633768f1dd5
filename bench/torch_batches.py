# pyright: basic, reportMissingImports=false
"""How fast Episodes become batches in torch: MB of row data (ids, mask, logprobs) by second of CPU time.

    .vllm/bin/python bench/torch_batches.py         # an environment with torch, polars and pyarrow

Prints for several lengths what decoding the Parquet costs once, and padded and packed batches after it.
"""

import time
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import polars as pl
import pyarrow as pa
from torch.utils.data import DataLoader

from spanmill.torch import EpisodeDataset, TokenBatches, pack, pad
from spanmill.triplets.parquet import write_file
from spanmill.triplets.schema import EPISODES, arrow_schema

TOKEN_BYTES = 9
BATCH_TOKENS = 131_072
BATCHES = (
    ("sequence", pad, False),
    ("response", partial(pad, align="response"), False),
    ("packed", pack, True),
)


def made(rows: int, length: int) -> pa.Table:
    """Episodes of random tokens, half to one and a half `length` long."""
    random = np.random.default_rng(0)
    lengths = random.integers(length // 2, 3 * length // 2, rows)
    offsets = pa.array(np.concatenate([[0], np.cumsum(lengths)]), pa.int32())
    total = int(lengths.sum())
    ids = random.integers(0, 100_000, total).astype(np.int32)
    lists = {
        "input_ids": ids,
        "loss_mask": (ids % 2).astype(np.int8),
        "logprobs": -random.random(total, dtype=np.float32),
    }
    columns = {name: pa.ListArray.from_arrays(offsets, pa.array(values)) for name, values in lists.items()}
    columns |= {name: pa.array(np.zeros(rows), pa.int32()) for name in ("attempt", "revision", "episode")}
    columns |= {name: pa.array([f"{name}-{n}" for n in range(rows)]) for name in ("rollout_id", "group_id")}
    columns |= {"reward": pa.array(random.random(rows)), "advantage": pa.nulls(rows, pa.float64())}
    columns |= {"prompt_length": pa.array(lengths // 3, pa.int32()), "rollout_tokens_trained": pa.array(lengths)}
    schema = arrow_schema(EPISODES)
    return pa.table({name: column.cast(schema.field(name).type) for name, column in columns.items()})


def main() -> None:
    """Measure."""
    for rows, length in ((100_000, 100), (10_000, 1_000), (1_000, 8_000)):
        with TemporaryDirectory() as folder:
            file = Path(folder) / "episodes.parquet"
            write_file(file, made(rows, length), {})
            start = time.process_time()
            dataset = EpisodeDataset(pl.scan_parquet(file))
            megabytes = int(dataset.lengths.sum()) * TOKEN_BYTES / 1e6
            shown = [f"decode {megabytes / (time.process_time() - start):.0f}"]
            for name, collate, packed in BATCHES:
                batches = TokenBatches(dataset.lengths, BATCH_TOKENS, packed=packed, shuffle=True)
                start = time.process_time()
                for _ in DataLoader(dataset, batch_sampler=batches, collate_fn=collate):
                    pass
                shown.append(f"{name} {megabytes / (time.process_time() - start):.0f}")
            print(f"episodes of {length} tokens, MB by CPU second: {', '.join(shown)}", flush=True)


if __name__ == "__main__":
    main()
