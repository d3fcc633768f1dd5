import json
import logging
import re
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from google.rpc.error_details_pb2 import RetryInfo
from google.rpc.status_pb2 import Status
from made_spans import make_call, make_request, make_rollout, make_span
from served import FREE, QUICK, Served, wait_for

from spanmill.collector import watch
from spanmill.collector.config import ServeConfig
from spanmill.collector.journal import JournalWriter, read
from spanmill.collector.logs import logging_to_stderr
from spanmill.collector.receive import Receiver, start_receiver

TRACES = "/opentelemetry.proto.collector.trace.v1.TraceService/Export"
HEALTH = "/grpc.health.v1.Health/Check"
PROTO = {"Content-Type": "application/x-protobuf"}
BODY = make_request(make_span("t", "root"))

_grpc: Any = grpc


def figures(url: str) -> dict[str, float]:
    """What /metrics says."""
    text = httpx.get(f"{url}/metrics").text
    return {name: float(value) for name, value in re.findall(r"^(spanmill_\S+) (\S+)$", text, re.MULTILINE)}


def test_metrics_say_what_came_and_what_became_of_it(tmp_path: Path) -> None:
    """Requests by outcome, bytes, the journal's size and lag, syncs, rows and quarantine by reason."""
    bad = make_call("r", "bad", attributes={"spanmill.response.token_ids": b"\x01"})
    with Served(tmp_path / "out", *QUICK) as service:
        url = f"http://{service.http_address}"
        request = make_request(*make_rollout("r"), bad)
        service.send(request)
        assert 400 == httpx.post(f"{url}/v1/traces", content=b"\xff", headers=PROTO).status_code
        wait_for(lambda: figures(url).get('spanmill_rows_written_total{table="rollouts"}'))
        wait_for(lambda: figures(url)["spanmill_journal_lag_bytes"] == 0)
        found = figures(url)
        expected = {
            "spanmill_requests_received_total": 2,
            "spanmill_requests_accepted_total": 1,
            'spanmill_requests_rejected_total{reason="malformed"}': 1,
            'spanmill_requests_rejected_total{reason="refused"}': 0,
            "spanmill_accepted_bytes_total": len(request),
            "spanmill_spans_total": 4,
            "spanmill_journal_fsync_seconds_count": 1,
            'spanmill_rows_written_total{table="triplets"}': 2,
            'spanmill_rows_written_total{table="episodes"}': 1,
            'spanmill_quarantined_total{reason="truncated_attribute"}': 1,
            "spanmill_open_components": 0,
            "spanmill_ready": 1,
            "spanmill_refusing": 0,
            "spanmill_inflight_bytes": 0,
        }
        assert expected == {name: found.get(name) for name in expected}
        assert len(request) < found["spanmill_journal_bytes"] < len(request) + 200
        assert 0 == service.stop()


@pytest.mark.parametrize("cause", ["disk", "lag"])
def test_requests_are_refused_before_the_disk_is_full(
    tmp_path: Path, journal: JournalWriter, monkeypatch: pytest.MonkeyPatch, cause: str
) -> None:
    """UNAVAILABLE with RetryInfo and 503 with Retry-After, on gRPC and HTTP; taken again by itself with some room."""
    free = [600 << 20]
    limit = 0.0001 if cause == "lag" else 50.0
    config = ServeConfig(out=tmp_path, journal=tmp_path / "journal", grpc=FREE, http=FREE, journal_max_gib=limit)

    def free_now(folder: Path) -> int:
        return free[0]

    monkeypatch.setattr(watch, "free_bytes", free_now)
    receiver = start_receiver(config, journal)
    try:
        url = f"http://{receiver.http_address}"
        assert 200 == httpx.post(f"{url}/v1/traces", content=BODY, headers=PROTO).status_code
        if cause == "disk":
            free[0] = 500 << 20
            reason = "the disk has less than --min-free-mib 512 left"
        else:
            large = make_request(make_span("t", "large", attributes={"x": "x" * 200_000}))
            assert 200 == httpx.post(f"{url}/v1/traces", content=large, headers=PROTO).status_code
            reason = "more than --journal-max-gib 0.0001 waits to be indexed"
        wait_for(lambda: httpx.get(f"{url}/readyz").status_code == 503)
        assert f"{reason}\n" == httpx.get(f"{url}/readyz").text
        before = len(list(read(tmp_path / "journal")))
        check_refused(receiver, url, reason)
        assert before + 1 == len(list(read(tmp_path / "journal")))  # the flush
        assert 1 == figures(url)["spanmill_refusing"]
        if cause == "disk":
            free[0] = 520 << 20  # above the limit, but hardly
            receiver_looks(receiver)
            assert 503 == httpx.get(f"{url}/readyz").status_code
            free[0] = 600 << 20
            wait_for(lambda: httpx.get(f"{url}/readyz").status_code == 200)
            assert 200 == httpx.post(f"{url}/v1/traces", content=BODY, headers=PROTO).status_code
    finally:
        receiver.stop(5)


def test_a_burst_does_not_fill_the_disk(
    tmp_path: Path, journal: JournalWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is written between two looks at the disk counts at once."""

    def free_now(folder: Path) -> int:
        return (512 << 20) + 100_000

    monkeypatch.setattr(watch, "free_bytes", free_now)
    monkeypatch.setattr(watch, "_LOOK_S", 60)
    body = make_request(make_span("t", "large", attributes={"x": "x" * 40_000}))
    receiver = start_receiver(ServeConfig(out=tmp_path, grpc=FREE, http=FREE), journal)
    try:
        with httpx.Client(base_url=f"http://{receiver.http_address}", headers=PROTO) as client:
            answers = [client.post("/v1/traces", content=body).status_code for _ in range(5)]
    finally:
        receiver.stop(5)
    assert [200, 200, 200, 503, 503] == answers


def receiver_looks(receiver: Receiver) -> None:
    """Have it take its figures now."""
    receiver.watch.look()


def check_refused(receiver: Receiver, url: str, reason: str) -> None:
    """Every way in is closed, but for a flush, which makes room."""
    answer = httpx.post(f"{url}/v1/traces", content=BODY, headers=PROTO)
    assert (503, "1", f"{reason}: send it again later") == (
        answer.status_code,
        answer.headers["retry-after"],
        Status.FromString(answer.content).message,
    )
    assert 202 == httpx.post(f"{url}/v1/flush").status_code
    with _grpc.insecure_channel(str(receiver.grpc_address)) as channel:
        with pytest.raises(grpc.RpcError) as caught:
            channel.unary_unary(TRACES)(BODY, timeout=10)
        assert b"\x08\x02" == channel.unary_unary(HEALTH)(b"", timeout=10)
    failed: Any = caught.value
    trailers = dict(failed.trailing_metadata())
    assert ("UNAVAILABLE", 1) == (
        failed.code().name,
        RetryInfo.FromString(trailers["google.rpc.retryinfo-bin"]).retry_delay.seconds,
    )
    assert "grpc-status-details-bin" in trailers


def test_readiness_follows_the_indexer(tmp_path: Path, journal: JournalWriter) -> None:
    """Alive at once, ready when what is received becomes rows."""
    receiver = start_receiver(ServeConfig(out=tmp_path, grpc=FREE, http=FREE), journal)
    try:
        url = f"http://{receiver.http_address}"
        receiver.unready("the indexer has died")
        answers = [httpx.get(f"{url}/healthz"), httpx.get(f"{url}/readyz")]
        assert [(200, "ok\n"), (503, "the indexer has died\n")] == [(a.status_code, a.text) for a in answers]
        assert 200 == httpx.post(f"{url}/v1/traces", content=BODY, headers=PROTO).status_code
        receiver.unready(None)
        assert (200, "ok\n") == (httpx.get(f"{url}/readyz").status_code, httpx.get(f"{url}/readyz").text)
    finally:
        receiver.stop(5)


@pytest.mark.parametrize("form", ["text", "json"])
def test_messages_are_one_line(capsys: pytest.CaptureFixture[str], form: Any) -> None:
    """Also with a traceback in them; as JSON with time and level."""
    with logging_to_stderr(form):
        logging.getLogger("spanmill.collector.x").warning("it broke\n  at %s\n", "line 1")
        logging.getLogger("spanmill.collector.x").info("nobody needs to know")
    logging.getLogger("spanmill.collector.x").debug("nobody is told")
    (line,) = capsys.readouterr().err.splitlines()
    if form == "text":
        assert "spanmill: it broke | at line 1" == line
    else:
        found = json.loads(line)
        assert {"level": "warning", "logger": "spanmill.collector.x", "message": "it broke | at line 1"} == {
            key: value for key, value in found.items() if key != "time"
        }
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}\+00:00", found["time"])
