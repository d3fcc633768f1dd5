"""Runs `spanmill serve` at full rate for a while and watches its memory, the journal's lag and its size.

    bench/soak.py [--seconds 600] [--senders 4] [--open 0] [--kib 64]

Each rollout is two requests of about --kib KiB. With --open N, N rollouts of one small call are sent first and never
end, so that the service has them open all the while. The journal is kept to 1 GiB. Linux only (/proc).
"""

import argparse
import random
import re
import sys
import tempfile
import threading
import time
from pathlib import Path

import grpc
import httpx

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "collector"))

from made_spans import make_call, make_request, make_rollout
from served import EXPORT, Served

EVERY_S = 5.0


def resident_mib(pid: int) -> float:
    """What a process has in memory."""
    found = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    return int(found[1]) / 1024 if found else 0.0


class Sender:
    """Sends rollouts until it is stopped, and those that are refused again."""

    def __init__(self, address: str, number: int, kib: int, done: threading.Event) -> None:
        self.sent = self.refused = 0
        self._number, self._text, self._done = number, random.Random(number).randbytes(kib << 9).hex(), done
        self._channel = grpc.insecure_channel(address, [("grpc.use_local_subchannel_pool", 1)])
        self._export: grpc.UnaryUnaryMultiCallable[bytes, bytes] = self._channel.unary_unary(EXPORT)
        self.thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        count = 0
        while not self._done.is_set():
            count += 1
            first, second, root = make_rollout(f"s{self._number}-{count}")
            text = make_call("x", "x", attributes={"note": self._text}).attributes[-1]
            for spans in ([first], [second, root]):
                spans[0].attributes.append(text)
                self._send(make_request(*spans))
        self._channel.close()

    def _send(self, body: bytes) -> None:
        while not self._done.is_set():
            try:
                self._export(body, timeout=30)
            except grpc.RpcError:
                self.refused += 1
                time.sleep(0.2)
            else:
                self.sent += len(body)
                return


def open_rollouts(address: str, count: int) -> None:
    """Send so many calls, each of a trace of its own, 500 in a request."""
    with grpc.insecure_channel(address) as channel:
        export: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(EXPORT)
        for start in range(0, count, 500):
            export(make_request(*(make_call(f"open-{n}", "call") for n in range(start, min(start + 500, count)))))


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--senders", type=int, default=4)
    parser.add_argument("--open", type=int, default=0)
    parser.add_argument("--kib", type=int, default=64)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        soak(Path(folder) / "out", options.seconds, options.senders, options.open, options.kib)


def soak(out: Path, seconds: float, count: int, held_open: int, kib: int) -> None:
    """Send, watch, print."""
    options = ["--settle", "1", "--flush-interval", "1", "--journal-max-gib", "1", "--idle-timeout", "1d"]
    with Served(out, *options) as service:
        if held_open:
            begun = time.monotonic()
            open_rollouts(service.address, held_open)
            print(f"{held_open:,} rollouts opened in {time.monotonic() - begun:.0f} s")
        done = threading.Event()
        senders = [Sender(service.address, number, kib, done) for number in range(count)]
        for sender in senders:
            sender.thread.start()
        samples = list[tuple[float, float]]()
        ends = time.monotonic() + seconds
        while time.monotonic() < ends:
            time.sleep(min(EVERY_S, max(0.1, ends - time.monotonic())))
            samples.append((resident_mib(service.process.pid), resident_mib(service.indexer())))
            print(_line(service, samples[-1], senders), flush=True)
        done.set()
        for sender in senders:
            sender.thread.join()
        sent = sum(sender.sent for sender in senders)
        print(
            f"{sent / seconds / 1e6:.1f} MB/s acknowledged; refused {sum(sender.refused for sender in senders)} times"
        )
        quarter = max(1, len(samples) // 4)
        for name, values in zip(("receiver", "indexer"), zip(*samples, strict=True), strict=True):
            first, last = max(values[:quarter]), max(values[-quarter:])
            print(
                f"{name}: {first:.0f} MiB in the first quarter, {last:.0f} MiB in the last, at most {max(values):.0f}"
            )


def _line(service: Served, sample: tuple[float, float], senders: list[Sender]) -> str:
    text = httpx.get(f"http://{service.http_address}/metrics", timeout=30).text
    figures = dict(re.findall(r"^(spanmill_\w+) (\S+)$", text, re.MULTILINE))
    journal, lag = (float(figures[f"spanmill_journal_{name}bytes"]) / (1 << 20) for name in ("", "lag_"))
    return (
        f"receiver {sample[0]:.0f} MiB, indexer {sample[1]:.0f} MiB, journal {journal:.0f} MiB, lag {lag:.0f} MiB, "
        f"open {float(figures['spanmill_open_components']):.0f}, sent {sum(s.sent for s in senders) / 1e6:.0f} MB"
    )


if __name__ == "__main__":
    main()
