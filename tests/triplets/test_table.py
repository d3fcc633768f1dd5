import tempfile
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spanmill.triplets.reader import read_episodes, read_quarantine, read_rollouts, read_triplets
from spanmill.triplets.records import Episode, PolicyRun, Quarantined, RewardSeen, Rollout, Triplet, Turn
from spanmill.triplets.table import rows_to_tables, same_content
from spanmill.triplets.writer import DatasetWriter

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
INT32 = st.integers(-(2**31), 2**31 - 1)
INT64 = st.integers(-(2**63), 2**63 - 1)
FLOAT = st.floats(width=32, allow_nan=False)
DOUBLE = st.floats(allow_nan=False)
TIME = st.integers(-(10**15), 10**16)
FLAGS = st.lists(TEXT, max_size=3).map(tuple)
RUNS = st.lists(st.builds(PolicyRun, TEXT, INT32, INT32), max_size=3).map(tuple)


def _arrays(elements: st.SearchStrategy[Any], dtype: Any) -> st.SearchStrategy[Any]:
    return st.lists(elements, max_size=5).map(lambda values: np.array(values, dtype))


IDS = _arrays(INT32, np.int32)
LOGPROBS = _arrays(FLOAT, np.float32)
EXPERTS = st.fixed_dictionaries({"data": st.binary(max_size=8), "shape": st.lists(INT32, max_size=3), "dtype": TEXT})


def _optional(strategy: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.none() | strategy


@st.composite
def rollouts(draw: st.DrawFn) -> Rollout:
    """A rollout with any value that its columns can hold."""
    keys = {"rollout_id": draw(TEXT), "attempt": draw(INT32)}
    shared = {
        **keys,
        "revision": draw(st.integers(0, 2**31 - 1)),
        **{name: draw(_optional(TEXT)) for name in ("group_id", "task_id", "mode")},
    }
    sampling: dict[str, st.SearchStrategy[Any]] = {
        "temperature": _optional(FLOAT),
        "top_p": _optional(FLOAT),
        "top_k": _optional(INT32),
        "reward": _optional(DOUBLE),
        "policy_versions": RUNS,
        **{name: _optional(TEXT) for name in ("agent", "model", "messages", "tools", "logprobs_mode", "finish_reason")},
        "flags": FLAGS,
        "metadata": TEXT,
    }
    fixed = {name: st.just(value) for name, value in shared.items()}
    own = {name: st.just(value) for name, value in keys.items()}
    triplet = st.builds(
        Triplet,
        **fixed,
        **sampling,
        turn=INT32,
        choice=INT32,
        **{name: TEXT for name in ("call_id", "trace_id", "span_id", "ids_source", "dialect")},
        **{
            name: _optional(TEXT)
            for name in ("parent_call_id", "policy_version", "stop_reason", "multimodal", "response")
        },
        prompt_token_ids=_optional(IDS),
        response_token_ids=_optional(IDS),
        response_logprobs=_optional(LOGPROBS),
        max_tokens=_optional(INT32),
        routed_experts=_optional(EXPERTS),
        trainable=st.booleans(),
        started_at=TIME,
        ended_at=TIME,
    )
    episode = st.builds(
        Episode,
        **fixed,
        **sampling,
        episode=INT32,
        input_ids=IDS,
        loss_mask=_arrays(st.integers(0, 1), np.int8),
        logprobs=_optional(LOGPROBS),
        prompt_length=INT32,
        num_turns=INT32,
        turns=st.lists(
            st.builds(Turn, TEXT, INT32, INT32, st.booleans(), _optional(TEXT), _optional(FLOAT)), max_size=3
        ).map(tuple),
        step_rewards=st.lists(_optional(DOUBLE), max_size=3).map(tuple),
        truncated=st.booleans(),
        advantage=_optional(DOUBLE),
        rollout_tokens_trained=INT64,
    )
    counts = ("captured", "trained", "masked", "superseded", "quarantined")
    return draw(
        st.builds(
            Rollout,
            **fixed,
            **{name: TEXT for name in ("identity_source", "status", "closed_by", "metadata")},
            **{f"tokens_{name}": INT64 for name in counts},
            **{f"num_{name}": INT32 for name in ("calls", "triplets", "episodes")},
            group_size=_optional(INT32),
            reward=_optional(DOUBLE),
            rewards=st.lists(st.builds(RewardSeen, TEXT, DOUBLE, _optional(TEXT), TEXT), max_size=3).map(tuple),
            flags=FLAGS.filter(lambda flags: "moved" not in flags),
            started_at=TIME,
            ended_at=TIME,
            triplets=st.lists(triplet, max_size=3),
            episodes=st.lists(episode, max_size=3),
            quarantined=st.lists(st.builds(Quarantined, TEXT, TEXT, TEXT, TEXT, TEXT, TIME, **own), max_size=3),
            announced=st.booleans(),
        )
    )


@settings(max_examples=40)
@given(st.lists(rollouts(), max_size=3, unique_by=lambda rollout: (rollout.rollout_id, rollout.attempt)))
def test_rows_come_back_as_they_were_written(as_row: Callable[[Any], Any], written: list[Rollout]):
    """Null lists, empty lists, any text and the extremes of every number survive the way through Parquet, in order."""
    with tempfile.TemporaryDirectory() as folder, DatasetWriter(folder) as writer:
        writer.write(written)
        read = [
            frame(folder).collect().to_dicts()
            for frame in (read_rollouts, read_triplets, read_episodes, read_quarantine)
        ]
    assert read == [
        [as_row(rollout) for rollout in written],
        [as_row(row) for rollout in written for row in rollout.triplets],
        [as_row(row) for rollout in written for row in rollout.episodes],
        [as_row(row) for rollout in written for row in rollout.quarantined],
    ]


@settings(max_examples=20)
@given(rollouts())
def test_content_is_the_same_as_itself_through_a_file(rollout: Rollout):
    """What was committed is recognised as the same content, so a restart writes no new revision."""
    with tempfile.TemporaryDirectory() as folder, DatasetWriter(folder) as writer:
        writer.write([rollout])
        key = (rollout.rollout_id, rollout.attempt)
        assert same_content(rollout, writer.read_rows([key])[key])


def test_content_does_not_depend_on_when_spans_came(make_rollout: Callable[..., Rollout]):
    """`revision`, `closed_by`, `received_at` and the flag `late` are no content."""
    first = make_rollout("r", revision=0)
    second = replace(
        first,
        revision=1,
        closed_by="idle",
        flags=("late",),
        triplets=[replace(row, revision=1, flags=("late",)) for row in first.triplets],
        episodes=[replace(row, revision=1) for row in first.episodes],
        quarantined=[replace(row, received_at=9) for row in first.quarantined],
    )
    assert same_content(second, rows_to_tables([first]))


def test_one_changed_logprob_is_other_content(make_rollout: Callable[..., Rollout]):
    """Floats are compared exactly."""
    first, second = make_rollout("r"), make_rollout("r")
    second.triplets[0].response_logprobs = np.array([np.nextafter(np.float32(-0.5), np.float32(0)), -1e-9], np.float32)
    assert not same_content(second, rows_to_tables([first]))


def test_a_null_list_is_other_content_than_an_empty_one(make_rollout: Callable[..., Rollout]):
    """Nothing recorded and nothing sampled are different things."""
    first, second = make_rollout("r"), make_rollout("r")
    first.triplets[0].response_token_ids = None
    second.triplets[0].response_token_ids = np.array([], np.int32)
    assert not same_content(second, rows_to_tables([first]))


def test_strays_stand_last_in_an_order_of_their_content(make_rollout: Callable[..., Rollout]):
    """Stray quarantine rows follow those of the rollouts, ordered by content, whatever order they came in."""
    strays = [
        Quarantined("b", "", "", "", "", received_at=1),
        Quarantined("a", "", "", "", "", received_at=2),
        Quarantined("z", "", "", "", "", received_at=3, rollout_id="a", attempt=0),
    ]
    reasons = [
        rows_to_tables([make_rollout("r")], order)["quarantine"]["reason"].to_pylist()
        for order in (strays, strays[::-1])
    ]
    assert reasons == [["bad_token_id", "z", "a", "b"]] * 2


def test_half_a_surrogate_pair_becomes_a_replacement_character():
    """JSON can spell text that UTF-8 cannot hold; it is stored as far as it can be, and whole pairs are joined."""
    row = Quarantined("r", "\ud83d", "", "", "\ud83d\ude00", 0)
    table = rows_to_tables([], [row])["quarantine"]
    assert (table["detail"].to_pylist(), table["span"].to_pylist()) == (["�"], ["😀"])


def test_a_row_stands_under_its_own_rollout(make_rollout: Callable[..., Rollout]):
    """A row that names another rollout, attempt or revision than the one it stands under is refused."""
    rollout = make_rollout("r", revision=1)
    rollout.triplets[1].revision = 0
    with pytest.raises(ValueError, match=r"a row of \('r', 0, 0\) stands under the rollout \('r', 0, 1\)"):
        rows_to_tables([rollout])


def test_ids_of_another_type_are_refused(make_rollout: Callable[..., Rollout]):
    """Token ids are int32; wider ones are not cut to fit."""
    rollout = make_rollout("r")
    rollout.triplets[0].prompt_token_ids = np.array([2**40])  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(TypeError, match="Cannot cast"):
        rows_to_tables([rollout])


def test_no_rows_make_tables_with_every_column():
    """A table without rows still has its schema."""
    tables = rows_to_tables([])
    assert {name: table.num_rows for name, table in tables.items()} == dict.fromkeys(
        ["rollouts", "triplets", "episodes", "quarantine"], 0
    )
    assert isinstance(pl.from_arrow(tables["episodes"]), pl.DataFrame)
    assert tables["episodes"].schema.field("step_rewards").type == pa.list_(pa.field("element", pa.float64()))
