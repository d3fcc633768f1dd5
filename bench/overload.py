"""More than `spanmill serve` takes: is anything acknowledged missing, how much memory does it take, do senders recover?

    bench/overload.py [--senders 24] [--mib 8] [--inflight 64] [--requests 10] [--http]

That many senders each have a request of --mib MiB under way at any time, three times --inflight with these figures.
They send what is refused again after a second, as they are asked to. Linux only (/proc). Exit code 1 if a call that was
acknowledged is not in the dataset.
"""

import argparse
import random
import re
import sys
import tempfile
import threading
import time
from collections import Counter
from http.client import HTTPConnection, HTTPException
from pathlib import Path

import grpc

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "collector"))

from made_spans import make_call, make_request, make_rollout
from served import EXPORT, Served

from spanmill.triplets.reader import read_triplets


def memory_mib(pid: int) -> dict[str, float]:
    """What a process has in memory, and the most that it had."""
    text = Path(f"/proc/{pid}/status").read_text()
    return {name: int(size) / 1024 for name, size in re.findall(r"(VmHWM|VmRSS):\s+(\d+)", text)}


class Sender:
    """Sends rollouts, each until it is acknowledged."""

    def __init__(self, service: Served, number: int, count: int, mib: int, http: bool) -> None:
        self.acknowledged = set[str]()
        self.refused = Counter[str]()
        self._number, self._count, self._http = number, count, http
        self._address = service.http_address if http else service.address
        text = random.Random(number).randbytes(mib << 19).hex()
        self._ballast = make_call("x", "x", attributes={"ballast": text}).attributes[-1]
        self.thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        with grpc.insecure_channel(self._address, [("grpc.use_local_subchannel_pool", 1)]) as channel:
            export: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(EXPORT)
            for number in range(self._count):
                spans = make_rollout(f"s{self._number}-{number}", calls=1)
                spans[0].attributes.append(self._ballast)
                body = make_request(*spans)
                while (refusal := self._posted(body) if self._http else self._exported(export, body)) is not None:
                    self.refused[refusal] += 1
                    time.sleep(1)
                self.acknowledged.add(f"chatcmpl-s{self._number}-{number}-call-0")

    def _exported(self, export: "grpc.UnaryUnaryMultiCallable[bytes, bytes]", body: bytes) -> str | None:
        try:
            export(body, timeout=60)
        except grpc.RpcError as error:
            return str(error).partition("status = ")[2].split("\n")[0]
        return None

    def _posted(self, body: bytes) -> str | None:
        connection = HTTPConnection(self._address, timeout=60)
        try:
            connection.request("POST", "/v1/traces", body, {"Content-Type": "application/x-protobuf"})
            status = connection.getresponse().status
        except (OSError, HTTPException) as error:
            return type(error).__name__
        finally:
            connection.close()
        return None if status == 200 else str(status)


def main() -> int:
    """Run and print; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--senders", type=int, default=24)
    parser.add_argument("--mib", type=int, default=8)
    parser.add_argument("--inflight", type=int, default=64)
    parser.add_argument("--requests", type=int, default=10)
    parser.add_argument("--http", action="store_true")
    options = parser.parse_args()
    limits = ["--max-inflight-mib", str(options.inflight), "--max-message-mib", str(min(64, options.inflight))]
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out"
        with Served(out, *limits, "--flush-on-exit", "--drain-timeout", "600") as service:
            before = memory_mib(service.process.pid)["VmRSS"]
            senders = [
                Sender(service, number, options.requests, options.mib, options.http)
                for number in range(options.senders)
            ]
            for sender in senders:
                sender.thread.start()
            for sender in senders:
                sender.thread.join()
            after = memory_mib(service.process.pid)
            service.process.terminate()
            code = service.process.wait(900)
        found = set(read_triplets(out).collect()["call_id"].to_list())
    acknowledged = set[str]().union(*(sender.acknowledged for sender in senders))
    refused = sum((sender.refused for sender in senders), Counter[str]())
    missing = len(acknowledged - found)
    most = (after["VmHWM"] - before) / options.inflight
    print(f"{options.senders} senders of {options.mib} MiB, --max-inflight-mib {options.inflight}")
    print(f"{len(acknowledged)} requests acknowledged by all senders, refused before that: {dict(refused)}")
    print(f"missing in the dataset: {missing}; last exit code: {code}")
    print(
        f"memory: {before:.0f} MiB at the start, {after['VmRSS']:.0f} at the end, at most {after['VmHWM']:.0f}", end=""
    )
    print(f": {most:.1f} times --max-inflight-mib above the start")
    return int(bool(missing or code))


if __name__ == "__main__":
    sys.exit(main())
