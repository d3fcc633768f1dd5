from collections.abc import Iterator
from pathlib import Path

import pytest
from dataset_rows import newest_rows, rollouts
from indexed import DEFAULT, Service
from made_spans import make_call, make_rollout, make_span, span_id, trace_id

from spanmill.adapters import Options
from spanmill.collector import build, journal
from spanmill.collector.assemble import SECOND
from spanmill.collector.expired import LIST_NAME
from spanmill.collector.index_file import INDEX_NAME, unknown_rollouts
from spanmill.collector.late import rewarded
from spanmill.collector.retention import Keep
from spanmill.errors import JournalError
from spanmill.triplets.from_tables import rollout_from_tables
from spanmill.triplets.reader import read_episodes, read_quarantine, read_triplets
from spanmill.triplets.records import Reward
from spanmill.triplets.table import rows_to_tables
from spanmill.triplets.writer import DatasetWriter

DAY = 86_400
NOTHING = Keep(max_bytes=0)
WEEK = Keep(max_age_ns=7 * DAY * SECOND)


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    """A service whose journal has a segment for each request, and keeps everything at first."""
    service = Service(tmp_path, segment_bytes=1)
    yield service
    service.close()


@pytest.fixture
def patient_service(tmp_path: Path) -> Iterator[Service]:
    """The same, which waits 100 days for the end of a rollout."""
    service = Service(tmp_path, DEFAULT._replace(max_open_ns=100 * DAY * SECOND), segment_bytes=1)
    yield service
    service.close()


def segments(service: Service) -> list[int]:
    """The segments that are there."""
    return journal.segments(service.folder / "journal")


def keeping(service: Service, keep: Keep, *, lose_index: bool = False) -> None:
    """Start the indexer again with another rule, and have it catch up."""
    service.keep = keep
    service.restart(lose_index=lose_index)
    service.work()


def written(service: Service, *names: str) -> None:
    """Rollouts that are received, each in requests of their own, and written."""
    for name in names:
        for span in make_rollout(name):
            service.receive(span)
    service.work(10)


def set_aside(service: Service) -> list[tuple[str, str, str | None]]:
    """(reason, span or reward, rollout) of everything in quarantine."""
    rows = read_quarantine(service.out).collect().sort("reason", "span_id", "span")
    return list(rows.select("reason", "span_id", "rollout_id").iter_rows())


def test_by_size_the_oldest_goes_first(service: Service) -> None:
    """Until the journal is small enough; the rows stay, and what is left can still be revised."""
    written(service, "a", "b")
    before, size = newest_rows(service.out), (service.folder / "journal" / "00000002.journal").stat().st_size
    keeping(service, Keep(max_bytes=4 * size))
    assert 0 < service.indexer.retire()
    assert segments(service) == list(range(min(segments(service)), 7))
    assert 4 * size >= sum(
        journal.segment_path(service.folder / "journal", n).stat().st_size for n in segments(service)
    )
    assert 0 == service.work(1000)
    assert before == newest_rows(service.out)
    service.receive(make_call("b", "late", 2))
    assert 1 == service.work(1000)
    assert [("a", 0), ("b", 1)] == rollouts(service.out, "rollout_id", "revision")


def test_by_size_nothing_goes_that_is_not_written(service: Service) -> None:
    """An open rollout holds the segments with its spans, whatever the limit, and no others."""
    service.receive(make_call("open", "call"))
    written(service, "a")
    service.receive(make_span("noise", "ping"))
    service.work()
    keeping(service, NOTHING)
    service.indexer.retire()
    assert [1, 5] == segments(service)
    assert [("a",)] == rollouts(service.out, "rollout_id")
    assert 1 == service.work(600)
    service.receive(make_span("noise", "pong"))
    service.work()
    service.indexer.retire()
    assert [5, 6] == segments(service)
    assert [(trace_id("open"),), ("a",)] == rollouts(service.out, "rollout_id")


def test_a_low_disk_counts_as_too_much(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    """The journal gives way before requests are refused."""
    written(service, "a")
    service.receive(make_span("noise", "ping"))

    def free(folder: Path) -> int:
        return 1000

    monkeypatch.setattr("spanmill.collector.retention.free_bytes", free)
    keeping(service, Keep(min_free_bytes=999))
    assert 0 == service.indexer.retire()
    keeping(service, Keep(min_free_bytes=1001))
    assert 1 == service.indexer.retire()


def test_by_age_what_is_open_is_forced_out(patient_service: Service) -> None:
    """A rollout that waits for an end that never comes is written as it is, and then its spans go."""
    service = patient_service
    announced = {"spanmill.rollout.id": "r", "spanmill.rollout.started": True}
    service.receive(make_span("r", "start", "root", attributes=announced), make_call("r", "call"))
    service.reward(Reward("nobody", 1.0))
    service.receive(make_span("noise", "ping"))
    assert [0, 0] == [service.work(DAY), service.work(DAY)]
    keeping(service, WEEK)
    assert 0 == service.indexer.retire()
    service.work(5.5 * DAY)
    assert 0 == service.indexer.retire()
    assert 1 == service.work()
    assert 2 == service.indexer.retire()
    assert [("r", "flush", None)] == rollouts(service.out, "rollout_id", "closed_by", "reward")
    assert [("unknown_rollout", "", "nobody")] == set_aside(service)


def expire(service: Service, *names: str) -> None:
    """Rollouts that were written and whose spans are gone."""
    written(service, *names)
    service.receive(make_span("noise", "ping"))
    service.work(1000)
    keeping(service, NOTHING)
    service.indexer.retire()
    assert 1 == len(segments(service))


@pytest.mark.parametrize("lose_index", [False, True], ids=["", "the index is lost"])
def test_a_span_that_comes_too_late_is_set_aside(service: Service, lose_index: bool) -> None:
    """With reason `expired`, by its trace or by its rollout; no partial revision takes the place of the whole rows."""
    expire(service, "a", "b")
    before = newest_rows(service.out)
    if lose_index:
        keeping(service, Keep(), lose_index=True)
    service.receive(make_call("a", "late", 2))
    service.receive(make_call("elsewhere", "late", 2, "", {"spanmill.rollout.id": "b"}))
    for _ in range(2):
        assert 0 == service.work(1000)
        assert [
            ("expired", span_id("a", "late"), None),
            ("expired", span_id("elsewhere", "late"), "b"),
        ] == sorted(set_aside(service), key=lambda row: row[2] or "")
        after = newest_rows(service.out)
        assert {**before, "quarantine": after["quarantine"]} == after
        keeping(service, Keep(), lose_index=lose_index)


def test_a_new_attempt_of_an_expired_rollout_is_a_rollout(service: Service) -> None:
    """What came before it is gone; it is whole."""
    expire(service, "a")
    again = make_rollout("again", root={"spanmill.rollout.id": "a", "spanmill.rollout.attempt": 1})
    service.receive(*again)
    assert 1 == service.work(10)
    assert [("a", 0, 0, 2), ("a", 1, 0, 2)] == rollouts(service.out, "rollout_id", "attempt", "revision", "num_calls")
    assert [] == set_aside(service)


@pytest.mark.parametrize("lose_index", [False, True], ids=["", "the index is lost"])
def test_a_component_that_is_gone_in_part_is_gone(service: Service, lose_index: bool) -> None:
    """A rollout of which some spans are still in the journal is not made anew from these."""
    spans = make_rollout("r", calls=4)
    for span in spans:
        service.receive(span)
    service.work(10)
    before = newest_rows(service.out)
    total = sum(journal.segment_path(service.folder / "journal", n).stat().st_size for n in segments(service))
    keeping(service, Keep(max_bytes=total - 1))
    assert 1 == service.indexer.retire()
    keeping(service, Keep(), lose_index=lose_index)
    service.indexer.look(flush=True)
    assert 0 == service.work(100_000)
    assert before == newest_rows(service.out)


@pytest.mark.parametrize("lose_index", [False, True], ids=["", "the index is lost"])
def test_a_reward_revises_the_rows_of_an_expired_rollout(service: Service, lose_index: bool) -> None:
    """The final one and those of calls, as if its spans were there; one that cannot be taken is set aside."""
    expire(service, "a", "b")
    if lose_index:
        keeping(service, Keep(), lose_index=True)
    call = "chatcmpl-a-call-1"
    service.reward(Reward("a", 0.25), Reward("a", 0.5, call_id=call), Reward("a", 7.0, name="metric"))
    service.reward(Reward("a", 0.75, attempt=0), Reward("a", 1.0, attempt=3), Reward("a", 1.0, call_id="none"))
    assert 1 == service.work()
    assert [("a", 1, 0.75), ("b", 0, None)] == rollouts(service.out, "rollout_id", "revision", "reward")
    steps = read_triplets(service.out).sort("rollout_id", "turn").collect()["reward"].to_list()
    episodes = read_episodes(service.out).sort("rollout_id").collect().select("reward", "step_rewards").rows()
    assert ([None, 0.5, None, None], [(0.75, [None, 0.5]), (None, [None, None])]) == (steps, episodes)
    assert [("unknown_call", "", "a")] == set_aside(service)
    keeping(service, Keep(), lose_index=lose_index)
    assert 0 == service.work(1000)
    assert [("a", 1, 0.75), ("b", 0, None)] == rollouts(service.out, "rollout_id", "revision", "reward")


@pytest.mark.parametrize("lose_index", [False, True], ids=["", "the index is lost"])
def test_a_kill_in_the_middle_of_removing(service: Service, monkeypatch: pytest.MonkeyPatch, lose_index: bool) -> None:
    """The list is on disk first, so the next start neither forgets what is gone nor revises by what is left."""
    written(service, "a", "b")
    before = newest_rows(service.out)
    service.receive(make_span("noise", "ping"))
    keeping(service, NOTHING)
    for step in ("expire", "drop_segment"):
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(f"spanmill.collector.index.Index.{step}", interrupt)
            service.indexer.retire()
        keeping(service, NOTHING, lose_index=lose_index)
        assert 0 == service.work(1000, flush=True)
        assert before == newest_rows(service.out)
    service.indexer.retire()
    assert 1 == len(segments(service))
    assert before == newest_rows(service.out)


def interrupt(*_: object) -> None:
    """A kill."""
    raise KeyboardInterrupt


def test_a_torn_list_is_cut_and_a_damaged_one_stops_the_start(service: Service) -> None:
    """A last line without an end was followed by no removal; anything else may hide what was."""
    expire(service, "a")
    path = service.folder / "journal" / LIST_NAME
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"upto":[1,')
    keeping(service, NOTHING, lose_index=True)
    written(service, "b")
    service.receive(make_span("noise", "pong"))
    service.work(1000)
    service.indexer.retire()
    assert path.read_bytes().startswith(whole + b'{"upto":[')
    path.write_bytes(b"x" + path.read_bytes())
    with pytest.raises(JournalError, match=r"expired\.jsonl is damaged"):
        service.restart(lose_index=True)
    path.write_bytes(path.read_bytes()[1:])
    service.restart()


def test_a_reward_for_an_expired_rollout_does_not_wait(service: Service) -> None:
    """Its sender is not told that the rollout is unknown."""
    expire(service, "a")
    assert ["b"] == unknown_rollouts(service.folder / "journal" / INDEX_NAME, ["a", "b"])


@pytest.mark.parametrize("partition_bytes", [1, 1 << 20])
def test_build_makes_no_rollout_of_what_is_left(
    partition_bytes: int, service: Service, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Spans whose companions have left the journal are set aside; a later attempt and other rollouts are whole."""
    monkeypatch.setattr(build, "PARTITION_BYTES", partition_bytes)
    written(service, "a", "b")
    size = sum(journal.segment_path(service.folder / "journal", number).stat().st_size for number in segments(service))
    keeping(service, Keep(max_bytes=size - 1))
    assert 1 == service.indexer.retire()
    for attempt in (0, 1):
        own = {"spanmill.rollout.id": "a", "spanmill.rollout.attempt": attempt}
        service.receive(make_call(f"later-{attempt}", "call", attributes=own))
    built = service.built()
    said = f"spanmill: {service.folder}/journal no longer holds all spans of 1 rollouts, which were written"
    assert said in capsys.readouterr().err
    assert [("a", 1, 1), ("b", 0, 2)] == rollouts(built, "rollout_id", "attempt", "num_calls")
    rows = read_quarantine(built).select("reason", "rollout_id", "span_id").collect().rows()
    left = {("a", span_id("a", "root")), (None, span_id("a", "call-1")), ("a", span_id("later-0", "call"))}
    assert {("expired", *one) for one in left} == set(rows)


def test_rows_become_records_and_the_same_rows(service: Service) -> None:
    """What is read from a dataset and written again is the same, value by value."""
    bad = {"spanmill.response.token_ids": b"\x01"}
    service.receive(*make_rollout("r"), make_call("r", "bad", attributes=bad), make_span("r", "deep", "root"))
    service.reward(Reward("r", 1.0), Reward("r", 0.5, call_id="chatcmpl-r-call-0"))
    service.work(10)
    service.indexer.close()
    with DatasetWriter(service.out) as dataset:
        rows = dataset.read_rows([("r", 0)])["r", 0]
    service.start()
    rollout = rollout_from_tables(rows)
    made = rows_to_tables([rollout])
    assert [1, 2, 1, 1] == [rows[name].num_rows for name in ("rollouts", "triplets", "episodes", "quarantine")]
    for name, table in rows.items():
        assert table.replace_schema_metadata().combine_chunks() == made[name].replace_schema_metadata().combine_chunks()
    same, refused = rewarded(
        rollout, [Reward("r", 1.0), Reward("r", 0.5, call_id="chatcmpl-r-call-0")], Options().counts
    )
    assert ([], 1.0, 2) == (refused, same.reward, len(same.rewards))
