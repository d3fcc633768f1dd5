import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from spanmill.collector.stats import loss_report
from spanmill.errors import DatasetError
from spanmill.triplets.records import Episode, Quarantined, Rollout, Triplet, Turn
from spanmill.triplets.writer import DatasetWriter


def triplet(call_id: str, turn: int, trainable: bool, *flags: str) -> Triplet:
    """A call of rollout r1."""
    return Triplet(
        rollout_id="r1",
        attempt=0,
        turn=turn,
        choice=0,
        call_id=call_id,
        trace_id="ab" * 16,
        span_id="cd" * 8,
        ids_source="engine",
        started_at=0,
        ended_at=1,
        dialect="spanmill",
        trainable=trainable,
        flags=flags,
    )


def rollouts() -> list[Rollout]:
    """One rollout with a trained, an untrained and a quarantined call, and one without any."""
    episode = Episode(
        rollout_id="r1",
        attempt=0,
        episode=0,
        input_ids=np.arange(1_500, dtype=np.int32),
        loss_mask=np.array([0] * 1_300 + [1] * 200, np.int8),
        prompt_length=1_300,
        turns=(Turn("a", 1_300, 1_500, True),),
        step_rewards=(None,),
        truncated=True,
        num_turns=1,
        rollout_tokens_trained=200,
    )
    full = Rollout(
        rollout_id="r1",
        attempt=0,
        identity_source="span",
        status="succeeded",
        closed_by="end",
        started_at=0,
        ended_at=1,
        reward=1.0,
        num_calls=3,
        num_triplets=2,
        num_episodes=1,
        tokens_captured=250,
        tokens_trained=200,
        tokens_masked=30,
        tokens_superseded=0,
        tokens_quarantined=20,
        triplets=[triplet("a", 0, True, "no_logprobs"), triplet("b", 1, False, "aborted", "no_logprobs")],
        episodes=[episode],
        quarantined=[Quarantined("length_mismatch", "2 logprobs for 3 ids", "ab" * 16, "ef" * 8, "{}", 0, "r1", 0)],
    )
    empty = Rollout("r2", 0, "span", "unknown", "idle", 0, 1, flags=("late",))
    return [full, empty]


REPORT = """\
rollouts                 2
  status succeeded       1   50.0%
  status unknown         1   50.0%
  closed by end          1   50.0%
  closed by idle         1   50.0%
  without a reward       1   50.0%
  flag late              1   50.0%

calls seen               3
  trained                1   33.3%
    flag no_logprobs     1   33.3%
  kept, not trained      1   33.3%
    flag aborted         1   33.3%
    flag no_logprobs     1   33.3%
  quarantined            1   33.3%

tokens sampled         250
  trained              200   80.0%
  masked                30   12.0%
  superseded             0    0.0%
  quarantined           20    8.0%
  conserved            in all 2 rollouts

episodes                 1
  turns each           1 to 1, median 1
  tokens each          1,500 to 1,500, median 1,500
  trained tokens each  200 to 200, median 200
  truncated              1  100.0%

rows in quarantine       1
  length_mismatch        1  100.0%
"""


def test_report_accounts_for_every_call_and_token(tmp_path: Path) -> None:
    """Every call and every sampled token stands in exactly one of the lines: trained, kept, superseded, quarantined."""
    with DatasetWriter(tmp_path) as writer:
        writer.write(rollouts())
    assert REPORT == loss_report(tmp_path)


@pytest.mark.parametrize("wrong", [{"tokens_captured": 251}, {"tokens_trained": 199, "tokens_masked": 31}])
def test_report_names_a_rollout_that_lost_tokens(tmp_path: Path, wrong: dict[str, int]) -> None:
    """Tokens whose fates do not add up, or that are trained without a loss mask, are named and not passed over."""
    full, empty = rollouts()
    with DatasetWriter(tmp_path) as writer:
        writer.write([replace(full, **wrong), empty])
    (line,) = [line for line in loss_report(tmp_path).splitlines() if "CONSERVED" in line]
    assert "NOT CONSERVED in 1 of 2 rollouts, first r1, attempt 0" == " ".join(line.split())


def test_report_of_an_empty_dataset(tmp_path: Path) -> None:
    """A dataset without rows has a report without shares, and no division by zero."""
    DatasetWriter(tmp_path).close()
    report = loss_report(tmp_path)
    assert ["rollouts", "0"] == report.splitlines()[0].split()
    assert "%" not in report


def test_no_dataset_is_an_error(tmp_path: Path) -> None:
    """A folder that holds no dataset is an error that names it, not an empty report."""
    with pytest.raises(DatasetError, match=str(tmp_path)):
        loss_report(tmp_path)


def test_the_report_as_json(tmp_path: Path) -> None:
    """Each line stands under its label, with value and share; what is indented under it are its parts."""
    with DatasetWriter(tmp_path) as writer:
        writer.write(rollouts())
    whole = json.loads(loss_report(tmp_path, as_json=True))
    assert {"value": 2} == {"value": whole["rollouts"]["value"]}
    assert {"value": 1, "share": 1 / 3} == {
        k: whole["calls seen"]["parts"]["quarantined"][k] for k in ("value", "share")
    }
    text = [line for line in loss_report(tmp_path).splitlines() if line]

    def count(lines: dict[str, Any]) -> int:
        return sum(1 + count(line.get("parts", {})) for line in lines.values())

    assert len(text) == count(whole)
