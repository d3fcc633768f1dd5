"""`make demo`: four rollouts of a tool-using agent become training rows, in front of your eyes.

    demo/agent.py           an ordinary agent: the openai client, OpenInference, OpenTelemetry; run four times at once
    demo/replay_server.py   its model: answers that a real vLLM once gave, with their token ids and log probabilities
    demo/demo.py            this: starts the service, runs and rewards the rollouts, shows the rows and checks them

Every token of the rows is held to what the engine itself logged when it sampled the answers. Exit code 0 only if they
are equal. Everything goes to ./demo-out, which is made anew.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import replay_server

import spanmill

ROOT = Path(__file__).parent.parent
CONFORMANCE = ROOT / "tests" / "conformance"
RECORDING = CONFORMANCE / "recorded" / "openinference_openai"
AGENT = ROOT / "demo" / "agent.py"
OUT = ROOT / "demo-out"
DATA = OUT / "data"
SPANMILL = Path(sys.executable).with_name("spanmill")
GROUP = "demo"
WAIT_S = 60


class Task(NamedTuple):
    """A question to the agent, and the rollout that answers it."""

    name: str
    question: str

    @property
    def rollout_id(self) -> str:
        """Its rollout."""
        return f"{GROUP}/{self.name}"


class Service(NamedTuple):
    """A running `spanmill serve`."""

    process: subprocess.Popen[str]
    grpc: str
    http: str


def main() -> int:
    """Run the demo; the exit code says whether the rows are what the engine did."""
    shutil.rmtree(OUT, ignore_errors=True)
    OUT.mkdir()
    with (OUT / "serve.log").open("wb") as log, replay_server.running() as model:
        service = start_service(log)
        try:
            say(f"spanmill serve takes spans at {service.grpc} and rewards at {service.http}.")
            say(f"Four agents ask the model at {model}, each under `spanmill run`:\n")
            rewards = run_agents(tasks(), service, model)
            say("\nThe rewards go to the service, by `spanmill reward`:\n")
            for task, value in rewards.items():
                spanmill_command("reward", task.rollout_id, f"{value:g}", "--endpoint", service.http)
            wait_for_rows(rewards)
        finally:
            service.process.send_signal(signal.SIGTERM)
            service.process.wait()
    folder = DATA.relative_to(ROOT)
    say(f"\nThe rows are there. spanmill show {folder}\n")
    spanmill_command("show", str(folder))
    longest = max(spanmill.read_rollouts(DATA).collect().to_dicts(), key=lambda row: row["tokens_captured"])
    say(f"spanmill show {folder} {longest['rollout_id']}\n")
    spanmill_command("show", str(folder), longest["rollout_id"])
    say(f"\nTo read them:\n\n    import spanmill\n    spanmill.read_episodes('{folder}').collect()\n")
    problems = check(rewards)
    say("\n".join(problems) or "Checked: every token id, log probability, mask and reward is what it should be.")
    return 1 if problems else 0


def say(text: str) -> None:
    """Print at once, so that it stands before what other processes print."""
    print(text, flush=True)


def tasks() -> list[Task]:
    """The questions whose answers were recorded."""
    conversations = [json.loads(line)["messages"] for line in replay_server.ANSWERS.read_text().splitlines()]
    questions = [messages[1]["content"] for messages in conversations if len(messages) == 2]
    return [Task(question.partition("]")[0].removeprefix("["), question) for question in questions]


def start_service(log: BinaryIO) -> Service:
    """`spanmill serve` on free ports, with short waits, that holds a finished rollout back until its reward comes."""
    options = ["--settle", "1", "--flush-interval", "0.5", "--await-reward", str(WAIT_S)]
    command = [SPANMILL, "serve", "--out", DATA, "--grpc", "127.0.0.1:0", "--http", "127.0.0.1:0", *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
    line = process.stdout.readline() if process.stdout else ""
    found = re.search(r"grpc=(\S+) http=(\S+)", line)
    if not found:
        raise SystemExit(f"serve did not get ready, see {OUT / 'serve.log'}")
    return Service(process, found[1], f"http://{found[2]}")


def run_agents(questions: Sequence[Task], service: Service, model: str) -> dict[Task, float]:
    """Run an agent for each question, all at once, and return what each is worth. SystemExit if one fails."""
    environment = {**os.environ, "OPENAI_BASE_URL": model, "OPENAI_API_KEY": "none"}
    running: dict[Task, subprocess.Popen[str]] = {}
    for task in questions:
        ids = ["--rollout-id", task.rollout_id, "--group-id", GROUP, "--task-id", task.name, "--mode", "train"]
        command = [SPANMILL, "run", *ids, "--endpoint", service.grpc, "--", sys.executable, AGENT, task.question]
        running[task] = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    rewards: dict[Task, float] = {}
    for task, process in running.items():
        output, _ = process.communicate(timeout=WAIT_S)
        if process.returncode:
            raise SystemExit(f"the agent of {task.name} ended with {process.returncode}")
        result = json.loads(output)
        rewards[task] = worth(result)
        say(f"  {task.question}\n      {result['answer']}  (tools: {', '.join(result['tools'])})")
    return rewards


def worth(result: dict[str, Any]) -> float:
    """The reward of a result: a half for each of the two tools that the agent made use of."""
    return len(set(result["tools"])) / 2


def spanmill_command(*arguments: str) -> None:
    """Run `spanmill`, its output to the terminal."""
    subprocess.run([SPANMILL, *arguments], check=True, cwd=ROOT)


def wait_for_rows(rewards: dict[Task, float]) -> None:
    """Wait until every rollout is written, with its reward."""
    deadline = time.monotonic() + WAIT_S
    wanted = {task.rollout_id: value for task, value in rewards.items()}
    while (written := written_rewards()) != wanted:
        if time.monotonic() > deadline:
            raise SystemExit(f"after {WAIT_S} s there are the rewards {written}, see {OUT / 'serve.log'}")
        time.sleep(0.2)


def written_rewards() -> dict[str, float | None]:
    """The final reward of every rollout in the dataset so far."""
    rows = spanmill.read_rollouts(DATA).select("rollout_id", "reward").collect()
    return dict(rows.iter_rows())


def check(rewards: dict[Task, float]) -> list[str]:
    """Every way in which the dataset is not what the engine did and the agents earned; empty if it is."""
    sys.path.insert(0, str(CONFORMANCE))
    from check_recorded import check as check_tokens

    own = OUT / "recording"
    own.mkdir()
    (own / "truth.json").write_text(json.dumps(truth_of(list(rewards))))
    rows = {row["rollout_id"]: row for row in spanmill.read_rollouts(DATA).collect().to_dicts()}
    problems = check_tokens(own, DATA)
    for task, value in rewards.items():
        row = rows.get(task.rollout_id, {})
        expected = {"status": "succeeded", "reward": value, "group_id": GROUP, "task_id": task.name, "mode": "train"}
        found = {name: row.get(name) for name in expected}
        if found != expected:
            problems.append(f"{task.rollout_id}: expected {expected}, found {found}")
    return problems


def truth_of(questions: Sequence[Task]) -> dict[str, Any]:
    """The engine's log of these rollouts alone, under the ids that they have here."""
    truth = json.loads((RECORDING / "truth.json").read_text())
    ids = {task.name: task.rollout_id for task in questions}
    truth["rollouts"] = [
        {**rollout, "carrier": "resource", "expected_rollout_id": ids[rollout["rollout"]], "trace_ids": []}
        for rollout in truth["rollouts"]
        if rollout["rollout"] in ids
    ]
    truth["generations"] = [one for one in truth["generations"] if one["rollout"] in ids]
    return truth


if __name__ == "__main__":
    sys.exit(main())
