import random
import re
import socket

import httpx
from google.rpc.code_pb2 import INVALID_ARGUMENT, OK
from mutated_requests import http_requests, run

from spanmill.collector.ingest import Ingest
from spanmill.collector.journal import JournalWriter
from spanmill.collector.receive import Receiver


def test_mutated_requests(journal: JournalWriter) -> None:
    """20,000 damaged requests, compressed and not: each is taken or refused for good, none is our failure."""
    ingest = Ingest(journal, 1 << 20, 16 << 20)
    codes = run(ingest, seed=7, count=20_000)
    assert {OK, INVALID_ARGUMENT} <= codes.keys()
    counts = ingest.counts()
    assert (0, 0, 0) == (ingest.inflight, counts.get("unforeseen", 0), counts.get("unwritten", 0))
    assert (codes[OK], codes[INVALID_ARGUMENT]) == (counts["requests"], counts["malformed"])


def test_mutated_http(receiver: Receiver) -> None:
    """500 damaged HTTP requests: an answer of the sender's fault or none, never of ours; then the next is served."""
    for request in http_requests(random.Random(7), 500):
        with socket.create_connection(receiver.http_address, timeout=10) as connection:
            connection.sendall(request)
            connection.shutdown(socket.SHUT_WR)
            try:
                answer = connection.recv(4096)
            except ConnectionResetError:
                answer = b""
        status = re.match(rb"HTTP/1\.1 (\d+)", answer)
        assert status is None or status[1] in (b"200", b"400", b"404", b"405", b"413", b"414", b"415", b"431"), request
    assert 200 == httpx.get(f"http://{receiver.http_address}/healthz").status_code
    assert 0 == receiver.counts().get("unforeseen", 0)
