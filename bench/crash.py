"""Kills the processes of `spanmill serve` again and again under load, and looks whether what it acknowledged is there.

    bench/crash.py [--kills 1000] [--seed N] [--workers 1,2] [--dir DIR]

Each service is started with one of the --workers, on the dataset and journal of those before it, and dies after some
kills: -9 of its indexer or of a worker, which it starts again; then of the service itself, of it and its indexer at
once, or a power failure: everything is killed, and each part of the journal that was begun since the start is cut at
random behind the last record that was acknowledged. Clients send what was not acknowledged again, as every OTLP
exporter does. At the end every acknowledged call has to be in the dataset, once, and the dataset has to be what
`spanmill build` makes of the journal. Exit code 1 if not.

With --dir a run that was cut off is gone on with, and what is wrong can be looked at.
"""

import argparse
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from shutil import rmtree
from typing import Any

import grpc

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "collector"))

from dataset_rows import newest_rows
from made_spans import endless_requests, make_request
from served import EXPORT, QUICK, Served, alive, wait_for

from spanmill.collector import journal
from spanmill.collector.build import build
from spanmill.collector.config import BuildConfig
from spanmill.triplets.reader import read_triplets

ENDS = ("service", "both", "power")
"""Deaths of a whole service."""


class Client:
    """Sends one request after the other, each until it is acknowledged, to whatever service there is."""

    def __init__(self, rng: random.Random, name: str, notes: Path) -> None:
        self.bodies = set[bytes]()
        """The requests that were acknowledged by the service of the moment."""
        self.address: str | None = None
        self._requests = endless_requests(rng, name)
        self._notes = notes
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def stop(self) -> None:
        """After the request at hand."""
        self._done.set()
        self._thread.join()

    def _run(self) -> None:
        with self._notes.open("a") as notes:
            for spans in self._requests:
                body = make_request(*spans)
                while not self._sent(body):
                    time.sleep(0.02)
                self.bodies.add(body)
                ids = (pair for span in spans for pair in span.attributes if pair.key == "gen_ai.response.id")
                notes.writelines(f"{pair.value.string_value}\n" for pair in ids)
                notes.flush()
                if self._done.is_set():
                    return
                time.sleep(0.005)  # leave the machine to the service

    def _sent(self, body: bytes) -> bool:
        if self.address is None:
            return False
        # A connection of its own, which may come to any worker.
        with grpc.insecure_channel(self.address, [("grpc.use_local_subchannel_pool", 1)]) as channel:
            export: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(EXPORT)
            try:
                export(body, timeout=10)
            except grpc.RpcError:
                return False
        return True


def cut(folder: Path, begun: Sequence[int], acknowledged: set[bytes], rng: random.Random) -> int:
    """Take off the segments what a power failure may: anything behind the last acknowledged record; how much."""
    lost = 0
    for number in begun:
        path = journal.segment_path(folder, number)
        end = 16
        after = journal.Position(number, 0)
        for entry in journal.read(folder, after, worker=journal.worker_of(number), complete=True):
            if entry.position.segment == number and entry.body in acknowledged:
                end = entry.end.offset
        size = path.stat().st_size
        keep = rng.randint(min(end, size), size)
        os.truncate(path, keep)
        lost += size - keep
    return lost


def kill_one(service: Served, rng: random.Random) -> str:
    """Kill the indexer or a worker; which it was."""
    workers = service.workers()
    kind = "worker" if workers and rng.random() < 0.6 else "indexer"
    with suppress(ProcessLookupError):
        os.kill(rng.choice(workers) if kind == "worker" else service.indexer(), signal.SIGKILL)
    return kind


def kill_all(service: Served, kind: str) -> None:
    """The death of a service."""
    children = [*service.workers(), service.indexer()]
    if kind != "service":
        for pid in children if kind == "power" else children[-1:]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    service.kill()
    if kind == "power":
        wait_for(lambda: not any(map(alive, children)))


class Progress:
    """What has been done in a folder."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "progress.json"
        found: dict[str, Any] = json.loads(self._path.read_text()) if self._path.exists() else {}
        self.runs: int = found.get("runs", 0) + 1
        self.kinds = Counter[str](found.get("kinds", {}))
        self.cut_bytes: int = found.get("cut_bytes", 0)
        self.save()

    @property
    def kills(self) -> int:
        """So far."""
        return sum(self.kinds.values())

    def save(self) -> None:
        """For a run that goes on from here."""
        found = {"runs": self.runs, "kinds": self.kinds, "cut_bytes": self.cut_bytes}
        self._path.with_suffix(".new").write_text(json.dumps(found))
        self._path.with_suffix(".new").rename(self._path)


def main() -> int:
    """Run and print; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=time.time_ns() % 1_000_000)
    parser.add_argument("--workers", default="1,2", help="each start takes one of these")
    parser.add_argument("--dir", type=Path, help="folder of the run; removed if all is well at the end")
    options = parser.parse_args()
    workers = [int(count) for count in options.workers.split(",")]
    with tempfile.TemporaryDirectory() as temporary:
        folder: Path = options.dir or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        code = crash(folder, options.kills, workers, options.seed)
        if options.dir and not code:
            rmtree(folder)
    return code


def crash(folder: Path, kills: int, workers: Sequence[int], seed: int) -> int:
    """Kill so often, then compare; the exit code."""
    progress = Progress(folder)
    print(f"seed {seed}, run {progress.runs}, {progress.kills} kills done before", flush=True)
    rng = random.Random(seed + progress.runs)
    out, notes = folder / "out", folder / "acknowledged"
    begun, starts = time.monotonic(), list[float]()
    clients = [Client(random.Random(rng.random()), f"{progress.runs}-{number}", notes) for number in range(2)]
    try:
        while progress.kills < kills:
            starts.append(_one_service(out, clients, progress, rng, rng.choice(workers)))
            minutes = (time.monotonic() - begun) / 60
            print(f"{progress.kills} kills, {_lines(notes):,} calls acknowledged, {minutes:.1f} minutes", flush=True)
    finally:
        with Served(out, *QUICK, "--flush-on-exit", "--drain-timeout", "300") as service:
            for client in clients:
                client.address = service.address
            for client in clients:
                client.stop()
            service.process.send_signal(signal.SIGTERM)
            code = service.process.wait(600)
    acknowledged = set(notes.read_text().split())
    found = Counter(read_triplets(out).collect()["call_id"].to_list())
    missing = sorted(acknowledged - found.keys())
    twice = [call for call, times in found.items() if times > 1]
    rmtree(folder / "built", ignore_errors=True)
    build([out / ".journal"], BuildConfig(out=folder / "built"))
    equal = newest_rows(folder / "built") == newest_rows(out)
    print(
        f"{progress.kills} kills {dict(progress.kinds)}, {progress.cut_bytes:,} bytes cut off; last exit code: {code}"
    )
    print(f"acknowledged calls: {len(acknowledged):,}; missing: {len(missing)}; twice: {len(twice)}")
    print(f"dataset equal to build of the journal: {equal}")
    if starts:
        print(f"start to ready: median {statistics.median(starts):.2f} s, most {max(starts):.2f} s")
    return int(bool(missing or twice or not equal or code))


def _one_service(out: Path, clients: Sequence[Client], progress: Progress, rng: random.Random, workers: int) -> float:
    """A service from its start to its death; how long the start took, in seconds."""
    folder = out / ".journal"
    before = set(journal.segments(folder)) if folder.exists() else set[int]()
    begun = time.monotonic()
    with Served(out, *QUICK, "--workers", str(workers)) as service:
        took = time.monotonic() - begun
        for client in clients:
            client.bodies.clear()
            client.address = service.address
        for _ in range(rng.randint(0, 3)):
            time.sleep(rng.uniform(0.0, 1.0))
            progress.kinds[kill_one(service, rng)] += 1
        time.sleep(rng.uniform(0.0, 1.0))
        kind = rng.choice(ENDS)
        kill_all(service, kind)
    for client in clients:
        client.address = None
    progress.kinds[kind] += 1
    if kind == "power":
        time.sleep(0.1)  # an answer may still be on its way to a client
        bodies = set[bytes]().union(*(client.bodies for client in clients))
        fresh = [number for number in journal.segments(folder) if number not in before]
        progress.cut_bytes += cut(folder, fresh, bodies, rng)
    progress.save()
    return took


def _lines(path: Path) -> int:
    return path.read_bytes().count(b"\n")


if __name__ == "__main__":
    sys.exit(main())
