import io
import json
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from spanmill.collector.show import show
from spanmill.errors import DatasetError
from spanmill.triplets.reader import read_episodes, read_rollouts
from spanmill.triplets.records import Episode, Quarantined, RewardSeen, Rollout, Triplet, Turn
from spanmill.triplets.writer import DatasetWriter


def triplet(turn: int, **given: object) -> Triplet:
    """A call of rollout `job/a`."""
    fields: dict[str, object] = {
        "call_id": f"c{turn}",
        "prompt_token_ids": np.arange(10 + turn, dtype=np.int32),
        "response_token_ids": np.arange(3, dtype=np.int32),
        "finish_reason": "stop",
        "trainable": True,
        **given,
    }
    return Triplet(
        "job/a",
        0,
        turn,
        0,
        trace_id="ab" * 16,
        span_id="cd" * 8,
        ids_source="engine",
        started_at=0,
        ended_at=1,
        dialect="vllm",
        **fields,  # pyright: ignore[reportArgumentType]
    )


def rollout(rollout_id: str, attempt: int = 0, **given: object) -> Rollout:
    """A rollout without rows."""
    fields: dict[str, object] = {"status": "succeeded", "closed_by": "end", "ended_at": 2_500_000, **given}
    return Rollout(rollout_id, attempt, "span", started_at=attempt, **fields)  # pyright: ignore[reportArgumentType]


def full() -> Rollout:
    """A rollout with two agents, an Episode of two turns, a flag and a quarantined call."""
    calls = [
        triplet(0, response=json.dumps({"role": "assistant", "content": "one \x1b[31mred\x1b[0m"})),
        triplet(1, parent_call_id="c0", reward=0.5, agent="helper"),
        triplet(2, trainable=False, flags=("aborted",), agent="helper", finish_reason=None),
    ]
    mask = np.zeros(60, np.int8)
    mask[20:50] = 1
    mask[55:60] = 1
    episode = Episode(
        "job/a",
        0,
        0,
        input_ids=np.arange(1000, 1060, dtype=np.int32),
        loss_mask=mask,
        prompt_length=20,
        turns=(Turn("c0", 20, 50, True), Turn("c1", 55, 60, True)),
        step_rewards=(None, 0.5),
        truncated=True,
        model="tiny",
        logprobs=np.where(mask == 1, -0.25, 0).astype(np.float32),
        num_turns=2,
    )
    aside = Quarantined("length_mismatch", "3 response ids, 2 logprobs", "ab" * 16, "ef" * 8, "{}", 0, "job/a", 0)
    return rollout(
        "job/a",
        group_id="g",
        reward=0.5,
        rewards=(RewardSeen("", 0.5, "c1", "span"), RewardSeen("speed", 3.0, None, "http")),
        num_calls=4,
        num_triplets=3,
        num_episodes=1,
        tokens_captured=37,
        tokens_trained=35,
        tokens_masked=2,
        triplets=calls,
        episodes=[episode],
        quarantined=[aside],
    )


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    """A dataset of four rollouts, one of them with two attempts."""
    with DatasetWriter(tmp_path / "data") as writer:
        others = [rollout("job/b"), rollout("job/b", 1), rollout("other\x07\u202e"), rollout("x", flags=("late",))]
        writer.write([full(), *others], [])
    return tmp_path / "data"


def shown(dataset: Path, rollout: str | None = None, attempt: int | None = None, width: int = 120) -> list[str]:
    """What `show` prints, line by line, without trailing blanks."""
    file = io.StringIO()
    show(dataset, rollout, attempt, Console(file=file, width=width, highlight=False))
    return [line.rstrip() for line in file.getvalue().splitlines() if line.strip()]


def test_without_a_rollout_all_are_listed(dataset: Path) -> None:
    """A line per attempt, in the order of their starts; control characters are escaped."""
    found = [line.split() for line in shown(dataset)[2:]]
    expected = [
        ["job/a", "0", "succeeded", "0.5", "4", "1", "35", "of", "37"],
        ["job/b", "0", "succeeded", "-", "0", "0", "0", "of", "0"],
        ["other\\x07\\u202e", "0", "succeeded", "-", "0", "0", "0", "of", "0"],
        ["x", "0", "succeeded", "-", "0", "0", "0", "of", "0", "late"],
        ["job/b", "1", "succeeded", "-", "0", "0", "0", "of", "0"],
    ]
    assert expected == found


def test_one_rollout_is_shown_in_full(dataset: Path) -> None:
    """Its numbers, rewards, calls by agent and parent, tokens, what is set aside, and flags in words."""
    lines = shown(dataset, "job/a")
    tokens = next(i for i, line in enumerate(lines) if line.startswith("episode 0"))
    expected = [
        "rollout job/a  attempt 0",
        "  succeeded, closed by end, id from span, revision 0",
        "  group g, 2.5 s from 1970-01-01 00:00:00 UTC",
        "  4 calls, 3 kept, 1 episodes",
        "  37 tokens sampled = 35 trained + 2 masked + 0 superseded + 0 quarantined",
        "final reward 0.5",
        " name   value  call  from",
        " ────────────────────────",
        " -      0.5    c1    span",
        " speed  3      -     http",
        "calls",
        "├── turn 0  c0  new context · 10 -> 3 tokens · stop · trained",
        "│     one \\x1b[31mred\\x1b[0m",
        "├── turn 1  c1  extends turn 0 · 11 -> 3 tokens · stop · trained · reward 0.5 · agent helper",
        "└── agent helper",
        "    └── turn 2  c2  new context · 12 -> 3 tokens · no finish reason · not trained · aborted",
    ]
    assert expected == lines[:tokens]
    end = [
        "quarantined: 1",
        "  length_mismatch  3 response ids, 2 logprobs  span efefefefefefefef",
        "what the flags mean",
        "  aborted  The answer has no finish reason: it was cut off.",
        "  length_mismatch  Log probabilities and response ids differ in number.",
    ]
    assert end == lines[-5:]


def test_an_episode_is_shown_token_by_token(dataset: Path) -> None:
    """Every token with mask and logprob; of long runs the middle is left out, and how much is said."""
    lines = shown(dataset, "job/a")
    start = next(i for i, line in enumerate(lines) if line.startswith("episode 0"))
    assert "episode 0: 60 tokens, 35 trained, 2 turns, truncated, model tiny" == lines[start]
    rows = [line.split() for line in lines[start + 3 : -5]]
    context = [["0", "1000", "0", "context"], ["1", "1001", "0"], ["2", "1002", "0"], ["...", "14", "more", "0"]]
    assert context == rows[:4]
    assert [["20", "1020", "1", "-0.2500", "0", "c0"], ["21", "1021", "1", "-0.2500"]] == rows[7:9]
    assert [["...", "6", "more", "1"]] == [row for row in rows if row[0] == "..." and row[-1] == "1"]
    assert [["50", "1050", "0", "context"]] == [row for row in rows if row[0] == "50"]
    assert [["55", "1055", "1", "-0.2500", "1", "c1,", "reward", "0.5"]] == [row for row in rows if row[0] == "55"]
    assert ["59", "1059", "1", "-0.2500"] == rows[-1]


def test_a_prefix_selects(dataset: Path) -> None:
    """The beginning of hierarchical ids lists what begins so; of one alone it shows that."""
    lines = shown(dataset, "job")
    assert ["job/a", "job/b", "job/b", "3"] == [line.split()[0] for line in lines[2:]]
    assert "3 match; name one of them, and its --attempt where it has several, to see it." == lines[-1]
    assert "rollout x  attempt 0" == shown(dataset, "x")[0]
    assert "rollout other\\x07\\u202e  attempt 0" == shown(dataset, "oth")[0]


def test_an_attempt_selects(dataset: Path) -> None:
    """One attempt of several is shown if it is named, and listed beside the others if not."""
    assert "rollout job/b  attempt 1" == shown(dataset, "job/b", 1)[0]
    assert (
        "2 match; name one of them, and its --attempt where it has several, to see it." == shown(dataset, "job/b")[-1]
    )


@pytest.mark.parametrize(("rollout", "attempt", "says"), [("no\x1b", None, "no\\\\x1b"), ("job/a", 3, "attempt 3")])
def test_a_rollout_that_is_not_there_is_named(dataset: Path, rollout: str, attempt: int | None, says: str) -> None:
    """An error says what was asked for and how to see what there is."""
    with pytest.raises(DatasetError, match=rf"has no rollout .*{says}; `spanmill show .*` lists the 5 it has"):
        shown(dataset, rollout, attempt)


def test_a_narrow_terminal_loses_nothing(dataset: Path) -> None:
    """At 40 columns the list has two lines for each rollout, and tokens keep all of their numbers."""
    assert ["job/a", "  attempt 0, succeeded, reward 0.5, 4", "calls, 1 episodes, 35 of 37 tokens"] == (
        shown(dataset, width=40)[:3]
    )
    rows = [line.split() for line in shown(dataset, "job/a", width=40)]
    assert ["59", "1059", "1", "-0.2500"] in rows
    assert all(len(line) <= 40 for line in shown(dataset, "job/a", width=40))


def test_stdout_that_is_no_terminal_gets_plain_text(dataset: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """No colours and no cursor movements in a pipe."""
    show(dataset, "job/a")
    assert "\x1b" not in capsys.readouterr().out


def test_a_terminal_gets_its_colours(dataset: Path) -> None:
    """On a terminal, styles are written, and texts of the dataset still cannot move its cursor."""
    file = io.StringIO()
    show(dataset, "job/a", None, Console(file=file, force_terminal=True, color_system="truecolor", width=100))
    assert ("\x1b[1m" in file.getvalue(), "\x1b[31m" in file.getvalue()) == (True, False)


def test_rows_come_as_json(dataset: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All rollouts are a line each; one is an object with the rows of every table, as they are stored."""
    show(dataset, as_json=True)
    listed = [json.loads(line)["rollout_id"] for line in capsys.readouterr().out.splitlines()]
    assert sorted(read_rollouts(dataset).collect()["rollout_id"]) == sorted(listed)
    show(dataset, "job/a", as_json=True)
    one = json.loads(capsys.readouterr().out)
    frame = read_episodes(dataset).filter(rollout_id="job/a").collect()
    assert frame["input_ids"].to_list() == [row["input_ids"] for row in one["episodes"]]
    assert {"rollouts", "triplets", "episodes", "quarantine"} == set(one)
