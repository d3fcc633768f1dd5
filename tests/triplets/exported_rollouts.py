"""Generated rollouts of every shape, and a dataset of them: what the tests of exports write and read."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import strategies as st

from spanmill.adapters.from_triplets import rollout_of
from spanmill.adapters.options import Options
from spanmill.triplets.records import PolicyRun, Rollout, Triplet
from spanmill.triplets.writer import DatasetWriter

Draw = Any
TOKENS = st.lists(st.integers(0, 9), min_size=1, max_size=4)


def call(number: int, prompt: Sequence[int], sampled: Sequence[int], **given: Any) -> Triplet:
    """A trainable call with the logprobs -0.125, -0.25, …, sampled by version 7 at temperature 0.5."""
    size = len(sampled)
    fields: dict[str, Any] = {
        "rollout_id": "",
        "attempt": 0,
        "turn": number,
        "choice": 0,
        "call_id": f"call-{number}",
        "trace_id": "ab" * 16,
        "span_id": f"{number:016x}",
        "ids_source": "engine",
        "started_at": 1_000_000 + number,
        "ended_at": 1_000_001 + number,
        "dialect": "spanmill",
        "trainable": True,
        "model": "policy",
        "prompt_token_ids": np.array(prompt, np.int32),
        "response_token_ids": np.array(sampled, np.int32),
        "response_logprobs": np.array([-(i + 1 + number) / 8 for i in range(size)], np.float32),
        "logprobs_mode": "raw",
        "policy_versions": (PolicyRun("7", 0, size),) if size else (),
        "temperature": 0.5,
        "finish_reason": "stop",
        "messages": '[{"role":"user","content":"hi"}]',
        "response": f'{{"role":"assistant","content":"answer {number}"}}',
    }
    return Triplet(**(fields | given))


def rollout(rollout_id: str, calls: Sequence[Triplet], merge: str = "prefix", **given: Any) -> Rollout:
    """The rollout that the calls make, merged as the pipeline merges; `given` replaces what it says of itself."""
    attempt = given.get("attempt", 0)
    labels = {name: given[name] for name in ("group_id", "task_id", "mode") if name in given}
    own = [replace(one, call_id=f"{rollout_id}-{one.call_id}", **labels) for one in calls]
    made = replace(
        rollout_of(own, rollout_id, attempt, Options(merge)), **{"status": "succeeded", "reward": 1.0} | given
    )
    for episode in made.episodes:
        episode.reward = made.reward
        if episode.messages is None and calls:
            episode.messages = calls[-1].messages
    return made


def write(path: Path, rollouts: Sequence[Rollout]) -> Path:
    """A dataset of the rollouts, in two parts."""
    with DatasetWriter(path) as writer:
        writer.write(list(rollouts[: len(rollouts) // 2]))
        writer.write(list(rollouts[len(rollouts) // 2 :]))
    return path


@st.composite
def rollouts(draw: Draw, rollout_id: str) -> Rollout:
    """Calls that extend each other, fork, sample a prompt twice, drift, or begin anew, as a sub-agent does."""
    calls: list[Triplet] = []
    for number in range(draw(st.integers(1, 6))):
        how = draw(st.sampled_from(["root", "extend", "again", "drift"])) if calls else "root"
        above = draw(st.sampled_from(calls)) if calls else None
        choice = 0
        if above is None or how == "root":
            prompt = draw(TOKENS)
        elif how == "again":
            prompt, choice = _ids(above.prompt_token_ids), 1
        else:
            prompt = [*_ids(above.prompt_token_ids), *_ids(above.response_token_ids)]
            if how == "drift":
                prompt[-1] = (prompt[-1] + 1) % 10
            prompt += draw(TOKENS)
        calls.append(_drawn(draw, number, prompt, choice))
    return rollout(
        rollout_id, calls, draw(st.sampled_from(["prefix", "none", "realign"])), group_id=f"g{draw(st.integers(0, 1))}"
    )


def _ids(array: Any) -> list[int]:
    return [int(n) for n in array]


def _drawn(draw: Draw, number: int, prompt: list[int], choice: int) -> Triplet:
    response = draw(TOKENS)
    logprobs = [-draw(st.integers(0, 800)) / 8 for _ in response]
    cut = draw(st.integers(0, len(response)))
    runs = [PolicyRun(str(draw(st.integers(0, 3))), s, n) for s, n in ((0, cut), (cut, len(response) - cut)) if n]
    return call(
        number,
        prompt,
        response,
        choice=choice,
        trainable=draw(st.sampled_from([True, True, True, False])),
        response_logprobs=draw(st.sampled_from([np.array(logprobs, np.float32)] * 4 + [None])),
        policy_versions=tuple(runs),
        temperature=draw(st.sampled_from([0.5, 1.0])),
        agent=draw(st.sampled_from(["lead", "helper"])),
    )
