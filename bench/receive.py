"""CPU per GB of receiving: `spanmill serve` (journal, synced) beside the Go collector (to nowhere), same requests.

    SPANMILL_PEERS=~/.cache/spanmill-peers bench/receive.py [--mb 100] [--rounds 5] [--senders 8] [--packed] [--http]

A request has 13 spans of token ids and logprobs, as OTLP arrays (219 KB) or, with --packed, as bytes (136 KB). Both run
at once and take turns; the median of the rounds counts. The indexer is another process and not counted: bench/ingest.py
has it. `tests/peers/get.sh` gets the Go collector. Linux only (/proc).
"""

import argparse
import os
import random
import statistics
import struct
import sys
import tempfile
import threading
import time
from http.client import HTTPConnection
from pathlib import Path

import grpc

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "collector"))

from made_spans import make_request, make_span
from peer_processes import go_collector
from served import EXPORT, Served

SPANS, PROMPT, ANSWER = 13, 2048, 256


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


def send(address: str, http: bool, body: bytes, times: int) -> None:
    """Send the request so often over one connection."""
    if http:
        connection = HTTPConnection(address, timeout=60)
        for _ in range(times):
            connection.request("POST", "/v1/traces", body, {"Content-Type": "application/x-protobuf"})
            answer = connection.getresponse()
            answer.read()
            if answer.status != 200:
                raise ValueError(f"{address} answers {answer.status}")
        connection.close()
        return
    with grpc.insecure_channel(address, [("grpc.use_local_subchannel_pool", 1)]) as channel:
        export: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(EXPORT)
        for _ in range(times):
            export(body, timeout=60)


def measure(pid: int, address: str, http: bool, body: bytes, count: int, senders: int) -> tuple[float, float]:
    """CPU seconds per GB, and MB/s."""
    before, begun = cpu_seconds(pid), time.monotonic()
    threads = [threading.Thread(target=send, args=(address, http, body, count // senders)) for _ in range(senders)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    gigabytes = len(body) * (count // senders) * senders / 1e9
    return (cpu_seconds(pid) - before) / gigabytes, gigabytes * 1000 / (time.monotonic() - begun)


def compare(mb: int, rounds: int, senders: int, *, packed: bool, http: bool) -> dict[str, tuple[float, float]]:
    """(CPU seconds per GB, MB/s) of each, the median of the rounds of `mb` each."""
    body = request(packed)
    count = mb * 1_000_000 // len(body)
    with (
        tempfile.TemporaryDirectory() as folder,
        go_collector(Path(folder), "  nop:") as peer,
        Served(Path(folder) / "out") as service,
    ):
        theirs = f"127.0.0.1:{peer.http_port if http else peer.port}"
        ours = service.http_address if http else service.address
        sides = {"Go collector": (peer.pid, theirs), "spanmill": (service.process.pid, ours)}
        found: dict[str, list[tuple[float, float]]] = {name: [] for name in sides}
        for _, address in sides.values():
            send(address, http, body, 20)
        for _ in range(rounds):
            for name, (pid, address) in sides.items():
                found[name].append(measure(pid, address, http, body, count, senders))
    return {
        name: (statistics.median(cost for cost, _ in taken), statistics.median(rate for _, rate in taken))
        for name, taken in found.items()
    }


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mb", type=int, default=100, help="in a round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--senders", type=int, default=8)
    parser.add_argument("--packed", action="store_true")
    parser.add_argument("--http", action="store_true")
    options = parser.parse_args()
    size = len(request(options.packed)) / 1000
    how = "OTLP/HTTP" if options.http else "OTLP/gRPC"
    print(f"{options.rounds} rounds of {options.mb} MB in requests of {size:.0f} KB, {options.senders} senders, {how}")
    found = compare(options.mb, options.rounds, options.senders, packed=options.packed, http=options.http)
    for name, (cost, rate) in found.items():
        print(f"  {name:14} {rate:8.0f} MB/s   {cost:6.2f} CPU s/GB")
    print(f"  ratio {found['spanmill'][0] / found['Go collector'][0]:.2f}")


if __name__ == "__main__":
    main()
