import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from made_spans import make_call, make_request, make_rollout, trace_id
from served import QUICK, Served, wait_for

import spanmill
from spanmill.cli import main
from spanmill.collector import build as module
from spanmill.collector.journal import JournalWriter, Kind
from spanmill.errors import ConfigError, DatasetError
from spanmill.storage import ObjectPath, locate
from spanmill.triplets import lease
from spanmill.triplets.follow import follow
from spanmill.triplets.reader import read_quarantine
from spanmill.triplets.records import Rollout
from spanmill.triplets.schema import TABLES
from spanmill.triplets.writer import DatasetWriter

pytest.importorskip("moto.server", reason="moto is the S3 server of these tests")
obstore: Any = pytest.importorskip("obstore", reason="stores are reached by obstore")
pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning")  # of moto's server

TIME = 1_700_000_000_000_000_000
READ = (spanmill.read_rollouts, spanmill.read_triplets, spanmill.read_episodes, read_quarantine)
SERVER = """
import sys
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
sys.stdin.read()
"""


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    """The address of an S3 server."""
    command = [sys.executable, "-c", SERVER]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as server:
        if server.stdout is None or server.stdin is None:
            raise ValueError("the server was started without pipes")
        port = int(next(line for line in server.stdout if line.strip().isdigit()))
        yield f"http://127.0.0.1:{port}"
        server.stdin.close()


@pytest.fixture
def store(endpoint: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """The URL of an empty bucket; the environment says how it is reached."""
    for name, value in {
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_REGION": "us-east-1",
    }.items():
        monkeypatch.setenv(name, value)
    bucket = f"b{abs(hash(tmp_path)):x}"
    httpx.put(f"{endpoint}/{bucket}").raise_for_status()
    return f"s3://{bucket}"


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leases that are over soon."""
    monkeypatch.setattr(lease, "RENEW_S", 0.2)
    monkeypatch.setattr(lease, "LEASE_S", 2.0)


def rows(dataset: str | Path) -> list[list[Any]]:
    """Every table as it stands."""
    return [read(dataset).collect().rows() for read in READ]


def keys(url: str) -> list[str]:
    """What lies under a URL."""
    place = locate(url)
    if not isinstance(place, ObjectPath):
        raise ValueError(url)
    return sorted(str(path).removeprefix(f"{url}/") for path in place.below())


def put(url: str, content: bytes, folder: Path) -> None:
    """An object."""
    file = folder / "put"
    file.write_bytes(content)
    place = locate(url)
    if not isinstance(place, ObjectPath):
        raise ValueError(url)
    place.put(file)


def framed(*names: str) -> bytes:
    """A file of a request for each rollout."""
    return b"".join(len(body).to_bytes(4) + body for body in (make_request(*make_rollout(name)) for name in names))


def part_names(*numbers: int) -> list[str]:
    """The keys of parts."""
    return sorted(f"{table.name}/part-{number:08d}.parquet" for table in TABLES for number in numbers)


@pytest.mark.parametrize("partition_bytes", [1000, 32 << 20])
def test_build_reads_and_writes_stores(
    store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, partition_bytes: int
) -> None:
    """The same rows come of inputs in a store, into a store, as of files, into a folder; parts are all that is left."""
    monkeypatch.setattr(module, "PARTITION_BYTES", partition_bytes)
    inputs = tmp_path / "in"
    (inputs / "deep" / "journal").mkdir(parents=True)
    (inputs / "a=1 ä.binpb").write_bytes(framed("a", "b"))
    (inputs / "notes.txt").write_text("no spans")
    with JournalWriter(inputs / "deep" / "journal") as journal:
        for name in ("c", "d"):
            journal.append(Kind.TRACES_PROTO, make_request(*make_rollout(name)), 1)
    rewards = b'{"rollout_id": "a", "value": 0.5}\n'
    (tmp_path / "rewards.jsonl").write_bytes(rewards)
    for path in inputs.rglob("*"):
        if path.is_file():
            put(f"{store}/in/{path.relative_to(inputs)}", path.read_bytes(), tmp_path)
    put(f"{store}/rewards.jsonl", rewards, tmp_path)

    here, there = str(tmp_path / "out"), f"{store}/data/out"
    assert 0 == main(["build", str(inputs), "--out", here, "--rewards", str(tmp_path / "rewards.jsonl")])
    assert 0 == main(["build", f"{store}/in/", "--out", f"{there}/", "--rewards", f"{store}/rewards.jsonl"])
    assert rows(here) == rows(there)
    assert ["a", "b", "c", "d"] == [row[0] for row in rows(there)[0]]
    parts = 4 if partition_bytes == 1000 else 1
    assert [".lock", *part_names(*range(1, parts + 1))] == keys(there)


def test_one_object_is_an_input(store: str, tmp_path: Path) -> None:
    """A URL that ends at an object names that; gzip is seen by its content."""
    import gzip

    put(f"{store}/one.bin", gzip.compress(framed("a")), tmp_path)
    assert 0 == main(["build", f"{store}/one.bin", "--out", str(tmp_path / "out")])
    assert ["a"] == spanmill.read_rollouts(tmp_path / "out").collect()["rollout_id"].to_list()


def test_a_build_into_a_dataset_is_refused(store: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A store that has a dataset, or something else, is not built into, and an input that is not there is named."""
    put(f"{store}/in.binpb", framed("a"), tmp_path)
    assert 0 == main(["build", f"{store}/in.binpb", "--out", f"{store}/out"])
    assert 1 == main(["build", f"{store}/in.binpb", "--out", f"{store}/out"])
    assert f"spanmill: {store}/out already holds a dataset; choose an empty folder\n" == capsys.readouterr().err
    assert 1 == main(["build", f"{store}/in.binpb", "--out", store])
    assert "is not empty" in capsys.readouterr().err
    assert 1 == main(["build", f"{store}/none", "--out", f"{store}/new"])
    assert f"spanmill: {store}/none cannot be read: {store}/none is not there\n" == capsys.readouterr().err


def test_readers_take_urls(store: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One rollout, show, stats, export and follow read a dataset in a store as one in a folder."""
    source = tmp_path / "in.binpb"
    source.write_bytes(framed("a", "b"))
    here, there = str(tmp_path / "out"), f"{store}/out"
    for out in (here, there):
        assert 0 == main(["build", str(source), "--out", out])
    capsys.readouterr()
    shown = list[str]()
    for out in (here, there):
        for command in (["show", out, "a"], ["show", out], ["stats", out]):
            assert 0 == main(command)
        assert 0 == main(["export", out, "--to", "trl-sft", "--out", str(tmp_path / f"{len(shown)}.jsonl")])
        shown.append(capsys.readouterr().out)
    assert shown[0] == shown[1]
    assert (tmp_path / "0.jsonl").read_bytes() == (tmp_path / "1.jsonl").read_bytes()
    assert [["a", "b"]] == [news.rollouts["rollout_id"].to_list() for news in follow(there, timeout=0)]


def test_a_url_that_became_a_path_is_refused() -> None:
    """A URL has lost a slash as a path and would name a folder here; a URL of an unknown kind is told as such."""
    with pytest.raises(ConfigError, match="give it as text"):
        spanmill.read_rollouts(Path("s3://bucket/data"))
    for url in ("ftp://host/data", "s3://", "s3:///data"):
        with pytest.raises(ConfigError, match="no place that is known"):
            spanmill.read_rollouts(url)


def test_where_there_is_no_dataset(store: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty prefix is no dataset; a bucket that is not there is an error of one line."""
    with pytest.raises(DatasetError, match="is no dataset"):
        spanmill.read_rollouts(f"{store}/none")
    with pytest.raises(OSError, match="no-such-bucket") as told:
        spanmill.read_rollouts("s3://no-such-bucket/data")
    assert 1 == len(str(told.value).splitlines())


def rollout(name: str, revision: int = 0) -> Rollout:
    """A rollout without calls."""
    told = Rollout(
        rollout_id=name,
        attempt=0,
        identity_source="attribute",
        status="unknown",
        closed_by="batch",
        started_at=TIME,
        ended_at=TIME,
    )
    return replace(told, revision=revision)


def test_the_writer_rewrites_and_recovers(store: str) -> None:
    """Revisions, rewriting and removal leave newest rows only; what was put without a commit is no part."""
    there = f"{store}/out"
    with DatasetWriter(there) as writer:
        assert [] == [row for table in rows(there) for row in table]
        for number, revision in enumerate((0, 1, 2), 1):
            assert number == writer.write([rollout("a", revision)])
        assert [2] == spanmill.read_rollouts(there).collect()["revision"].to_list()
        while writer.rewrite() is not None:
            pass
        assert {("a", 0): (2, 3)} == dict(writer.committed())
        assert 8 == writer.purge_old(0, time.time() + 60)
    assert [".lock", *part_names(3, 4)] == keys(there)
    for table in ("quarantine", "triplets"):
        source, left = (locate(f"{there}/{table}/part-{number:08d}.parquet") for number in (3, 5))
        if isinstance(source, ObjectPath) and isinstance(left, ObjectPath):
            source.copy(left)
    assert [2] == spanmill.read_rollouts(there).collect()["revision"].to_list()
    with DatasetWriter(there) as writer:
        assert {("a", 0): (2, 3)} == dict(writer.committed())
        assert [".lock", *part_names(3, 4)] == [key for key in keys(there) if not key.startswith(".old")]
        assert 5 == writer.write([rollout("b")])
    assert ["a", "b"] == spanmill.read_rollouts(there).collect()["rollout_id"].to_list()


@pytest.mark.usefixtures("quick")
def test_a_second_writer_is_refused(store: str) -> None:
    """While one writes, another is refused; when it has closed, the next comes in at once."""
    with DatasetWriter(f"{store}/out"), pytest.raises(DatasetError, match="another spanmill is writing"):
        DatasetWriter(f"{store}/out")
    began = time.monotonic()
    with DatasetWriter(f"{store}/out") as writer:
        assert 1 == writer.write([rollout("a")])
    assert time.monotonic() - began < lease.LEASE_S


@pytest.mark.usefixtures("quick")
def test_a_dead_writer_is_followed_and_its_ghost_is_refused(store: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A writer that no longer renews its lease is followed after its time, and can commit nothing if it comes back."""
    with monkeypatch.context() as dead:
        dead.setattr(lease, "RENEW_S", 3600.0)
        ghost = DatasetWriter(f"{store}/out")
        ghost.write([rollout("a")])
    with DatasetWriter(f"{store}/out") as writer:
        assert 2 == writer.write([rollout("b")])
        with pytest.raises(DatasetError, match="was lost: another spanmill has it"):
            ghost.write([rollout("c")])
        ghost.close()
        assert 3 == writer.write([rollout("d")])
    assert ["a", "b", "d"] == spanmill.read_rollouts(f"{store}/out").collect()["rollout_id"].to_list()


def test_two_commits_of_one_number_are_one(store: str) -> None:
    """Even writers that both believe they are alone do not replace each other's part."""
    with DatasetWriter(f"{store}/out") as one:
        lock = locate(f"{store}/out/.lock")
        if isinstance(lock, ObjectPath):
            lock.unlink()
        with DatasetWriter(f"{store}/out") as other:
            one.write([rollout("a")])
            with pytest.raises(DatasetError, match="another spanmill has written part 1"):
                other.write([rollout("b")])
    assert ["a"] == spanmill.read_rollouts(f"{store}/out").collect()["rollout_id"].to_list()


def test_serve_needs_a_journal_here(capsys: pytest.CaptureFixture[str]) -> None:
    """What was acknowledged lies on this machine, so a service that writes to a store is told where."""
    assert 2 == main(["serve", "--out", "ftp://host/out"])
    expected = "--out is 'ftp://host/out': expected a folder, s3://BUCKET/... or gs://BUCKET/..."
    assert f"spanmill: {expected}\n" == capsys.readouterr().err
    assert 2 == main(["serve", "--out", "s3://bucket/out"])
    assert capsys.readouterr().err.startswith("spanmill: --journal is missing: --out s3://bucket/out needs a folder")


@pytest.mark.slow
def test_serve_writes_to_a_store_through_kills(store: str, tmp_path: Path) -> None:
    """Rows of every rollout are in the store, revised by late spans, after the whole service was killed in between."""
    there = f"{store}/data"
    options = ("--journal", str(tmp_path / "journal"), *QUICK)

    def found() -> list[tuple[str, int, int]]:
        frame = spanmill.read_rollouts(there).select("rollout_id", "num_calls", "revision").collect()
        return sorted(frame.rows())

    def served() -> Served:
        return Served(tmp_path / "served", *options, "--out", there)

    with served() as service:
        assert f"out={there}" in service.ready
        service.send(make_request(*make_rollout("a")))
        wait_for(lambda: found() == [("a", 2, 0)])
        for pid in (service.process.pid, service.indexer()):
            os.kill(pid, signal.SIGKILL)
    with served() as service:
        service.send(make_request(*make_rollout("b")))
        service.send(make_request(make_call("a", "late")))
        wait_for(lambda: found() == [("a", 3, 1), ("b", 2, 0)])
        assert 0 == service.stop()
    assert trace_id("a") in {row["trace_id"] for row in spanmill.read_triplets(there).collect().to_dicts()}
    assert not (tmp_path / "served").exists()
    assert {".lock", ".old", *(table.name for table in TABLES)} >= {key.partition("/")[0] for key in keys(there)}


def test_a_build_on_ray_reads_and_writes_stores(store: str, tmp_path: Path) -> None:
    """With a folder for what is in between, inputs and dataset of a build on Ray may both be in a store."""
    pytest.importorskip("ray")
    put(f"{store}/in/spans.binpb", framed("a", "b", "c"), tmp_path)
    spanmill_command = [sys.executable, "-c", "import sys; from spanmill.cli import main; sys.exit(main())", "build"]
    on_ray = ["--engine", "ray", "--work", str(tmp_path), "--workers", "1"]
    for out, options in ((f"{store}/out", on_ray), (str(tmp_path / "local"), [])):
        subprocess.run([*spanmill_command, f"{store}/in", "--out", out, *options], check=True, capture_output=True)
    assert rows(str(tmp_path / "local")) == rows(f"{store}/out")
