from datetime import UTC, datetime
from typing import Any

import polars as pl
import pytest

from compare_rows import column_differences, conservation_differences, frame_differences, table_differences


@pytest.mark.parametrize(
    ("column", "want", "got", "same"),
    [
        ("turn", 1, 1, True),
        ("turn", 1, 2, False),
        ("reward", 0.1, 0.1 + 1e-9, True),
        ("reward", 0.1, 0.1001, False),
        ("reward", None, 0.0, False),
        ("trainable", True, 1, False),
        ("started_at", 1_500_000, datetime(1970, 1, 1, 0, 0, 1, 500_000, UTC), True),
        ("started_at", 1_500_001, datetime(1970, 1, 1, 0, 0, 1, 500_000, UTC), False),
        ("input_ids", [1, 2], [1, 2], True),
        ("input_ids", [1, 2], [1, 2, 3], False),
        ("turns", [{"call_id": "a"}], [{"call_id": "a", "trained": True}], True),
        ("turns", [{"call_id": "a"}], [{"call_id": "b"}], False),
        ("flags", ["late"], ["late", "orphan"], True),
        ("flags", ["late"], ["orphan"], False),
        ("flags_exact", ["late"], ["late", "orphan"], False),
        ("flags_not", ["late"], ["orphan"], True),
        ("flags_not", ["late"], ["late"], False),
        ("messages@present", True, None, False),
        ("messages@present", False, None, True),
        ("messages@json", {"content": "hi"}, '{"content": [{"type": "text", "text": "hi"}], "name": null}', True),
        ("messages@json", {"content": None}, '{"role": "assistant"}', True),
        ("messages@json", {"content": "hi"}, '{"content": "ho"}', False),
        ("messages@json", {"arguments": '{"a": 1}'}, '{"arguments": "{\\"a\\":1}"}', True),
        ("messages@json", {"arguments": '{"a": 1}'}, '{"arguments": "{\\"a\\":2}"}', False),
        ("messages@json", {"content": "hi"}, None, False),
    ],
)
def test_columns_are_compared_by_their_kind(column: str, want: Any, got: Any, same: bool) -> None:
    """Ints exactly, floats nearly, flags as sets, times in microseconds, JSON by what is listed; null is never 0."""
    name = column.partition("@")[0]
    name = "flags" if name.startswith("flags") else name
    assert same is ([] == list(column_differences(column, want, {name: got}, "row")))


CALLS: list[dict[str, Any]] = [
    {"rollout_id": "r", "attempt": 0, "turn": turn, "choice": 0, "call_id": call, "span_id": call.upper(), "flags": []}
    for turn, call in enumerate(["a", "b"])
]


@pytest.mark.parametrize(
    ("expected", "exact", "differs"),
    [
        ([{"rollout_id": "r", "call_id": "b", "turn": 1}], False, False),
        ([{"rollout_id": "r", "span_id": "B", "turn": 1}], False, False),
        ([{"turn": 0}, {"turn": 1}], True, False),
        ([{"rollout_id": "r", "call_id": "b", "turn": 1}], True, True),
        ([{"rollout_id": "r", "call_id": "c"}], False, True),
        ([{"rollout_id": "r", "call_id": "b"}] * 2, False, True),
        ([{"rollout_id": "r", "call_id": "b", "reward": 1.0}], False, True),
    ],
)
def test_rows_are_found_by_their_key(expected: list[dict[str, Any]], exact: bool, differs: bool) -> None:
    """An expected row is that of its key, once; a missing row, a missing column and, where exact, a row more differ."""
    assert differs is ([] != list(table_differences("triplets", expected, CALLS, exact)))


def tables(**changed: Any) -> dict[str, list[dict[str, Any]]]:
    """A rollout of 3 sampled tokens, 2 of them trained in one Episode; `changed` columns wherever they stand."""
    rollout: dict[str, Any] = {"rollout_id": "r", "attempt": 0, "num_triplets": 1, "num_episodes": 1}
    rollout |= {"tokens_captured": 3, "tokens_trained": 2, "tokens_masked": 1}
    rollout |= {"tokens_superseded": 0, "tokens_quarantined": 0}
    episode: dict[str, Any] = {"rollout_id": "r", "attempt": 0, "episode": 0, "input_ids": [1, 2, 3]}
    episode |= {"loss_mask": [0, 1, 1], "logprobs": None, "turns": ["t"], "step_rewards": [None], "num_turns": 1}
    episode |= {"rollout_tokens_trained": 2}
    changing = {
        name: [{k: changed.get(k, v) for k, v in row.items()}]
        for name, row in (("rollouts", rollout), ("episodes", episode))
    }
    return {**changing, "triplets": [{"rollout_id": changed.get("stray", "r"), "attempt": 0}], "quarantine": []}


def test_conserved_tokens_are_no_difference() -> None:
    """Where all counts agree there is nothing to say."""
    assert [] == list(conservation_differences(tables()))


@pytest.mark.parametrize(
    "changed",
    [
        {"tokens_captured": 4},
        {"tokens_trained": 1, "tokens_masked": 2},
        {"num_triplets": 2},
        {"num_episodes": 0},
        {"loss_mask": [1, 1]},
        {"logprobs": [0.0]},
        {"num_turns": 2},
        {"rollout_tokens_trained": 3},
        {"stray": "s"},
    ],
)
def test_lost_tokens_and_rows_are_differences(changed: dict[str, Any]) -> None:
    """A token whose fate is unknown, a count that no row bears out and a row without its rollout are found."""
    assert [] != list(conservation_differences(tables(**changed)))


@pytest.mark.parametrize(("again", "differs"), [([1, 2], False), ([2, 1], True), ([1], True)])
def test_builds_are_compared_row_by_row(again: list[int], differs: bool) -> None:
    """Two builds are the same only with the same rows in the same order; when a span was received does not count."""
    names = ("rollouts", "triplets", "episodes", "quarantine")
    first = {name: pl.DataFrame({"a": [1, 2], "received_at": [0, 0]}) for name in names}
    second = {name: pl.DataFrame({"a": again, "received_at": [9] * len(again)}) for name in names}
    assert differs is ([] != list(frame_differences(first, second, "again")))
