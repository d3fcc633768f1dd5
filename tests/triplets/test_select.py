from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from exported_rollouts import call, rollout, write

import spanmill
from spanmill import select
from spanmill.errors import ExportError
from spanmill.triplets.records import PolicyRun, Rollout
from spanmill.triplets.select import LEFT_OUT, Selection, decide

A, B = [1, 2, 3], [4, 5]


def one(rollout_id: str, attempt: int = 0, version: str | None = "7", **given: Any) -> Rollout:
    """A rollout of one call."""
    own = {name: given.pop(name) for name in ("agent", "model", "logprobs_mode") if name in given}
    runs = (PolicyRun(version, 0, 2),) if version is not None else ()
    return rollout(rollout_id, [call(0, A, B, policy_versions=runs, **own)], attempt=attempt, **given)


def chosen(path: Path, rollouts: Sequence[Rollout], selection: Selection) -> list[tuple[str, int]]:
    """The selected (rollout, attempt)."""
    frame = select.rollouts(write(path / "data", rollouts), selection).collect()
    return frame.select("rollout_id", "attempt").rows()


def reasons(path: Path, rollouts: Sequence[Rollout], selection: Selection, *needs: Any) -> list[str | None]:
    """Why each Episode is left out."""
    dataset = write(path / "data", rollouts)
    found = decide(spanmill.read_rollouts(dataset), spanmill.read_episodes(dataset), selection, needs)
    return found.episodes[LEFT_OUT].to_list()


@pytest.mark.parametrize(
    ("attempts", "expected"),
    [
        ([("succeeded", None), ("unknown", None)], [1]),
        ([("succeeded", None), ("failed", 1.0)], [0]),
        ([("failed", 0.5), ("cancelled", 0.0), ("failed", None)], [1]),
        ([("failed", None), ("cancelled", None)], []),
    ],
)
def test_the_attempt_that_counts(tmp_path: Path, attempts: list[tuple[str, float | None]], expected: list[int]) -> None:
    """The last attempt that is not failed or cancelled counts, else the last one with a reward, else none."""
    made = [one("r", number, status=status, reward=reward) for number, (status, reward) in enumerate(attempts)]
    assert [("r", number) for number in expected] == chosen(tmp_path, made, Selection())


def test_the_rule_of_attempts_is_an_expression(tmp_path: Path) -> None:
    """`counts` filters a LazyFrame of rollouts by itself; with a status it means the last attempt that ended so."""
    made = [one("r", 0, status="failed"), one("r", 1, status="failed"), one("r", 2, status="succeeded")]
    frame = spanmill.read_rollouts(write(tmp_path / "data", made))
    assert [2] == frame.filter(select.counts()).collect()["attempt"].to_list()
    assert [1] == frame.filter(select.counts(["failed"])).collect()["attempt"].to_list()


@pytest.mark.parametrize(
    ("selection", "expected"),
    [
        (Selection(mode=("train",)), ["a/1", "a/2"]),
        (Selection(task_id=("t2", "t3")), ["a/2", "b/1"]),
        (Selection(rollout_prefix="a/"), ["a/1", "a/2"]),
        (Selection(min_reward=0.5), ["a/2", "b/1"]),
        (Selection(max_reward=0.5), ["a/1", "a/2"]),
        (Selection(status=("unknown",)), ["b/1"]),
        (Selection(agent="^pla"), ["a/1"]),
    ],
)
def test_rules_keep_what_they_say(tmp_path: Path, selection: Selection, expected: list[str]) -> None:
    """Each rule alone: a tuple means one of its members, a bound of rewards is inclusive, null is in none."""
    made = [
        one("a/1", mode="train", task_id="t1", reward=0.0, agent="planner"),
        one("a/2", mode="train", task_id="t2", reward=0.5, agent="my planner"),
        one("b/1", task_id="t3", reward=1.0, status="unknown"),
        one("c/1", reward=None, status="failed"),
    ]
    dataset = write(tmp_path / "data", made)
    assert expected == select.episodes(dataset, selection).collect()["rollout_id"].to_list()


def test_a_rollout_is_as_old_as_its_oldest_token(tmp_path: Path) -> None:
    """All Episodes of a rollout go by the oldest version of any; unknown ones, and no whole numbers, are left out."""
    calls = [call(0, A, B), call(1, [9], B, policy_versions=(PolicyRun("5", 0, 1), PolicyRun("7", 1, 1)))]
    made = [
        rollout("mixed", calls),
        one("new", version="7"),
        one("unknown", version=None),
        one("partly", version=None),
        one("named", version="step-7"),
    ]
    made[3].episodes[0].policy_versions = (PolicyRun("7", 3, 1),)
    left = ["no_policy_version"] * 3
    assert ["policy_age", "policy_age", None, *left] == reasons(tmp_path / "1", made, Selection(max_policy_age=1))
    assert [None, None, None, *left] == reasons(tmp_path / "2", made, Selection(max_policy_age=2))
    later = Selection(max_policy_age=2, policy_version=9)
    assert ["policy_age", "policy_age", None, *left] == reasons(tmp_path / "3", made, later)


def test_whole_groups(tmp_path: Path) -> None:
    """A group is whole with as many selected rollouts as it was meant to have, or as the dataset has, at least two."""
    made = [
        *(one(f"whole-{n}", group_id="whole", group_size=2) for n in range(2)),
        *(one(f"short-{n}", group_id="short", group_size=3) for n in range(2)),
        *(one(f"unsized-{n}", group_id="unsized") for n in range(2)),
        one("lost-0", group_id="lost"),
        one("lost-1", group_id="lost", status="failed", reward=None),
        one("alone", group_id="one", group_size=1),
        one("none"),
    ]
    selection = Selection(whole_groups=True)
    expected = [None, None, "incomplete_group", "incomplete_group", None, None, "incomplete_group"]
    assert [*expected, "failed_or_cancelled", "group_of_one", "no_group"] == reasons(tmp_path, made, selection)


def test_a_group_whose_member_loses_its_rows_is_not_whole(tmp_path: Path) -> None:
    """Rules of Episodes come before that of groups: no group is exported without the rows of one of its rollouts."""
    made = [one("a", group_id="g"), rollout("b", [call(0, A * 3, B)], group_id="g")]
    expected = ["incomplete_group", "incomplete_group"]
    assert expected == reasons(tmp_path, made, Selection(whole_groups=True, max_tokens=5))


def test_logprobs_modes_are_not_mixed_unless_asked(tmp_path: Path) -> None:
    """Two modes, or one and an unknown one, are refused with their numbers; one can be chosen, or both be allowed."""
    made = [one("a", logprobs_mode="raw"), one("b", logprobs_mode="processed"), one("c", logprobs_mode=None)]
    with pytest.raises(ExportError, match=r"mixes logprobs modes, not recorded \(1\), processed \(1\), raw \(1\)"):
        reasons(tmp_path / "1", made, Selection())
    assert [None, "logprobs_mode", "logprobs_mode"] == reasons(tmp_path / "2", made, Selection(logprobs="raw"))
    assert [None, None, None] == reasons(tmp_path / "3", made, Selection(logprobs="any"))
    assert [None] == reasons(tmp_path / "4", made[2:], Selection())


def test_a_mode_is_that_of_every_trained_turn(tmp_path: Path) -> None:
    """An Episode whose turns differ is of no mode; turns that are not trained do not count."""
    first = call(0, A, B, logprobs_mode="processed")
    calls = [first, call(1, [*A, *B, 6], [7])]
    made = [
        rollout("both", calls),
        rollout("one", [call(0, A, B, logprobs_mode="processed", trainable=False), calls[1]]),
    ]
    assert ["logprobs_mode", None] == reasons(tmp_path, made, Selection(logprobs="raw"))


def test_models_are_not_mixed_unless_asked(tmp_path: Path) -> None:
    """Two models are refused with their numbers; models that were not recorded go with any."""
    made = [one("a", model="x"), one("b", model="y"), one("c", model=None)]
    with pytest.raises(ExportError, match=r"2 models, x \(1\), y \(1\): choose with --model, or allow"):
        reasons(tmp_path / "1", made, Selection())
    assert [None, "model", "model"] == reasons(tmp_path / "2", made, Selection(model=("x",)))
    assert [None, None, None] == reasons(tmp_path / "3", made, Selection(mix_models=True))
    assert [None, None] == reasons(tmp_path / "4", made[1:], Selection())


def test_what_a_format_needs(tmp_path: Path) -> None:
    """Rows without it are left out, each under the name of what it lacks."""
    bare = call(0, A, B, response_logprobs=None, temperature=None, policy_versions=(), messages=None, response=None)
    made = [one("full"), rollout("bare", [bare], reward=None)]
    for need in ("logprobs", "temperature", "policy_version", "reward"):
        assert [None, f"no_{need}"] == reasons(tmp_path / need, made, Selection(), need)
    made[1].episodes[0].messages = None
    assert [None, "no_messages"] == reasons(tmp_path / "messages", made, Selection(), "messages")


def test_long_sequences(tmp_path: Path) -> None:
    """`max_tokens` is inclusive; a sequence of which truncating leaves nothing trained is left out, too."""
    made = [one("five"), rollout("long", [call(0, A * 2, B)]), rollout("cut", [call(0, [1], [2, 3, 4, 5, 6, 7])])]
    assert [None, "overlong", "overlong"] == reasons(tmp_path / "1", made, Selection(max_tokens=5))
    truncating = Selection(max_tokens=5, overlong="truncate")
    assert [None, "overlong", None] == reasons(tmp_path / "2", made, truncating)


def test_a_first_token_is_never_trained(tmp_path: Path) -> None:
    """A call with an empty prompt is left out: trainers shift by one, and its first token has nothing before it."""
    made = [one("a"), rollout("b", [call(0, [], B)])]
    assert [None, "no_prompt"] == reasons(tmp_path, made, Selection())


def test_a_pattern_that_is_none(tmp_path: Path) -> None:
    """A regular expression that does not parse is named."""
    with pytest.raises(ExportError, match=r"--agent '\(' is no regular expression"):
        reasons(tmp_path, [one("a", agent="x")], Selection(agent="("))


def test_the_program_of_the_docs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What docs/trainers.md shows of selection in Python runs as it stands."""
    text = (Path(__file__).parents[2] / "docs" / "trainers.md").read_text()
    program = text.split("```python\n")[1].split("```")[0]
    write(tmp_path / "data", [one(f"r{n}", group_id="g", mode="train") for n in range(2)])
    monkeypatch.chdir(tmp_path)
    found: dict[str, Any] = {}
    exec(program, found)
    assert (2, 2) == (found["episodes"].height, found["final"].height)


def test_an_empty_dataset_has_nothing_selected(tmp_path: Path) -> None:
    """Frames have their columns, and no rows."""
    dataset = write(tmp_path / "data", [])
    selection = Selection(max_policy_age=1, whole_groups=True, max_tokens=3)
    assert (0, 0) == (
        select.rollouts(dataset, selection).collect().height,
        select.episodes(dataset, selection).collect().height,
    )


def test_token_ids_of_an_episode_are_whole(tmp_path: Path) -> None:
    """`select.episodes` gives the dataset's rows as they are."""
    dataset = write(tmp_path / "data", [one("a")])
    (ids,) = select.episodes(dataset, Selection(max_tokens=5, overlong="truncate")).collect()["input_ids"]
    assert np.array_equal([*A, *B], ids)
