import http.server
import os
import random
import threading
import time
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import grpc
import polars as pl
import pytest
from made_spans import make_call, make_request, make_rollout, make_span
from served import QUICK, Served, wait_for

from spanmill.errors import CollectorError, UnknownRecordError
from spanmill.instrument import record_store
from spanmill.instrument.record_store import Drained, RecordStore
from spanmill.triplets.reader import read_rollouts, read_triplets

SEED = int(os.environ.get("SPANMILL_CRASH_SEED", str(time.time_ns() % 1_000_000)))
SLOW = ("--settle", "60", "--flush-interval", "0.1")
"""Nothing is written before it is flushed."""


def _store(service: Served) -> RecordStore:
    return RecordStore(service.http_address)


def _send(service: Served, *names: str) -> None:
    service.send(make_request(*(span for name in names for span in make_rollout(name))))


def _rows(drained: Drained, table: str = "rollouts") -> pl.DataFrame:
    return pl.read_ipc_stream(drained.table(table))


def _versions(drained: Drained) -> list[tuple[Any, ...]]:
    return sorted(_rows(drained).select("rollout_id", "attempt", "revision").rows())


def _states(store: RecordStore, prefix: str = "") -> dict[str, str]:
    return {row["rollout_id"]: row["state"] for row in store.list(prefix)}


def test_a_prefix_is_drained_once(tmp_path: Path) -> None:
    """What was received is flushed and handed over as Arrow, other prefixes stay open, and nothing comes twice."""
    with Served(tmp_path / "out", *SLOW) as service:
        store = _store(service)
        _send(service, "b/t1/0", "b/t1/1", "c/t1/0")
        with store.drain("b/") as drained:
            assert [("b/t1/0", 0, 0), ("b/t1/1", 0, 0)] == _versions(drained)
            assert {"b/t1/0": "handed", "b/t1/1": "handed", "c/t1/0": "open"} == _states(store)
            read = read_triplets(tmp_path / "out").collect()
            assert read.equals(pl.DataFrame(_rows(drained, "triplets"), schema=read.schema))
            assert (2, False, []) == (_rows(drained, "episodes").height, drained.again, drained.open)
        assert {"b/t1/0": "drained", "b/t1/1": "drained", "c/t1/0": "open"} == _states(store)
        again = store.drain("b/")
        assert (None, 0) == (again.id, again.rollouts)
        assert {"c/t1/0": "open"} == _states(store, "c/")


def test_a_drain_that_was_not_acknowledged_comes_again(tmp_path: Path) -> None:
    """After kill -9 of the service the same drain comes, byte for byte, though more has finished since."""
    out = tmp_path / "out"
    with Served(out, *SLOW) as service:
        _send(service, "b/0")
        before = _store(service).drain("b/")
        table = before.table("episodes")
        service.kill()
    with Served(out, *SLOW) as service:
        store = _store(service)
        _send(service, "b/1")
        after = store.drain("b/")
        assert (before.id, True, table) == (after.id, True, after.table("episodes"))
        service.kill()
    with Served(out, *SLOW) as service:
        store = _store(service)
        store.acknowledge(before.id or "")
        assert 1 == store.acknowledge(before.id or "")
        with store.drain("b/") as drained:
            assert [("b/1", 0, 0)] == _versions(drained)
        with pytest.raises(UnknownRecordError, match="waits to be acknowledged"):
            store.table(before.id or "", "episodes")


@pytest.mark.slow
def test_kills_hand_nothing_over_twice(tmp_path: Path) -> None:
    """Whenever the service is killed, each rollout is in one drain, and a drain that comes again is the same."""
    rng = random.Random(SEED)
    print(f"SPANMILL_CRASH_SEED={SEED}")
    drains: dict[str, bytes] = {}
    sent: list[str] = []
    for round_ in range(6):
        with Served(tmp_path / "out", *QUICK) as service:
            store = _store(service)
            killer = threading.Timer(rng.uniform(0.1, 2), service.kill)
            killer.start()
            for number in range(20):
                try:
                    _send(service, f"b/{round_}/{number}")
                    sent.append(f"b/{round_}/{number}")
                    drained = store.drain("b/")
                    if drained.id is not None:
                        table = drained.table("rollouts")
                        assert drains.setdefault(drained.id, table) == table
                        if rng.random() < 0.6:
                            drained.acknowledge()
                except (CollectorError, grpc.RpcError):
                    break
            killer.cancel()
    with Served(tmp_path / "out", *QUICK) as service:
        store = _store(service)
        while (drained := store.drain("b/")).id is not None:
            assert drains.setdefault(drained.id, drained.table("rollouts")) == drained.table("rollouts")
            drained.acknowledge()
    found = [
        row for table in drains.values() for row in pl.read_ipc_stream(table).select("rollout_id", "revision").rows()
    ]
    assert sorted(set(found)) == sorted(found)
    assert set() == set(sent) - {name for name, _ in found}


def test_a_late_write_is_handed_over_as_a_revision(tmp_path: Path) -> None:
    """What comes for a drained rollout makes a revision, which is listed as such and comes with the next drain."""
    with Served(tmp_path / "out", *QUICK) as service:
        store = _store(service)
        _send(service, "b/0", "b/1")
        with store.drain("b/") as drained:
            assert [("b/0", 0, 0), ("b/1", 0, 0)] == _versions(drained)
        service.send(make_request(make_call("b/0", "late", 2)))
        wait_for(lambda: "revised" == _states(store)["b/0"])
        with store.drain("b/") as drained:
            assert [("b/0", 0, 1)] == _versions(drained)
            assert [["late"]] == _rows(drained)["flags"].to_list()


def test_a_drain_names_what_else_there_is(tmp_path: Path) -> None:
    """Rollouts that stay open, and drains of other prefixes that hold some of these, are in the answer."""
    with Served(tmp_path / "out", *SLOW) as service:
        store = _store(service)
        _send(service, "b/t1/0")
        whole = store.drain("b/")
        _send(service, "b/t2/0")
        part = store.drain("b/t1/")
        assert (None, [(whole.id, "b/", 1)]) == (part.id, [(w["id"], w["prefix"], w["rollouts"]) for w in part.waiting])
        unflushed = store.drain("b/t2", flush=False)
        assert (None, ["b/t2/0"]) == (unflushed.id, unflushed.open)


def test_a_patch_rewards_and_informs(tmp_path: Path) -> None:
    """A reward and info reach the rollout's rows, or with call ids those of its calls, as a new revision."""
    out = tmp_path / "out"
    with Served(out, *QUICK) as service:
        store = _store(service)
        _send(service, "b/0")
        wait_for(lambda: "ready" == _states(store).get("b/0"))
        call = "chatcmpl-b/0-call-0"
        store.patch("b/0", reward=0.5, info={"verifier": "v1", "seconds": 3})
        store.patch("b/0", info={"verifier": "v2"})
        store.patch("b/0", reward=0.25, info={"good": True}, call_ids=[call])
        with store.drain("b/") as drained:
            (rollout,) = _rows(drained).to_dicts()
            triplets = _rows(drained, "triplets").to_dicts()
        assert (0.5, True) == (
            rollout["reward"],
            '"info":{"verifier":"v2","seconds":3}' in _packed(rollout["metadata"]),
        )
        assert {call: 0.25, "chatcmpl-b/0-call-1": None} == {row["call_id"]: row["reward"] for row in triplets}
        assert ['{"info":{"good":true}}', "{}"] == [_packed(row["metadata"]) for row in triplets]
        (ended,) = read_rollouts(out).select("ended_at").collect()["ended_at"]
        assert ended.year == 2026


def _packed(json_text: str) -> str:
    return json_text.replace(" ", "")


def test_a_patch_of_an_open_rollout_waits_for_its_rows(tmp_path: Path) -> None:
    """An open rollout takes reward and info; calls that cannot be told yet are named as such."""
    with Served(tmp_path / "out", *SLOW) as service:
        store = _store(service)
        service.send(
            make_request(
                *make_rollout("b/0")[:-1], make_span("b/0", "x", "root", attributes={"spanmill.rollout.id": "b/0"})
            )
        )
        answer = store.patch("b/0", reward=1.0, info={"a": 1}, call_ids=["chatcmpl-b/0-call-1"])
        assert ["chatcmpl-b/0-call-1"] == answer["unverified_calls"]
        service.send(make_request(*make_rollout("b/0")[-1:]))
        with store.drain("b/0") as drained:
            assert [None, 1.0] == _rows(drained, "triplets").sort("turn")["reward"].to_list()


def test_what_is_not_known_is_said(tmp_path: Path) -> None:
    """An unknown rollout, call, attempt, drain or table is an error of its own kind, and nothing is stored."""
    with Served(tmp_path / "out", *QUICK) as service:
        store = _store(service)
        _send(service, "b/0")
        wait_for(lambda: "ready" == _states(store).get("b/0"))
        for wrong, said in (
            (
                lambda: store.patch("typo", reward=1.0),
                "rollout typo is not known: no span has named it; nothing was stored",
            ),
            (
                lambda: store.patch("b/0", reward=1.0, call_ids=["nope"]),
                "rollout b/0 has no call nope; nothing was stored",
            ),
            (lambda: store.get("typo"), "rollout typo is not known: no span has named it"),
            (lambda: store.get("b/0", attempt=3), "rollout b/0 is open: it has no rows of that attempt yet"),
            (lambda: store.acknowledge("nope"), "there never was a drain nope"),
            (lambda: store.table("nope", "episodes"), "no drain nope with a table episodes waits to be acknowledged"),
        ):
            with pytest.raises(UnknownRecordError) as caught:
                wrong()
            assert said == str(caught.value)
        assert (0.0, 2) == (sum(row["reward"] or 0 for row in store.list()), len(store.get("b/0")["triplets"]))


@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        ("/v1/records/drain", b"{}", "prefix: expected a text"),
        ("/v1/records/drain", b'{"prefix": "", "typo": 1}', "typo: unknown field"),
        ("/v1/records/drain", b'{"prefix": "", "flush": 1}', "flush: expected true or false"),
        ("/v1/records/drain", b'{"prefix": "", "timeout": -1}', "timeout: expected seconds"),
        ("/v1/records/drain", b'{"prefix": "\\ud800"}', "half of a surrogate pair"),
        ("/v1/records/patch", b"[]", "expected an object"),
        ("/v1/records/patch", b"{", "the body is no JSON"),
        ("/v1/records/patch", b'{"rollout_id": "a"}', "expected reward, info or both"),
        ("/v1/records/patch", b'{"rollout_id": "a", "info": {"x": NaN}}', "info: expected an object, without NaN"),
        ("/v1/records/patch", b'{"rollout_id": "a", "reward": 1, "call_ids": []}', "call_ids: expected a list"),
        ("/v1/records/patch", b'{"rollout_id": "a", "reward": 1, "attempt": true}', "attempt: expected a whole number"),
    ],
)
def test_what_cannot_be_meant_is_refused(served: Served, path: str, body: bytes, said: str) -> None:
    """A wrong request is answered 400 with the field that is wrong."""
    request = Request(f"http://{served.http_address}{path}", body, {"Content-Type": "application/json"})
    with pytest.raises(HTTPError) as caught:
        urlopen(request, timeout=30)
    with caught.value as error:
        assert (400, True) == (error.code, said in error.read().decode())


@pytest.fixture(scope="module", name="served")
def served_fixture(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A service that has received nothing."""
    with Served(tmp_path_factory.mktemp("records") / "out", *QUICK) as service:
        yield service


def test_an_empty_store_is_empty(served: Served) -> None:
    """Where nothing was received there is nothing to list and nothing to drain."""
    store = _store(served)
    drained = store.drain("")
    assert ([], None, [], []) == (list(store.list()), drained.id, drained.open, drained.waiting)


def test_what_is_no_collector_is_said(tmp_path: Path) -> None:
    """An address where nobody answers, and one that knows no records, are errors with the address in them."""
    with pytest.raises(CollectorError, match=r"no collector answers at http://127\.0\.0\.1:1/"):
        list(RecordStore("http://127.0.0.1:1").list())
    with http.server.HTTPServer(("127.0.0.1", 0), http.server.SimpleHTTPRequestHandler) as other:
        threading.Thread(target=other.handle_request).start()
        with pytest.raises(CollectorError, match="is not there: that is no collector") as caught:
            RecordStore(f"http://127.0.0.1:{other.server_port}").get("a")
    assert not isinstance(caught.value, UnknownRecordError)


def test_tokens_guard_the_records(tmp_path: Path) -> None:
    """Who has no token is refused, as on every other route."""
    tokens = tmp_path / "tokens"
    tokens.write_text("secret\n")
    with Served(tmp_path / "out", *QUICK, "--token-file", str(tokens)) as service:
        assert [] == list(RecordStore(service.http_address, token="secret").list())
        with pytest.raises(CollectorError, match="401"):
            list(_store(service).list())


def test_any_worker_answers_for_all(tmp_path: Path) -> None:
    """With several workers a drain finds what came to others, and whichever is asked knows what was handed over."""
    with Served(tmp_path / "out", *SLOW, "--workers", "2") as service:
        for number in range(12):
            _send(service, f"b/{number}")
        stores = [_store(service) for _ in range(6)]
        with stores[0].drain("b/") as drained:
            assert 12 == drained.rollouts
            assert [drained.id] * 3 == [store.drain("b/").id for store in stores[1:4]]
        assert [None] * 2 == [store.drain("b/").id for store in stores[4:]]


def test_many_are_listed_page_by_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages join without a gap or a repetition, also where a page ends between attempts of one rollout."""
    monkeypatch.setattr(record_store, "_PAGE", 3)
    with Served(tmp_path / "out", *SLOW) as service:
        store = _store(service)
        for number in range(4):
            for attempt in range(2):
                service.send(
                    make_request(*make_rollout(f"b/{number}", root={"spanmill.rollout.attempt": attempt})[-1:])
                )
                time.sleep(0.01)
        service.send(make_request(*make_rollout("b/1x")))
        store.drain("")
        listed = [(row["rollout_id"], row.get("attempt")) for row in store.list("b/")]
        assert listed == sorted(set(listed))
        assert {"b/0", "b/1", "b/1x", "b/2", "b/3"} == {name for name, _ in listed}
