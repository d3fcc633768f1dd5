import os
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from made_spans import make_request, make_rollout, make_span
from served import wait_for

from load_cases import case_names, load_case, write_lines
from spanmill.cli import main
from spanmill.collector import build as module
from spanmill.collector import build_ray
from spanmill.collector import rewards as posted
from spanmill.collector.build import build
from spanmill.collector.config import BuildConfig
from spanmill.collector.inputs import units
from spanmill.collector.journal import JournalWriter, Kind, segment_path
from spanmill.errors import DatasetError, InputError
from spanmill.triplets.records import Reward

pytest.importorskip("ray")
# Ray's own code uses what it has deprecated, and leaves files to the garbage collector.
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

CASES = case_names()
SPANMILL = Path(sys.executable).with_name("spanmill")


@pytest.fixture(scope="module", autouse=True)
def cluster_fixture() -> Iterator[None]:
    """One cluster of two workers for all tests."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with build_ray.cluster(2):
            yield


def files(dataset: Path) -> dict[str, bytes]:
    """Every file of a dataset, by its path."""
    return {str(path.relative_to(dataset)): path.read_bytes() for path in sorted(dataset.glob("*/*.parquet"))}


def journal_of(folder: Path, name: str, rollouts: int, first: int = 0) -> Path:
    """A journal of rollouts of three calls, and rewards for them and for nobody."""
    with JournalWriter(folder / name, segment_bytes=20_000) as journal:
        for number in range(first, first + rollouts):
            spans = make_rollout(f"r{number}", 3)
            journal.append(Kind.TRACES_PROTO, make_request(*spans[:2]), 10 + number)
            journal.append(Kind.TRACES_PROTO, make_request(*spans[2:], make_span(f"noise{number}", "x")), 20 + number)
            given = [Reward(f"r{number}", float(number)), Reward(f"nobody{number}", 1.0)]
            journal.append(Kind.REWARDS, posted.encode(given), 30 + number)
    return folder / name


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if i % 12 == 0 else pytest.mark.slow) for i, n in enumerate(CASES)]
)
def test_the_same_files_as_without_ray(name: str, tmp_path: Path) -> None:
    """The dataset that Ray makes of a case is, byte by byte, the one that `--engine local` makes."""
    case = load_case(name)
    lines = write_lines(case.requests, tmp_path / "input.jsonl")
    options = [*(["--rewards", str(case.rewards)] if case.rewards else []), *case.arguments]
    for engine in ("local", "ray"):
        assert 0 == main(["build", str(lines), "--out", str(tmp_path / engine), "--engine", engine, *options])
    assert files(tmp_path / "local") == files(tmp_path / "ray")


def test_partitions_of_several_journals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rollouts split over the journals of several collectors are put together, over many partitions and units."""
    monkeypatch.setattr(module, "PARTITION_BYTES", 20_000)
    inputs = [journal_of(tmp_path, "one", 40), journal_of(tmp_path, "two", 40, first=20)]
    assert len([unit for path in inputs for unit in units(path)]) > 3
    for engine in ("local", "ray"):
        build(inputs, BuildConfig(out=tmp_path / engine, engine=engine))
    made = files(tmp_path / "ray")
    assert len([name for name in made if name.startswith("rollouts/")]) > 2
    assert files(tmp_path / "local") == made
    assert [] == list((tmp_path / "ray").glob(".build*"))


def test_what_is_passed_over_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """What workers cannot read is said by the driver, as without Ray."""
    journal = journal_of(tmp_path / "all", "journal", 3)
    with segment_path(journal, 1).open("ab") as file:
        file.write(b"torn")
    with JournalWriter(journal):
        pass
    notes = tmp_path / "all" / "notes.txt"
    notes.write_text("no spans")
    build([notes.parent], BuildConfig(out=tmp_path / "ray", engine="ray"))
    assert [
        f"{segment_path(journal, 1)}: 4 bytes in 1 places are damaged and left out",
        f"1 files in {notes.parent} are not OTLP and are passed over, the first is {notes}",
    ] == [record.message for record in caplog.records if record.name.startswith("spanmill")]


def test_inputs_that_cannot_be_read_are_said(tmp_path: Path) -> None:
    """A damaged input ends the build as it does without Ray."""
    (tmp_path / "bad.jsonl").write_text("{not json\n")
    with pytest.raises(InputError, match="holds no OTLP"):
        build([tmp_path / "bad.jsonl"], BuildConfig(out=tmp_path / "out", engine="ray"))
    with pytest.raises(InputError, match=r"absent\.jsonl cannot be read: No such file"):
        build([tmp_path / "absent.jsonl"], BuildConfig(out=tmp_path / "out", engine="ray"))
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(InputError, match="pipe can be read only once"):
        build([tmp_path / "pipe"], BuildConfig(out=tmp_path / "out", engine="ray"))


def test_requests_that_cannot_be_read_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A broken request between good ones is said, and the good ones are built, as without Ray."""
    with JournalWriter(tmp_path / "journal") as journal:
        for body in (make_request(*make_rollout("a")), b"\xff\xff", make_request(*make_rollout("b"))):
            journal.append(Kind.TRACES_PROTO, body, 5)
        journal.append(Kind.TRACES_JSON, b"{", 5)
    for engine in ("local", "ray"):
        build([tmp_path / "journal"], BuildConfig(out=tmp_path / engine, engine=engine))
        assert "2 of 4 requests cannot be read" in capsys.readouterr().err
    assert files(tmp_path / "local") == files(tmp_path / "ray")


def test_an_input_that_changes_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What a worker finds at the second reading ends the build as it does without Ray."""
    source = tmp_path / "in.binpb"
    request = make_request(*make_rollout("a"))
    source.write_bytes(len(request).to_bytes(4) + request)
    placed = module._placed  # pyright: ignore[reportPrivateUsage]

    def change(*known: Any) -> Any:
        source.write_bytes(b"")
        return placed(*known)

    monkeypatch.setattr(module, "_placed", change)
    assert 1 == main(["build", str(source), "--out", str(tmp_path / "out"), "--engine", "ray"])
    assert f"spanmill: {source} changed while it was read\n" == capsys.readouterr().err


def test_other_inputs_do_not_go_on_with_a_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where rows of a build that was cut off are committed, another input is refused; the same one goes on."""
    monkeypatch.setattr(module, "PARTITION_BYTES", 20_000)
    journal = journal_of(tmp_path, "journal", 40)
    build([journal], BuildConfig(out=tmp_path / "whole", engine="ray"))
    with monkeypatch.context() as patched:
        taken = iter(range(2))

        def cut_off(part: Path, near: Path) -> AbstractContextManager[Path]:
            next(taken)
            return copied(part, near)

        copied = build_ray._copied  # pyright: ignore[reportPrivateUsage]
        patched.setattr(build_ray, "_copied", cut_off)
        with pytest.raises((StopIteration, RuntimeError)):
            build([journal], BuildConfig(out=tmp_path / "out", engine="ray"))
    with pytest.raises(DatasetError, match="cut off"):
        build([journal_of(tmp_path, "other", 1)], BuildConfig(out=tmp_path / "out", engine="ray"))
    build([journal], BuildConfig(out=tmp_path / "out", engine="ray"))
    assert files(tmp_path / "whole") == files(tmp_path / "out")


def test_work_on_another_disk(tmp_path: Path) -> None:
    """What is in between may be on another file system than the dataset, and is no other dataset's."""
    journal = journal_of(tmp_path, "journal", 3)
    build([journal], BuildConfig(out=tmp_path / "local"))
    with TemporaryDirectory(dir="/dev/shm") as other:
        build([journal], BuildConfig(out=tmp_path / "ray", engine="ray", work=Path(other)))
        assert [] == list(Path(other).iterdir())
        (Path(other) / build_ray.FOLDER).mkdir()
        with pytest.raises(DatasetError):
            build([journal], BuildConfig(out=tmp_path / "local", engine="ray", work=Path(other)))
    assert files(tmp_path / "local") == files(tmp_path / "ray")
    assert [] == list((tmp_path / "ray").glob(".build*"))


@pytest.mark.slow
def test_a_killed_worker_and_a_killed_driver_change_nothing(tmp_path: Path) -> None:
    """Kill -9 of a worker is worked around; after kill -9 of the driver the same command goes on with what is done."""
    journal = journal_of(tmp_path, "journal", 1500)
    build([journal], BuildConfig(out=tmp_path / "whole"))
    small = "from spanmill.collector import build; build.PARTITION_BYTES = 100_000"
    script = f"import sys; {small}; from spanmill.cli import main; sys.exit(main())"
    env = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}  # a cluster of its own
    command = [sys.executable, "-c", script, "build", str(journal), "--engine", "ray", "--workers", "2"]
    parts = tmp_path / "out" / build_ray.FOLDER / "parts"

    def start() -> subprocess.Popen[bytes]:
        return subprocess.Popen([*command, "--out", str(tmp_path / "out")], env=env, start_new_session=True)

    driver = start()
    wait_for(lambda: len(list(parts.glob("*.part"))) > 2, 120)
    for pid in _ray_tasks(driver.pid)[:1]:
        os.kill(pid, signal.SIGKILL)
    done = len(list(parts.glob("*.part")))
    wait_for(lambda: driver.poll() is not None or len(list(parts.glob("*.part"))) > done + 2, 120)
    if driver.poll() is None:
        os.killpg(driver.pid, signal.SIGKILL)
        driver.wait()
        time.sleep(2)  # what it started ends with it
        assert 0 == start().wait(300)
    monkey = tmp_path / "expected"
    subprocess.run(
        [sys.executable, "-c", script, "build", str(journal), "--workers", "1", "--out", str(monkey)], check=True
    )
    assert files(monkey) == files(tmp_path / "out")


def _ray_tasks(driver: int) -> list[int]:
    """The processes that run tasks for a driver."""
    found: list[int] = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                words = (entry / "cmdline").read_bytes()
                session = os.getsid(int(entry.name))
            except (OSError, ProcessLookupError):
                continue
            if words.startswith((b"ray::MapBatches", b"ray::FlatMap")) and session == driver:
                found.append(int(entry.name))
    return found
