"""A million damaged requests through the receiver's checks: no crash, no leak, the right code for each.

    bench/fuzz_requests.py [--requests 1000000] [--seed N]

Stops with the request at the first wrong answer. Prints requests a second and how the resident memory grew after the
first tenth, which is to be about nothing.
"""

import argparse
import resource
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "collector"))

from mutated_requests import run

from spanmill.collector.ingest import Ingest
from spanmill.collector.journal import JournalWriter


def resident_mib() -> float:
    """What this process has in memory now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / (1 << 20)


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=time.time_ns() % 1_000_000)
    options = parser.parse_args()
    print(f"seed {options.seed}")
    batch = max(1, options.requests // 10)
    codes, begun, first = Counter[int](), time.monotonic(), 0.0
    for number in range(10):
        # A journal for each batch: a million requests are not to fill the disk.
        with tempfile.TemporaryDirectory() as folder, JournalWriter(Path(folder)) as journal:
            ingest = Ingest(journal, 1 << 20, 16 << 20)
            codes += run(ingest, options.seed + number, batch)
            if ingest.inflight:
                raise ValueError(f"{ingest.inflight} bytes were not given back")
        first = first or resident_mib()
        print(f"{(number + 1) * batch:,} requests, {resident_mib():.0f} MiB", flush=True)
    seconds = time.monotonic() - begun
    print(
        f"{10 * batch / seconds:,.0f} requests/s; codes {dict(codes)}; memory grew by {resident_mib() - first:.1f} MiB"
    )


if __name__ == "__main__":
    main()
