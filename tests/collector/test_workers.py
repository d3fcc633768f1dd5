"""`serve --workers N`: several receivers, one journal in parts, one dataset."""

import os
import random
import re
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import grpc
import httpx
import pytest
from dataset_rows import newest_rows, rollouts
from indexed import Service
from made_spans import make_call, make_request, make_rollout
from served import EXPORT, QUICK, Served, alive, wait_for

from spanmill.collector import journal
from spanmill.collector.assemble import SECOND
from spanmill.collector.build import build
from spanmill.collector.config import BuildConfig
from spanmill.collector.journal import Entry, JournalWriter, Kind, Position, read_all, seal
from spanmill.collector.retention import Keep
from spanmill.triplets.reader import read_triplets
from spanmill.triplets.records import Reward

T = TypeVar("T")


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    """A journal with a segment for each request, and its indexer."""
    service = Service(tmp_path, segment_bytes=1)
    yield service
    service.close()


# The journal in parts


def bodies(entries: Iterator[Entry]) -> list[bytes]:
    """Of journal records."""
    return [entry.body for entry in entries]


def test_all_parts_are_read_in_the_order_of_receiving(tmp_path: Path) -> None:
    """Each worker's records from its own place on, the earliest first; a worker's own order stands."""
    with JournalWriter(tmp_path) as one, JournalWriter(tmp_path, worker=12) as other:
        one.append(Kind.FLUSH, b"b", 20)
        place = other.append(Kind.FLUSH, b"a", 10)
        other.append(Kind.FLUSH, b"e", 50)
        other.append(Kind.FLUSH, b"f", 15)  # its clock was put back
        one.append(Kind.FLUSH, b"c", 30)
    assert Position(1_200_000_001, place.offset) == place
    assert [b"a", b"b", b"c", b"e", b"f"] == bodies(read_all(tmp_path, {}))
    assert [b"a", b"e", b"f"] == bodies(read_all(tmp_path, {0: Position(1, 10_000)}))
    assert [0, 12] == journal.workers(tmp_path)


def test_each_part_has_one_writer(tmp_path: Path) -> None:
    """Another writer of a part waits for the one that has it to go, if it may, and goes on with the next number."""
    with JournalWriter(tmp_path, worker=3):
        with pytest.raises(journal.JournalError, match=rf"written by another spanmill \(process {os.getpid()}\)"):
            JournalWriter(tmp_path, worker=3, wait_s=0.1)
        JournalWriter(tmp_path, worker=2).close()
    with JournalWriter(tmp_path, worker=3) as writer:
        assert 300_000_002 == writer.append(Kind.FLUSH, b"", 0).segment


def test_a_flush_closes_what_any_worker_had_received(service: Service) -> None:
    """What another worker acknowledged before is in the rows, what comes to it later stays open."""
    service.receive(make_call("t", "call-0"), worker=1)
    service.now_ns += 1
    service.append(Kind.FLUSH, b"", 0)
    service.now_ns += 1
    service.receive(make_call("u", "call-1"), worker=1)
    assert 1 == service.work()
    assert [("flush", 1)] == rollouts(service.out, "closed_by", "num_calls")


def test_a_flush_waits_for_what_was_written_while_it_was_found(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A record of another worker that came between the reading of its part and the flush is closed by it as well."""
    real, calls = journal.read_all, list[bool]()

    def ended_early(*args: object, **options: object) -> Iterator[Entry]:
        calls.append(True)
        for entry in real(*args, **options):  # pyright: ignore[reportArgumentType]
            if len(calls) > 1 or journal.worker_of(entry.position.segment) == 0:
                yield entry

    service.receive(make_call("b", "call"), worker=1)
    service.now_ns += 1
    service.append(Kind.FLUSH, b"", 0)
    monkeypatch.setattr(journal, "read_all", ended_early)
    assert 1 == service.work()
    assert [("flush", 1)] == rollouts(service.out, "closed_by", "num_calls")


def test_of_two_rewards_the_one_received_last_counts(service: Service) -> None:
    """Whichever worker received it, and whichever part of the journal is read first."""
    for span in make_rollout("r"):
        service.receive(span)
    service.now_ns += SECOND
    late = service.now_ns + SECOND
    service.reward(Reward("r", 0.25, name="reward"), worker=1)
    service.work(10)
    service.now_ns = late - 2 * SECOND
    service.reward(Reward("r", 0.75, name="reward"), worker=2)
    service.now_ns = late
    service.work(10)
    assert [(0.25,)] == rollouts(service.out, "reward")
    assert newest_rows(service.built()) == newest_rows(service.out)
    service.restart(lose_index=True)
    service.work(10)
    assert [(0.25,)] == rollouts(service.out, "reward")


def test_retention_covers_every_part(service: Service) -> None:
    """Also that of a worker which no longer is, once it is sealed; what comes late for what has gone is set aside."""
    folder = service.folder / "journal"
    for name, number in (("a", 0), ("b", 1)):
        for span in make_rollout(name):
            service.receive(span, worker=number)
    service.work(10)
    service.keep = Keep(max_bytes=0)
    service.restart()
    service.work()
    service.indexer.retire()
    assert [3, 100_000_003] == journal.segments(folder)  # the newest of each
    service.close_part(1)
    seal(folder, 1)
    seal(folder, 1)
    service.receive(*make_rollout("c"))
    service.work(10)
    service.indexer.retire()
    assert [4, 100_000_004] == journal.segments(folder)
    before = newest_rows(service.out)
    for lose_index in (False, True):
        service.restart(lose_index=lose_index)
        service.receive(make_call("b", "late", 3), worker=2)
        service.work(700)
        assert [("a", 0), ("b", 0), ("c", 0)] == rollouts(service.out, "rollout_id", "revision")
        assert before["triplets"] == newest_rows(service.out)["triplets"]
        assert ["expired"] == [row["reason"] for row in newest_rows(service.out)["quarantine"]]


# The processes


def connected(service: Served, use: Callable[[httpx.Client], T], count: int = 12) -> list[T]:
    """What `use` gives over so many connections, each of which comes to one worker or another."""
    found: list[T] = []
    for _ in range(count):
        with httpx.Client(base_url=f"http://{service.http_address}") as client:
            found.append(use(client))
    return found


def figure(text: str, name: str) -> str:
    """One of /metrics."""
    return re.findall(rf"^spanmill_{name} (\S+)$", text, re.MULTILINE)[0]


def parts(out: Path) -> list[int]:
    """The workers that have received something."""
    return sorted({journal.worker_of(entry.position.segment) for entry in read_all(out / ".journal", {})})


def send_all(service: Served, count: int = 16) -> None:
    """A span at a time over as many gRPC connections, the spans of a rollout to any worker."""
    for number in range(count):
        for span in make_rollout(f"r{number}"):
            service.send(make_request(span))


@pytest.mark.slow
def test_many_workers_make_one_dataset(tmp_path: Path) -> None:
    """The rows are those of one worker, and a start with fewer or more workers goes on with the same journal."""
    for name, counts in (("one", [1]), ("several", [3, 2])):
        out = tmp_path / name
        for run, count in enumerate(counts):
            with Served(out, *QUICK, "--workers", str(count)) as service:
                assert (0 if count == 1 else count) == len(service.workers())
                if run == 0:
                    send_all(service)
                wait_for(lambda out=out: len(rollouts(out, "rollout_id")) == 16)
                assert 0 == service.stop()
                assert "" == service.errors.read_text()
    assert len(parts(tmp_path / "several")) > 1
    assert newest_rows(tmp_path / "one") == newest_rows(tmp_path / "several")
    build([tmp_path / "several" / ".journal"], BuildConfig(out=tmp_path / "built"))
    assert newest_rows(tmp_path / "one") == newest_rows(tmp_path / "built")


@pytest.mark.slow
def test_any_worker_answers_for_all(tmp_path: Path) -> None:
    """Figures are sums, probes say the same, and a flush or a reward may come to any of them."""
    out = tmp_path / "out"
    tokens = tmp_path / "tokens"
    tokens.write_text("one\n")
    with Served(out, *QUICK, "--workers", "2", "--idle-timeout", "1h", "--token-file", str(tokens)) as service:
        allowed = {"Authorization": "Bearer one"}
        body = make_request(make_call("t", "call"))
        typed = {"Content-Type": "application/x-protobuf", **allowed}
        answers = connected(service, lambda c: c.post("/v1/traces", content=body, headers=typed).status_code)
        assert [200] * 12 == answers
        assert [0, 1] == parts(out)
        texts = connected(service, lambda c: c.get("/metrics", headers=allowed).text)
        assert {"12.0"} == {figure(text, "requests_accepted_total") for text in texts}
        assert {"12.0"} == {figure(text, "journal_fsync_seconds_count") for text in texts}
        assert ["ok\n"] * 12 == connected(service, lambda c: c.get("/readyz").text)
        assert 202 == connected(service, lambda c: c.post("/v1/flush", headers=allowed).status_code, 1)[0]
        assert [("flush",)] == wait_for(lambda: rollouts(out, "closed_by"))
        reward = {"rollout_id": rollouts(out, "rollout_id")[0][0]}
        for value in range(6):
            given = {**reward, "value": value}
            connected(service, lambda c, given=given: c.post("/v1/rewards", json=given, headers=allowed), 1)
        connected(service, lambda c: c.post("/v1/flush", headers=allowed), 1)
        wait_for(lambda: rollouts(out, "reward") == [(5.0,)])
        tokens.write_text("two\n")
        wait_for(lambda: set(connected(service, lambda c: c.get("/metrics", headers=allowed).status_code)) == {401})
        assert 0 == service.stop()
    said = service.errors.read_text().splitlines()
    assert {f"spanmill: worker {n}: --token-file {tokens} has changed: 1 tokens count now" for n in (0, 1)} == set(said)


@pytest.mark.slow
def test_readiness_reaches_every_worker(tmp_path: Path) -> None:
    """While the indexer is away all of them say so, also one that was started meanwhile; then none does."""
    out = tmp_path / "out"
    with Served(out, *QUICK, "--workers", "2") as service:
        for _ in range(4):  # then it stays away for a while
            pid = service.indexer()
            os.kill(pid, signal.SIGKILL)
            wait_for(lambda pid=pid: not alive(pid))
        wait_for(lambda: set(connected(service, lambda c: c.get("/readyz").text)) == {"the indexer has died\n"})
        wait_for(lambda: set(connected(service, lambda c: c.get("/readyz").text)) == {"ok\n"})
        assert 0 == service.stop()
    assert 4 == service.errors.read_text().count("the indexer has died (exit code -9)")


@pytest.mark.slow
def test_a_dead_worker_is_started_again(tmp_path: Path) -> None:
    """The others go on receiving, its figures stand, and what it had acknowledged becomes rows."""
    out = tmp_path / "out"
    with Served(out, *QUICK, "--workers", "2") as service:
        send_all(service, 4)
        os.kill(service.workers()[0], signal.SIGKILL)
        wait_for(lambda: len(service.workers()) == 2)
        time.sleep(1)
        send_all(service)
        text = httpx.get(f"http://{service.http_address}/metrics").text
        assert "60.0" == figure(text, "requests_accepted_total")
        wait_for(lambda: len(rollouts(out, "rollout_id")) == 16)
        assert 0 == service.stop()
    said = "spanmill: worker 0 has died (exit code -9); it starts again in 0.5 s; the others go on\n"
    assert said == service.errors.read_text()


@pytest.mark.slow
def test_workers_go_when_their_service_is_gone(tmp_path: Path) -> None:
    """After kill -9 of the service they end by themselves, and a new service starts at once, with one worker too."""
    out = tmp_path / "out"
    for count in ("2", "1", "2"):
        with Served(out, *QUICK, "--workers", count) as service:
            send_all(service, 2)
            pids = [*service.workers(), service.indexer()]
            service.kill()
            wait_for(lambda pids=pids: not any(map(alive, pids)))
    with Served(out, *QUICK) as service:
        wait_for(lambda: len(rollouts(out, "rollout_id")) == 2)
        assert 0 == service.stop()


@pytest.mark.slow
def test_a_port_of_others_is_not_shared(tmp_path: Path) -> None:
    """A second service with several workers does not take half of the requests of a first."""
    with Served(tmp_path / "one", "--workers", "2") as first:
        second = Served(tmp_path / "two", "--workers", "2", "--http", first.http_address)
        with second:
            assert (1, "") == (second.process.wait(30), second.ready)
        expected = f"spanmill: --http {first.http_address} cannot be listened on: Address already in use\n"
        assert expected == second.errors.read_text()


@pytest.mark.slow
def test_kills_of_workers_lose_nothing(tmp_path: Path) -> None:
    """With kill -9 of workers, indexer and service under load, every acknowledged call is there, once."""
    rng = random.Random(int(os.environ.get("SPANMILL_CRASH_SEED", str(time.time_ns() % 1_000_000))))
    out, acknowledged = tmp_path / "out", set[str]()

    def client(address: str, name: str) -> None:
        # Its own connection for each request: the next may come to another worker.
        for number in range(1000):
            spans = make_rollout(f"{name}-{number}")
            with grpc.insecure_channel(address, [("grpc.use_local_subchannel_pool", 1)]) as channel:
                export: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(EXPORT)
                try:
                    for span in spans:
                        export(make_request(span), timeout=10)
                        acknowledged.update(p.value.string_value for p in span.attributes if p.key.endswith("e.id"))
                except grpc.RpcError:
                    if done:
                        return

    for crash in range(3):
        done = list[bool]()
        with Served(out, *QUICK, "--workers", "2") as service, ThreadPoolExecutor(3) as threads:
            running = [threads.submit(client, service.address, f"{crash}-{number}") for number in range(3)]
            for _ in range(4):
                time.sleep(rng.uniform(0.2, 0.8))
                os.kill(rng.choice([*service.workers(), service.indexer()]), signal.SIGKILL)
            done.append(True)
            service.kill()
            for one in running:
                one.result()
    with Served(out, *QUICK, "--workers", "2", "--flush-on-exit") as service:
        assert 0 == service.stop()
    found = Counter(read_triplets(out).collect()["call_id"].to_list())
    assert acknowledged
    assert [] == sorted(acknowledged - found.keys())
    assert [] == [call for call, times in found.items() if times > 1]
    build([out / ".journal"], BuildConfig(out=tmp_path / "built"))
    assert newest_rows(tmp_path / "built") == newest_rows(out)


@pytest.mark.slow
def test_a_worker_that_cannot_start_stops_the_start(tmp_path: Path) -> None:
    """With its reason, in one line; nothing stays behind."""
    (tmp_path / "out" / ".journal" / "writer-1.lock").mkdir(parents=True)
    with Served(tmp_path / "out", "--workers", "2") as service:
        assert (1, "") == (service.process.wait(30), service.ready)
    expected = f"spanmill: journal {tmp_path}/out/.journal cannot be written: Is a directory\n"
    assert expected == service.errors.read_text()
    (tmp_path / "out" / ".journal" / "writer-1.lock").rmdir()
    with Served(tmp_path / "out", "--workers", "2") as service:
        assert 0 == service.stop()


@pytest.mark.slow
def test_a_stop_does_not_wait_for_a_worker_that_hangs(tmp_path: Path) -> None:
    """After --drain-timeout it is ended; what it had acknowledged is there at the next start."""
    out = tmp_path / "out"
    with Served(out, *QUICK, "--workers", "2", "--drain-timeout", "2") as service:
        send_all(service, 3)
        os.kill(service.workers()[1], signal.SIGSTOP)
        begun = time.monotonic()
        assert 0 == service.stop()
        assert time.monotonic() - begun < 20
    assert "the time to drain is over; what it has acknowledged is in the journal" in service.errors.read_text()
    with Served(out, *QUICK, "--workers", "2") as service:
        wait_for(lambda: len(rollouts(out, "rollout_id")) == 3)
        assert 0 == service.stop()
