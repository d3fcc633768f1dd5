"""Kill -9 of the service and of its indexer, again and again, while a client sends and notes what was acknowledged.

SPANMILL_CRASHES says how often (3 if not given), SPANMILL_CRASH_SEED makes a run come again.
"""

import os
import random
import signal
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
from dataset_rows import newest_rows
from made_spans import Span, endless_requests, make_request
from served import EXPORT, QUICK, Served

from spanmill.collector.build import build
from spanmill.collector.config import BuildConfig
from spanmill.triplets.reader import read_triplets

CRASHES = int(os.environ.get("SPANMILL_CRASHES", "3"))
SEED = int(os.environ.get("SPANMILL_CRASH_SEED", str(time.time_ns() % 1_000_000)))


def calls_in(spans: list[Span]) -> set[str]:
    """The response ids of the calls among the spans."""
    return {pair.value.string_value for span in spans for pair in span.attributes if pair.key == "gen_ai.response.id"}


class Client:
    """Sends one request after the other until the service is gone, and notes the calls that were acknowledged."""

    def __init__(self, sent: Iterator[list[Span]]) -> None:
        self.acknowledged = set[str]()
        self._sent = sent

    def run(self, address: str) -> None:
        """Send until a request is refused: what was in it is promised by nobody."""
        with grpc.insecure_channel(address) as channel:
            export: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(EXPORT)
            for spans in self._sent:
                try:
                    export(make_request(*spans), timeout=10)
                except grpc.RpcError:
                    return
                self.acknowledged |= calls_in(spans)
                time.sleep(0.01)  # leave the machine to the service


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="finds the indexer by /proc")
@pytest.mark.slow
@pytest.mark.parametrize("crashes", [CRASHES])
def test_no_acknowledged_span_is_lost_or_doubled(tmp_path: Path, crashes: int) -> None:
    """Every acknowledged call is in the dataset once, and the dataset is what `build` makes of the journal."""
    print(f"SPANMILL_CRASH_SEED={SEED}")
    rng = random.Random(SEED)
    out = tmp_path / "out"
    client = Client(endless_requests(rng, "r"))
    for crash in range(crashes):
        with Served(out, *QUICK) as service, ThreadPoolExecutor(1) as thread:
            running = thread.submit(client.run, service.address)
            for _ in range(crash % 3):
                time.sleep(rng.uniform(0, 1.5))
                os.kill(service.indexer(), signal.SIGKILL)
            time.sleep(rng.uniform(0.1, 1.5))
            service.kill()
            running.result()
    with Served(out, *QUICK, "--flush-on-exit") as service:
        assert 0 == service.stop()
    found = Counter(read_triplets(out).collect()["call_id"].to_list())
    assert client.acknowledged
    assert [] == sorted(client.acknowledged - found.keys())
    assert [] == [call for call, times in found.items() if times > 1]
    build([out / ".journal"], BuildConfig(out=tmp_path / "built"))
    assert newest_rows(tmp_path / "built") == newest_rows(out)
