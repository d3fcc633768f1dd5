"""Parquet: spanmill's writer against polars' own, on rollouts of 8 calls whose prompts extend each other.

    python bench/parquet.py [--rollouts 1000] [--prompt 512] [--response 128] [--between 256] [--repeat 3]

Prints, per peer, write speed and read speed (MB of numbers per second, best of the repeats), file size over the size of
the numbers, and the ratio to the peer of the same run. `--rollouts 20 --prompt 98304 --response 1024 --between 1024`
shows long prompts. Token ids follow Zipf's law, logprobs are random: real ones compress no worse.
"""

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import cast

import numpy as np
import polars as pl
import pyarrow as pa

from spanmill.triplets.parquet import read_file, write_file
from spanmill.triplets.records import Episode, Rollout, Triplet, Turn
from spanmill.triplets.table import rows_to_tables

CALLS = 8
VOCABULARY = 150_000


def make_rollout(number: int, prompt: int, response: int, between: int, random: np.random.Generator) -> Rollout:
    """A rollout of 8 calls; each prompt is the last one, its response, and `between` new tokens."""

    def ids(count: int) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
        return np.minimum(random.zipf(1.2, count), VOCABULARY).astype(np.int32)

    rollout_id, group_id = f"rollout-{number:06d}", f"group-{number // 8}"
    sequence, mask, logprobs = ids(prompt), np.zeros(prompt, np.int8), np.zeros(prompt, np.float32)
    triplets: list[Triplet] = []
    turns: list[Turn] = []
    for turn in range(CALLS):
        sampled = ids(response)
        own = -random.exponential(0.5, response).astype(np.float32)
        triplets.append(
            Triplet(
                rollout_id=rollout_id,
                attempt=0,
                group_id=group_id,
                turn=turn,
                choice=0,
                call_id=f"chatcmpl-{number:08x}{turn:08x}",
                trace_id=f"{number:032x}",
                span_id=f"{turn:016x}",
                ids_source="engine",
                started_at=turn,
                ended_at=turn + 1,
                dialect="spanmill",
                trainable=True,
                prompt_token_ids=sequence,
                response_token_ids=sampled,
                response_logprobs=own,
            )
        )
        turns.append(Turn(triplets[-1].call_id, len(sequence), len(sequence) + response, True))
        fresh = ids(between if turn < CALLS - 1 else 0)
        sequence = np.concatenate([sequence, sampled, fresh])
        mask = np.concatenate([mask, np.ones(response, np.int8), np.zeros(len(fresh), np.int8)])
        logprobs = np.concatenate([logprobs, own, np.zeros(len(fresh), np.float32)])
    episode = Episode(
        rollout_id=rollout_id,
        attempt=0,
        group_id=group_id,
        episode=0,
        input_ids=sequence,
        loss_mask=mask,
        logprobs=logprobs,
        prompt_length=prompt,
        turns=tuple(turns),
        step_rewards=(None,) * CALLS,
        truncated=False,
    )
    return Rollout(
        rollout_id=rollout_id,
        attempt=0,
        group_id=group_id,
        identity_source="span",
        status="succeeded",
        closed_by="end",
        started_at=0,
        ended_at=CALLS,
        triplets=triplets,
        episodes=[episode],
    )


def best_of(repeat: int, run: Callable[[], object]) -> float:
    """The shortest of `repeat` runs, in seconds."""
    times: list[float] = []
    for _ in range(repeat):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return min(times)


def measure(table: pa.Table, path: Path, repeat: int, write: Callable[[], object]) -> tuple[float, ...]:
    """Write speed, file size over table size, and read speed with polars and with pyarrow; speeds in MB/s."""
    megabytes = table.nbytes / 1e6
    written = megabytes / best_of(repeat, write)
    size = path.stat().st_size / table.nbytes
    reads = (lambda: pl.read_parquet(path), lambda: read_file(path))
    return (written, size, *(megabytes / best_of(repeat, read) for read in reads))


def compare(name: str, table: pa.Table, path: Path, repeat: int) -> None:
    """Prints a line per writer and their ratio."""
    frame = cast(pl.DataFrame, pl.from_arrow(table))
    theirs = measure(table, path, repeat, lambda: frame.write_parquet(path, compression="zstd", compression_level=1))
    ours = measure(table, path, repeat, lambda: write_file(path, table, {}))
    ratios = tuple(our / their for our, their in zip(ours, theirs, strict=True))
    for label, row in (("polars zstd-1", theirs), ("spanmill", ours)):
        print(f"{name:10}{label:15}{row[0]:12.0f}{row[1]:8.3f}{row[2]:14.0f}{row[3]:15.0f}")
    print(f"{name:10}{'ratio':15}{ratios[0]:12.2f}{ratios[1]:8.2f}{ratios[2]:14.2f}{ratios[3]:15.2f}")


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("rollouts", 1000), ("prompt", 512), ("response", 128), ("between", 256), ("repeat", 3)):
        parser.add_argument(f"--{name}", type=int, default=default)
    given = parser.parse_args()
    random = np.random.default_rng(0)
    rollouts = [make_rollout(n, given.prompt, given.response, given.between, random) for n in range(given.rollouts)]
    tables = rows_to_tables(rollouts)
    megabytes = sum(table.nbytes for table in tables.values()) / 1e6
    seconds = best_of(given.repeat, lambda: rows_to_tables(rollouts))
    print(f"records to Arrow: {megabytes:.0f} MB at {megabytes / seconds:.0f} MB/s")
    print(f"{'table':10}{'writer':15}{'write MB/s':>12}{'size':>8}{'polars reads':>14}{'pyarrow reads':>15}")
    with tempfile.TemporaryDirectory() as folder:
        for name in ("triplets", "episodes"):
            compare(name, tables[name], Path(folder) / f"{name}.parquet", given.repeat)


if __name__ == "__main__":
    main()
