import gzip
import json
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from dataset_rows import Rows, newest_rows, rollouts
from hypothesis import given, settings
from hypothesis import strategies as st
from made_spans import Span, make_call, make_request, make_rollout, make_span, trace_id
from served import SPANMILL, wait_for

from spanmill.cli import main
from spanmill.collector import build as module
from spanmill.collector import rewards
from spanmill.collector.build import build
from spanmill.collector.config import BuildConfig
from spanmill.collector.journal import JournalWriter, Kind
from spanmill.errors import DatasetError, InputError
from spanmill.triplets.reader import read_episodes, read_quarantine, read_rollouts, read_triplets
from spanmill.triplets.records import Reward

BAD = make_call("a", "bad")
BAD.span_id = b"short"

SPANS = [
    *make_rollout("a", 3),
    *make_rollout("b", 1),
    make_span("t", "root"),
    make_call("t", "call", attributes={"gen_ai.response.id": "shared"}),
    make_call("engine", "call", parent="", attributes={"gen_ai.response.id": "shared", "spanmill.capture": "engine"}),
    make_call("u", "call", attributes={"spanmill.rollout.id": "a", "spanmill.rollout.attempt": 1}),
    make_span("u", "judge", attributes={"spanmill.reward.value": float("nan")}),
    make_span("noise", "ping"),
    BAD,
]


def write_requests(path: Path, requests: Sequence[bytes]) -> Path:
    """A file of protobuf requests, a 4-byte length before each."""
    path.write_bytes(b"".join(len(request).to_bytes(4) + request for request in requests))
    return path


def built(folder: Path, requests: Sequence[bytes], name: str = "out") -> Path:
    """The dataset that comes of these requests."""
    build([write_requests(folder / f"{name}.binpb", requests)], BuildConfig(out=folder / name))
    return folder / name


def rows_in_order(dataset: Path) -> list[list[Any]]:
    """Every table as it stands, but for the times of receiving."""
    frames = [read(dataset).collect() for read in (read_rollouts, read_triplets, read_episodes, read_quarantine)]
    return [frame.drop("received_at", strict=False).rows() for frame in frames]


def cut(spans: Sequence[Span], sizes: Sequence[int]) -> list[bytes]:
    """Requests of so many spans each, the rest in one more."""
    requests: list[bytes] = []
    for size in sizes:
        requests.append(make_request(*spans[:size]))
        spans = spans[size:]
    return [*requests, make_request(*spans)]


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[list[Any]]:
    """The rows of all SPANS in one request."""
    return rows_in_order(built(tmp_path_factory.mktemp("whole"), [make_request(*SPANS)]))


@settings(max_examples=20)
@given(
    st.permutations(SPANS),
    st.lists(st.sampled_from(SPANS), max_size=5),
    st.lists(st.integers(0, 4), max_size=6),
)
def test_order_duplicates_and_cutting_change_nothing(
    tmp_path_factory: pytest.TempPathFactory,
    expected: list[list[Any]],
    spans: list[Span],
    again: list[Span],
    sizes: list[int],
) -> None:
    """The same spans give the same rows in the same order, whatever requests they came in and however often."""
    dataset = built(tmp_path_factory.mktemp("build"), cut([*spans, *again], sizes))
    assert expected == rows_in_order(dataset)


@settings(max_examples=8)
@given(st.permutations(SPANS), st.lists(st.integers(0, 4), max_size=6), st.sampled_from([300, 1000, 3000]))
def test_partitions_change_no_row(
    tmp_path_factory: pytest.TempPathFactory,
    expected: list[list[Any]],
    spans: list[Span],
    sizes: list[int],
    partition_bytes: int,
) -> None:
    """An input that does not fit into one partition gives the same rows."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(module, "PARTITION_BYTES", partition_bytes)
        dataset = built(tmp_path_factory.mktemp("partitions"), cut(spans, sizes))
    assert 1 < len(list((dataset / "rollouts").glob("*.parquet")))
    assert [sorted(table, key=repr) for table in expected] == [sorted(t, key=repr) for t in rows_in_order(dataset)]
    assert [] == list(dataset.glob(".build-*"))


def test_the_number_of_processes_changes_no_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One process or three, every file of the dataset is the same, and holds the rows in their order."""
    monkeypatch.setattr(module, "PARTITION_BYTES", 1000)
    source = write_requests(tmp_path / "in.binpb", [make_request(*SPANS[3:]), make_request(*SPANS[:3])])
    datasets: list[dict[str, bytes]] = []
    for workers in (1, 3):
        out = tmp_path / str(workers)
        build([source], BuildConfig(out=out, workers=workers))
        datasets.append({str(path.relative_to(out)): path.read_bytes() for path in sorted(out.rglob("*.parquet"))})
    assert datasets[0] == datasets[1]
    assert 2 < len([name for name in datasets[0] if name.startswith("rollouts/")])
    assert ["a", "a", "b", trace_id("t")] == read_rollouts(tmp_path / "3").collect()["rollout_id"].to_list()


def test_the_order_of_rows_does_not_depend_on_partitions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rollouts of one component stand together, however the components are cut into partitions and encoded."""
    apart = make_call("x", "c", attributes={"spanmill.rollout.id": "c"})
    joined = make_call("y", "d", attributes={"spanmill.rollout.id": "b"})
    spans = [*make_rollout("x"), apart, joined, *make_rollout("z")]
    orders: list[list[str]] = []
    for partition_bytes in (1 << 20, 300):
        monkeypatch.setattr(module, "PARTITION_BYTES", partition_bytes)
        dataset = built(tmp_path, [make_request(span) for span in spans], str(partition_bytes))
        orders.append(read_rollouts(dataset).collect()["rollout_id"].to_list())
    assert orders[0] == orders[1]
    assert ["b", "c", "x", "z"] == orders[0]


def test_rows_stand_by_rollout_and_attempt(tmp_path: Path) -> None:
    """Rows stand in the order of (rollout_id, attempt), in every table."""
    dataset = built(tmp_path, [make_request(*make_rollout(name)) for name in ("c", "a", "b")])
    assert ["a", "b", "c"] == read_rollouts(dataset).collect()["rollout_id"].to_list()
    assert ["a", "a", "b", "b", "c", "c"] == read_triplets(dataset).collect()["rollout_id"].to_list()
    assert [0] * 3 == read_rollouts(dataset).collect()["revision"].to_list()


def test_inputs_are_joined(tmp_path: Path) -> None:
    """Files, compressed files, folders and journals make one dataset: a rollout may be spread over all of them."""
    spans = make_rollout("r", 4)
    packed = tmp_path / "packed.binpb.gz"
    packed.write_bytes(gzip.compress(write_requests(tmp_path / "b", [make_request(spans[1])]).read_bytes()))
    folder = tmp_path / "folder"
    folder.mkdir()
    write_requests(folder / "c.binpb", [make_request(spans[2])])
    with JournalWriter(tmp_path / "journal") as journal:
        journal.append(Kind.TRACES_PROTO, make_request(*spans[3:]), 5)
        journal.append(Kind.FLUSH, b"", 6)
    first = write_requests(tmp_path / "a.binpb", [make_request(spans[0])])
    out = tmp_path / "out"
    build([first, packed, folder, tmp_path / "journal"], BuildConfig(out=out))
    assert newest_rows(built(tmp_path, [make_request(*spans)], "whole")) == newest_rows(out)


@pytest.mark.parametrize("partition_bytes", [1 << 20, 300])
def test_rewards_come_from_journals_and_tables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, partition_bytes: int
) -> None:
    """The table's word counts last; what no rollout takes is quarantined, once, and makes no rollout."""
    monkeypatch.setattr(module, "PARTITION_BYTES", partition_bytes)
    with JournalWriter(tmp_path / "journal") as journal:
        posted = [Reward("a", 0.25), Reward("b", 0.5), Reward("nobody", 1.0), Reward("a", 1.0, attempt=7)]
        journal.append(Kind.REWARDS, rewards.encode(posted), 5)
        for name in ("a", "b", "c"):
            journal.append(Kind.TRACES_PROTO, make_request(*make_rollout(name)), 6)
    table = tmp_path / "rewards.jsonl"
    table.write_text(json.dumps({"rollout_id": "a", "value": 0.75}) + "\n")
    out = tmp_path / "out"
    build([tmp_path / "journal"], BuildConfig(out=out, rewards=table))
    assert [("a", 0.75), ("b", 0.5), ("c", None)] == rollouts(out, "rollout_id", "reward")
    quarantine = read_quarantine(out).select("rollout_id", "attempt", "reason").sort("rollout_id").collect()
    assert [("a", 7, "unknown_rollout"), ("nobody", None, "unknown_rollout")] == quarantine.rows()


def test_a_request_that_cannot_be_read_is_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Requests that are no OTLP are left out and counted in one line; the rest is built."""
    with JournalWriter(tmp_path / "journal") as journal:
        for body in (b"\xff\xff", make_request(*make_rollout("r")), b"\xff"):
            journal.append(Kind.TRACES_PROTO, body, 5)
    build([tmp_path / "journal"], BuildConfig(out=tmp_path / "out"))
    assert [("r",)] == rollouts(tmp_path / "out", "rollout_id")
    assert capsys.readouterr().err.startswith("spanmill: 2 of 3 requests cannot be read, the first of them: ")


def test_input_without_one_readable_request_is_refused(tmp_path: Path) -> None:
    """A file in which nothing is OTLP is an error, not an empty dataset; the folder can be used afterwards."""
    with JournalWriter(tmp_path / "journal") as journal:
        journal.append(Kind.TRACES_PROTO, b"\xff", 5)
    with pytest.raises(InputError, match="1 of 1 requests cannot be read"):
        build([tmp_path / "journal"], BuildConfig(out=tmp_path / "out"))
    assert rows_in_order(built(tmp_path, [make_request(*make_rollout("r"))]))[0]


def test_files_that_are_not_otlp_are_passed_over(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Other files of a folder are counted and one of them named, once; a folder of nothing else is refused."""
    folder = tmp_path / "in"
    (folder / "b").mkdir(parents=True)
    (folder / "notes.md").write_text("# Notes")
    (folder / "rewards.jsonl").write_text('{"rollout_id": "r", "value": 1}\n')
    with pytest.raises(InputError, match="holds no journal and no file of OTLP requests"):
        build([folder], BuildConfig(out=tmp_path / "none"))
    write_requests(folder / "b" / "traces.binpb", [make_request(*make_rollout("r"))])
    build([folder], BuildConfig(out=tmp_path / "out"))
    assert ["r"] == read_rollouts(tmp_path / "out").collect()["rollout_id"].to_list()
    assert [
        f"2 files in {folder} are not OTLP and are passed over, the first is {folder / 'notes.md'}"
    ] == caplog.messages


def test_what_came_meanwhile_waits_for_the_next_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests that an input gets between its two readings are not half taken: none of them is."""
    source = write_requests(tmp_path / "in.binpb", [make_request(*make_rollout("a", 2))])
    build([source], BuildConfig(out=tmp_path / "expected"))
    placed = module._placed  # pyright: ignore[reportPrivateUsage]

    def late(*known: Any) -> Any:
        late_call = make_call("a", "late", attributes={"gen_ai.response.id": "late"})
        request = make_request(late_call)
        with source.open("ab") as file:
            file.write(len(request).to_bytes(4) + request)
        return placed(*known)

    monkeypatch.setattr(module, "_placed", late)
    build([source], BuildConfig(out=tmp_path / "out"))
    assert rows_in_order(tmp_path / "expected") == rows_in_order(tmp_path / "out")


def test_an_input_that_changes_while_it_is_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other requests at the second reading, or fewer, end the build: the dataset would lack spans and nobody know."""
    placed = module._placed  # pyright: ignore[reportPrivateUsage]
    for name, changed in (("other", [make_request(*make_rollout("b", 2))]), ("fewer", [])):
        source = write_requests(tmp_path / f"{name}.binpb", [make_request(*make_rollout("a", 2))])

        def change(*known: Any, source: Path = source, changed: list[bytes] = changed) -> Any:
            write_requests(source, changed)
            return placed(*known)

        monkeypatch.setattr(module, "_placed", change)
        with pytest.raises(InputError, match=f"{name}.binpb changed while it was read"):
            build([source], BuildConfig(out=tmp_path / name))
        assert [] == list((tmp_path / name).rglob("*.parquet"))


def test_a_build_that_was_cut_off_is_seen(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What it left is not taken for a whole dataset: neither by the next build nor by the loss report."""
    out = built(tmp_path, [make_request(*make_rollout("a"))])
    (out / ".build-x").mkdir()
    with pytest.raises(DatasetError, match="was cut off or still runs"):
        build([tmp_path / "out.binpb"], BuildConfig(out=out))
    capsys.readouterr()
    assert 0 == main(["stats", str(out)])
    assert ["unfinished", "builds", "1"] == capsys.readouterr().out.splitlines()[0].split()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_workers_end_with_the_build(tmp_path: Path, number: int) -> None:
    """However a build is ended, no process of it stays; what can be cleared away is."""
    folder = tmp_path / "in"
    folder.mkdir()
    requests = [make_request(*make_rollout(f"r{other}", 20)) for other in range(400)]
    for part in range(4):
        write_requests(folder / f"{part}.binpb", requests)
    small = "from spanmill.collector import build; build.PARTITION_BYTES = build.SHARE_BYTES = 100_000"
    script = f"import sys; {small}; from spanmill.cli import main; sys.exit(main())"
    command = [sys.executable, "-c", script, "build", str(folder), "--out", str(tmp_path / "out"), "--workers", "2"]
    with subprocess.Popen(command, start_new_session=True, stderr=subprocess.PIPE) as running:
        wait_for(lambda: list((tmp_path / "out").glob(".build-*/*.told")), 60)
        running.send_signal(number)
        assert running.stderr is not None
        told = running.stderr.read()  # until no process has it any longer
    expected = (-number, 1) if number == signal.SIGKILL else (128 + number, 0)
    assert expected == (running.returncode, len(list((tmp_path / "out").glob(".build-*"))))
    assert b"Traceback" not in told


def test_a_name_that_is_not_utf8_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Parquet's libraries cannot open such a file: that is said before anything is read."""
    source = write_requests(tmp_path / "in.binpb", [make_request(*make_rollout("a"))])
    assert 1 == main(["build", str(source), "--out", f"{tmp_path}/out\udcff"])
    assert "is not UTF-8" in capsys.readouterr().err
    assert ["in.binpb"] == [path.name for path in tmp_path.iterdir()]


def test_a_pipe_is_read_like_a_file(tmp_path: Path) -> None:
    """What can be read only once is kept until it has been read twice."""
    content = write_requests(
        tmp_path / "in.binpb", [make_request(*make_rollout("a")), make_request(*make_rollout("b"))]
    )
    command = [str(SPANMILL), "build", "/dev/stdin", "--out", str(tmp_path / "out")]
    with subprocess.Popen(["cat", str(content)], stdout=subprocess.PIPE) as cat:
        subprocess.run(command, stdin=cat.stdout, check=True, capture_output=True)
    assert ["a", "b"] == read_rollouts(tmp_path / "out").collect()["rollout_id"].to_list()


def test_shares_of_an_input_change_no_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files that processes of their own survey and deal make the dataset that one process makes of all."""
    folder = tmp_path / "in"
    folder.mkdir()
    for number, span in enumerate(SPANS):
        write_requests(folder / f"{number}.binpb", [make_request(span)])
    monkeypatch.setattr(module, "PARTITION_BYTES", 1000)
    datasets: list[dict[str, bytes]] = []
    for share_bytes, workers in ((1 << 20, 1), (500, 3), (1, 2)):
        monkeypatch.setattr(module, "SHARE_BYTES", share_bytes)
        out = tmp_path / f"{share_bytes}"
        build([folder], BuildConfig(out=out, workers=workers))
        datasets.append({str(path.relative_to(out)): path.read_bytes() for path in sorted(out.rglob("*.parquet"))})
    assert [datasets[0]] * 2 == datasets[1:]
    assert [] == list(out.glob(".build-*"))


def test_a_disk_without_room_is_one_line(tmp_path: Path) -> None:
    """What is in between may find no room: then the build ends with one line, and no dataset half written."""
    folder = tmp_path / "in"
    folder.mkdir()
    for number in range(3):
        requests = [make_request(*make_rollout(f"{number}-{other}")) for other in range(60)]
        write_requests(folder / f"{number}.binpb", requests)
    small = "from spanmill.collector import build; build.PARTITION_BYTES = build.SHARE_BYTES = 20_000"
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (ROOM, ROOM))"
    script = f"import sys; {small}; {limit}; from spanmill.cli import main; sys.exit(main())"
    for kib in (10, 40):  # for traces and keys, or for pieces
        command = [sys.executable, "-c", script.replace("ROOM", str(kib << 10)), "build", str(folder)]
        ended = subprocess.run([*command, "--out", str(tmp_path / f"{kib}")], capture_output=True, text=True)
        assert (1, "", 1) == (ended.returncode, ended.stdout, ended.stderr.count("\n")), ended.stderr
        assert "cannot write to" in ended.stderr
        assert [] == list((tmp_path / f"{kib}").rglob("*.parquet"))


def test_what_a_killed_build_left_is_cleared_away(tmp_path: Path) -> None:
    """A folder in which a build was killed before it wrote a row can be built into; nothing of that build stays."""
    left = tmp_path / "out" / ".build-x"
    left.mkdir(parents=True)
    (left / "0.spans").write_bytes(b"half of it")
    assert [("r",)] == rollouts(built(tmp_path, [make_request(*make_rollout("r"))]), "rollout_id")
    assert not left.exists()


def test_a_dataset_is_not_built_over(tmp_path: Path) -> None:
    """A folder that holds a dataset, or anything else, is refused by name."""
    dataset = built(tmp_path, [make_request(*make_rollout("r"))])
    before = newest_rows(dataset)
    with pytest.raises(DatasetError, match="out already holds a dataset; choose an empty folder"):
        built(tmp_path, [make_request(*make_rollout("s"))])
    assert before == newest_rows(dataset)
    other = tmp_path / "other"
    other.mkdir()
    (other / "notes.txt").write_text("mine")
    with pytest.raises(DatasetError, match=r"is not empty, it has notes\.txt; choose an empty folder"):
        built(tmp_path, [make_request(*make_rollout("s"))], "other")


@pytest.mark.parametrize("name", ["missing.jsonl", "text.txt"])
def test_a_bad_input_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    """An input that is missing or is no OTLP ends `build` with exit code 1 and one line that names it."""
    (tmp_path / "text.txt").write_text("no requests here\n")
    assert 1 == main(["build", str(tmp_path / name), "--out", str(tmp_path / "out")])
    printed = capsys.readouterr()
    assert ("", 1, True) == (printed.out, printed.err.count("\n"), name in printed.err)


def test_the_loss_report_ends_a_build(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What became of every call and token is printed at the end."""
    built(tmp_path, [make_request(*make_rollout("r", 3))])
    assert ["rollouts", "1"] == capsys.readouterr().out.splitlines()[0].split()


def test_long_work_says_how_far_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without a terminal a plain line now and then tells what is being done."""
    monkeypatch.setattr(module, "PARTITION_BYTES", 300)
    monkeypatch.setattr(module, "LINE_S", 0.0)
    source = write_requests(tmp_path / "in.binpb", [make_request(*make_rollout(name)) for name in ("a", "b")])
    build([source], BuildConfig(out=tmp_path / "one", workers=1))
    build([source, source], BuildConfig(out=tmp_path / "two", workers=1))
    one = ["reading: 0", "reading: 1", "sorting: 0", "sorting: 1", "writing rows: 0 of 2", "writing rows: 1 of 2"]
    monkeypatch.setattr(module, "SHARE_BYTES", 1)
    build([source, source], BuildConfig(out=tmp_path / "three", workers=1))
    shares = ["surveying: 0 of 2", "surveying: 1 of 2", "sorting: 0 of 2", "sorting: 1 of 2"]
    assert [*one, *one[:2], *one[:2], *one[2:4], *one[2:4], *one[4:], *shares, *one[4:]] == [
        line.removeprefix("spanmill: ") for line in capsys.readouterr().err.splitlines()
    ]


def test_nothing_makes_an_empty_dataset(tmp_path: Path) -> None:
    """An empty journal makes an empty dataset that readers can open."""
    with JournalWriter(tmp_path / "journal") as journal:
        journal.append(Kind.FLUSH, b"", 5)
    build([tmp_path / "journal"], BuildConfig(out=tmp_path / "out"))
    empty: Rows = {"rollouts": [], "triplets": [], "episodes": [], "quarantine": []}
    assert empty == newest_rows(tmp_path / "out")
