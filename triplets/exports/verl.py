"""verl: a padded batch for DataProto, AgentLoopOutput lines, and the prompts of the tasks."""

import json
from typing import Any, Final

import numpy as np
import pyarrow as pa

from spanmill.triplets.exports.conversations import messages_column, parsed
from spanmill.triplets.exports.sinks import Arrays, json_lines, parquet, tensors
from spanmill.triplets.exports.target import Fill, Target
from spanmill.triplets.exports.tokens import Ragged, prompt_part, response_part, splits, version_span

_TEXTS: Final = ("uid", "rollout_id", "episode", "min_global_steps", "max_global_steps")


def _batch(rows: Any, fill: Fill) -> Any:
    """Response aligned, [R]; the reward stands on the last response token."""
    prompts, tokens = splits(rows)
    responses = tokens - prompts
    scores = Ragged(np.zeros(int(responses.sum()), np.float32), responses)
    scores.values[np.cumsum(responses) - 1] = rows.column("reward").to_numpy()
    oldest, newest = version_span(rows)
    ones = Ragged(np.ones(int(tokens.sum()), np.int64), tokens)
    return pa.table(
        {
            "prompts": prompt_part(rows, "input_ids", pa.int64()),
            "responses": response_part(rows, "input_ids", pa.int64()),
            "prompt_attention": ones.part(np.zeros_like(prompts), prompts).to_arrow(pa.int64()),
            "attention_mask": ones.part(prompts, tokens).to_arrow(pa.int64()),
            "response_mask": response_part(rows, "loss_mask", pa.int64()),
            "rollout_log_probs": response_part(rows, "logprobs", pa.float32()),
            "rm_scores": scores.to_arrow(pa.float32()),
            "__num_turns__": rows.column("num_turns"),
            "uid": rows.column("uid"),
            "rollout_id": rows.column("rollout_id"),
            "episode": rows.column("episode"),
            "min_global_steps": oldest,
            "max_global_steps": newest,
        }
    )


def _whole(arrays: Arrays) -> Arrays:
    """The prompt, padded at its start, and the response, padded at its end, as one sequence."""
    mask = np.concatenate([arrays.pop("prompt_attention"), arrays["attention_mask"]], axis=1)
    positions = np.maximum(np.cumsum(mask, axis=1) - 1, 0)
    ids = np.concatenate([arrays["prompts"], arrays["responses"]], axis=1)
    return {**arrays, "input_ids": ids, "attention_mask": mask, "position_ids": positions}


def _agent_loop(rows: Any, fill: Fill) -> Any:
    """As `_batch`, unpadded, with the reward as a number."""
    oldest, newest = version_span(rows)
    extra = {
        "uid": rows.column("uid"),
        "rollout_id": rows.column("rollout_id"),
        "episode": rows.column("episode"),
        "turn_scores": rows.column("step_rewards"),
        "min_global_steps": oldest,
        "max_global_steps": newest,
    }
    return pa.table(
        {
            "prompt_ids": prompt_part(rows, "input_ids", pa.int32()),
            "response_ids": response_part(rows, "input_ids", pa.int32()),
            "response_mask": response_part(rows, "loss_mask", pa.int8()),
            "response_logprobs": response_part(rows, "logprobs", pa.float32()),
            "reward_score": rows.column("reward"),
            "num_turns": rows.column("num_turns"),
            "metrics": pa.array([{"num_preempted": -1}] * rows.num_rows),
            "extra_fields": pa.table(extra).to_struct_array(),
        }
    )


def _prompts(rows: Any, fill: Fill) -> Any:
    """The request messages of a task's first call. What is rewarded stands in the rollout's metadata, if anywhere."""
    rows = rows.filter(rows.column("messages").is_valid())
    known = [json.loads(text) for text in rows.column("rollout_metadata").to_pylist()]
    split, index = rows.column("mode").to_pylist(), rows.column("group_index").to_pylist()
    keys = [rows.column(name).to_pylist() for name in ("task_id", "group_id", "rollout_id")]
    return pa.table(
        {
            "data_source": pa.array([str(one.get("data_source", "spanmill")) for one in known]),
            "prompt": messages_column([parsed(text) for text in rows.column("messages").to_pylist()]),
            "ability": pa.array([_text(one.get("ability")) for one in known], pa.string()),
            "reward_model": pa.array(
                [{"style": "rule", "ground_truth": _text(one.get("ground_truth"))} for one in known],
                pa.struct([("style", pa.string()), ("ground_truth", pa.string())]),
            ),
            "extra_info": pa.array(
                [
                    {"index": i, "split": s, "task_id": t, "group_id": g, "rollout_id": r}
                    for i, s, t, g, r in zip(index, split, *keys, strict=True)
                ],
                pa.struct(
                    [
                        ("index", pa.int64()),
                        *((name, pa.string()) for name in ("split", "task_id", "group_id", "rollout_id")),
                    ]
                ),
            ),
        }
    )


def _text(value: object) -> str | None:
    return value if value is None or isinstance(value, str) else json.dumps(value)


TARGETS: Final = (
    Target(
        "verl",
        "a folder of safetensors files, each the tensors of a DataProto",
        _batch,
        tensors(ids=("prompts", "responses"), left=("prompts", "prompt_attention"), texts=_TEXTS, finish=_whole),
        needs=frozenset({"logprobs", "reward"}),
        optional_logprobs="rollout_log_probs",
    ),
    Target(
        "verl-rollouts",
        "JSON lines, each a verl AgentLoopOutput",
        _agent_loop,
        json_lines,
        needs=frozenset({"logprobs"}),
        optional_logprobs="response_logprobs",
    ),
    Target(
        "verl-prompts",
        "Parquet for verl's RLHFDataset: one prompt for each task",
        _prompts,
        parquet,
        reads="tasks",
        needs=frozenset({"messages"}),
        exact=False,
        logprobs=False,
    ),
)
