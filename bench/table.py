"""One table: what spanmill takes from wire to Parquet, beside peers in the same run on the same machine.

    bench/table.py [--spans 8000] [--write docs/benchmarks.md] [--check docs/benchmarks.md]

The ratio is how much better than the peer: it says more than the figures, which change with the machine and with what
else runs on it. `--write` puts the table into a page; `--check` compares the ratios with those of such a page and ends
with 1 if one has lost more than a quarter. Figures are CPU time, user and system; what two workers gain is wall time.
The Go collector is a peer where SPANMILL_PEERS has it (tests/peers/get.sh).
"""

import argparse
import importlib
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple, cast

import decode
import ingest
import numpy as np
import parquet
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import receive

from spanmill.adapters import adapt
from spanmill.collector.decode import decode_traces
from spanmill.collector.journal import JournalWriter, Kind
from spanmill.triplets.parquet import read_file, write_file
from spanmill.triplets.table import rows_to_tables

adapters = importlib.import_module("adapters")
"""bench/adapters.py; a type checker would take the name for the folder at the root."""

LOSS = 0.75
"""A ratio below this share of the committed one is a loss."""
TURNS, LONG_PROMPT, LONG_ROLLOUTS = 20, 131_072, 6
HEAD = "| work | ours | goal | peer | peer's | ratio |\n|---|---|---|---|---|---|"
ROW = re.compile(r"\| (.+?) \| .* \| ([\d.]+) \|")


class Row(NamedTuple):
    """A line of the table. `ratio` is ours to the peer's, above 1 where ours is better."""

    work: str
    ours: str
    goal: str
    peer: str
    theirs: str
    ratio: float

    def __str__(self) -> str:
        return f"| {self.work} | {self.ours} | {self.goal} | {self.peer} | {self.theirs} | {self.ratio:.2f} |"


def decoding() -> Iterator[Row]:
    """Spans a second on one core."""
    for encoding, goal in (("arrays", 9000), ("packed", 50_000)):
        body = decode.load(100, encoding).SerializeToString()
        theirs = 100 / decode.best(lambda body=body: decode.peer(body), 3)
        ours = 100 / decode.best(lambda body=body: decode_traces(body), 3)
        peer = "opentelemetry-proto, loops"
        yield Row(f"decode, {encoding}, spans/s", f"{ours:,.0f}", f"{goal:,}", peer, f"{theirs:,.0f}", ours / theirs)


def receiving() -> Iterator[Row]:
    """CPU per GB of receiving into a synced journal, beside the Go collector that receives into nothing."""
    if "SPANMILL_PEERS" not in os.environ:
        return
    for http in (False, True):
        found = receive.compare(100, 3, 8, packed=False, http=http)
        ours, theirs = found["spanmill"][0], found["Go collector"][0]
        label = f"receive, {'HTTP' if http else 'gRPC'}, CPU s/GB"
        yield Row(label, f"{ours:.2f}", f"{theirs / 4:.2f}", "Go collector, to nop", f"{theirs:.2f}", theirs / ours)


def serving(spans: int) -> Iterator[Row]:
    """Spans from the wire to rows, and from a journal to rows, for each CPU-second of all processes."""
    for packed, serve_goal, build_goal in ((False, 4000, 6000), (True, 8000, 12_000)):
        what = "packed" if packed else "arrays"
        load = ingest.Load(spans, 16, 8, packed)
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            _, used = ingest.measure_peer(load)
            theirs = spans / used.cpu
            served = ingest.measure_serve(load, folder)
            ours = spans / served.all_in
            peer = "grpcio, opentelemetry-proto parse only"
            yield Row(
                f"serve, {what}, spans/CPU s", f"{ours:,.0f}", f"{serve_goal:,}", peer, f"{theirs:,.0f}", ours / theirs
            )
            empty = _journal(folder / "empty", [])
            _, started = ingest.measure_build(empty, folder / "started")
            wall: dict[int, float] = {}
            for workers in (1, 2):
                out = folder / f"built-{workers}"
                wall[workers], built = ingest.measure_build(folder / "journal", out, "--workers", str(workers))
                if workers == 1:
                    ours = spans / (built.cpu - started.cpu)
            yield Row(
                f"build, {what}, spans/CPU s", f"{ours:,.0f}", f"{build_goal:,}", peer, f"{theirs:,.0f}", ours / theirs
            )
            gain = wall[1] / wall[2]
            yield Row(f"build, {what}, 2 workers", f"{gain:.2f}x as fast", "2x", "1 worker", "1.00x", gain)


def long_context() -> Iterator[Row]:
    """Rollouts of 20 turns with prompts of 128k ids, packed."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        made = list(_long_rollouts())
        size = sum(map(len, made))
        _, started = ingest.measure_build(_journal(folder / "empty", []), folder / "started")
        journal = _journal(folder / "journal", made)
        _, built = ingest.measure_build(journal, folder / "out", "--workers", "1")
        ours = size / 1e6 / (built.cpu - started.cpu)
        copied = _cpu(lambda: _copy(made))
        theirs = size / 1e6 / copied
        yield Row(
            "build, 128k prompts, MB/CPU s",
            f"{ours:.0f}",
            "150",
            "the numbers, pyarrow",
            f"{theirs:.0f}",
            ours / theirs,
        )
        grown = built.peak_mib - started.peak_mib
        rollout = size / LONG_ROLLOUTS / (1 << 20)
        allowed = 2048 + 3 * rollout
        yield Row(
            "build, 128k prompts, peak MiB",
            f"{built.peak_mib:.0f} ({grown / rollout:.1f} rollouts)",
            f"{allowed:.0f}",
            "2 GiB + 3 rollouts",
            f"{allowed:.0f}",
            allowed / built.peak_mib,
        )


def merging() -> Iterator[Row]:
    """Time for a token in rollouts of N and 2N turns."""
    small, large = adapters.chain(1000), adapters.chain(2000)
    one, two = adapters.cost(adapt, small), adapters.cost(adapt, large)
    growth = (two / adapters.tokens_of(large)) / (one / adapters.tokens_of(small))
    yield Row("merge, 2,000 to 1,000 turns, us/token", f"{growth:.2f}", "1.10", "linear", "1.00", 1 / growth)


def writing() -> Iterator[Row]:
    """Parquet of multi-turn rollouts: size, and reading."""
    random = np.random.default_rng(0)
    rollouts = [parquet.make_rollout(n, 512, 128, 256, random) for n in range(600)]
    tables = rows_to_tables(rollouts)
    names = ("prompt_token_ids", "response_token_ids", "response_logprobs")
    raw = tables["triplets"].select(names).nbytes
    with tempfile.TemporaryDirectory() as name:
        ours, theirs = Path(name) / "ours.parquet", Path(name) / "theirs.parquet"
        write_file(ours, tables["triplets"].select(names), {})
        cast("pl.DataFrame", pl.from_arrow(tables["triplets"].select(names))).write_parquet(
            theirs, compression="zstd", compression_level=1
        )
        size, other = ours.stat().st_size / raw, theirs.stat().st_size / raw
        yield Row("Parquet, size of raw numbers", f"{size:.3f}", "0.22", "polars, zstd 1", f"{other:.3f}", other / size)
        pq.write_table(tables["triplets"].select(names), theirs, compression="zstd", compression_level=1)
        mine, copy = (raw / 1e6 / _cpu(lambda path=path: _arrays(path)) for path in (ours, theirs))
        label = "Parquet into arrays or tensors, MB/CPU s"
        yield Row(label, f"{mine:.0f}", "400", "pyarrow's own defaults", f"{copy:.0f}", mine / copy)


def starting() -> Iterator[Row]:
    """CPU seconds until a command has shown its help, and until the service is ready."""
    bare = _least(lambda: subprocess.run([sys.executable, "-c", "import typer"], check=True))
    shown = _least(lambda: subprocess.run([ingest.COMMAND, "--help"], check=True, stdout=subprocess.DEVNULL))
    yield Row("spanmill --help, CPU s", f"{shown:.2f}", "0.3", "python, import typer", f"{bare:.2f}", bare / shown)
    ready = _least(_ready)
    heavy = "import grpc, polars, pyarrow.parquet, starlette, uvicorn, google.protobuf"
    bare = _least(lambda: subprocess.run([sys.executable, "-c", heavy], check=True))
    yield Row(
        "spanmill serve ready, CPU s",
        f"{ready:.2f}",
        "1.5",
        "python, import of its libraries",
        f"{bare:.2f}",
        bare / ready,
    )


# ---------------------------------------------------------------- what they are made of


def _ready() -> None:
    with tempfile.TemporaryDirectory() as name:
        command = [ingest.COMMAND, "serve", "--out", name, "--grpc", "127.0.0.1:0", "--http", "127.0.0.1:0"]
        serve = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        line = serve.stdout.readline() if serve.stdout else ""
        serve.kill()
        serve.wait()
        time.sleep(0.3)  # its children notice that it is gone before their folder goes
        if "grpc=" not in line:
            raise SystemExit("spanmill serve did not get ready")


def _least(run: Callable[[], object]) -> float:
    """CPU seconds of the processes that a run starts and waits for, best of three."""
    taken: list[float] = []
    for _ in range(3):
        before = os.times()
        run()
        after = os.times()
        taken.append(after.children_user - before.children_user + after.children_system - before.children_system)
    return min(taken)


def _cpu(run: Callable[[], object]) -> float:
    """CPU seconds of the best of three runs in this process."""
    taken: list[float] = []
    for _ in range(3):
        start = time.process_time()
        run()
        taken.append(time.process_time() - start)
    return min(taken)


def _journal(folder: Path, requests: list[bytes]) -> Path:
    with JournalWriter(folder) as journal:
        journal.append(Kind.FLUSH, b"", 1)
        for body in requests:
            journal.append(Kind.TRACES_PROTO, body, 1)
    return folder


def _long_rollouts() -> Iterator[bytes]:
    """Requests of one call each."""
    for number in range(LONG_ROLLOUTS):
        rng = np.random.default_rng(number)
        tokens = rng.integers(0, ingest.VOCABULARY, LONG_PROMPT).tolist()
        for turn in range(TURNS):
            end = LONG_PROMPT - (TURNS - turn) * 512
            logprobs = (-rng.random(ingest.ANSWER)).tolist()
            made = ingest.template(turn, tokens[:end], tokens[end : end + ingest.ANSWER], logprobs, packed=True)
            yield (
                made.replace(ingest.TRACE, (number + 1).to_bytes(16, "big"))
                .replace(ingest.SPAN, (number * TURNS + turn + 1).to_bytes(8, "big"))
                .replace(ingest.NAME.encode(), f"rollout-{number:08d}".encode())
            )


def _copy(requests: list[bytes]) -> None:
    """The same amount of numbers as one list column, by pyarrow as it is."""
    column = pa.array([np.frombuffer(body[: len(body) // 4 * 4], np.int32) for body in requests], pa.list_(pa.int32()))
    with tempfile.NamedTemporaryFile() as file:
        pq.write_table(
            pa.table({"ids": column}), file.name, compression="zstd", compression_level=1, use_dictionary=False
        )


def _arrays(path: Path) -> list[np.ndarray]:
    """The numbers of a file without a copy, as `torch.from_numpy` takes them."""
    return [
        chunk.values.to_numpy(zero_copy_only=True)
        for column in read_file(path).columns
        for chunk in cast("list[pa.ListArray]", column.chunks)
    ]


def page(rows: list[Row]) -> str:
    """The page with the table."""
    machine = f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}"
    told = (
        "<!-- made by `make bench`; bench/table.py says how each figure is taken -->\n\n# Benchmarks\n\n"
        "The ratio is how much better than the peer in the same run; figures change with the machine and its load.\n"
        f"`make bench-check` fails when a ratio has lost more than a quarter. Machine: {machine}.\n"
        "[Performance](design/performance.md) says what profiles show of each, and why a goal is not reached.\n\n"
    )
    return told + "\n".join([HEAD, *map(str, rows)]) + "\n"


def losses(rows: list[Row], before: str) -> list[str]:
    """What has lost more than a quarter against a page's table."""
    known = {match[1]: float(match[2]) for match in map(ROW.fullmatch, before.splitlines()) if match}
    return [
        f"{row.work}: ratio {row.ratio:.2f}, was {known[row.work]:.2f}"
        for row in rows
        if row.work in known and row.ratio < LOSS * known[row.work]
    ]


def main() -> int:
    """Measure, print, and write or check."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--spans", type=int, default=8000)
    parser.add_argument("--write", type=Path)
    parser.add_argument("--check", type=Path)
    given = parser.parse_args()
    rows: list[Row] = []
    print(HEAD, flush=True)
    for measured in (decoding(), receiving(), serving(given.spans), long_context(), merging(), writing(), starting()):
        for row in measured:
            rows.append(row)
            print(row, flush=True)
    if given.write:
        given.write.write_text(page(rows))
    lost = losses(rows, given.check.read_text()) if given.check else []
    print("\n".join(lost))
    return 1 if lost else 0


if __name__ == "__main__":
    sys.exit(main())
