from pathlib import Path

import pytest

from check_recorded import check
from spanmill.cli import main

RECORDED = Path(__file__).parent / "recorded"
RECORDINGS = sorted(path.parent.name for path in RECORDED.glob("*/truth.json"))


@pytest.mark.parametrize("name", RECORDINGS)
def test_recording_gives_what_the_engine_did(name: str, tmp_path: Path) -> None:
    """The spans of a real agent on a real vLLM give the ids, logprobs, turns and Episodes that the engine logged."""
    recording = RECORDED / name
    inputs = [str(path) for path in (recording / "traces.binpb", recording / "logs.binpb") if path.exists()]
    assert 0 == main(["build", *inputs, "--out", str(tmp_path / "data")])
    assert [] == check(recording, tmp_path / "data")
