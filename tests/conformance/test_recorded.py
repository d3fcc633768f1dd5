import re
import signal
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import pytest

from check_recorded import check
from compare_rows import TABLE_ORDER, Frames, frame_differences, read_frames
from replay import replay
from spanmill.cli import main

RECORDED = Path(__file__).parent / "recorded"
RECORDINGS = sorted(path.parent.name for path in RECORDED.glob("*/truth.json"))
SPANMILL = Path(sys.executable).with_name("spanmill")
DEPENDS_ON_TIME = ("revision", "closed_by", "received_at")
"""What may differ between rows written live and rows built afterwards."""


def build(inputs: list[Path], dataset: Path) -> Path:
    """The dataset that `spanmill build` makes of the inputs, in this process."""
    assert 0 == main(["build", *map(str, inputs), "--out", str(dataset)])
    return dataset


def inputs_of(recording: Path) -> list[Path]:
    """The recording's files of requests."""
    return [path for path in (recording / "traces.binpb", recording / "logs.binpb") if path.exists()]


@contextmanager
def served(folder: Path) -> Generator[str]:
    """`spanmill serve` in a process of its own, as its gRPC address; at the end every rollout is closed and written."""
    out = ["--out", folder / "live", "--journal", folder / "journal", "--flush-on-exit"]
    command = [SPANMILL, "serve", *out, "--grpc", "127.0.0.1:0", "--http", "127.0.0.1:0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout
            ready = re.search(r"grpc=(\S+)", process.stdout.readline())
            assert ready
            yield ready[1]
        finally:
            process.send_signal(signal.SIGTERM)
            assert 0 == process.wait(60)


def comparable(dataset: Path) -> Frames:
    """The tables in one order, without what depends on when spans came."""
    frames = read_frames(dataset)
    return {
        table: frame.drop(DEPENDS_ON_TIME, strict=False).sort(TABLE_ORDER[table]) for table, frame in frames.items()
    }


@pytest.mark.parametrize("name", RECORDINGS)
def test_recording_gives_what_the_engine_did(name: str, tmp_path: Path) -> None:
    """The spans of a real agent on a real vLLM give the ids, logprobs, turns and Episodes that the engine logged."""
    recording = RECORDED / name
    assert [] == check(recording, build(inputs_of(recording), tmp_path / "data"))


@pytest.mark.parametrize("name", RECORDINGS)
def test_serve_gives_what_build_gives(name: str, tmp_path: Path) -> None:
    """Rows written live from real requests are those that `build` makes of the journal, and of the recorded files."""
    recording = RECORDED / name
    with served(tmp_path) as address:
        replay(recording, address)
    live = comparable(tmp_path / "live")
    assert live["triplets"].height > 0
    from_journal = comparable(build([tmp_path / "journal"], tmp_path / "from-journal"))
    from_files = comparable(build(inputs_of(recording), tmp_path / "from-files"))
    assert [] == list(frame_differences(live, from_journal, "from the journal"))
    assert [] == list(frame_differences(live, from_files, "from the files"))
    assert [] == check(recording, tmp_path / "live")
