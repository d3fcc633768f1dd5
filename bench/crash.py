"""Kills `spanmill serve` again and again under load, and looks whether anything that was acknowledged is missing.

    bench/crash.py [--kills 1000] [--seed N] [--keep DIR]

Each time one of: kill -9 of the service, of its indexer, of both at once, or a power failure: both are killed, and the
newest segment of the journal is cut at random behind the last record that was acknowledged. The client sends what was
not acknowledged again, as every OTLP exporter does. At the end every acknowledged call has to be in the dataset, once,
and the dataset has to be what `spanmill build` makes of the journal. Exit code 1 if not.
"""

import argparse
import os
import random
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import grpc

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "collector"))

from dataset_rows import newest_rows
from made_spans import Span, make_call, make_request, make_rollout
from served import EXPORT, QUICK, Served

from spanmill.collector import journal
from spanmill.collector.build import build
from spanmill.collector.config import BuildConfig
from spanmill.triplets.reader import read_triplets

KINDS = ("service", "indexer", "both", "power")


def requests(rng: random.Random) -> Iterator[list[Span]]:
    """Requests without end: three rollouts at a time, mixed and cut; some never end, some spans come twice."""
    number = 0
    while True:
        spans: list[Span] = []
        for _ in range(3):
            number += 1
            whole = make_rollout(f"r{number}", calls=rng.randint(1, 4))
            spans += whole if rng.random() < 0.7 else [make_call(f"t{number}", "call"), *whole[:-1]]
        spans += rng.sample(spans, 2)
        rng.shuffle(spans)
        while spans:
            size = rng.randint(1, 4)
            yield spans[:size]
            spans = spans[size:]


class Client:
    """Sends one request after the other, each until it is acknowledged, to whatever service there is."""

    def __init__(self, rng: random.Random) -> None:
        self.acknowledged = set[str]()
        """Response ids of calls."""
        self.bodies = set[bytes]()
        """The newest acknowledged requests."""
        self.address: str | None = None
        self._requests = requests(rng)
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def stop(self) -> None:
        """After the request at hand."""
        self._done.set()
        self._thread.join()

    def _run(self) -> None:
        for spans in self._requests:
            body = make_request(*spans)
            while not self._sent(body):
                time.sleep(0.02)
            self.bodies.add(body)
            self.acknowledged |= {
                pair.value.string_value
                for span in spans
                for pair in span.attributes
                if pair.key == "gen_ai.response.id"
            }
            if self._done.is_set():
                return
            time.sleep(0.005)  # leave the machine to the service

    def _sent(self, body: bytes) -> bool:
        if self.address is None:
            return False
        with grpc.insecure_channel(self.address, [("grpc.use_local_subchannel_pool", 1)]) as channel:
            export: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(EXPORT)
            try:
                export(body, timeout=10)
            except grpc.RpcError:
                return False
        return True


def cut(folder: Path, acknowledged: set[bytes], rng: random.Random) -> int:
    """Take off the newest segment what a power failure may: anything behind the last acknowledged record; how much."""
    newest = journal.segments(folder)[-1]
    path = journal.segment_path(folder, newest)
    end = 16
    for entry in journal.read(folder, journal.Position(newest, 0), complete=True):
        if entry.position.segment == newest and entry.body in acknowledged:
            end = entry.end.offset
    size = path.stat().st_size
    keep = rng.randint(min(end, size), size)
    os.truncate(path, keep)
    return size - keep


def kill(service: Served, kind: str, rng: random.Random) -> None:
    """One death."""
    if kind != "service":
        with suppress(ProcessLookupError):
            os.kill(service.indexer(), signal.SIGKILL)
    if kind == "indexer":
        time.sleep(rng.uniform(0.1, 0.8))
    service.kill()


def main() -> int:
    """Run and print; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=time.time_ns() % 1_000_000)
    parser.add_argument("--keep", type=Path, help="folder for the dataset, to look at it afterwards")
    options = parser.parse_args()
    print(f"seed {options.seed}")
    with tempfile.TemporaryDirectory() as folder:
        return crash(options.keep or Path(folder), options.kills, random.Random(options.seed))


def crash(folder: Path, kills: int, rng: random.Random) -> int:
    """Kill so often, then compare; the exit code."""
    out = folder / "out"
    client = Client(rng)
    starts, kinds, lost = list[float](), Counter[str](), 0
    for number in range(kills):
        begun = time.monotonic()
        with Served(out, *QUICK) as service:
            client.address = service.address
            starts.append(time.monotonic() - begun)
            time.sleep(rng.uniform(0.0, 1.0))
            kind = rng.choice(KINDS)
            kinds[kind] += 1
            kill(service, kind, rng)
        client.address = None
        if kind == "power":
            lost += cut(out / ".journal", set(client.bodies), rng)
        if number % 25 == 24:
            print(f"{number + 1} kills, {len(client.acknowledged)} calls acknowledged", flush=True)
    with Served(out, *QUICK, "--flush-on-exit") as service:
        client.address = service.address
        client.stop()
        code = service.stop()
    found = Counter(read_triplets(out).collect()["call_id"].to_list())
    missing = sorted(client.acknowledged - found.keys())
    twice = [call for call, times in found.items() if times > 1]
    build([out / ".journal"], BuildConfig(out=folder / "built"))
    equal = newest_rows(folder / "built") == newest_rows(out)
    print(f"{kills} deaths ({dict(kinds)}), {lost:,} bytes cut off; exit code of the last stop: {code}")
    print(f"acknowledged calls: {len(client.acknowledged):,}; missing: {len(missing)}; twice: {len(twice)}")
    print(f"dataset equal to build of the journal: {equal}")
    print(f"start to ready: median {statistics.median(starts):.2f} s, most {max(starts):.2f} s")
    return int(bool(missing or twice or not equal or code))


if __name__ == "__main__":
    sys.exit(main())
