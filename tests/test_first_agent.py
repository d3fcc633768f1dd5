"""An agent from one end to the other: emitted by the Python API or `spanmill run`, through a real service, to rows."""

import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

import pytest
from dataset_rows import TABLES, newest_rows, rollouts
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from otlp_sink import grpc_receiver
from served import QUICK, SPANMILL, Served, wait_for

import spanmill
from spanmill.instrument.exporters import make_exporter, target
from spanmill.triplets.reader import read_quarantine
from spanmill.triplets.writer import DatasetWriter

MESSAGES = [{"role": "user", "content": "How much is a pear?"}]


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing from the environment of whoever runs the tests."""
    for name in list(os.environ):
        if name.startswith(("SPANMILL_", "OTEL_", "TRACEPARENT", "TRACESTATE", "BAGGAGE")):
            monkeypatch.delenv(name)


@pytest.fixture
def served(tmp_path: Path) -> Generator[Served]:
    """A running service whose dataset is `tmp_path/data`."""
    with Served(tmp_path / "data", *QUICK) as service:
        yield service


class Both(SpanExporter):
    """Sends spans to a collector, and keeps them."""

    def __init__(self, address: str) -> None:
        self.collector = make_exporter(target(f"http://{address}"))
        self.kept: list[ReadableSpan] = []

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Do both."""
        self.kept += spans
        return self.collector.export(spans)

    def shutdown(self) -> None:
        """End the connection."""
        self.collector.shutdown()


def sample(prompt: list[int], sampled: list[int], **given: Any) -> None:
    """An LLM call."""
    with spanmill.call("tiny", messages=MESSAGES, temperature=1.0) as call:
        logprobs = [-0.5] * len(sampled)
        call.record(prompt_token_ids=prompt, response_token_ids=sampled, logprobs=logprobs, **given)


def agent() -> None:
    """Two turns, a call that was cut off, one whose numbers contradict each other, rewards, and a rollout inside."""
    with spanmill.rollout("job/outer", attempt=1, group_id="g", task_id="t", mode="train", group_size=2) as outer:
        sample([1, 2, 3], [4, 5], finish_reason="tool_calls", response="one", response_id="a", policy_version=7)
        spanmill.reward(0.25)
        with spanmill.rollout("job/inner"):
            sample([9], [8], finish_reason="stop", response_id="b")
            spanmill.reward(float("nan"))
        sample([1, 2, 3, 4, 5, 6], [7], finish_reason="length", response={"role": "assistant", "content": "two"})
        sample([1, 2], [3])
        with spanmill.call("tiny") as call:
            call.record(prompt_token_ids=[1], response_token_ids=[2, 3], logprobs=[-1.0], finish_reason="stop")
        outer.reward(1, name="final")


def wait_for_rollouts(dataset: Path, count: int, *columns: str) -> list[tuple[Any, ...]]:
    """The rows of `rollouts`, as soon as there are so many."""

    def rows() -> list[tuple[Any, ...]]:
        found = rollouts(dataset, *columns) if any((dataset / "rollouts").glob("*.parquet")) else []
        return found if len(found) == count else []

    return wait_for(rows)


def test_emitted_rows_equal_adapted_rows(served: Served, tmp_path: Path) -> None:
    """Spans that went through the service give the rows that `spanmill.adapt` gives of them in memory."""
    exporter = Both(served.address)
    spanmill.configure(exporter=exporter)
    agent()
    assert spanmill.flush(20)
    wait_for_rollouts(tmp_path / "data", 2, "rollout_id")
    adapted = spanmill.adapt(exporter.kept)
    with DatasetWriter(tmp_path / "memory") as writer:
        writer.write(list(adapted), adapted.stray)
    emitted, in_memory = newest_rows(tmp_path / "data"), newest_rows(tmp_path / "memory")
    assert {"rollouts": 2, "triplets": 4, "episodes": 2, "quarantine": 2} == {t: len(emitted[t]) for t in TABLES}
    assert in_memory == emitted


def test_a_rollout_inside_a_rollout_has_rows_of_its_own(served: Served, tmp_path: Path) -> None:
    """Each call and reward is the innermost rollout's; NaN is kept aside, and the outer one ends as it would."""
    spanmill.configure(endpoint=served.address)
    agent()
    assert spanmill.flush(20)
    columns = ("rollout_id", "attempt", "status", "group_id", "reward", "num_calls", "num_triplets", "tokens_trained")
    expected = [
        ("job/inner", 0, "succeeded", None, None, 1, 1, 1),
        ("job/outer", 1, "succeeded", "g", 1.0, 4, 3, 3),
    ]
    assert expected == wait_for_rollouts(tmp_path / "data", 2, *columns)
    aside = read_quarantine(tmp_path / "data").select("rollout_id", "reason").sort("rollout_id").collect().rows()
    assert [("job/inner", "nonfinite_reward"), ("job/outer", "length_mismatch")] == aside


CALLS = """
import os, sys, time, spanmill
with spanmill.call("tiny") as call:
    call.record(prompt_token_ids=[1, 2], response_token_ids=[3], logprobs=[-0.5], finish_reason="stop")
"""


def run(served: Served, rollout_id: str, program: str, *options: str) -> subprocess.Popen[str]:
    """A Python program under `spanmill run`."""
    command = [SPANMILL, "run", "--rollout-id", rollout_id, "--endpoint", served.address, *options]
    return subprocess.Popen([*command, "--", sys.executable, "-c", program], stderr=subprocess.PIPE, text=True)


ENDINGS = {
    "ends": ("", 0, "succeeded", 1),
    "crashes": ("raise ValueError('the agent broke')", 1, "failed", 0),
    "exits": ("sys.exit(3)", 3, "failed", 0),
    "is killed": ("spanmill.flush(); os.kill(os.getpid(), 9)", 137, "failed", 0),
    "crashes in a block": ("with spanmill.rollout(): raise ValueError('the agent broke')", 1, "failed", 0),
}
"""How an agent may end: what it does after its call, the exit code, the status, and the tokens that are trained."""


def test_an_agent_that_crashes_or_is_killed_keeps_its_rows(served: Served, tmp_path: Path) -> None:
    """What was sampled is there, the status says how it ended, and failed calls are trained only if rewarded."""
    agents = {name: run(served, name, CALLS + program) for name, (program, *_) in ENDINGS.items()}
    for process in agents.values():
        process.communicate(timeout=60)
    assert {name: code for name, (_, code, *_) in ENDINGS.items()} == {n: p.returncode for n, p in agents.items()}
    expected = sorted((name, status, 1, trained) for name, (_, _, status, trained) in ENDINGS.items())
    columns = ("rollout_id", "status", "num_calls", "tokens_trained")
    assert expected == wait_for_rollouts(tmp_path / "data", len(ENDINGS), *columns)


def test_a_killed_run_leaves_a_rollout_that_stays_open(served: Served, tmp_path: Path) -> None:
    """Where the agent and `spanmill run` are both killed, nothing reports the end: a flush writes what there is."""
    process = run(
        served, "job/a", CALLS + "spanmill.flush(); print('sent', file=sys.stderr, flush=True); time.sleep(60)"
    )
    assert process.stderr is not None
    assert "sent\n" == process.stderr.readline()
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    for pid in (process.pid, *map(int, children)):
        os.kill(pid, signal.SIGKILL)
    process.wait(20)
    process.stderr.close()
    post(served, "/v1/flush")
    row = ("job/a", "unknown", "flush", 1, 1)
    columns = ("rollout_id", "status", "closed_by", "num_calls", "tokens_trained")
    assert [row] == wait_for_rollouts(tmp_path / "data", 1, *columns)


def post(served: Served, path: str) -> None:
    """An empty request to the service's HTTP address."""
    url = "http://" + served.ready.partition("http=")[2].split()[0] + path
    with urllib.request.urlopen(urllib.request.Request(url, b"", method="POST"), timeout=20) as answer:
        answer.read()


def test_an_agent_whose_collector_is_down_goes_on() -> None:
    """It runs and ends as it would have, within the time that its end may wait, and one line says what is lost."""
    started = time.monotonic()
    command = [SPANMILL, "run", "--rollout-id", "r", "--endpoint", "127.0.0.1:1", "--", sys.executable, "-c", CALLS]
    environment = {**os.environ, "SPANMILL_EXIT_TIMEOUT": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert (0, "") == (done.returncode, done.stdout)
    assert "spanmill run: rollout r: its start or end could not be reported" in done.stderr
    assert "Traceback" not in done.stderr
    assert 30 > time.monotonic() - started


def test_an_agent_whose_collector_hangs_goes_on() -> None:
    """A collector that takes requests and never answers holds nobody up: emitting returns at once."""
    with grpc_receiver() as sink:
        sink.answers.clear()
        program = CALLS + (
            "t = time.monotonic()\n"
            "for _ in range(200):\n"
            "    with spanmill.call('tiny') as c: c.record(prompt_token_ids=[1] * 1000, response_token_ids=[2])\n"
            "print(time.monotonic() - t < 5)\n"
        )
        command = [SPANMILL, "run", "--endpoint", sink.endpoint, "--", sys.executable, "-c", program]
        environment = {**os.environ, "SPANMILL_EXIT_TIMEOUT": "1"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
        assert (0, "True\n") == (done.returncode, done.stdout)
