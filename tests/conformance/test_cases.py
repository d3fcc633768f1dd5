import os
from pathlib import Path
from typing import Any

import pytest

from compare_rows import Frames, dataset_differences, frame_differences, read_frames
from load_cases import Case, case_names, load_case, shuffled, write_lines
from spanmill.cli import main

SHUFFLES = int(os.environ.get("SPANMILL_SHUFFLES", "1"))
"""How often each case is built again in another order."""


def build(case: Case, requests: list[dict[str, Any]], folder: Path) -> Frames:
    """The tables that `spanmill build` makes of the requests; in this process, to spare each case four starts."""
    folder.mkdir()
    rewards = ["--rewards", str(case.rewards)] if case.rewards else []
    lines = write_lines(requests, folder / "input.jsonl")
    assert 0 == main(["build", str(lines), "--out", str(folder / "data"), *rewards, *case.arguments])
    return read_frames(folder / "data")


@pytest.mark.parametrize("name", case_names())
def test_case(name: str, tmp_path: Path) -> None:
    """The spans of a case give the expected rows, with every sampled token accounted for, and the same in any order."""
    case = load_case(name)
    frames = build(case, case.requests, tmp_path / "first")
    assert [] == dataset_differences(case.expect, frames)
    for seed in range(SHUFFLES):
        again = build(case, shuffled(case, seed), tmp_path / f"shuffle-{seed}")
        assert [] == list(frame_differences(frames, again, f"after shuffle {seed}"))
