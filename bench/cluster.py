"""Measures `spanmill build` by both engines: the same rows, the gain of a second worker, memory.

    bench/cluster.py [--spans 20000] [--files 8]

Spans are those of bench/ingest.py with short prompts, about 1 KB each as packed bytes, 8 to a rollout, dealt out over
the files in turn, so that every rollout is split over all of them; 1,000,000 spans take 1 GB of disk for the input.
Printed for each run: wall seconds, and the most MiB that the driver and the largest worker process had of their own,
without what Ray's store shares among them. A second worker can gain only what the machine has idle: what two loops gain
that share nothing is printed beside it. Ends with 1 if the rows differ. Linux only: memory is read from /proc.
"""

import argparse
import hashlib
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import ingest

FIRST_PROMPT, ANSWER = 32, 16
PER_REQUEST = 64
POLL_S = 0.2


def main() -> None:
    """Print the figures of a run."""
    parser = argparse.ArgumentParser(description="the Ray engine of spanmill build against the local one")
    parser.add_argument("--spans", type=int, default=20_000, help="how many are built")
    parser.add_argument("--files", type=int, default=8, help="how many inputs they are dealt out over")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="spanmill-bench-") as temporary:
        folder = Path(temporary)
        size = write_inputs(folder / "in", chosen.spans, chosen.files)
        print(f"{chosen.spans:,} spans in {chosen.files} files, {size / 2**20:,.0f} MiB; {os.cpu_count()} cores")
        runs = {f"{engine}, {count} workers": (engine, count) for engine in ("local", "ray") for count in (1, 2)}
        seconds = {name: measured(folder, name, *run) for name, run in runs.items()}
        for engine in ("local", "ray"):
            gain = seconds[f"{engine}, 1 workers"] / seconds[f"{engine}, 2 workers"]
            print(f"{engine}, 1 -> 2 workers: {gain:.2f}x as fast")
        print(f"two loops of Python: {two_loops():.2f}x as fast as one")
        rows = [dataset(folder / name) for name in runs]
    if any(one != rows[0] for one in rows):
        sys.exit("the engines made different rows")
    print(f"the same bytes in {len(rows[0])} files, whatever the engine")


def write_inputs(folder: Path, spans: int, files: int) -> int:
    """Write the inputs; their bytes."""
    folder.mkdir()
    outputs = [(folder / f"{number}.binpb").open("wb") for number in range(files)]
    waiting = [list[bytes]() for _ in outputs]
    for number, span in enumerate(made(spans)):
        turn = (number + number // ingest.TURNS) % files
        waiting[turn].append(span)
        if len(waiting[turn]) == PER_REQUEST:
            outputs[turn].write(framed(waiting[turn]))
    for output, rest in zip(outputs, waiting, strict=True):
        output.write(framed(rest) if rest else b"")
        output.close()
    return sum(path.stat().st_size for path in folder.iterdir())


def framed(spans: list[bytes]) -> bytes:
    """A request of these spans behind its length; the list is empty then."""
    body = b"".join(spans)
    spans.clear()
    return len(body).to_bytes(4, "big") + body


def made(spans: int) -> Iterator[bytes]:
    """The spans, each with ids of its own."""
    rng = random.Random(17)
    templates = list[bytes]()
    prompt = rng.choices(range(ingest.VOCABULARY), k=FIRST_PROMPT)
    for turn in range(ingest.TURNS):
        answer = rng.choices(range(ingest.VOCABULARY), k=ANSWER)
        templates.append(ingest.template(turn, prompt, answer, [-rng.expovariate(2.0) for _ in answer], packed=True))
        prompt = prompt + answer
    for number in range(spans):
        rollout = number // ingest.TURNS
        span = templates[number % ingest.TURNS].replace(ingest.TRACE, (rollout + 1).to_bytes(16, "big"))
        span = span.replace(ingest.SPAN, (number + 1).to_bytes(8, "big"))
        yield span.replace(ingest.NAME.encode(), f"rollout-{rollout:08d}".encode())


def measured(folder: Path, name: str, engine: str, workers: int) -> float:
    """Build, print the figures, and return the wall seconds."""
    command = [ingest.COMMAND, "build", str(folder / "in"), "--out", str(folder / name)]
    start = time.perf_counter()
    build = subprocess.Popen([*command, "--engine", engine, "--workers", str(workers)], stdout=subprocess.DEVNULL)
    driver, largest = 0.0, 0.0
    while build.poll() is None:
        driver = max(driver, own_mib(build.pid))
        largest = max([largest, *(own_mib(pid) for pid in descendants(build.pid) if is_worker(pid))])
        time.sleep(POLL_S)
    seconds = time.perf_counter() - start
    if build.returncode:
        raise SystemExit(f"spanmill build ended with {build.returncode}")
    told = f", largest worker {largest:,.0f} MiB" if largest else ""
    print(f"{name}: {seconds:.1f} s, driver {driver:,.0f} MiB{told}", flush=True)
    return seconds


def descendants(pid: int) -> list[int]:
    """The processes below one."""
    children = dict[int, list[int]]()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            parent = field(int(entry.name), "PPid")
            children.setdefault(parent, []).append(int(entry.name))
    found = [pid]
    for one in found:
        found += children.get(one, [])
    return found[1:]


def is_worker(pid: int) -> bool:
    """Whether a process runs tasks of Ray."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"ray::")
    except OSError:
        return False


def own_mib(pid: int) -> float:
    """What a process has in memory by itself; 0 once it has ended."""
    return field(pid, "RssAnon") / 1024


def two_loops() -> float:
    """What two processes at once do of plain Python, to what one does in the same time."""
    command = [sys.executable, "-c", "for _ in range(60_000_000): pass"]
    seconds = list[float]()
    for count in (1, 2):
        start = time.perf_counter()
        for running in [subprocess.Popen(command) for _ in range(count)]:
            running.wait()
        seconds.append(time.perf_counter() - start)
    return 2 * seconds[0] / seconds[1]


def field(pid: int, name: str) -> int:
    """A number of /proc/PID/status; 0 once it has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith(f"{name}:")), 0)


def dataset(folder: Path) -> dict[str, str]:
    """The files of a dataset, and digests of them."""
    return {str(path.relative_to(folder)): digest(path) for path in sorted(folder.rglob("*.parquet"))}


def digest(path: Path) -> str:
    """Of a file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


if __name__ == "__main__":
    main()
