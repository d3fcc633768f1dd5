"""Rollouts to write, and what reading them back must give."""

from collections.abc import Callable
from dataclasses import fields, is_dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, TypeAlias, cast

import numpy as np
import pytest

from spanmill.triplets.records import Episode, PolicyRun, Quarantined, RewardSeen, Rollout, Triplet, Turn

Row: TypeAlias = dict[str, Any]
MakeRollout: TypeAlias = Callable[..., Rollout]
AsRow: TypeAlias = Callable[[Any], Row]


def rollout(rollout_id: str, attempt: int = 0, revision: int = 0, calls: int = 2, moved: bool = False) -> Rollout:
    """A rollout whose tokens tell its id and revision apart; one that moved away has no rows of its own."""
    calls = 0 if moved else calls
    mark = revision * 1000 + sum(rollout_id.encode())
    triplets = [
        Triplet(
            rollout_id=rollout_id,
            attempt=attempt,
            revision=revision,
            turn=turn,
            choice=0,
            call_id=f"{rollout_id}-{turn}",
            trace_id="ab" * 16,
            span_id=f"{turn:016x}",
            ids_source="engine",
            started_at=turn,
            ended_at=turn + 1,
            dialect="spanmill",
            trainable=True,
            prompt_token_ids=np.arange(mark, mark + 3 + turn, dtype=np.int32),
            response_token_ids=np.array([mark, turn], np.int32),
            response_logprobs=np.array([-0.5, -1e-9], np.float32),
            policy_versions=(PolicyRun("v1", 0, 2),),
        )
        for turn in range(calls)
    ]
    episodes = [
        Episode(
            rollout_id=rollout_id,
            attempt=attempt,
            revision=revision,
            episode=0,
            input_ids=np.arange(mark, mark + 5, dtype=np.int32),
            loss_mask=np.array([0, 0, 0, 1, 1], np.int8),
            logprobs=np.array([0, 0, 0, -0.5, -1e-9], np.float32),
            prompt_length=3,
            turns=(Turn(f"{rollout_id}-0", 3, 5, True, "raw", 0.5),),
            step_rewards=(None,),
            truncated=False,
            num_turns=1,
        )
    ]
    return Rollout(
        rollout_id=rollout_id,
        attempt=attempt,
        revision=revision,
        identity_source="span",
        status="succeeded",
        closed_by="end",
        started_at=0,
        ended_at=calls,
        rewards=(RewardSeen("reward", 1.0, None, "span"),),
        reward=1.0,
        num_calls=calls,
        num_triplets=calls,
        num_episodes=min(calls, 1),
        flags=("moved",) if moved else (),
        triplets=triplets,
        episodes=episodes if calls else [],
        quarantined=[quarantined(f"revision {revision}", rollout_id, attempt)] if calls else [],
    )


def quarantined(detail: str, rollout_id: str | None = None, attempt: int | None = None) -> Quarantined:
    """A quarantine row that its detail tells apart."""
    return Quarantined("bad_token_id", detail, "ab" * 16, "cd" * 8, "{}", 5, rollout_id, attempt)


def as_row(record: Any) -> Row:
    """The row that a record must come back as from polars."""
    return {
        field.name: _time(value) if field.name.endswith("_at") else _value(value)
        for field in fields(record)
        for value in [getattr(record, field.name)]
        if field.name not in ("triplets", "episodes", "quarantined", "announced")
    }


def _time(microseconds: int) -> datetime:
    return datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=microseconds)


def _value(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.tolist()
    if is_dataclass(value):
        return as_row(value)
    return [_value(element) for element in cast(tuple[Any, ...], value)] if isinstance(value, tuple) else value


@pytest.fixture(scope="session", name="make_rollout")
def make_rollout_fixture() -> MakeRollout:
    """`rollout`"""
    return rollout


@pytest.fixture(scope="session", name="make_quarantined")
def make_quarantined_fixture() -> Callable[..., Quarantined]:
    """`quarantined`"""
    return quarantined


@pytest.fixture(scope="session", name="as_row")
def as_row_fixture() -> AsRow:
    """`as_row`"""
    return as_row
