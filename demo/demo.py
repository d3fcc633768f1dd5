"""`make demo`: a real agent's spans become training rows, in front of your eyes.

Starts `spanmill serve` on free ports, sends it the requests that a real agent on a real vLLM once sent (they lie in
tests/conformance/recorded) over real OTLP gRPC, waits for the rows, shows them, and holds them to what the engine
logged. Exit code 0 only if they are equal. Everything goes to ./demo-out, which is made anew.
"""

import json
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, BinaryIO

import polars as pl
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

import spanmill

ROOT = Path(__file__).parent.parent
CONFORMANCE = ROOT / "tests" / "conformance"
RECORDING = CONFORMANCE / "recorded" / "openinference_openai"
OUT = ROOT / "demo-out"
DATA = OUT / "data"
WAIT_S = 60
ENDS = 2
"""Tokens shown at each end of a context."""


def main() -> int:
    """Run the demo; the exit code says whether the rows are what the engine did."""
    console = Console(highlight=False)
    shutil.rmtree(OUT, ignore_errors=True)
    OUT.mkdir()
    truth = json.loads((RECORDING / "truth.json").read_text())
    with (OUT / "serve.log").open("wb") as log:
        serve = start_serve(log)
        try:
            address = ready_address(serve)
            say(console, f"spanmill serve listens on {address}, a real agent's spans go there:")
            subprocess.run([sys.executable, CONFORMANCE / "replay.py", RECORDING, address], check=True)
            wait_for_rows(sum(len(generation["choices"]) for generation in truth["generations"]))
        finally:
            serve.send_signal(signal.SIGTERM)
            serve.wait()
    show_rollouts(console)
    show_episode(console, longest_episode())
    folder = DATA.relative_to(ROOT)
    say(console, f"The Parquet is in {folder}. Read it with\n")
    say(console, f'    import spanmill\n    spanmill.read_episodes("{folder}").collect()\n')
    say(console, "Held to the engine's own log of what it sampled:")
    return subprocess.run([sys.executable, CONFORMANCE / "check_recorded.py", RECORDING, DATA]).returncode


def say(console: Console, text: str) -> None:
    """Print at once, so that it stands before what other processes print."""
    console.print(text)
    sys.stdout.flush()


def start_serve(log: BinaryIO) -> subprocess.Popen[str]:
    """`spanmill serve` on free ports, with short waits: a demo has no spans that come late."""
    command = [
        Path(sys.executable).with_name("spanmill"),
        "serve",
        "--out",
        DATA,
        "--settle",
        "1",
        "--idle-timeout",
        "3",
    ]
    ports = ["--grpc", "127.0.0.1:0", "--http", "127.0.0.1:0"]
    return subprocess.Popen([*command, *ports], stdout=subprocess.PIPE, stderr=log, text=True)


def ready_address(serve: subprocess.Popen[str]) -> str:
    """The gRPC address that serve's ready line names."""
    line = serve.stdout.readline() if serve.stdout else ""
    found = re.search(r"grpc=(\S+)", line)
    if not found:
        raise SystemExit(f"serve did not get ready, see {OUT / 'serve.log'}")
    return found[1]


def wait_for_rows(calls: int) -> None:
    """Wait until the rollouts that were written hold as many calls as the engine sampled answers."""
    deadline = time.monotonic() + WAIT_S
    while (written := written_calls()) < calls:
        if time.monotonic() > deadline:
            raise SystemExit(f"after {WAIT_S} s there are {written} of {calls} calls, see {OUT / 'serve.log'}")
        time.sleep(0.2)


def written_calls() -> int:
    """Calls in the dataset so far; none before its first rollout."""
    if not any((DATA / "rollouts").glob("*.parquet")):
        return 0
    return int(spanmill.read_rollouts(DATA).select(pl.col("num_calls").sum()).collect().item())


def show_rollouts(console: Console) -> None:
    """Print the table of rollouts."""
    columns = ("rollout", "id from", "calls", "episodes", "trained")
    table = Table(*columns, title="rollouts", box=SIMPLE_HEAD, collapse_padding=True, pad_edge=False)
    for row in spanmill.read_rollouts(DATA).sort("started_at", "rollout_id").collect().to_dicts():
        trained = f"{row['tokens_trained']} of {row['tokens_captured']}"
        counts = str(row["num_calls"]), str(row["num_episodes"])
        table.add_row(row["rollout_id"], row["identity_source"], *counts, trained)
    console.print(table)


def longest_episode() -> dict[str, Any]:
    """The Episode with the most turns."""
    episodes = spanmill.read_episodes(DATA).sort("num_turns", "rollout_id", "episode", descending=[True, False, False])
    return episodes.head(1).collect().to_dicts()[0]


def show_episode(console: Console, episode: dict[str, Any]) -> None:
    """Print an Episode token by token; of a long context only its ends."""
    title = f"an episode of {episode['num_turns']} turns, of rollout {episode['rollout_id']}"
    console.print(f"{title:^80}")
    table = Table("position", "token id", "mask", "logprob", "turn", box=SIMPLE_HEAD)
    position = 0
    for number, turn in enumerate(episode["turns"]):
        context, answer = range(position, turn["prompt_end"]), range(turn["prompt_end"], turn["response_end"])
        hidden = context[ENDS:-ENDS]
        for at in context:
            if at not in hidden:
                table.add_row(str(at), str(episode["input_ids"][at]), str(episode["loss_mask"][at]), "", "context")
            elif at == hidden[0]:
                table.add_row("...", f"{len(hidden)} more", "0", "", "context")
        for at in answer:
            logprob = f"{episode['logprobs'][at]:.4f}"
            table.add_row(str(at), str(episode["input_ids"][at]), str(episode["loss_mask"][at]), logprob, str(number))
        position = turn["response_end"]
    console.print(table)


if __name__ == "__main__":
    sys.exit(main())
