import json
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from dataset_rows import newest_rows, rollouts
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from indexed import Service
from made_spans import Span, make_call, make_rollout, make_span, trace_id
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.logs.v1.logs_pb2 import LogRecord

from spanmill.collector import indexer as module
from spanmill.collector.assemble import SECOND, Timing
from spanmill.collector.index import Index
from spanmill.collector.journal import Kind
from spanmill.triplets.reader import read_quarantine, read_rollouts, read_triplets
from spanmill.triplets.records import Reward


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    """A service without anything received, with the default waits."""
    service = Service(tmp_path)
    yield service
    service.close()


def test_a_rollout_is_written_once_it_has_settled(service: Service) -> None:
    """10 s after the newest span of a rollout that reported its end, and then not again."""
    service.receive(*make_rollout("r")[:-1])
    assert 0 == service.work(100)
    service.receive(make_rollout("r")[-1])
    assert [0, 0, 1, 0] == [service.work(0), service.work(9), service.work(1), service.work(1000)]
    assert [("r", 0, 0, "succeeded", "end", 2)] == rollouts(
        service.out, "rollout_id", "attempt", "revision", "status", "closed_by", "num_triplets"
    )
    assert newest_rows(service.built()) == newest_rows(service.out)


def test_rows_of_a_write_stand_in_order(service: Service) -> None:
    """One part holds all that was complete, by rollout and attempt, whatever order it came in."""
    for name in ("b", "c", "a"):
        service.receive(*make_rollout(name))
    assert 3 == service.work(10)
    assert ["a", "b", "c"] == read_rollouts(service.out).collect()["rollout_id"].to_list()
    assert 1 == len(list((service.out / "rollouts").glob("*.parquet")))


def test_a_silent_rollout_is_closed_when_idle(service: Service) -> None:
    """A rollout that never says how it ended is written after 600 s without a span; noise makes no row."""
    service.receive(make_call("t", "call"), make_span("noise", "ping"))
    assert [0, 1, 0] == [service.work(599), service.work(1), service.work(10_000)]
    assert [(trace_id("t"), "idle")] == rollouts(service.out, "rollout_id", "closed_by")


def test_one_trace_of_many_rollouts_closes_one_by_one(service: Service) -> None:
    """Rollouts that end in a trace which never falls silent are written soon after their own end."""
    service.receive(make_span("step", "root"))
    for name, later in (("a", 0), ("b", 6), ("c", 6), ("d", 6), ("e", 6)):
        service.work(later)
        identity = {"spanmill.rollout.id": name}
        service.receive(
            make_call("step", f"call-{name}", attributes=identity),
            make_span("step", f"end-{name}", "root", attributes={**identity, "spanmill.rollout.status": "succeeded"}),
        )
        service.work()
    assert ["a", "b", "c"] == [name for (name,) in rollouts(service.out, "rollout_id")]
    service.work(100)
    assert ["a", "b", "c", "d", "e"] == [name for (name,) in rollouts(service.out, "rollout_id")]
    assert [0, 0, 0, 0, 0] == [revision for (revision,) in rollouts(service.out, "revision")]


def test_what_comes_late_makes_a_revision(service: Service) -> None:
    """A span that comes after the rows were written makes revision 1: `late` on the rollout and on the new call."""
    service.receive(*make_rollout("r"))
    service.work(10)
    service.receive(make_call("r", "late", 2))
    assert 1 == service.work(10)
    assert [(1, ["late"], 3)] == rollouts(service.out, "revision", "flags", "num_triplets")
    triplets = read_triplets(service.out).select("turn", "revision", "flags").collect()
    assert [(0, 1, []), (1, 1, []), (2, 1, ["late"])] == triplets.rows()
    service.receive(make_call("r", "later", 3))
    assert 1 == service.work(10)
    triplets = read_triplets(service.out).select("turn", "revision", "flags").collect()
    assert [(0, 2, []), (1, 2, []), (2, 2, ["late"]), (3, 2, ["late"])] == triplets.rows()
    assert newest_rows(service.built()) == newest_rows(service.out)


def test_what_changes_nothing_is_not_written(service: Service) -> None:
    """A request that is sent again after the rows were written makes no revision."""
    service.receive(*make_rollout("r"))
    service.work(10)
    service.receive(*make_rollout("r"))
    assert 0 == service.work(10)
    assert [(0, [])] == rollouts(service.out, "revision", "flags")


def test_superseded_rows_are_rewritten_away(service: Service) -> None:
    """After tidying a plain glob finds the newest rows only; the replaced files are removed a minute later."""
    service.receive(*make_rollout("r"))
    service.work(10)
    service.receive(make_call("r", "late", 2))
    service.work(10)
    service.indexer.tidy()
    assert [1, 1, 1] == pl.read_parquet(service.out / "triplets" / "*.parquet")["revision"].to_list()
    assert [] != list((service.out / ".old").glob("*/*"))
    service.now_ns = (time.time_ns() // SECOND + 61) * SECOND
    service.indexer.tidy()
    assert [] == list((service.out / ".old").glob("*/*"))


def test_a_reward_revises_a_written_rollout(service: Service) -> None:
    """A reward that comes after the rows makes a revision, the newest of several counts; one before them is in them."""
    service.reward(Reward("s", 0.5), Reward("unknown", 1.0))
    service.receive(*make_rollout("r"), *make_rollout("s"))
    service.work(10)
    assert [("r", None, 0), ("s", 0.5, 0)] == rollouts(service.out, "rollout_id", "reward", "revision")
    service.reward(Reward("r", 0.25))
    service.reward(Reward("r", 1.0))
    assert 1 == service.work(1)
    assert [("r", 1.0, 1), ("s", 0.5, 0)] == rollouts(service.out, "rollout_id", "reward", "revision")
    assert [] == newest_rows(service.out)["quarantine"]
    service.receive(*make_rollout("unknown"))
    service.work(10)
    assert ["r", "s", "unknown"] == [name for (name,) in rollouts(service.out, "rollout_id")]
    assert newest_rows(service.built()) == newest_rows(service.out)


@pytest.mark.parametrize(("later_s", "expected"), [(59, []), (60, [(None,)])])
def test_a_reward_is_awaited(tmp_path: Path, later_s: int, expected: list[tuple[None]]) -> None:
    """With `await_reward` a rollout without its final reward stays open so long; one that has it does not."""
    service = Service(tmp_path, Timing(await_reward_ns=60 * SECOND))
    service.receive(*make_rollout("r"))
    service.work(later_s)
    assert expected == rollouts(service.out, "reward")
    service.reward(Reward("r", 1.0))
    service.work(1)
    assert [(1.0,)] == rollouts(service.out, "reward")
    service.close()


def test_a_flush_closes_what_came_before_it(service: Service) -> None:
    """Everything open is written with the spans that came before the flush; what came after it stays open."""
    service.receive(make_call("a", "call"), make_call("b", "call"))
    service.append(Kind.FLUSH, b"")
    service.receive(make_call("a", "after", 1), make_call("c", "call"))
    assert 2 == service.work()
    expected = sorted([(trace_id("a"), "flush", 1), (trace_id("b"), "flush", 1)])
    assert expected == rollouts(service.out, "rollout_id", "closed_by", "num_calls")
    assert 2 == service.work(flush=True)
    assert [1, 1, 2] == sorted(number for (number,) in rollouts(service.out, "num_calls"))


def make_end(trace: str, rollout_id: str) -> Span:
    """A span under the root which says that the rollout has failed."""
    reports = {"spanmill.rollout.id": rollout_id, "spanmill.rollout.status": "failed"}
    return make_span(trace, "end", "root", attributes=reports)


def test_rows_that_move_leave_a_note(service: Service) -> None:
    """A rollout known by its trace, whose spans turn out to belong to another, is revised away and names that one."""
    service.receive(make_call("t", "call"), make_span("t", "root"))
    service.work(10)
    assert [(trace_id("t"), "root")] == rollouts(service.out, "rollout_id", "closed_by")
    service.receive(
        make_span("t", "end", "root", attributes={"spanmill.rollout.id": "r", "spanmill.rollout.status": "failed"})
    )
    assert 2 == service.work(10)
    assert [("r", 1)] == rollouts(service.out, "rollout_id", "num_calls")
    last = read_last(service.out, trace_id("t"))
    assert (1, 0, ["moved"], {"moved_to": ["r"]}) == last
    assert newest_rows(service.built()) == newest_rows(service.out)
    service.indexer.tidy()
    assert [("r", 1)] == rollouts(service.out, "rollout_id", "num_calls")


def read_last(out: Path, rollout_id: str) -> tuple[int, int, list[str], Any]:
    """Revision, calls, flags and metadata of the newest row of a rollout, also of one that has moved."""
    frame = pl.read_parquet(out / "rollouts" / "*.parquet").filter(pl.col("rollout_id") == rollout_id)
    row = frame.sort("revision").row(-1, named=True)
    return row["revision"], row["num_calls"], row["flags"], json.loads(row["metadata"])


def test_rows_that_move_are_found_without_the_index(service: Service) -> None:
    """That rows have moved is also seen if the index was lost in between."""
    service.receive(make_call("t", "call"), make_span("t", "root"))
    service.work(10)
    service.receive(
        make_span("t", "end", "root", attributes={"spanmill.rollout.id": "r", "spanmill.rollout.status": "failed"})
    )
    service.restart(lose_index=True)
    assert 2 == service.work(10)
    assert [("r", 1)] == rollouts(service.out, "rollout_id", "num_calls")
    assert (1, 0, ["moved"], {"moved_to": ["r"]}) == read_last(service.out, trace_id("t"))
    service.restart(lose_index=True)
    assert 0 == service.work(1000)


def test_a_kill_between_rows_and_index_writes_nothing_twice(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that were committed before the index knew of it are found in the dataset, also with what came after."""
    service.receive(*make_rollout("r"), make_call("t", "call"), make_span("t", "root"))
    with monkeypatch.context() as patched:
        patched.setattr(Index, "looked", _killed)
        with pytest.raises(KeyboardInterrupt):
            service.work(10)
    assert 2 == len(rollouts(service.out, "rollout_id"))
    service.receive(
        make_span("t", "end", "root", attributes={"spanmill.rollout.id": "q", "spanmill.rollout.status": "failed"})
    )
    service.restart()
    assert 2 == service.work(10)  # q, and the note that the rollout of its trace has moved there
    assert [("q", 0, 1), ("r", 0, 2)] == rollouts(service.out, "rollout_id", "revision", "num_calls")
    assert newest_rows(service.built()) == newest_rows(service.out)


def test_what_was_looked_at_too_early_is_not_forgotten_by_a_restart(service: Service) -> None:
    """A rollout that had ended and not yet settled closes by its end, not by the long wait of one that never ended."""
    call, *rest = make_rollout("r")
    service.receive(*rest)
    for _ in range(2):
        assert 0 == service.work(9)
        service.receive(call)
    assert 0 == service.work(4)  # twice the settling time after the end
    service.restart()
    assert 0 == service.work()
    assert 1 == service.work(6)
    assert [("r", "end")] == rollouts(service.out, "rollout_id", "closed_by")


def _killed(*_: object) -> None:
    raise KeyboardInterrupt


def test_losing_the_index_costs_a_replay(service: Service) -> None:
    """From the journal alone the same dataset follows; rows that stand there are not written again, half or whole."""
    service.receive(*make_rollout("r")[:1])
    service.work(700)  # closed as idle
    service.receive(*make_rollout("r")[1:])
    service.reward(Reward("r", 1.0))
    service.append(Kind.FLUSH, b"")
    service.work(10)
    before = read_rollouts(service.out).collect()
    service.restart(lose_index=True)
    assert 0 == service.work(1000)
    assert before.equals(read_rollouts(service.out).collect())


def test_a_bad_span_is_quarantined_once(service: Service) -> None:
    """A span without a valid id is one row of quarantine under no rollout, however often it comes."""
    bad = make_call("r", "call")
    bad.span_id = b"short"
    for _ in range(2):
        service.receive(*make_rollout("r"), bad)
        service.work(700)
    service.restart(lose_index=True)
    service.work(700)
    assert [("bad_span_id", trace_id("r"))] == read_quarantine(service.out).select(
        "reason", "trace_id"
    ).collect().rows()
    assert newest_rows(service.built()) == newest_rows(service.out)


@pytest.mark.parametrize("trace", [b"", b"short", bytes(16), b"x" * 17, b"y" * 32])
def test_a_span_without_a_valid_trace_id_is_quarantined(service: Service, trace: bytes) -> None:
    """Whatever stands where the trace id should be, the span ends in quarantine as `build` puts it there."""
    bad = make_call("r", "call")
    bad.trace_id = trace
    service.receive(bad, *make_rollout("r"))
    service.work(700)
    assert [("bad_span_id", trace.hex())] == read_quarantine(service.out).select("reason", "trace_id").collect().rows()
    assert newest_rows(service.built()) == newest_rows(service.out)


def log_request(name: str, **attributes: str) -> bytes:
    """A log record outside any trace."""
    request = ExportLogsServiceRequest()
    pairs = [
        KeyValue(key=key.replace("__", "."), value=AnyValue(string_value=text)) for key, text in attributes.items()
    ]
    record = LogRecord(event_name=name, time_unix_nano=1_780_000_000_000_000_000, attributes=pairs)
    request.resource_logs.add().scope_logs.add().log_records.append(record)
    return request.SerializeToString()


def test_a_log_record_outside_any_trace_joins_by_its_keys(service: Service) -> None:
    """A log record without trace id that names a rollout ends it; one that names nothing makes nothing."""
    identity = {"spanmill.rollout.id": "r"}
    service.receive(make_call("t", "call", attributes=identity))
    service.append(Kind.LOGS_PROTO, log_request("done", spanmill__rollout__id="r", spanmill__rollout__status="failed"))
    service.append(Kind.LOGS_PROTO, log_request("done", spanmill__rollout__id="s", spanmill__rollout__status="failed"))
    service.append(Kind.LOGS_PROTO, log_request("hello"))
    assert 2 == service.work(10)
    expected = [("r", "failed", "end", 1), ("s", "failed", "end", 0)]
    assert expected == rollouts(service.out, "rollout_id", "status", "closed_by", "num_calls")
    assert newest_rows(service.built()) == newest_rows(service.out)


def test_damage_is_reported_once(service: Service) -> None:
    """A damaged record of the journal costs itself, is reported, and reported once."""
    service.receive(*make_rollout("a"))
    place = service.receive(*make_rollout("b"))
    service.receive(*make_rollout("c"))
    path = service.folder / "journal" / f"{place.segment:08}.journal"
    with path.open("r+b") as file:
        file.seek(place.offset + 40)
        file.write(b"\xff\xff\xff\xff")
    assert 2 == service.work(10)
    service.work(10)
    assert ["a", "c"] == [name for (name,) in rollouts(service.out, "rollout_id")]
    assert 1 == len(service.reports)
    assert service.reports[0].endswith(f"of segment {place.segment} at {place.offset} are damaged")


def test_one_component_does_not_hold_up_others(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    """What cannot be put together is reported and tried again later; all else is written meanwhile."""
    adapt: Callable[..., Any] = module.adapt

    def fails(spans: Sequence[Any], *others: Any) -> Any:
        if any(span.trace_id == trace_id("bad") for span in spans):
            raise ZeroDivisionError("as if the rules had a hole")
        return adapt(spans, *others)

    service.receive(*make_rollout("bad"), *make_rollout("good"))
    with monkeypatch.context() as patched:
        patched.setattr(module, "adapt", fails)
        assert 1 == service.work(10)
    assert ["good"] == [name for (name,) in rollouts(service.out, "rollout_id")]
    assert 1 == len(service.reports)
    assert trace_id("bad") in service.reports[0]
    assert 1 == service.work(600)
    assert ["bad", "good"] == [name for (name,) in rollouts(service.out, "rollout_id")]


def test_many_components_are_put_together_in_batches(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    """More than fits into one batch is written in several parts, nothing is left out."""
    monkeypatch.setattr(module, "LOAD_BYTES", 2000)
    for number in range(10):
        service.receive(*make_rollout(f"r{number}"))
    assert 10 == service.work(10)
    assert 1 < len(list((service.out / "rollouts").glob("*.parquet"))) < 10
    assert newest_rows(service.built()) == newest_rows(service.out)


def test_while_behind_time_is_that_of_the_journal(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests that wait in the journal are not taken for silence: no rollout is closed while its spans wait there."""
    service.work()
    monkeypatch.setattr(module, "INDEX_BYTES", 1)
    service.receive(make_call("t", "call-0"))
    service.now_ns += 500 * SECOND
    service.receive(make_call("t", "call-1", 1))
    service.now_ns += 500 * SECOND
    service.indexer.step()
    assert (0, True) == (service.indexer.look(), service.indexer.behind)
    assert 0 == service.work(99)
    assert 1 == service.work(1)
    assert [(2, 0)] == rollouts(service.out, "num_calls", "revision")


SPANS = [
    *make_rollout("a", 3),
    *make_rollout("b", 1),
    make_span("t", "root"),
    make_call("t", "call", attributes={"gen_ai.response.id": "shared"}),
    make_call("engine", "call", parent="", attributes={"gen_ai.response.id": "shared", "spanmill.capture": "engine"}),
    make_call("u", "call", attributes={"spanmill.rollout.id": "a", "spanmill.rollout.attempt": 1}),
    make_span("noise", "ping"),
]
ACTIONS = st.one_of(
    st.integers(0, len(SPANS) - 1),
    st.sampled_from(["flush", "restart", "lose index", "reward", "tidy", 5.0, 20.0, 700.0, -30.0, -5000.0]),
)


@settings(max_examples=20, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.lists(ACTIONS, max_size=25),
    st.permutations(range(len(SPANS))),
    st.lists(st.integers(0, 2), min_size=1, max_size=40),
)
def test_whatever_happens_the_rows_are_those_of_build(
    tmp_path_factory: pytest.TempPathFactory, actions: list[int | float | str], rest: list[int], workers: list[int]
) -> None:
    """After pauses, clocks put back, duplicates, flushes, kills and losses of the index the newest rows are `build`'s,
    whichever worker received what.
    """
    service = Service(tmp_path_factory.mktemp("service"))
    for number, (action, worker) in enumerate(zip([*actions, *rest], cycle(workers), strict=False)):
        match action:
            case int():
                service.receive(SPANS[action], worker=worker)
            case float():
                service.work(action)
            case "reward":
                service.reward(Reward("a", float(number)), worker=worker)
            case "flush":
                service.append(Kind.FLUSH, b"", worker)
            case "tidy":
                service.indexer.tidy()
            case _:
                service.restart(lose_index=action == "lose index")
    service.work(flush=True)
    assert newest_rows(service.built()) == newest_rows(service.out)
    assert 0 == service.work(10_000)
    service.close()


def test_ids_that_look_like_paths_are_ids(service: Service) -> None:
    """A rollout id names no file, whatever it is made of."""
    names = ["../../../tmp/r", "/etc/r", "a\x00b", "C:\\r", "..", "x" * 5000]
    for number, name in enumerate(names):
        service.receive(*make_rollout(f"t{number}", root={"spanmill.rollout.id": name}))
    before = sorted(service.folder.rglob("*"))
    assert len(names) == service.work(10)
    assert sorted(names) == sorted(name for (name,) in rollouts(service.out, "rollout_id"))
    made = {path.relative_to(service.folder).as_posix() for path in set(service.folder.rglob("*")) - set(before)}
    assert {
        f"out/{table}/part-00000001.parquet" for table in ("rollouts", "triplets", "episodes", "quarantine")
    } == made


def test_messages_hold_nothing_of_a_span(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the rules choke, the place is told and not what they choked on; other rollouts are written."""

    def choke(spans: Sequence[Span], *_: object) -> None:
        raise KeyError(spans)

    service.receive(*make_rollout("r"))
    with monkeypatch.context() as patch:
        patch.setattr(module, "adapt", choke)
        assert 0 == service.work(10)
    (report,) = service.reports
    assert f"the spans of {trace_id('r')} could not be put together, later tried again: KeyError" in report
    assert "chatcmpl" not in report
    assert 1 == service.work(1000)
