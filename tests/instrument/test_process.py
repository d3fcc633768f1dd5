"""Programs that emit, each in a process of its own: how they end, fork, are killed, and what they load."""

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from otlp_sink import Sink, grpc_receiver

Start = Callable[..., subprocess.Popen[str]]
STARTED = "spanmill.rollout.started"
ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"
NOBODY = "http://127.0.0.1:1"
"""A port where nobody listens."""

UNDELIVERED = (
    "spanmill: spans cannot be delivered: is the collector reachable at OTEL_EXPORTER_OTLP_ENDPOINT? (said once)\n"
)

AGENT = """
from spanmill.instrument import call, reward, rollout
with rollout("r"):
    with call("m") as c:
        c.record(prompt_token_ids=[1, 2], response_token_ids=[3], logprobs=[-0.5], finish_reason="stop")
    reward(1)
"""
SLEEPER = """
import time
from spanmill.instrument import rollout
with rollout("r"):
    print("ready", flush=True)
    while True:
        time.sleep(0.05)  # a signal just before one long sleep would lie until it ends
"""


def ended(sink: Sink) -> list[tuple[str, str]]:
    """(rollout id, status) of every rollout that reported its end."""
    return sorted(
        (s["attributes"]["spanmill.rollout.id"], s["attributes"]["spanmill.rollout.status"])
        for s in sink.named("rollout")
    )


def finish(process: subprocess.Popen[str], timeout_s: float = 60) -> tuple[int, str, str]:
    """(exit code, stdout, stderr) of a program, once it has ended."""
    out, err = process.communicate(timeout=timeout_s)
    return process.returncode, out, err


@pytest.mark.parametrize("sink_name", ["grpc_sink", "http_sink"])
def test_everything_is_delivered_when_a_program_ends(
    sink_name: str, start: Start, request: pytest.FixtureRequest
) -> None:
    """A plain program that just ends has delivered all its spans, and said nothing."""
    sink: Sink = request.getfixturevalue(sink_name)
    protocol = {"grpc_sink": "grpc", "http_sink": "http/protobuf"}[sink_name]
    process = start(AGENT, **{ENDPOINT: sink.endpoint, "OTEL_EXPORTER_OTLP_PROTOCOL": protocol})
    assert (0, "", "") == finish(process)
    assert sorted([STARTED, "chat m", "spanmill.reward", "rollout"]) == sorted(s["name"] for s in sink.spans())
    assert [("r", "succeeded")] == ended(sink)


def test_an_unhandled_exception_is_a_failed_rollout(grpc_sink: Sink, start: Start) -> None:
    """A crash is reported, with the program's own exit code and traceback."""
    code, _, err = finish(start(AGENT + "    1 / 0", **{ENDPOINT: grpc_sink.endpoint}))
    assert (1, [("r", "failed")]) == (code, ended(grpc_sink))
    assert "ZeroDivisionError" in err


def test_the_start_arrives_while_the_rollout_goes_on(grpc_sink: Sink, start: Start) -> None:
    """The announcement does not wait for a batch to fill or for its delay."""
    process = start(SLEEPER, **{ENDPOINT: grpc_sink.endpoint, "OTEL_BSP_SCHEDULE_DELAY": "60000"})
    assert [STARTED] == [span["name"] for span in grpc_sink.wait_for(1)]
    process.kill()
    finish(process)


def test_sigterm_ends_open_rollouts_as_cancelled(grpc_sink: Sink, start: Start) -> None:
    """A process that is told to end flushes and says that its rollout is over; it dies of the signal as before."""
    process = start(SLEEPER, **{ENDPOINT: grpc_sink.endpoint})
    assert process.stdout is not None
    assert "ready\n" == process.stdout.readline()
    process.send_signal(signal.SIGTERM)
    assert (-signal.SIGTERM, "", "") == finish(process)
    assert [("r", "cancelled")] == ended(grpc_sink)


def test_sigterm_of_a_program_that_handles_it(grpc_sink: Sink, start: Start) -> None:
    """The program's own handler runs as before, and the spans that it emits still arrive."""
    program = "import signal, sys\nsignal.signal(signal.SIGTERM, lambda *_: sys.exit(7))\n" + SLEEPER
    process = start(program, **{ENDPOINT: grpc_sink.endpoint})
    assert process.stdout is not None
    assert "ready\n" == process.stdout.readline()
    process.send_signal(signal.SIGTERM)
    assert (7, "", "") == finish(process)
    assert [("r", "failed")] == ended(grpc_sink)


def test_sigterm_that_is_ignored_stays_ignored(grpc_sink: Sink, start: Start) -> None:
    """A program that ignores the signal is not ended by it."""
    program = (
        "import os, signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + AGENT + "    os.kill(os.getpid(), 15)"
    )
    assert (0, "", "") == finish(start(program, **{ENDPOINT: grpc_sink.endpoint}))
    assert [("r", "succeeded")] == ended(grpc_sink)


FORK = """
import os, sys
from spanmill.instrument import flush, reward, rollout
with rollout("parent"):
    reward(1)
    assert flush(20)
    reward(2)
    pid = os.fork()
    if pid == 0:
        reward(3)
        with rollout("child"):
            reward(4)
        sys.exit(0)
    os.waitpid(pid, 0)
    reward(5)
"""


def test_a_forked_child_sends_its_own_and_only_its_own(grpc_sink: Sink, start: Start) -> None:
    """Spans of parent and child arrive once each; the parent's rollout ends once, by the parent."""
    code, _, err = finish(start(FORK, **{ENDPOINT: grpc_sink.endpoint, "OTEL_BSP_SCHEDULE_DELAY": "60000"}))
    assert (0, "") == (code, err)
    assert [(1.0, "parent"), (2.0, "parent"), (3.0, "parent"), (4.0, "child"), (5.0, "parent")] == sorted(
        (s["attributes"]["spanmill.reward.value"], s["attributes"]["spanmill.rollout.id"])
        for s in grpc_sink.named("spanmill.reward")
    )
    assert [("child", "succeeded"), ("parent", "succeeded")] == ended(grpc_sink)


FORK_AT_ONCE = """
import os, sys
from spanmill.instrument import reward
children = []
for number in range(5):
    reward(number)
    pid = os.fork()
    if pid == 0:
        reward(100 + number)
        sys.exit(0)
    children.append(pid)
sys.exit(max(os.waitpid(pid, 0)[1] for pid in children))
"""


@pytest.mark.parametrize("sink_name", ["grpc_sink", "http_sink"])
def test_a_fork_while_the_first_spans_are_sent(sink_name: str, start: Start, request: pytest.FixtureRequest) -> None:
    """A child that is forked while the exporter is imported or speaks to the collector can still send its spans."""
    sink: Sink = request.getfixturevalue(sink_name)
    protocol = {"grpc_sink": "grpc", "http_sink": "http/protobuf"}[sink_name]
    environ = {ENDPOINT: sink.endpoint, "OTEL_EXPORTER_OTLP_PROTOCOL": protocol, "OTEL_BSP_SCHEDULE_DELAY": "1"}
    assert (0, "", "") == finish(start(FORK_AT_ONCE, **environ))
    rewards = sorted(span["attributes"]["spanmill.reward.value"] for span in sink.spans())
    assert [0.0, 1.0, 2.0, 3.0, 4.0, 100.0, 101.0, 102.0, 103.0, 104.0] == rewards


MULTIPROCESSING = """
import multiprocessing, sys
from spanmill.instrument import call, flush, reward, rollout

def agent(number):
    with rollout(f"child{number}"):
        reward(number)

if __name__ == "__main__":
    reward(0)
    assert flush(20)
    context = multiprocessing.get_context(sys.argv[1])
    workers = [context.Process(target=agent, args=(number,)) for number in (1, 2, 3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    sys.exit(max(worker.exitcode for worker in workers))
"""


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_children_of_multiprocessing_deliver(
    method: str, grpc_sink: Sink, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They end without `atexit`, and deliver all the same."""
    monkeypatch.setenv(ENDPOINT, grpc_sink.endpoint)
    program = tmp_path / "agents.py"
    program.write_text(MULTIPROCESSING)
    done = subprocess.run([sys.executable, program, method], capture_output=True, text=True, timeout=60)
    assert (0, "") == (done.returncode, done.stderr)
    assert [(f"child{n}", "succeeded") for n in (1, 2, 3)] == ended(grpc_sink)


@pytest.mark.parametrize("protocol", ["grpc", "http/protobuf"])
def test_no_collector_costs_a_bounded_wait_at_the_end(protocol: str, start: Start) -> None:
    """The agent runs as quickly as ever, waits at its end no longer than it was told to, and exits as it would."""
    timed = "import time\nbegan = time.monotonic()\n" + AGENT * 50 + "\nprint(time.monotonic() - began < 2)"
    environ = {ENDPOINT: NOBODY, "OTEL_EXPORTER_OTLP_PROTOCOL": protocol, "SPANMILL_EXIT_TIMEOUT": "0.5"}
    began = time.monotonic()
    code, out, err = finish(start(timed, **environ))
    assert (0, "True\n", UNDELIVERED) == (code, out, err)
    assert time.monotonic() - began < 15


@pytest.mark.parametrize("sink_name", ["grpc_sink", "http_sink"])
def test_a_collector_that_hangs_costs_a_bounded_wait_at_the_end(
    sink_name: str, start: Start, request: pytest.FixtureRequest
) -> None:
    """A collector that takes requests and never answers holds up nothing but the end, and that not for long."""
    sink: Sink = request.getfixturevalue(sink_name)
    sink.answers.clear()
    protocol = {"grpc_sink": "grpc", "http_sink": "http/protobuf"}[sink_name]
    environ = {ENDPOINT: sink.endpoint, "OTEL_EXPORTER_OTLP_PROTOCOL": protocol, "SPANMILL_EXIT_TIMEOUT": "0.5"}
    began = time.monotonic()
    assert (0, "", UNDELIVERED) == finish(start(AGENT, **environ))
    assert time.monotonic() - began < 15


def test_one_warning_for_a_collector_that_is_not_there(start: Start) -> None:
    """Many batches that fail are one line of ours and none of the exporter's."""
    program = """
from spanmill.instrument import configure, counters, flush, outbox, reward
outbox.SENDS = 1
for _ in range(4):
    reward(1)
    flush(20)
print(counters())
"""
    environ = {ENDPOINT: NOBODY, "OTEL_EXPORTER_OTLP_TIMEOUT": "1", "SPANMILL_EXIT_TIMEOUT": "0.5"}
    code, out, err = finish(start(program, **environ))
    assert (0, "Counters(emitted=0, dropped=0, failed=4, ignored=0)\n") == (code, out)
    assert UNDELIVERED == err


def test_a_collector_that_comes_late_gets_everything(start: Start) -> None:
    """What was emitted before the collector was there is sent when it is."""
    with grpc_receiver() as gone:
        address = gone.endpoint.removeprefix("http://")
    process = start(AGENT, **{ENDPOINT: gone.endpoint, "SPANMILL_EXIT_TIMEOUT": "30"})
    time.sleep(1)
    with grpc_receiver(address) as sink:
        assert (0, "", "") == finish(process)
        assert [("r", "succeeded")] == ended(sink)


def test_seeding_random_does_not_repeat_ids(grpc_sink: Sink, start: Start) -> None:
    """Agents seed `random`; equal trace ids in two runs would make the second a duplicate of the first."""
    seeded = "import random\nrandom.seed(0)\n" + AGENT
    for process in [start(seeded, **{ENDPOINT: grpc_sink.endpoint}) for _ in range(2)]:
        assert 0 == finish(process)[0]
    ids = {(s["trace_id"], s["span_id"]) for s in grpc_sink.spans()}
    assert (8, 2) == (len(ids), len({trace_id for trace_id, _ in ids}))


def test_a_switched_off_sdk_emits_nothing_and_breaks_nothing(grpc_sink: Sink, start: Start) -> None:
    """OTEL_SDK_DISABLED is respected."""
    environ = {ENDPOINT: grpc_sink.endpoint, "OTEL_SDK_DISABLED": "true"}
    assert (0, "") == finish(start(AGENT, **environ))[:2]
    assert [] == grpc_sink.spans()


def test_the_base_install_is_enough(start: Start) -> None:
    """Importing and even using the emitter loads no gRPC, protobuf, polars, pyarrow or numpy until spans go out."""
    program = """
import sys
import spanmill.instrument, spanmill.instrument.run
from spanmill.instrument import call, configure
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
configure(exporter=InMemorySpanExporter())
with call("m") as c:
    c.record(response_token_ids=[1])
print(sorted({"grpc", "polars", "pyarrow", "numpy", "google.protobuf"} & set(sys.modules)))
"""
    assert (0, "[]\n", "") == finish(start(program))
