from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rows_of import rollouts_of, rows_of

from spanmill.triplets.records import Rollout

RECORDED = Path(__file__).parents[2] / "conformance" / "recorded" / "agentlightning"


def rollout_of(name: str) -> Rollout:
    """The one rollout of a recording."""
    (rollout,) = rollouts_of(RECORDED / f"{name}.jsonl")
    return rollout


@pytest.mark.parametrize(
    ("name", "counts"),
    [
        ("agent_pure_openai", [(14, 8)]),
        ("agent_langchain_tooluse", [(100, 20), (150, 15)]),
        ("agent_langgraph", [(208, 22), (235, 97), (1227, 97), (1376, 68)]),
    ],
)
def test_canned_ids_that_the_usage_contradicts_are_quarantined(name: str, counts: list[tuple[int, int]]) -> None:
    """Agents on a canned server: 3 prompt and 3 answer ids each, usage says otherwise, so every call is set aside.

    Agent Lightning trained on them. The two spans of each call are one call; none of its tokens is lost from the sums.
    """
    rollout = rollout_of(name)
    assert [
        (
            "token_count_mismatch",
            f"3 prompt ids, {prompt} declared by client; token_count_mismatch: 3 response ids, usage says {response}",
        )
        for prompt, response in counts
    ] == [(q.reason, q.detail) for q in sorted(rollout.quarantined, key=lambda q: _prompt_count(q.detail))]
    assert (len(counts), 0, 0) == (rollout.num_calls, rollout.num_triplets, rollout.num_episodes)
    assert (3 * len(counts), 3 * len(counts)) == (rollout.tokens_captured, rollout.tokens_quarantined)


def _prompt_count(detail: str) -> int:
    return int(detail.split()[3])


def test_call_with_logprobs_is_trained() -> None:
    """`client_logprobs`: ids, logprobs and usage agree, so the call trains, its annotation is step and final reward."""
    rollout = rollout_of("client_logprobs")
    (row,) = rows_of(RECORDED / "client_logprobs.jsonl")
    wanted: dict[str, Any] = {
        "call_id": "chatcmpl-0001",
        "prompt_token_ids": [151644, 872, 198, 100],
        "response_token_ids": [10, 20, 30],
        "messages": [{"role": "user", "content": "q"}],
        "response": {"role": "assistant", "content": "hi 0"},
        "dialect": "agentlightning",
        "reward": 1.0,
        "trainable": True,
        "flags": [],
    }
    assert wanted == {name: row[name] for name in wanted}
    assert np.array([-0.05, -0.15, -0.25], np.float32).tolist() == row["response_logprobs"]
    assert (1.0, 3) == (rollout.reward, rollout.tokens_trained)


def test_of_two_choices_only_the_first_has_ids() -> None:
    """`client_n2`: Agent Lightning records ids of choice 0 alone; choice 1 is kept as text, which is never trained."""
    rows = rows_of(RECORDED / "client_n2.jsonl")
    assert [
        ("chatcmpl-0002", [10, 20, 30], True, []),
        ("chatcmpl-0002#1", None, False, ["no_token_ids"]),
    ] == [(r["call_id"], r["response_token_ids"], r["trainable"], r["flags"]) for r in rows]


def test_streamed_call_has_no_ids() -> None:
    """`client_stream`: the ids were lost on the way, so the call is text that is not trained; its reward is kept."""
    rollout = rollout_of("client_stream")
    (row,) = rows_of(RECORDED / "client_stream.jsonl")
    assert (None, None, ["no_token_ids"], 1.0) == (
        row["prompt_token_ids"],
        row["response_token_ids"],
        row["flags"],
        row["reward"],
    )
    assert (1.0, 0) == (rollout.reward, rollout.num_episodes)


def test_call_whose_span_was_lost_leaves_a_reward_alone() -> None:
    """`client_parse`: no span of the call and empty ids, so the trace is a rollout with a reward and no call."""
    rollout = rollout_of("client_parse")
    assert ("trace", 0, 1.0, []) == (
        rollout.identity_source,
        rollout.num_calls,
        rollout.reward,
        rollout.quarantined,
    )
