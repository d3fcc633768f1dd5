import hashlib
import json
import os
import struct
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow.parquet as pq
import pytest
from exported_rollouts import call, rollout, write
from safetensors.numpy import load

from spanmill.errors import DatasetError, ExportError, SchemaVersionError
from spanmill.triplets.exports import TARGETS, Fill, Report, export
from spanmill.triplets.exports import rows as reading
from spanmill.triplets.exports.target import Target, Write
from spanmill.triplets.parts import VERSION_KEY
from spanmill.triplets.records import PolicyRun, Rollout
from spanmill.triplets.select import Selection
from spanmill.triplets.writer import DatasetWriter

A, B = [1, 2, 3], [4, 5]
NAMES = [target.name for target in TARGETS]


def lines(path: Path) -> list[Any]:
    """The objects of a file of JSON lines."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def parquet(path: Path) -> list[dict[str, Any]]:
    """The rows of a Parquet file."""
    return pq.ParquetFile(path).read().to_pylist()


def pair(name: str, **given: Any) -> list[Rollout]:
    """A group of two, one of which was rewarded."""
    return [rollout(f"{name}-{n}", [call(0, A, [n])], group_id=name, reward=float(n), **given) for n in range(2)]


@pytest.mark.parametrize("name", NAMES)
def test_nothing_half_written_is_left(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """If writing fails on the way, neither the output nor a temporary file is there."""
    dataset = write(tmp_path / "data", pair("a") + pair("b"))
    before = sorted(os.listdir(tmp_path))
    target = next(target for target in TARGETS if target.name == name)

    @contextmanager
    def failing(path: Path, fill: Fill) -> Generator[Write]:
        with target.sink(path, fill) as own:

            def write_and_fail(rows: Any) -> None:
                own(rows)
                raise OSError(28, "No space left on device")

            yield write_and_fail

    monkeypatch.setattr("spanmill.triplets.exports.exporting.TARGETS", (target._replace(sink=failing),))
    with pytest.raises(OSError, match="No space left"):
        export(dataset, name, tmp_path / "out")
    assert before == sorted(os.listdir(tmp_path))


@pytest.mark.parametrize("what", ["file", "folder", "link"])
def test_an_output_that_exists_is_left_alone(tmp_path: Path, what: str) -> None:
    """A file, a folder or a link in the place of the output stops the export before it reads anything."""
    out = tmp_path / "out"
    match what:
        case "file":
            out.touch()
        case "folder":
            out.mkdir()
        case _:
            out.symlink_to("nowhere")
    with pytest.raises(ExportError, match="out exists already; choose another path"):
        export(tmp_path / "no dataset", "sft", tmp_path / "out")


def test_what_cannot_be_exported_is_said(tmp_path: Path) -> None:
    """An unknown format, a folder that is missing, whole messages to cut and a format that needs logprobs."""
    dataset, out = write(tmp_path / "data", pair("a")), tmp_path / "out"
    with pytest.raises(ExportError, match="--to 'trl' is no format; there are verl, verl-rollouts"):
        export(dataset, "trl", out)
    with pytest.raises(ExportError, match="missing is no folder"):
        export(dataset, "sft", tmp_path / "missing" / "out")
    with pytest.raises(ExportError, match="--to sft has whole messages, which cannot be cut"):
        export(dataset, "sft", out, Selection(max_tokens=4, overlong="truncate"))
    with pytest.raises(ExportError, match="--to areal has no place for rows without logprobs"):
        export(dataset, "areal", out, Selection(logprobs="none"))
    with pytest.raises(DatasetError, match="is no dataset"):
        export(tmp_path / "nothing", "sft", out)
    assert ["data"] == os.listdir(tmp_path)


@pytest.mark.parametrize("name", NAMES)
def test_an_empty_selection_is_an_error_with_the_reasons(tmp_path: Path, name: str) -> None:
    """Nothing selected is never an empty file: the error is the loss report."""
    dataset = write(tmp_path / "data", pair("a"))
    with pytest.raises(ExportError, match=r"(?s)nothing was written.*mode +2 +100.0%"):
        export(dataset, name, tmp_path / "out", Selection(mode=("train",)))
    with pytest.raises(ExportError, match="nothing was written"):
        export(write(tmp_path / "empty", []), name, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_newer_dataset_is_refused(tmp_path: Path) -> None:
    """A part of a schema version that is not understood stops the export."""
    dataset = write(tmp_path / "data", pair("a"))
    part = dataset / "rollouts" / "part-00000002.parquet"
    table = pq.ParquetFile(part).read()
    pq.write_table(table.replace_schema_metadata({**table.schema.metadata, VERSION_KEY: b"99"}), part)
    with pytest.raises(SchemaVersionError, match="schema version 99"):
        export(dataset, "sft", tmp_path / "out")


def test_every_call_and_token_is_accounted_for(tmp_path: Path) -> None:
    """The report splits what the dataset has into what was exported and the reasons, for rollouts, calls and tokens."""
    made = [
        rollout("kept", [call(0, A, B), call(1, [*A, *B], [6, 7, 8], trainable=False), call(2, [9], [1])]),
        rollout("failed", [call(0, A, B)], status="failed", reward=None),
        rollout("again", [call(0, A, B)], status="failed", reward=0.0),
        rollout("again", [call(0, A, B)], attempt=1),
        rollout("bare", [call(0, A, [4, 4, 4], response_logprobs=None)]),
        rollout("nothing", []),
        rollout("unrewarded", [call(0, A, B)], reward=None),
    ]
    report = export(write(tmp_path / "data", made), "verl", tmp_path / "out")
    assert (
        Report(
            rows=3,
            rollouts={
                "exported": 2,
                "failed_or_cancelled": 1,
                "other_attempt": 1,
                "no_logprobs": 1,
                "no_episode": 1,
                "no_reward": 1,
            },
            calls={
                "exported": 3,
                "failed_or_cancelled": 1,
                "other_attempt": 1,
                "no_logprobs": 1,
                "no_reward": 1,
                "not trained": 1,
            },
            tokens={
                "exported": 5,
                "failed_or_cancelled": 2,
                "other_attempt": 2,
                "no_logprobs": 3,
                "no_reward": 2,
                "not trained": 3,
            },
        )
        == report
    )
    expected = "sampled tokens 17 exported 5 29.4% no_logprobs 3 17.6% not trained 3 17.6% failed_or_cancelled 2 11.8%"
    assert expected in " ".join(report.text.split())


def test_truncating_is_said_and_done_on_every_column(tmp_path: Path) -> None:
    """A sequence is cut where asked: a turn that is cut ends there, a later one is gone; the report counts both."""
    calls = [call(0, A, B), call(1, [*A, *B, 6], [7, 8, 9]), call(2, [*A, *B, 6, 7, 8, 9, 1], [2])]
    dataset = write(tmp_path / "data", [rollout("r", calls)])
    report = export(dataset, "slime", tmp_path / "out", Selection(max_tokens=8, overlong="truncate"))
    (row,) = lines(tmp_path / "out")
    names = ("tokens", "response_length", "loss_mask", "rollout_log_probs", "status", "weight_versions")
    expected = [[1, 2, 3, 4, 5, 6, 7, 8], 5, [1, 1, 0, 1, 1], [-0.125, -0.25, 0.0, -0.25, -0.375], "truncated"]
    assert [*expected, ["7", "7"]] == [row[name] for name in names]
    assert ({"exported": 4, "cut at max_tokens": 2}, {"exported": 2, "cut at max_tokens": 1}) == (
        report.tokens,
        report.calls,
    )
    report = export(dataset, "nemo-gym", tmp_path / "calls", Selection(max_tokens=8, overlong="truncate"))
    found = [(row["prompt_token_ids"], row["generation_token_ids"]) for row in lines(tmp_path / "calls")]
    assert [(A, B), ([1, 2, 3, 4, 5, 6], [7, 8])] == found


def test_logprobs_may_be_left_out(tmp_path: Path) -> None:
    """With `none` an Episode without logprobs is exported, and the column is not there at all."""
    dataset = write(tmp_path / "data", [rollout("r", [call(0, A, B, response_logprobs=None)])])
    for number, (name, column) in enumerate((target.name, target.optional_logprobs) for target in TARGETS):
        if column:
            out = tmp_path / str(number)
            assert 1 == export(dataset, name, out, Selection(logprobs="none")).rows
            read = out if out.is_file() else next(out.iterdir())
            assert column.encode() not in read.read_bytes().replace(b"no_" + column.encode(), b"")


def test_what_was_not_recorded_is_filled_only_if_asked(tmp_path: Path) -> None:
    """Reward, temperature and policy version: left out and counted, or what the user says in their place."""
    bare = call(0, A, B, temperature=None, policy_versions=())
    dataset = write(tmp_path / "data", [rollout("bare", [bare], reward=None), rollout("full", [call(0, A, B)])])
    assert {"exported": 1, "no_reward": 1} == export(dataset, "areal", tmp_path / "1").rollouts
    fill = Fill(reward=-1.0, temperature=0.75, policy_version=3)
    assert {"exported": 2} == export(dataset, "areal", tmp_path / "2", fill=fill).rollouts
    assert {"exported": 1, "no_temperature": 1} == export(dataset, "prime-rl", tmp_path / "3").rollouts
    assert {"exported": 2} == export(dataset, "prime-rl", tmp_path / "4", fill=fill).rollouts
    export(dataset, "trl-async", tmp_path / "5", fill=fill)
    assert [3, 7] == [row["model_version"] for row in parquet(tmp_path / "5")]
    export(dataset, "skyrl", tmp_path / "6", fill=fill)
    assert [-1.0, 1.0] == [row["rewards"] for row in parquet(tmp_path / "6")]


def test_an_advantage_is_passed_through(tmp_path: Path) -> None:
    """What the environment recorded stands on every trained token, or in its column; without it there is none."""
    made = [rollout("with", [call(0, A, B)]), rollout("without", [call(0, A, B)])]
    made[0].episodes[0].advantage = 0.5
    dataset = write(tmp_path / "data", made)
    export(dataset, "tinker", tmp_path / "tinker")
    assert [[0.0, 0.0, 0.5, 0.5], None] == [row["advantages"] for row in parquet(tmp_path / "tinker")]
    export(dataset, "trl-async", tmp_path / "async")
    assert [0.5, None] == [row["advantage"] for row in parquet(tmp_path / "async")]
    export(dataset, "slime", tmp_path / "slime")
    assert [0.5, None] == [row["metadata"]["advantage"] for row in lines(tmp_path / "slime")]


def test_pairs_are_the_best_and_the_worst_of_a_group(tmp_path: Path) -> None:
    """Members may stand in different parts; equal rewards, different prompts and single rollouts make no pair."""
    groups = [pair("first"), pair("second")]
    interleaved = [one for both in zip(*groups, strict=True) for one in both]
    between = rollout("first-2", [call(0, A, B)], group_id="first", reward=0.5)
    equal = [rollout(f"equal-{n}", [call(0, A, B)], group_id="equal") for n in range(2)]
    other = '[{"role":"user","content":"else"}]'
    differing = pair("differing")
    differing[0].episodes[0].messages = other.replace("]", ',{"role":"assistant","content":"x"}]')
    alone = rollout("alone", [call(0, A, B)], group_id="alone")
    made = [*interleaved, between, *equal, *differing, alone]
    report = export(write(tmp_path / "data", made), "dpo", tmp_path / "out")
    found = [(r["chosen_rollout_id"], r["rejected_rollout_id"], r["chosen_reward"]) for r in parquet(tmp_path / "out")]
    assert [("second-1", "second-0", 1.0), ("first-1", "first-0", 1.0)] == found
    assert {"exported": 4, "no_pair": 6} == report.rollouts
    (prompt, chosen) = (parquet(tmp_path / "out")[0][name] for name in ("prompt", "chosen"))
    assert (["user"], ["assistant"]) == ([m["role"] for m in prompt], [m["role"] for m in chosen])


def test_prompts_are_one_for_each_task(tmp_path: Path) -> None:
    """A task's prompt is the request of its first call; what is rewarded comes from the rollout's metadata."""
    made = [
        *(rollout(f"a-{n}", [call(0, A, B), call(1, [9], B)], task_id="a", mode="train") for n in range(2)),
        rollout("b", [call(0, A, B)], metadata='{"data_source": "gsm8k", "ground_truth": "4"}'),
    ]
    report = export(write(tmp_path / "data", made), "verl-prompts", tmp_path / "out")
    first, second = parquet(tmp_path / "out")
    assert ("spanmill", [("user", "hi")]) == (
        first["data_source"],
        [(message["role"], message["content"]) for message in first["prompt"]],
    )
    expected = {"index": 0, "split": "train", "task_id": "a", "group_id": None, "rollout_id": "a-0"}
    assert (expected, {"style": "rule", "ground_truth": None}) == (first["extra_info"], first["reward_model"])
    assert ("gsm8k", {"style": "rule", "ground_truth": "4"}) == (second["data_source"], second["reward_model"])
    assert (2, {"exported": 2, "same_task": 1}, {}) == (report.rows, report.rollouts, report.tokens)


def test_messages_keep_what_models_wrote(tmp_path: Path) -> None:
    """Arguments stay the text that they were, text parts are joined, other parts stand as their JSON."""
    spoken: list[dict[str, Any]] = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]},
        {
            "role": "assistant",
            "content": None,
            "reasoning_content": "hm",
            "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": '{"x": 1 }'}}],
        },
        {"role": "tool", "tool_call_id": "c", "content": "2"},
    ]
    made = rollout("r", [call(0, A, B)])
    made.episodes[0].messages = json.dumps(spoken)
    export(write(tmp_path / "data", [made]), "sft", tmp_path / "out")
    (row,) = parquet(tmp_path / "out")
    assert ["ab", '[{"type": "image_url", "image_url": {"url": "x"}}]', None, "2"] == [
        message["content"] for message in row["messages"]
    ]
    function = {"name": "f", "arguments": '{"x": 1 }'}
    assert [{"id": "c", "type": "function", "function": function}] == row["messages"][2]["tool_calls"]
    assert ("hm", "c", [True]) == (
        row["messages"][2]["reasoning_content"],
        row["messages"][3]["tool_call_id"],
        row["trained"],
    )


@pytest.mark.parametrize("name", NAMES)
def test_batches_do_not_show(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """However few rows are read at a time, the same rows are written, rollouts whole."""
    made = [one for number in range(4) for one in pair(f"g{number}")]
    made[3] = rollout("g1-1", [call(n, [n, n], [n]) for n in range(5)], group_id="g1")
    dataset = write(tmp_path / "data", made)
    whole = export(dataset, name, tmp_path / "whole")
    seen: list[set[str]] = []
    target = next(target for target in TARGETS if target.name == name)

    def convert(rows: Any, fill: Fill) -> Any:
        seen.append(set(rows.column("rollout_id").to_pylist()))
        return target.convert(rows, fill)

    monkeypatch.setattr(reading, "BATCH_BYTES", 1)
    monkeypatch.setattr("spanmill.triplets.exports.exporting.TARGETS", (target._replace(convert=convert),))
    assert whole == export(dataset, name, tmp_path / "bit by bit")
    assert sum(map(len, seen)) == len(set[str]().union(*seen))
    assert len(seen) > 2
    if (tmp_path / "whole").is_file():
        read = parquet if (tmp_path / "whole").read_bytes()[:4] == b"PAR1" else lines
        assert read(tmp_path / "whole") == read(tmp_path / "bit by bit")


def test_only_the_newest_revision_is_exported(tmp_path: Path) -> None:
    """Rows of an older revision, in a part that was not rewritten yet, are not read."""
    older, newer = rollout("r", [call(0, A, B)]), rollout("r", [call(0, A, [9])], revision=1)
    newer.triplets[0].revision = newer.episodes[0].revision = 1
    with DatasetWriter(tmp_path / "data") as writer:
        writer.write([older, rollout("other", [call(0, A, [8])])])
        writer.write([newer])
    export(tmp_path / "data", "skyrl-sft", tmp_path / "out")
    assert [[*A, 8], [*A, 9]] == [row["input_ids"] for row in parquet(tmp_path / "out")]


def test_a_part_that_was_moved_away_is_still_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A running service may replace parts while an export reads: their rows are the same where they wait."""
    dataset = write(tmp_path / "data", pair("a"))
    real = reading.batches

    def moved(root: Path, *given: Any) -> Iterator[Any]:
        for table in ("rollouts", "triplets", "episodes", "quarantine"):
            (root / ".old" / table).mkdir(parents=True, exist_ok=True)
            (root / table / "part-00000001.parquet").rename(root / ".old" / table / "part-00000001.parquet")
        yield from real(root, *given)

    monkeypatch.setattr("spanmill.triplets.exports.exporting.batches", moved)
    assert 2 == export(dataset, "skyrl-sft", tmp_path / "out").rows
    assert [0, 1] == [row["input_ids"][-1] for row in parquet(tmp_path / "out")]


def test_every_target_is_named_once_and_explained() -> None:
    """Names are unique, and each says what it is for."""
    assert (len(NAMES), True) == (len(set(NAMES)), all(isinstance(t, Target) and t.about for t in TARGETS))


def test_numbers_of_groups_and_rollouts(tmp_path: Path) -> None:
    """Whole numbers in the order of the dataset: of groups, of rollouts, and of a rollout in its group."""
    made = [*pair("z"), rollout("alone", [call(0, A, B), call(1, [9], B)]), *pair("a")]
    dataset = write(tmp_path / "data", made)
    export(dataset, "slime", tmp_path / "slime")
    found = [(row["group_index"], row["index"]) for row in lines(tmp_path / "slime")]
    assert [(0, 0), (0, 1), (1, 2), (1, 2), (2, 3), (2, 4)] == found
    export(dataset, "skyrl", tmp_path / "skyrl")
    ids = [(row["trajectory_ids"], row["is_last_step"]) for row in parquet(tmp_path / "skyrl")]
    assert [0, 1, 0, 0, 0, 1] == [one["repetition_id"] for one, _ in ids]
    assert [True, True, False, True, True, True] == [last for _, last in ids]


def test_padding_and_dtypes_of_verl(tmp_path: Path) -> None:
    """Prompts are padded at their start, responses at their end, ids with the pad token; the reward stands last."""
    made = [rollout("r", [call(0, A, B), call(1, [*A, *B, 6], [7])]), rollout("s", [call(0, [8], [9])], reward=0.5)]
    with DatasetWriter(tmp_path / "data") as writer:
        writer.write(made)
    export(tmp_path / "data", "verl", tmp_path / "out", fill=Fill(pad_token_id=99))
    data = (tmp_path / "out" / "part-00000.safetensors").read_bytes()
    found = load(data)
    head = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    said = {name: json.loads(text) for name, text in head["__metadata__"].items()}
    expected: dict[str, Any] = {
        "prompts": np.array([[1, 2, 3], [99, 99, 8]], np.int64),
        "responses": np.array([[4, 5, 6, 7], [9, 99, 99, 99]], np.int64),
        "input_ids": np.array([[1, 2, 3, 4, 5, 6, 7], [99, 99, 8, 9, 99, 99, 99]], np.int64),
        "attention_mask": np.array([[1, 1, 1, 1, 1, 1, 1], [0, 0, 1, 1, 0, 0, 0]], np.int64),
        "position_ids": np.array([[0, 1, 2, 3, 4, 5, 6], [0, 0, 0, 1, 1, 1, 1]], np.int64),
        "response_mask": np.array([[1, 1, 0, 1], [1, 0, 0, 0]], np.int64),
        "rollout_log_probs": np.array([[-0.125, -0.25, 0, -0.25], [-0.125, 0, 0, 0]], np.float32),
        "rm_scores": np.array([[0, 0, 0, 1], [0.5, 0, 0, 0]], np.float32),
        "__num_turns__": np.array([2, 1], np.int32),
    }
    assert sorted(expected) == sorted(found)
    for name, array in expected.items():
        assert (name, array.dtype, array.tolist()) == (name, found[name].dtype, found[name].tolist())
    assert {
        "uid": ["r", "s"],
        "rollout_id": ["r", "s"],
        "episode": [0, 0],
        "min_global_steps": [7, 7],
        "max_global_steps": [7, 7],
    } == said


SCHEMAS = {
    "trl-sft": "input_ids: list<int32> assistant_masks: list<int8>",
    "trl-grpo": "prompt_ids: list<int32> completion_ids: list<int32> logprobs: list<float> env_mask: list<int8> "
    "reward: double group_id: string task_id: string rollout_id: string episode: int32",
    "trl-async": "input_ids: list<int32> completion_mask: list<int8> old_log_probs: list<float> advantage: double "
    "reward: double model_version: int64 group_id: int64 rollout_id: string episode: int32",
    "skyrl": "prompt_token_ids: list<int32> response_ids: list<int32> rewards: double loss_masks: list<int8> "
    "stop_reasons: string rollout_logprobs: list<float> "
    "trajectory_ids: struct<instance_id: string, repetition_id: int64> is_last_step: bool",
    "skyrl-sft": "input_ids: list<int32> loss_mask: list<int8>",
    "tinker": "model_input: list<int32> target_tokens: list<int64> logprobs: list<float> mask: list<float> "
    "advantages: list<float> reward: double group_id: string rollout_id: string episode: int32",
    "nemo-rl": "message_log: list<struct<role: string, content: string, token_ids: list<int64>, "
    "generation_logprobs: list<float>>> length: int64 loss_multiplier: double idx: int64 task_name: string "
    "reward: double group_id: string rollout_id: string episode: int32",
}
"""Columns and types of the Parquet formats of tokens."""


@pytest.mark.parametrize("name", SCHEMAS)
def test_columns_and_types_of_parquet(tmp_path: Path, name: str) -> None:
    """Names, order and types are what the trainer's code takes."""
    export(write(tmp_path / "data", pair("a")), name, tmp_path / "out")
    found = " ".join(f"{field.name}: {field.type}" for field in pq.read_schema(tmp_path / "out"))
    plain = found.replace("list<element: ", "list<").replace("list<item: ", "list<").replace(" not null", "")
    assert SCHEMAS[name] == plain.replace("halffloat", "float")


def test_dtypes_of_areal(tmp_path: Path) -> None:
    """As AReaL's own rows: whole numbers are int64, logprobs and rewards float32; versions are -1 off the mask."""
    calls = [call(0, A, B, policy_versions=(PolicyRun("3", 0, 1), PolicyRun("4", 1, 1))), call(1, [9], [8])]
    with DatasetWriter(tmp_path / "data") as writer:
        writer.write([rollout("r", calls)])
    export(tmp_path / "data", "areal", tmp_path / "out")
    found = load((tmp_path / "out" / "part-00000.safetensors").read_bytes())
    expected: dict[str, Any] = {
        "input_ids": np.array([[1, 2, 3, 4, 5], [9, 8, 0, 0, 0]], np.int64),
        "loss_mask": np.array([[0, 0, 0, 1, 1], [0, 1, 0, 0, 0]], np.int64),
        "logprobs": np.array([[0, 0, 0, -0.125, -0.25], [0, -0.25, 0, 0, 0]], np.float32),
        "versions": np.array([[-1, -1, -1, 3, 4], [-1, 7, 0, 0, 0]], np.int64),
        "attention_mask": np.array([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0]], np.bool_),
        "rewards": np.array([1, 1], np.float32),
    }
    assert sorted(expected) == sorted(found)
    for name, array in expected.items():
        assert (name, array.dtype, array.tolist()) == (name, found[name].dtype, found[name].tolist())


def test_fields_of_a_training_sample(tmp_path: Path) -> None:
    """prime-rl's struct is an array: fields stand in its order, temperatures are 1 off the mask, unknowns are null."""
    with DatasetWriter(tmp_path / "data") as writer:
        writer.write([rollout("r", [call(0, A, B, agent="lead")])])
    export(tmp_path / "data", "prime-rl", tmp_path / "out")
    ((sample,),) = [msgspec.msgpack.decode(path.read_bytes()) for path in (tmp_path / "out").iterdir()]
    mask, logprobs = [False, False, False, True, True], [0.0, 0.0, 0.0, -0.125, -0.25]
    temperatures = [1.0, 1.0, 1.0, 0.5, 0.5]
    assert [[*A, *B], mask, logprobs, temperatures, "lead", *[None] * 9, "r", 0] == sample


def test_parents_of_token_entries(tmp_path: Path) -> None:
    """A call's parent is the call before it that is exported with the same tokens; its digest is NeMo-Gym's."""
    calls = [
        call(0, A, B),
        call(1, [*A, *B, 6], [7], trainable=False),
        call(2, [*A, *B, 6, 7, 8], [9]),
        call(3, [*A, *B, 1], [2]),
    ]
    export(write(tmp_path / "data", [rollout("r", calls)]), "nemo-gym", tmp_path / "out")
    found = {row["model_call_id"]: row for row in lines(tmp_path / "out")}
    parents = {"r-call-0": None, "r-call-2": "r-call-0", "r-call-3": "r-call-0"}
    assert parents == {name: row["parent_call_id"] for name, row in found.items()}
    assert {"root", "resolved"} == {row["parent_resolution"] for row in found.values()}
    words = struct.pack(">BQ5Q", 1, 5, *A, *B)
    assert (5, hashlib.sha256(b"nemo-gym-tokens" + words).hexdigest()) == (
        found["r-call-0"]["cum_len"],
        found["r-call-0"]["digest"],
    )
