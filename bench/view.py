"""Measures the viewer on a dataset of many rollouts: the time of each page, cold and warm, over HTTP.

    bench/view.py [ROLLOUTS]

The default is 100,000 rollouts of three calls, 600 tokens each. `first` is the first time that a page is asked for,
which counts what is kept afterwards; `again` the median of five. CPU seconds are the server's. Fails when the first
page or the table takes more than 1 s, or a page of one rollout 0.5 s, in wall and in CPU time.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from urllib.request import urlopen

import numpy as np

from spanmill.triplets.records import Episode, PolicyRun, Rollout, Triplet, Turn
from spanmill.triplets.writer import DatasetWriter

CALLS, TOKENS, ANSWER = 3, 600, 60
AT_ONCE = 5000
ASKED = json.dumps([{"role": "user", "content": "What is the capital of France? " * 8}])
SAID = json.dumps({"role": "assistant", "content": "Paris, of course. " * 5})


def main() -> None:
    """Prints one line for each page."""
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 100_000
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "data"
        write(data, count)
        late = pages(data, count)
    if late:
        raise SystemExit(f"too slow: {', '.join(late)}")


def pages(data: Path, count: int) -> list[str]:
    """Asks for each page; returns those that took too long."""
    command = [str(Path(sys.executable).with_name("spanmill")), "view", str(data), "--port", "0"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    some = count // 2
    paths = {
        "first page": ("", 1.0),
        "rollouts": ("rollouts", 1.0),
        "rollouts by reward, of a version": ("rollouts?sort=reward&version=5", None),
        "a rollout": (f"rollout?id={name(some)}", 0.5),
        "another rollout": (f"rollout?id={name(some + 1)}", 0.5),
        "a call": (f"call?id={name(some)}&call=chatcmpl-{some}-1", 0.5),
        "a group": (f"group?id=task-{some // 8}", None),
    }
    late: list[str] = []
    try:
        base = server.stdout.readline().split()[-1] if server.stdout else ""
        print(f"{count:,} rollouts\n{'page':34}{'first: wall s':>15}{'CPU s':>8}{'again: wall s':>15}{'CPU s':>8}")
        for page, (path, goal) in paths.items():
            first = asked(base + path, server.pid)
            again = [asked(base + path, server.pid) for _ in range(5)]
            wall, cpu = (statistics.median(times) for times in zip(*again, strict=True))
            print(f"{page:34}{first[0]:>15.3f}{first[1]:>8.2f}{wall:>15.3f}{cpu:>8.2f}")
            if goal is not None and min(first) > goal:
                late.append(page)
    finally:
        server.terminate()
        server.communicate()
    return late


def asked(address: str, pid: int) -> tuple[float, float]:
    """(wall, CPU) seconds of one page."""
    cpu, start = cpu_of(pid), time.perf_counter()
    with urlopen(address) as answer:
        answer.read()
    return time.perf_counter() - start, cpu_of(pid) - cpu


def cpu_of(pid: int) -> float:
    """Seconds that a process has used, of all its threads."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def name(number: int) -> str:
    """A rollout's id."""
    return f"run-7/task-{number // 8:06d}/{number % 8}"


def write(data: Path, count: int) -> None:
    """A dataset of `count` rollouts, compacted as `serve` leaves one."""
    rng = np.random.default_rng(0)
    with DatasetWriter(data) as writer:
        for start in range(0, count, AT_ONCE):
            writer.write([rollout(rng, n, count) for n in range(start, min(count, start + AT_ONCE))])
        while writer.rewrite() is not None:
            pass


def rollout(rng: np.random.Generator, number: int, count: int) -> Rollout:
    """A rollout of calls that extend each other: one Episode."""
    key, group, task = name(number), f"task-{number // 8}", f"t{number // 8}"
    started = 1_780_000_000_000_000 + number * 500_000
    ids = rng.integers(0, 32_000, TOKENS).astype(np.int32)
    drawn = (-rng.exponential(0.4, TOKENS)).astype(np.float32)
    reward = float(rng.random() < 0.3 + 0.4 * number / count)
    version = str(number * 10 // count)
    ends = [TOKENS * (turn + 1) // CALLS for turn in range(CALLS)]
    calls = [call(key, turn, number, started, (ids, drawn), end, version) for turn, end in enumerate(ends)]
    turns = tuple(Turn(one.call_id, end - ANSWER, end, True) for one, end in zip(calls, ends, strict=True))
    mask = np.zeros(TOKENS, np.int8)
    for turn in turns:
        mask[turn.prompt_end : turn.response_end] = 1
    episode = Episode(
        key,
        0,
        0,
        ids,
        mask,
        ends[0] - ANSWER,
        turns,
        (None,) * CALLS,
        False,
        group_id=group,
        task_id=task,
        agent="coder",
        logprobs=np.where(mask, drawn, 0).astype(np.float32),
        num_turns=CALLS,
        reward=reward,
        policy_versions=(PolicyRun(version, ends[0] - ANSWER, ANSWER),),
        rollout_tokens_trained=CALLS * ANSWER,
        messages=ASKED,
    )
    tokens = CALLS * ANSWER
    return Rollout(
        key,
        0,
        "span",
        "succeeded",
        "end",
        started,
        started + 3_000_000,
        group_id=group,
        task_id=task,
        group_size=8,
        reward=reward,
        num_calls=CALLS,
        num_triplets=CALLS,
        num_episodes=1,
        tokens_captured=tokens,
        tokens_trained=tokens,
        triplets=calls,
        episodes=[episode],
    )


def call(
    key: str, turn: int, number: int, started: int, tokens: Sequence[np.ndarray], end: int, version: str
) -> Triplet:
    """One call; its answer ends at `end` of the rollout's tokens."""
    ids, drawn = tokens
    begun = started + turn * 1_000_000
    return Triplet(
        key,
        0,
        turn,
        0,
        f"chatcmpl-{number}-{turn}",
        f"{number + 1:032x}",
        f"{number * CALLS + turn + 1:016x}",
        "engine",
        begun,
        begun + 800_000,
        "spanmill",
        True,
        agent="coder",
        model="m",
        prompt_token_ids=ids[: end - ANSWER],
        response_token_ids=ids[end - ANSWER : end],
        response_logprobs=drawn[end - ANSWER : end],
        policy_version=version,
        finish_reason="stop",
        messages=ASKED,
        response=SAID,
        parent_call_id=f"chatcmpl-{number}-{turn - 1}" if turn else None,
    )


if __name__ == "__main__":
    main()
