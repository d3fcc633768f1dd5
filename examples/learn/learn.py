# pyright: basic, reportMissingImports=false
"""A small model learns from its own rollouts: vLLM samples, spanmill records, torch updates, vLLM reloads.

    make learn            # or: python learn.py --iterations 10 --out /tmp/learn

The task: answers of lower-case letters. The policy is a random model of 0.2 million weights, so chance is what its
tokens come to. Before the first update of every iteration the probabilities that torch computes are held to those that
vLLM sampled with: were a token id or a logprob shifted by one, the ratio would be nowhere near 1.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import mkdtemp

import engine
import polars as pl
from grpo import Learner, advantages
from plot import Iteration, draw

import spanmill
from spanmill.instrument.posted import post_rewards

HERE = Path(__file__).parent
MAKE_MODEL = HERE.parents[1] / "tests" / "vllm" / "tiny_model.py"
WAIT_S = 120
EPOCHS = 4


def arguments() -> argparse.Namespace:
    """What was typed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--out", type=Path, default=None, help="folder for dataset, weights, figures (default: a new one)"
    )
    parser.add_argument("--iterations", type=int, default=11)
    parser.add_argument("--tasks", type=int, default=8, help="groups of an iteration")
    parser.add_argument("--plays", type=int, default=8, help="rollouts of a group")
    parser.add_argument("--learning-rate", type=float, default=5e-3)
    parser.add_argument("--vllm-python", default=sys.executable, help="the Python that vLLM is installed for")
    parser.add_argument("--spanmill", default="spanmill", help="the spanmill that has the collector")
    return parser.parse_args()


@contextmanager
def collector(program: str, data: Path) -> Generator[tuple[str, str]]:
    """`spanmill serve`; its addresses for OTLP/gRPC and for HTTP. Rollouts wait for the reward that is posted."""
    command = [program, "serve", "--out", str(data), "--grpc", "127.0.0.1:0", "--http", "127.0.0.1:0"]
    command += ["--settle", "1", "--flush-interval", "0.5", "--await-reward", "600"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        ready = process.stdout.readline().split() if process.stdout else []
        found = dict(word.split("=", 1) for word in ready if "=" in word)
        if "http" not in found:
            raise RuntimeError("spanmill serve did not start")
        yield f"http://{found['grpc']}", f"http://{found['http']}"
    finally:
        process.terminate()
        process.wait(60)


def play(options: argparse.Namespace, server: str, collector_url: str, step: str) -> list[dict[str, object]]:
    """One iteration's rollouts, each with its reward."""
    environment = {
        **os.environ,
        "OTEL_EXPORTER_OTLP_ENDPOINT": collector_url,
        "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc",
    }
    command = [options.vllm_python, str(HERE / "agents.py"), server, step, str(options.tasks), str(options.plays)]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return [json.loads(line) for line in done.stdout.splitlines()]


def episodes_of(follower: Iterator[spanmill.News], played: list[dict[str, object]]) -> pl.DataFrame:
    """The rows of the rollouts that were played, as soon as all are there; a newer revision takes an older's place."""
    waiting = {reward["rollout_id"] for reward in played}
    found: dict[str, pl.DataFrame] = {}
    for news in follower:
        for (rollout_id,), rows in news.episodes.group_by("rollout_id", maintain_order=True):
            found[str(rollout_id)] = rows
        if waiting <= found.keys():
            return pl.concat([found[str(reward["rollout_id"])] for reward in played])
    raise RuntimeError(f"{len(waiting - found.keys())} of {len(waiting)} rollouts did not come within {WAIT_S} s")


def main() -> int:
    """Learn, and write figures and plot; 0 if all went as it must."""
    options = arguments()
    out = options.out or Path(mkdtemp(prefix="spanmill-learn-"))
    out.mkdir(parents=True, exist_ok=True)
    print(f"everything goes to {out}", flush=True)
    weights = out / "weights"
    subprocess.run([options.vllm_python, str(MAKE_MODEL), str(weights)], check=True, capture_output=True)
    learner = Learner(weights, options.learning_rate)
    history: list[Iteration] = []
    with (
        collector(options.spanmill, out / "data") as (otlp, http),
        engine.running(options.vllm_python, weights, out / "vllm.log", otlp) as server,
    ):
        follower = spanmill.follow(out / "data", timeout=WAIT_S)
        server.name("step-0")
        for number in range(options.iterations):
            step = f"step-{number}"
            played = play(options, server.url, otlp, step)
            post_rewards(played, http)
            episodes = advantages(episodes_of(follower, played))
            sampled_by = {run["version"] for runs in episodes["policy_versions"] for run in runs}
            if sampled_by != {step}:
                raise RuntimeError(f"{step}: sampled by {sampled_by}; the weights were not exchanged")
            reward = sum(float(str(one["value"])) for one in played) / len(played)
            history.append(Iteration(number, reward, *learner.ratios(episodes)))
            print(history[-1].said(), flush=True)
            if number + 1 < options.iterations:
                learner.update(episodes, EPOCHS)
                learner.save(weights)
                server.load(weights, f"step-{number + 1}")
            (out / "cursor").write_text(follower.cursor)
    (out / "learning.json").write_text(json.dumps([iteration._asdict() for iteration in history], indent=1))
    (out / "learning.svg").write_text(draw(history))
    print(f"reward {history[0].reward:.3f} -> {history[-1].reward:.3f}; {out / 'learning.svg'}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
