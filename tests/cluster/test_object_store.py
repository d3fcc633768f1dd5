import os
import signal
import subprocess
import sys
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
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
from spanmill.storage import ObjectPath, locate, move
from spanmill.triplets import lease
from spanmill.triplets.follow import follow
from spanmill.triplets.reader import read_quarantine
from spanmill.triplets.records import Rollout
from spanmill.triplets.schema import TABLES
from spanmill.triplets.writer import DatasetWriter

pytest.importorskip("moto.server", reason="moto is the S3 server of these tests")
pytest.importorskip("cryptography", reason="the server as Google's checks signatures")
obstore: Any = pytest.importorskip("obstore", reason="stores are reached by obstore")
pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning")  # of moto's server

TIME = 1_700_000_000_000_000_000
READ = (spanmill.read_rollouts, spanmill.read_triplets, spanmill.read_episodes, read_quarantine)
MOTO = """
import sys
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
sys.stdin.read()
"""


@dataclass(frozen=True)
class Server:
    """A server of one kind of stores, and the environment by which it is reached."""

    scheme: str
    address: str
    environment: dict[str, str]

    def bucket(self, name: str) -> str:
        """The URL of an empty bucket."""
        httpx.put(f"{self.address}/{name}").raise_for_status()
        return f"{self.scheme}://{name}"


@contextmanager
def started(*command: str) -> Generator[str]:
    """The address of a server that prints its port and ends with its standard input."""
    whole = [sys.executable, *command]
    with subprocess.Popen(whole, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as server:
        if server.stdout is None or server.stdin is None:
            raise ValueError("the server was started without pipes")
        port = int(next(line for line in server.stdout if line.strip().isdigit()))
        yield f"http://127.0.0.1:{port}"
        server.stdin.close()


@pytest.fixture(scope="module")
def s3_server() -> Iterator[Server]:
    """As Amazon's."""
    with started("-c", MOTO) as address:
        keys = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_REGION": "us-east-1"}
        yield Server("s3", address, {"AWS_ENDPOINT_URL": address, **keys})


@pytest.fixture(scope="module")
def gs_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """As Google's; the file of the service account names it."""
    folder = tmp_path_factory.mktemp("gcs")
    with started(str(Path(__file__).with_name("gcs_server.py")), str(folder)) as address:
        yield Server("gs", address, {"GOOGLE_SERVICE_ACCOUNT": str(folder / "account.json")})


def reached(server: Server, monkeypatch: pytest.MonkeyPatch, folder: Path) -> str:
    """The URL of an empty bucket; the environment says how it is reached."""
    for name in [name for name in os.environ if name.startswith(("AWS_", "GOOGLE_"))]:
        monkeypatch.delenv(name)
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    return server.bucket(f"b{abs(hash(folder)):x}")


@pytest.fixture(params=["s3", "gs"])
def store(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """The URL of an empty bucket, of each kind."""
    return reached(request.getfixturevalue(f"{request.param}_server"), monkeypatch, tmp_path)


@pytest.fixture
def google(gs_server: Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """The URL of an empty bucket of Google's kind."""
    return reached(gs_server, monkeypatch, tmp_path)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leases that are over soon."""
    monkeypatch.setattr(lease, "RENEW_S", 0.2)
    monkeypatch.setattr(lease, "LEASE_S", 4.0)


def rows(dataset: str | Path) -> list[list[Any]]:
    """Every table as it stands."""
    return [read(dataset).collect().rows() for read in READ]


def keys(url: str) -> list[str]:
    """What lies under a URL."""
    return sorted(str(path).removeprefix(f"{url}/") for path in place(url).below())


def place(url: str) -> ObjectPath:
    """Where a URL leads."""
    found = locate(url)
    if not isinstance(found, ObjectPath):
        raise ValueError(url)
    return found


def put(url: str, content: bytes, folder: Path, *, new: bool = False) -> bool:
    """An object."""
    file = folder / "put"
    file.write_bytes(content)
    return place(url).put(file, new=new)


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
    """A URL that ends at an object names that, one of a bucket all that is in it; gzip is seen by its content."""
    import gzip

    put(f"{store}/one.binpb", gzip.compress(framed("a")), tmp_path)
    for url, out in ((f"{store}/one.binpb", tmp_path / "one"), (f"{store}/", tmp_path / "all")):
        assert 0 == main(["build", url, "--out", str(out)])
        assert ["a"] == spanmill.read_rollouts(out).collect()["rollout_id"].to_list()


def test_a_bucket_is_a_dataset(store: str, tmp_path: Path) -> None:
    """A dataset may have a bucket to itself."""
    (tmp_path / "in.binpb").write_bytes(framed("a"))
    assert 0 == main(["build", str(tmp_path / "in.binpb"), "--out", store])
    assert ["a"] == spanmill.read_rollouts(f"{store}/").collect()["rollout_id"].to_list()
    assert [".lock", *part_names(1)] == keys(store)


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


def test_where_there_is_no_dataset(store: str) -> None:
    """An empty prefix is no dataset; a bucket that is not there is an error of one line."""
    with pytest.raises(DatasetError, match="is no dataset"):
        spanmill.read_rollouts(f"{store}/none")
    with pytest.raises(OSError, match="no-such-bucket") as told:
        spanmill.read_rollouts(f"{store[:2]}://no-such-bucket/data")
    assert 1 == len(str(told.value).splitlines())


def test_objects_of_several_requests(store: str, tmp_path: Path) -> None:
    """What is put in pieces is whole, new only once, read from anywhere, moved, and removed though it be gone."""
    content, other = (seed * (3 << 19) for seed in (b"0123", b"abcd"))
    big = place(f"{store}/folder x=1/big ä%2F")
    for new, one, done in ((True, other, True), (True, other, True), (True, content, False), (False, content, True)):
        assert done is put(str(big), one, tmp_path, new=new)
    with big.open() as file:
        assert content == file.read()
    with big.random() as file:
        file.seek(-7, os.SEEK_END)
        assert (b"123", b"0123", b"") == tuple(file.read(size) for size in (3, 9, 1))
    moved = big.parent / "moved"
    move(big, moved)
    assert (False, True, (len(content), content)) == (big.exists(), moved.exists(), (moved.stamp()[0], moved.get()[0]))
    assert [moved] == moved.parent.older(time.time() + 60)
    for _ in range(2):
        moved.unlink()
    assert [] == keys(store)


def test_answers_that_are_lost(google: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the store has done although it answered 503 counts as done: the lease, the parts, their removal."""
    monkeypatch.setattr(lease, "RENEW_S", 0.2)
    there = f"{google}/lossy"
    for number, revision in enumerate((0, 1, 2), 1):
        began = time.monotonic()
        with DatasetWriter(there) as writer:
            assert time.monotonic() - began < lease.LEASE_S
            assert number == writer.write([rollout("a", revision)])
            time.sleep(2 * lease.RENEW_S)
    with DatasetWriter(there) as writer:
        while writer.rewrite() is not None:
            pass
        assert 8 == writer.purge_old(0, time.time() + 60)
    assert [2] == spanmill.read_rollouts(there).collect()["revision"].to_list()
    assert [".lock", *part_names(3, 4)] == keys(there)


def test_accounts_that_do_not_serve(
    google: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An account that may not read, or cannot be read itself, is an error of one line."""
    command = ["build", f"{google}/in", "--out", str(tmp_path / "out")]
    monkeypatch.setenv("GOOGLE_SKIP_SIGNATURE", "true")
    assert 1 == main(command)
    assert "401 Unauthorized" in capsys.readouterr().err
    with pytest.raises(PermissionError, match="may not be had with the credentials of the environment"):
        spanmill.read_rollouts(f"{google}/in")
    monkeypatch.setenv("GOOGLE_SERVICE_ACCOUNT", str(tmp_path / "none.json"))
    assert 1 == main([part.replace("gs://b", "gs://c") for part in command])
    told = capsys.readouterr().err
    assert (1, True) == (len(told.splitlines()), str(tmp_path / "none.json") in told)


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
        assert {("a", 0): (2, 3)} == writer.newest([("a", 0), ("b", 0)])
        assert 8 == writer.purge_old(0, time.time() + 60)
    assert [".lock", *part_names(3, 4)] == keys(there)
    for table in ("quarantine", "triplets"):
        source, left = (locate(f"{there}/{table}/part-{number:08d}.parquet") for number in (3, 5))
        if isinstance(source, ObjectPath) and isinstance(left, ObjectPath):
            source.copy(left)
    assert [2] == spanmill.read_rollouts(there).collect()["revision"].to_list()
    with DatasetWriter(there) as writer:
        assert {("a", 0): (2, 3)} == writer.newest([("a", 0), ("b", 0)])
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
        for name in ("RENEW_S", "LEASE_S"):
            dead.setattr(lease, name, 3600.0)
        ghost = DatasetWriter(f"{store}/out")
        ghost.write([rollout("a")])
    with DatasetWriter(f"{store}/out") as writer:
        assert 2 == writer.write([rollout("b")])
        with pytest.raises(DatasetError, match="was lost: another spanmill has it"):
            ghost.write([rollout("c")])
        ghost.close()
        assert 3 == writer.write([rollout("d")])
    assert ["a", "b", "d"] == spanmill.read_rollouts(f"{store}/out").collect()["rollout_id"].to_list()


def test_two_commits_of_one_number_are_one(store: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even writers that both believe they are alone do not replace each other's part."""
    for name in ("RENEW_S", "LEASE_S"):
        monkeypatch.setattr(lease, name, 3600.0)
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


@pytest.mark.parametrize("store", ["s3", pytest.param("gs", marks=pytest.mark.slow)], indirect=True)
def test_a_build_on_ray_reads_and_writes_stores(store: str, tmp_path: Path) -> None:
    """With a folder for what is in between, inputs and dataset of a build on Ray may both be in a store."""
    pytest.importorskip("ray")
    put(f"{store}/in/spans.binpb", framed("a", "b", "c"), tmp_path)
    spanmill_command = [sys.executable, "-c", "import sys; from spanmill.cli import main; sys.exit(main())", "build"]
    on_ray = ["--engine", "ray", "--work", str(tmp_path), "--workers", "1"]
    for out, options in ((f"{store}/out", on_ray), (str(tmp_path / "local"), [])):
        subprocess.run([*spanmill_command, f"{store}/in", "--out", out, *options], check=True, capture_output=True)
    assert rows(str(tmp_path / "local")) == rows(f"{store}/out")
