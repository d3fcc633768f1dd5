"""The programs of docs/trainers.md, as they stand, in the environment of the trainers: what comes out is the dataset.

What a check prints last, as JSON, are the rows as (ids, [(position, token, logprob)]), unless it says otherwise.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from environment import PYTHON, ROOT
from exported_rollouts import call, rollout, write
from exported_tokens import Sequence, of_episode

import spanmill
from spanmill.triplets.records import PolicyRun, Rollout

pytestmark = pytest.mark.trainers
TEXT = (ROOT / "docs" / "trainers.md").read_text()
COMMON = """
import json
def rows(ids, mask, logprobs=None, before=0):
    found = [
        [before + at, int(token), None if logprobs is None else float(logprobs[at])]
        for at, token in enumerate(ids) if mask[at]
    ]
    return found
"""

POLICY = """
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM, PreTrainedTokenizerFast
words = {"<pad>": 0, "<eos>": 1, "<unk>": 2} | {f"w{i}": i for i in range(3, 16)}
made = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
made.pre_tokenizer = pre_tokenizers.Whitespace()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")
tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }} {% endfor %}"
tokenizer.save_pretrained("policy")
small = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
GPTNeoXForCausalLM(GPTNeoXConfig(vocab_size=16, **small)).save_pretrained("policy")
"""
"""A model whose tokens are words, with its tokenizer."""

Run = Callable[[str, str], Any]


def recorded() -> list[Rollout]:
    """Two groups of two rollouts, of two turns each, which differ in length, reward and policy versions."""
    made: list[Rollout] = []
    for group in range(2):
        for member in range(2):
            sampled = [4, 5 + member, *[6] * group]
            runs = (PolicyRun("3", 0, 1), PolicyRun("4", 1, len(sampled) - 1))
            calls = [
                call(0, [1, 2, *[3] * member], sampled, policy_versions=runs),
                call(1, [1, 2, *[3] * member, *sampled, 8], [7]),
            ]
            one = rollout(f"r{group}{member}", calls, group_id=f"g{group}", task_id=f"t{group}", reward=float(member))
            told = [{"role": "user", "content": "w3 w4"}, {"role": "assistant", "content": f"w{5 + member}"}]
            for episode in one.episodes:
                episode.messages = json.dumps(told)
            made.append(one)
    return made


EXPECTED = [of_episode(episode) for one in recorded() for episode in one.episodes]


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny model."""
    if not PYTHON.exists():
        pytest.skip(f"{PYTHON} is not there: make test-trainers makes it")
    folder = tmp_path_factory.mktemp("model")
    subprocess.run([str(PYTHON), "-W", "ignore", "-c", POLICY], cwd=folder, check=True, capture_output=True)
    return folder / "policy"


@pytest.fixture
def run(tmp_path: Path, policy: Path) -> Run:
    """Runs a section's commands and its program, and a check after it; what it printed last."""
    write(tmp_path / "data", recorded())
    (tmp_path / "policy").symlink_to(policy)

    def section(title: str, check: str) -> Any:
        text = TEXT.split(f"\n## {title}\n")[1].split("\n## ")[0]
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        for commands in re.findall(r"```sh\n(.*?)```", text, re.DOTALL):
            done = subprocess.run(
                ["bash", "-ec", commands],
                cwd=tmp_path,
                env={**os.environ, "PATH": path},
                capture_output=True,
                text=True,
            )
            assert 0 == done.returncode, done.stderr
        (program,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
        (tmp_path / "program.py").write_text(f"{program}\n{COMMON}\n{check}")
        quiet = {"TRL_EXPERIMENTAL_SILENCE": "1", "HF_HUB_OFFLINE": "1", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
        done = subprocess.run(
            [str(PYTHON), "-W", "ignore", "program.py"],
            cwd=tmp_path,
            env={**os.environ, **quiet},
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert 0 == done.returncode, done.stderr[-4000:]
        return json.loads(done.stdout.strip().splitlines()[-1])

    return section


def as_json(rows: list[Sequence], logprobs: bool = True) -> Any:
    """Expected rows as a check prints them."""
    return [[list(ids), [[at, token, value if logprobs else None] for at, token, value in own]] for ids, own in rows]


def test_verl(run: Run) -> None:
    """DataProto takes the tensors, its GRPO advantages are those of the groups, and files concatenate to whole rows."""
    check = """
from verl.trainer.ppo.core_algos import compute_grpo_outcome_advantage
found, advantages = [], []
for data in batches:
    data.check_consistency()
    width = data.batch["prompts"].shape[1]
    for i in range(len(data)):
        row = data[i].batch
        real = row["attention_mask"] == 1
        mask = row["response_mask"].tolist()
        positions = row["position_ids"][width:].tolist()
        own = rows(row["responses"].tolist(), mask, row["rollout_log_probs"])
        found.append([row["input_ids"][real].tolist(), [[positions[at], token, value] for at, token, value in own]])
    mask, uid = data.batch["response_mask"], data.non_tensor_batch["uid"]
    values, _ = compute_grpo_outcome_advantage(data.batch["rm_scores"], mask, uid, norm_adv_by_std_in_grpo=False)
    advantages += [sorted(set(row[own == 1].tolist())) for row, own in zip(values, mask)]
print(json.dumps([found, advantages]))
"""
    assert [as_json(EXPECTED), [[-0.5], [0.5], [-0.5], [0.5]]] == run("verl", check)


def test_verl_agent_loop(run: Run) -> None:
    """AgentLoopOutput takes each line; the tensors it makes of it are the Episode."""
    check = """
found = []
for output in outputs:
    made, extra = output.as_dict(), output.extra_fields
    prompt, response = made["prompts"].tolist(), made["responses"].tolist()
    own = rows(response, made["response_mask"].tolist(), made["rollout_log_probs"], len(prompt))
    found.append([[prompt + response, own], output.reward_score, extra["min_global_steps"], extra["max_global_steps"]])
print(json.dumps(found))
"""
    found = run("verl: agent loop outputs", check)
    assert (as_json(EXPECTED), [[0.0, 3, 7], [1.0, 3, 7]] * 2) == (
        [row[0] for row in found],
        [row[1:] for row in found],
    )


def test_verl_prompts(run: Run) -> None:
    """RLHFDataset reads the prompts, one for each task."""
    check = """
print(json.dumps([[row["raw_prompt"][0]["content"], row["index"], row["data_source"]] for row in prompts]))
"""
    assert [["hi", 0, "spanmill"], ["hi", 1, "spanmill"]] == run("verl: prompts", check)


def test_trl_sft(run: Run) -> None:
    """After a real step of SFTTrainer, labels of its batches are the trained tokens and -100 elsewhere."""
    check = """
batch = next(iter(trainer.get_train_dataloader()))
found = []
for ids, labels, real in zip(*(batch[name].tolist() for name in ("input_ids", "labels", "attention_mask"))):
    size = sum(real)
    assert all(label in (-100, token) for token, label in zip(ids, labels))
    found.append([ids[:size], rows(ids[:size], [label != -100 for label in labels])])
print(json.dumps(sorted(found)))
"""
    rewarded = [of_episode(episode) for one in recorded() if one.reward == 1.0 for episode in one.episodes]
    assert sorted(as_json(rewarded, logprobs=False)) == run("TRL: SFT on recorded tokens", check)


def test_trl_grpo(run: Run) -> None:
    """In a real step of GRPOTrainer its batch has the recorded tokens, mask, logprobs and rewards of the groups."""
    check = """
seen = []
real = trainer._generate_and_score_completions
trainer._generate_and_score_completions = lambda inputs: seen.append(real(inputs)) or seen[-1]
trainer._step = 0
trainer.train()
found = []
batch = {name: value.tolist() for name, value in seen[0].items() if hasattr(value, "tolist")}
for i in range(len(batch["prompt_ids"])):
    prompt = [t for t, m in zip(batch["prompt_ids"][i], batch["prompt_mask"][i]) if m]
    size = sum(batch["completion_mask"][i])
    mask = [m and t for m, t in zip(batch["completion_mask"][i], batch["tool_mask"][i])]
    own = rows(batch["completion_ids"][i][:size], mask, batch["sampling_per_token_logps"][i], len(prompt))
    found.append([prompt + batch["completion_ids"][i][:size], own, batch["advantages"][i] > 0])
print(json.dumps(sorted(found)))
"""
    expected = [[*row, number % 2 == 1] for number, row in enumerate(as_json(EXPECTED))]
    assert sorted(expected) == run("TRL: GRPO", check)


def test_trl_async(run: Run) -> None:
    """RolloutSample has the Episode, the version of its oldest token and the centred reward."""
    check = """
print(json.dumps([
    [[s.input_ids.tolist(), rows(s.input_ids.tolist(), s.completion_mask, s.old_log_probs)], s.model_version,
     s.group_id, s.advantage] for s in samples
]))
"""
    found = run("TRL: asynchronous GRPO", check)
    about = [[3, 0, -0.5], [3, 0, 0.5], [3, 1, -0.5], [3, 1, 0.5]]
    assert (as_json(EXPECTED), about) == ([row[0] for row in found], [row[1:] for row in found])


def test_trl_dpo(run: Run) -> None:
    """DPOTrainer tokenises prompt, chosen and rejected of both groups, and takes a step."""
    check = """
names = ("prompt_ids", "chosen_ids", "rejected_ids")
print(json.dumps([[row[name] for name in names] for row in trainer.train_dataset]))
"""
    assert [[[3, 4], [6], [5]]] * 2 == run("TRL: DPO", check)


def test_skyrl(run: Run) -> None:
    """SkyRL's own conversion to tensors takes the lists; its right-aligned tensors are the Episodes."""
    check = """
import torch
from transformers import AutoTokenizer
from skyrl.train.dataset.preprocess import convert_prompts_responses_to_batch_tensors
names = ("prompt_token_ids", "response_ids")
rewards = [[0.0] * (len(r) - 1) + [v] for r, v in zip(output["response_ids"], output["rewards"])]
tokenizer = AutoTokenizer.from_pretrained("policy")
ids, real, action, rewards, masks, logprobs, *_ = convert_prompts_responses_to_batch_tensors(
    tokenizer, *(output[name] for name in names), rewards, output["loss_masks"], output["rollout_logprobs"]
)
found = []
width = masks.shape[1]
for i in range(len(ids)):
    whole = ids[i][real[i] == 1].tolist()
    offset = len(whole) - width
    own = [[offset + at, int(ids[i][-width:][at]), float(logprobs[i][at])] for at in range(width) if masks[i][at]]
    found.append([[whole, own], float(rewards[i][-1]), output["trajectory_ids"][i], output["is_last_step"][i]])
print(json.dumps(found))
"""
    found = run("SkyRL", check)
    ids = [{"instance_id": f"g{group}", "repetition_id": member} for group in range(2) for member in range(2)]
    about = [[float(one["repetition_id"]), one, True] for one in ids]
    assert (as_json(EXPECTED), about) == ([row[0] for row in found], [row[1:] for row in found])


def test_areal(run: Run) -> None:
    """The batch is, element for element, what AReaL's own interactions of the same calls make."""
    check = """
import torch
from areal.api import ModelResponse
from areal.experimental.openai.types import InteractionWithTokenLogpReward
made = []
for reward, calls in json.load(open("calls.json")):
    parent = None
    for prompt, response, logprobs, versions in calls:
        answer = ModelResponse(prompt, response, logprobs, versions)
        parent = InteractionWithTokenLogpReward(answer, reward, parent, "concat")
    made.append(parent.to_tensor_dict())
own = concat_padded_tensors(made)
assert sorted(own) == sorted(batch)
for name in own:
    assert own[name].dtype == batch[name].dtype and torch.equal(own[name], batch[name]), name
print(len(batch["rewards"]))
"""
    calls = [[one.reward, [_sampled(triplet) for triplet in one.triplets]] for one in recorded()]
    check = f"open('calls.json', 'w').write({json.dumps(json.dumps(calls))})\n{check}"
    assert 4 == run("AReaL", check)


def _sampled(triplet: Any) -> list[Any]:
    versions = [int(run.version) for run in triplet.policy_versions for _ in range(run.length)]
    arrays = (triplet.prompt_token_ids, triplet.response_token_ids, triplet.response_logprobs)
    return [*(array.tolist() for array in arrays), versions]


def test_tinker(run: Run) -> None:
    """Each Datum is, element for element, what the cookbook makes of the same calls as a trajectory."""
    check = """
import tinker
from tinker_cookbook.completers import TokensWithLogprobs
from tinker_cookbook.rl.data_processing import trajectory_to_data
from tinker_cookbook.rl.types import Trajectory, Transition
for (reward, calls), mine in zip(json.load(open("calls.json")), datums, strict=True):
    steps = [
        Transition(tinker.ModelInput.from_ints(prompt), TokensWithLogprobs(response, logprobs), 0.0, False)
        for prompt, response, logprobs, _ in calls
    ]
    (theirs,) = trajectory_to_data(Trajectory(steps, tinker.ModelInput.from_ints([])), reward - 0.5)
    assert theirs.model_input.to_ints() == mine.model_input.to_ints()
    assert theirs.loss_fn_inputs.keys() == mine.loss_fn_inputs.keys()
    for name, data in theirs.loss_fn_inputs.items():
        own = mine.loss_fn_inputs[name]
        assert (data.dtype, data.shape) == (own.dtype, own.shape), name
        assert data.to_numpy().tolist() == own.to_numpy().tolist(), name
print(len(datums))
"""
    calls = [[one.reward, [_sampled(triplet) for triplet in one.triplets]] for one in recorded()]
    check = f"open('calls.json', 'w').write({json.dumps(json.dumps(calls))})\n{check}"
    assert 4 == run("Tinker", check)


def test_atif(run: Run, tmp_path: Path) -> None:
    """The package's models accept every document, and `spanmill build` makes the same Episodes of them."""
    check = """
found = [
    [step.metrics.prompt_token_ids, step.metrics.completion_token_ids, step.metrics.logprobs]
    for document in documents for step in document.steps if step.metrics is not None
]
print(json.dumps(found))
"""
    expected = [_sampled(triplet)[:3] for one in recorded() for triplet in one.triplets]
    assert expected == run("ATIF", check)
    columns = ("rollout_id", "group_id", "reward", "input_ids", "loss_mask", "logprobs", "policy_versions", "turns")
    first, again = (
        spanmill.read_episodes(tmp_path / name).select(columns).sort("rollout_id").collect()
        for name in ("data", "again")
    )
    assert first.to_dicts() == again.to_dicts()
