"""Mutated real spans against every reader and the whole adapter, in numbers too large for a test.

    bench/fuzz.py [--mutations 100000] [--seed N]

The spans are those of the tests. Ends with exit code 1 at the first that raises, does not add up or depends on order,
and prints the seed that makes it again.
"""

import argparse
import random
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "adapters"))

from mutated_spans import mutated, real_spans, some_spans

from spanmill.adapters import adapt
from spanmill.adapters.dialects import READERS
from spanmill.adapters.keys import keys, signal
from spanmill.triplets.records import Rollout
from spanmill.triplets.table import rows_to_tables

BATCH = 12
"""Spans that are adapted together, so that they meet as calls of one rollout."""


def main() -> int:
    """Run until the number of mutations is reached."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mutations", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**32))
    arguments = parser.parse_args()
    print(f"{len(real_spans())} real spans, seed {arguments.seed}", flush=True)
    start = time.monotonic()
    for seed in range(arguments.seed, arguments.seed + arguments.mutations // (2 * BATCH)):
        try:
            _one(random.Random(seed))
        except Exception as error:  # whatever it is, the seed that finds it again is what is wanted
            print(f"seed {seed}: {type(error).__name__}: {error}")
            return 1
    print(f"{arguments.mutations} mutations, none raised, {time.monotonic() - start:.0f} s")
    return 0


def _one(rng: random.Random) -> None:
    for _ in range(BATCH):
        span = mutated(rng.choice(real_spans()), rng)
        for reader in READERS:
            if not span.is_log and reader.recognises(span):
                reader.read(span)
        keys(span)
        signal(span)
    spans = some_spans(rng, BATCH)
    adapted = adapt(spans)
    rows_to_tables(adapted.rollouts, adapted.stray)
    wrong = [r.rollout_id for r in adapted.rollouts if not _adds_up(r)]
    if wrong:
        raise ValueError(f"tokens of {wrong} do not add up")
    if repr(adapted) != repr(adapt(rng.sample(spans, len(spans)))):
        raise ValueError("another order gives other rows")


def _adds_up(rollout: Rollout) -> bool:
    parts = (rollout.tokens_trained, rollout.tokens_masked, rollout.tokens_superseded, rollout.tokens_quarantined)
    return rollout.tokens_captured == sum(parts) and min(parts) >= 0


if __name__ == "__main__":
    sys.exit(main())
