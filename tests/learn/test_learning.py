"""The learning run in short: its first two iterations, with a real vLLM and a real update between them."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from running_vllm import environment, vllm_python

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def history(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The figures of two iterations."""
    python = vllm_python()
    if subprocess.run([python, "-c", "import polars, pyarrow, torch"], capture_output=True, check=False).returncode:
        pytest.skip("needs polars and pyarrow beside vLLM: make test-learn gets them")
    out = tmp_path_factory.mktemp("learn")
    command = [python, str(ROOT / "examples" / "learn" / "learn.py"), "--out", str(out), "--iterations", "2"]
    command += ["--tasks", "4", "--plays", "4", "--spanmill", str(Path(sys.executable).with_name("spanmill"))]
    log = out / "log"
    with log.open("wb") as file:
        done = subprocess.run(command, env=environment(PATH=os.environ["PATH"]), stdout=file, stderr=file, check=False)
    if done.returncode:
        raise RuntimeError(log.read_text(errors="replace")[-3000:])
    return json.loads((out / "learning.json").read_text())


def test_what_was_recorded_is_what_the_policy_samples(history: list[dict[str, Any]]):
    """Before either update torch gives the sampled tokens the recorded probabilities, but for bfloat16's noise."""
    assert [True, True] == [abs(one["ratio"] - 1) < 0.005 for one in history]
    assert [True, True] == [one["mean_deviation"] < 0.01 for one in history]
    assert [True, True] == [one["max_deviation"] < 0.1 for one in history]


def test_a_shift_by_one_token_would_be_seen(history: list[dict[str, Any]]):
    """The control: against logprobs that are one token late the deviation is a hundred times as large."""
    assert [True, True] == [one["shifted_deviation"] > 100 * one["mean_deviation"] for one in history]


def test_all_that_was_sampled_is_trained(history: list[dict[str, Any]]):
    """Two answers of 16 tokens, or fewer where the model ended itself, of each of the 16 rollouts."""
    assert [True, True] == [16 * 2 * 12 < one["tokens"] <= 16 * 2 * 16 for one in history]
