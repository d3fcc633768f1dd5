"""CPU per GB of receiving: `spanmill serve` (journal, synced) beside the Go collector (to nowhere), same requests.

    SPANMILL_PEERS=~/.cache/spanmill-peers bench/receive.py [--mb 400] [--senders 8] [--packed]

A request has 16 spans of token ids and logprobs, as OTLP arrays (265 KB) or, with --packed, as bytes (167 KB). The
indexer is another process and not counted: bench/ingest.py has it. `tests/peers/get.sh` gets the
Go collector. Linux only (/proc).
"""

import argparse
import os
import random
import struct
import sys
import tempfile
import threading
import time
from pathlib import Path

import grpc

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "collector"))

from made_spans import make_request, make_span
from peer_processes import go_collector
from served import EXPORT, Served

SPANS, PROMPT, ANSWER = 16, 2048, 256


def request(packed: bool) -> bytes:
    """One request; what is in it is never looked at twice."""
    rng = random.Random(1)
    spans = list[object]()
    for number in range(SPANS):
        prompt = [rng.randrange(150_000) for _ in range(PROMPT)]
        answer = [rng.randrange(150_000) for _ in range(ANSWER)]
        logprobs = [-rng.random() for _ in range(ANSWER)]
        attributes: dict[str, object] = {
            "spanmill.prompt.token_ids": struct.pack(f"<{PROMPT}i", *prompt) if packed else prompt,
            "spanmill.response.token_ids": struct.pack(f"<{ANSWER}i", *answer) if packed else answer,
            "spanmill.response.logprobs": struct.pack(f"<{ANSWER}f", *logprobs) if packed else logprobs,
        }
        spans.append(make_span("t", f"call-{number}", "root", attributes=attributes))
    return make_request(*spans)  # pyright: ignore[reportArgumentType]


def cpu_seconds(pid: int) -> float:
    """User and system time of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure(name: str, pid: int, address: str, body: bytes, count: int, senders: int) -> float:
    """Send, print, and return CPU seconds per GB."""

    def send(times: int) -> None:
        with grpc.insecure_channel(address, [("grpc.use_local_subchannel_pool", 1)]) as channel:
            export: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(EXPORT)
            for _ in range(times):
                export(body, timeout=60)

    send(20)
    before, begun = cpu_seconds(pid), time.monotonic()
    threads = [threading.Thread(target=send, args=(count // senders,)) for _ in range(senders)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    gigabytes = len(body) * (count // senders) * senders / 1e9
    cpu = (cpu_seconds(pid) - before) / gigabytes
    print(f"  {name:14} {gigabytes * 1000 / (time.monotonic() - begun):8.0f} MB/s   {cpu:6.2f} CPU s/GB", flush=True)
    return cpu


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mb", type=int, default=400)
    parser.add_argument("--senders", type=int, default=8)
    parser.add_argument("--packed", action="store_true")
    options = parser.parse_args()
    body = request(options.packed)
    count = options.mb * 1_000_000 // len(body)
    print(f"{count} requests of {len(body) / 1000:.0f} KB, {options.senders} senders")
    with tempfile.TemporaryDirectory() as folder:
        peer = go_collector(Path(folder), "  nop:")
        with peer:
            theirs = measure("Go collector", peer.pid, f"127.0.0.1:{peer.port}", body, count, options.senders)
        with Served(Path(folder) / "out") as service:
            ours = measure("spanmill", service.process.pid, service.address, body, count, options.senders)
    print(f"  ratio {ours / theirs:.2f}")


if __name__ == "__main__":
    main()
