"""`spanmill run` with real commands: its exit codes, signals, environment, and what it reports."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.context import Context
from otlp_sink import Sink, grpc_receiver

from spanmill.errors import ConfigError
from spanmill.instrument.identity import Identity
from spanmill.instrument.run import AUTO, child_environment, run

RunCommand = Callable[..., subprocess.Popen[str]]
STARTED = "spanmill.rollout.started"
PYTHON = sys.executable
PRINT_ENVIRONMENT = (PYTHON, "-c", "import json, os; print(json.dumps(dict(os.environ)))")


@pytest.fixture
def command(clean_environment: None) -> RunCommand:
    """Starts `run(COMMAND, **identity)` in a process of its own, as the command line does."""

    def launch(*words: str, environ: dict[str, str] | None = None, **identity: Any) -> subprocess.Popen[str]:
        program = f"import sys\nfrom spanmill.instrument.run import run\nsys.exit(run(sys.argv[1:], **{identity!r}))"
        return subprocess.Popen(
            [PYTHON, "-c", program, *words],
            env={**os.environ, **(environ or {})},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,  # no terminal: signals come from the test alone
        )

    return launch


def finish(process: subprocess.Popen[str], stdin: str = "") -> tuple[int, str, str]:
    """(exit code, stdout, stderr)."""
    out, err = process.communicate(stdin, timeout=60)
    return process.returncode, out, err


def reported(sink: Sink) -> list[tuple[str, str, Any]]:
    """(span name, rollout id, status) in the order of arrival."""
    return [
        (s["name"], s["attributes"]["spanmill.rollout.id"], s["attributes"].get("spanmill.rollout.status"))
        for s in sink.spans()
    ]


@pytest.mark.parametrize(
    ("words", "code", "status"),
    [
        (("true",), 0, "succeeded"),
        (("sh", "-c", "exit 3"), 3, "failed"),
        (("sh", "-c", "kill -KILL $$"), 137, "failed"),
        (("sh", "-c", "kill -TERM $$"), 143, "failed"),
        (("sh", "-c", "kill -INT $$"), 130, "failed"),
    ],
)
def test_the_exit_code_is_passed_on_and_decides_the_status(
    words: tuple[str, ...], code: int, status: str, grpc_sink: Sink, command: RunCommand
) -> None:
    """0 is a success, all else a failure; 128 + n for a command that signal n ended. One announcement, one end."""
    process = command(*words, rollout_id="r1", endpoint=grpc_sink.endpoint)
    assert (code, "", "") == finish(process)
    assert [(STARTED, "r1", None), ("rollout", "r1", status)] == reported(grpc_sink)


def test_a_command_that_is_not_there(grpc_sink: Sink, command: RunCommand) -> None:
    """127 and one line that names it; the rollout failed."""
    process = command("no-such-command", "--flag", rollout_id="r1", endpoint=grpc_sink.endpoint)
    assert (127, "", "spanmill run: no-such-command: No such file or directory\n") == finish(process)
    assert [(STARTED, "r1", None), ("rollout", "r1", "failed")] == reported(grpc_sink)


def test_a_command_that_cannot_be_executed(grpc_sink: Sink, command: RunCommand, tmp_path: Path) -> None:
    """126 and one line that names it."""
    plain = tmp_path / "plain.txt"
    plain.write_text("text")
    process = command(str(plain), rollout_id="r1", endpoint=grpc_sink.endpoint)
    assert (126, "", f"spanmill run: {plain}: Permission denied\n") == finish(process)


def test_input_and_output_are_the_commands(grpc_sink: Sink, command: RunCommand) -> None:
    """What is piped in reaches it, what it writes comes out, byte for byte."""
    process = command("sh", "-c", "cat; echo oops >&2", endpoint=grpc_sink.endpoint)
    assert (0, "one\ntwo", "oops\n") == finish(process, "one\ntwo")


def test_every_run_is_a_new_rollout(grpc_sink: Sink, command: RunCommand) -> None:
    """Without an id each run has a random one, the same in announcement, end and child."""
    told: list[str] = []
    for _ in range(2):
        process = command("sh", "-c", "echo $SPANMILL_ROLLOUT_ID", endpoint=grpc_sink.endpoint)
        told.append(finish(process)[1].strip())
    assert [32, 32] == [len(own) for own in told]
    assert told[0] != told[1]
    assert [told[0]] * 2 + [told[1]] * 2 == [own for _, own, _ in reported(grpc_sink)]


def test_without_a_collector_the_command_runs_the_same(command: RunCommand) -> None:
    """Its output and exit code are its own; one line at the end says what is lost."""
    environ = {"SPANMILL_EXIT_TIMEOUT": "0.5"}
    process = command("sh", "-c", "echo out; exit 4", rollout_id="r1", endpoint="127.0.0.1:1", environ=environ)
    lost = "spanmill run: rollout r1: its start or end could not be reported, no collector answers at 127.0.0.1:1\n"
    assert (4, "out\n", lost) == finish(process)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1])
def test_signals_reach_the_command(number: signal.Signals, grpc_sink: Sink, command: RunCommand) -> None:
    """The command handles them as if it had been started alone; Ctrl-C is a cancellation."""
    child = f"""
import signal, sys, time
signal.signal({int(number)}, lambda *_: sys.exit(9))
print("ready", flush=True)
while True:
    time.sleep(0.05)  # a signal just before one long sleep would lie until it ends
"""
    process = command(PYTHON, "-c", child, rollout_id="r1", endpoint=grpc_sink.endpoint)
    assert process.stdout is not None
    assert "ready\n" == process.stdout.readline()
    process.send_signal(number)
    assert (9, "", "") == finish(process)
    status = "cancelled" if number == signal.SIGINT else "failed"
    assert [(STARTED, "r1", None), ("rollout", "r1", status)] == reported(grpc_sink)


def test_a_command_that_outlives_ctrl_c_and_ends_well_succeeded(grpc_sink: Sink, command: RunCommand) -> None:
    """An agent in which Ctrl-C stops one turn is judged by how it ends."""
    child = """
import time
try:
    print("ready", flush=True)
    while True:
        time.sleep(0.05)
except KeyboardInterrupt:
    pass
"""
    process = command(PYTHON, "-c", child, rollout_id="r1", endpoint=grpc_sink.endpoint)
    assert process.stdout is not None
    assert "ready\n" == process.stdout.readline()
    process.send_signal(signal.SIGINT)
    assert (0, "", "") == finish(process)
    assert ("rollout", "r1", "succeeded") == reported(grpc_sink)[-1]


def test_the_start_is_reported_while_the_command_runs(grpc_sink: Sink, command: RunCommand) -> None:
    """A rollout that runs for an hour is known from its first second."""
    process = command("sleep", "60", rollout_id="r1", endpoint=grpc_sink.endpoint)
    assert [STARTED] == [span["name"] for span in grpc_sink.wait_for(1)]
    process.terminate()
    assert 143 == finish(process)[0]


def test_the_childs_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Identity in every form that a library reads, beside what was there; nothing that would sample or cut."""
    own = Identity("r/1", 2, "g,1", "é", "train")
    before = {
        "PATH": "/bin",
        "OTEL_RESOURCE_ATTRIBUTES": "team=a",
        "OTEL_TRACES_SAMPLER": "traceidratio",
        "OTEL_TRACES_SAMPLER_ARG": "0.1",
        "OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT": "64",
        "OTEL_ATTRIBUTE_VALUE_LENGTH_LIMIT": "1000",
        "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://elsewhere:1/v1/traces",
        "OPENAI_CUSTOM_HEADERS": "x-team: a\nX-Spanmill-Rollout-Id: outer",
        "TRACEPARENT": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
        "BAGGAGE": "spanmill.rollout.id=outer",
    }
    assert {
        "PATH": "/bin",
        "OTEL_RESOURCE_ATTRIBUTES": "team=a,spanmill.rollout.id=r%2F1,spanmill.rollout.attempt=2,"
        "spanmill.group.id=g%2C1,spanmill.task.id=%C3%A9,spanmill.mode=train",
        "OTEL_TRACES_SAMPLER": "always_on",
        "OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT": "10000",
        "OTEL_SPAN_EVENT_COUNT_LIMIT": "10000",
        "OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector:4318",
        "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf",
        "OPENAI_CUSTOM_HEADERS": "x-team: a\nx-spanmill-rollout-id: r/1\nx-spanmill-attempt: 2\n"
        "x-spanmill-group-id: g,1\nx-spanmill-mode: train",
        "ANTHROPIC_CUSTOM_HEADERS": "x-spanmill-rollout-id: r/1\nx-spanmill-attempt: 2\n"
        "x-spanmill-group-id: g,1\nx-spanmill-mode: train",
        "OTEL_PYTHON_DISTRO": "spanmill",
        "OTEL_PYTHON_CONFIGURATOR": "spanmill",
        "PYTHONPATH": AUTO,
        "SPANMILL_RUN": "r/1",
        "SPANMILL_ROLLOUT_ID": "r/1",
        "SPANMILL_ATTEMPT": "2",
        "SPANMILL_GROUP_ID": "g,1",
        "SPANMILL_TASK_ID": "é",
        "SPANMILL_MODE": "train",
    } == child_environment(own, before, Context(), endpoint="collector:4318")


def test_the_child_stands_under_the_rollouts_span(grpc_sink: Sink, command: RunCommand) -> None:
    """Traceparent and baggage of the child are those of the rollout."""
    _, out, _ = finish(command(*PRINT_ENVIRONMENT, rollout_id="r1", group_id="a b", endpoint=grpc_sink.endpoint))
    child = json.loads(out)
    (end,) = grpc_sink.named("rollout")
    assert f"00-{end['trace_id']}-{end['span_id']}" == child["TRACEPARENT"].rpartition("-")[0]
    assert (
        "spanmill.rollout.id=r1,spanmill.rollout.attempt=0,spanmill.group.id=a+b",
        grpc_sink.endpoint,
        "grpc",
    ) == (child["BAGGAGE"], child["OTEL_EXPORTER_OTLP_ENDPOINT"], child["OTEL_EXPORTER_OTLP_PROTOCOL"])


def test_an_agent_that_uses_the_python_api_is_one_rollout(grpc_sink: Sink, command: RunCommand) -> None:
    """Its call and reward stand under the announced rollout, by span, baggage and resource alike."""
    agent = """
from spanmill.instrument import call, reward, rollout
with rollout() as r:
    assert r.id == "r1" and r.attempt == 3
    with call("m") as c:
        c.record(response_token_ids=[1], finish_reason="stop")
reward(0.5)
"""
    assert (0, "", "") == finish(command(PYTHON, "-c", agent, rollout_id="r1", attempt=3, endpoint=grpc_sink.endpoint))
    spans = grpc_sink.spans()
    assert [("r1", 3)] * 5 == [
        (s["attributes"]["spanmill.rollout.id"], s["attributes"]["spanmill.rollout.attempt"]) for s in spans
    ]
    assert (1, 1, 1) == (
        len(grpc_sink.named(STARTED)),
        len({s["trace_id"] for s in spans}),
        len([s for s in spans if "spanmill.rollout.status" in s["attributes"]]),
    )
    assert ["r1"] * 3 == [
        s["resource"].get("spanmill.rollout.id") for s in spans if "spanmill.rollout.id" in s["resource"]
    ]


def test_a_program_with_a_provider_of_its_own_is_told_by_its_resource(grpc_sink: Sink, command: RunCommand) -> None:
    """Plain OpenTelemetry in the child needs nothing of ours: environment alone makes its spans the rollout's."""
    agent = """
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
provider = TracerProvider()
provider.add_span_processor(SimpleSpanProcessor(OTLPSpanExporter()))
provider.get_tracer("app").start_span("llm").end()
"""
    own = {"rollout_id": "a,b=c d", "group_id": "g", "endpoint": grpc_sink.endpoint}
    assert (0, "", "") == finish(command(PYTHON, "-c", agent, **own))
    (llm,) = grpc_sink.named("llm")
    assert ("a,b=c d", "g") == (llm["resource"]["spanmill.rollout.id"], llm["resource"]["spanmill.group.id"])


def test_options_come_from_the_environment_too(grpc_sink: Sink, command: RunCommand) -> None:
    """SPANMILL_ROLLOUT_ID and the like are options; what is given wins."""
    environ = {
        "SPANMILL_ROLLOUT_ID": "from-env",
        "SPANMILL_ATTEMPT": "4",
        "SPANMILL_GROUP_ID": "g",
        "SPANMILL_ENDPOINT": grpc_sink.endpoint,
    }
    assert 0 == finish(command("true", environ=environ, attempt=5))[0]
    identity = {k: v for k, v in grpc_sink.named("rollout")[0]["attributes"].items() if not k.endswith("status")}
    assert {"spanmill.rollout.id": "from-env", "spanmill.rollout.attempt": 5, "spanmill.group.id": "g"} == identity


def test_a_run_inside_a_run_is_a_rollout_of_its_own(grpc_sink: Sink, command: RunCommand) -> None:
    """What the outer run set is not taken for options of the inner one; only the trace goes on."""
    program = "import sys\nfrom spanmill.instrument.run import run\nsys.exit(run(['true']))"
    process = command(PYTHON, "-c", program, rollout_id="outer", group_id="g", endpoint=grpc_sink.endpoint)
    assert (0, "", "") == finish(process)
    (inner,) = (s for s in grpc_sink.named("rollout") if s["attributes"]["spanmill.rollout.id"] != "outer")
    (outer,) = (s for s in grpc_sink.named("rollout") if s["attributes"]["spanmill.rollout.id"] == "outer")
    assert (32, None, outer["trace_id"], outer["span_id"]) == (
        len(inner["attributes"]["spanmill.rollout.id"]),
        inner["attributes"].get("spanmill.group.id"),
        inner["trace_id"],
        inner["parent_id"],
    )


@pytest.mark.parametrize(
    ("options", "environ", "message"),
    [
        ({"rollout_id": ""}, {}, "rollout_id: expected a text that is not empty"),
        ({"attempt": -1}, {}, "attempt: expected a number from 0 to 2147483647, found -1"),
        ({}, {"SPANMILL_ATTEMPT": "two"}, "SPANMILL_ATTEMPT: expected a number, found 'two'"),
    ],
)
def test_an_impossible_option_stops_before_anything_runs(
    options: dict[str, Any], environ: dict[str, str], message: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """One line that names it, and the command has not run."""
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    ran = tmp_path / "ran"
    with pytest.raises(ConfigError) as raised:
        run(["touch", str(ran)], **options)
    assert (message, False) == (str(raised.value), ran.exists())


def test_the_command_line_hands_on_its_options_and_the_command_its_own(grpc_sink: Sink) -> None:
    """Options before the command are ours, everything after it is the command's, with `--` or without."""
    options = ("--rollout-id", "r1", "--attempt", "2", "--group-id", "g", "--task-id", "t", "--mode", "val")
    for words in (("--", "sh", "-c", "exit $0", "3"), ("sh", "-c", "exit $0", "3", "--mode", "x")):
        line = [PYTHON, "-c", "import sys; from spanmill.cli import main; sys.exit(main())", "run"]
        done = subprocess.run([*line, *options, "--endpoint", grpc_sink.endpoint, *words], capture_output=True)
        assert (3, b"", b"") == (done.returncode, done.stdout, done.stderr)
    assert [
        {
            "spanmill.rollout.id": "r1",
            "spanmill.rollout.attempt": 2,
            "spanmill.group.id": "g",
            "spanmill.task.id": "t",
            "spanmill.mode": "val",
            "spanmill.rollout.status": "failed",
        }
    ] * 2 == [span["attributes"] for span in grpc_sink.named("rollout")]


def test_a_collector_that_dies_on_the_way_is_said(command: RunCommand) -> None:
    """The start arrived, the end did not: one line says so, and the exit code is the command's."""
    with grpc_receiver() as sink:
        environ = {"SPANMILL_EXIT_TIMEOUT": "0.5"}
        process = command("sh", "-c", "read line; exit 5", rollout_id="r1", endpoint=sink.endpoint, environ=environ)
        assert [STARTED] == [span["name"] for span in sink.wait_for(1)]
    time.sleep(0.1)
    code, _, err = finish(process, "go\n")
    assert (5, "spanmill run: rollout r1: its start or end") == (code, err.partition(" could not")[0])


def rewards(sink: Sink) -> list[tuple[Any, ...]]:
    """(value, name, call) of the rewards that arrived, in the order of arrival."""
    names = ("spanmill.reward.value", "spanmill.reward.name", "spanmill.reward.call_id")
    found = [span["attributes"] for span in sink.spans() if span["name"] == "spanmill.reward"]
    assert {"r1"} >= {attributes["spanmill.rollout.id"] for attributes in found}
    return [tuple(attributes.get(name) for name in names) for attributes in found]


@pytest.mark.parametrize(("word", "value"), [("true", 1.0), ("false", 0.0)])
def test_reward_from_exit(word: str, value: float, grpc_sink: Sink, command: RunCommand) -> None:
    """1 for a command that succeeds, 0 for one that fails."""
    finish(command(word, rollout_id="r1", endpoint=grpc_sink.endpoint, reward_from_exit=True))
    assert [(value, "final", None)] == rewards(grpc_sink)


def test_a_command_writes_its_rewards(grpc_sink: Sink, command: RunCommand, tmp_path: Path) -> None:
    """A number is the rollout's; names and calls are taken as they are written; the command is told the path."""
    file = tmp_path / "rewards"
    lines = '0.5\n\n{"value": 2, "name": "format"}\n{"value": true, "call_id": "c1"}\n'
    script = f"cat > $SPANMILL_REWARD_FILE <<'END'\n{lines}END"
    process = command("sh", "-c", script, rollout_id="r1", endpoint=grpc_sink.endpoint, reward_file=str(file))
    assert (0, "", "") == finish(process)
    assert [(0.5, "final", None), (2.0, "format", None), (1.0, None, "c1")] == rewards(grpc_sink)


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("true", "{file}: the command wrote no reward there"),
        ("echo good > $SPANMILL_REWARD_FILE", '{file}:1: expected a number, or {{"value": …'),
        ('echo \'{{"value": 1, "nmae": 2}}\' > $SPANMILL_REWARD_FILE', '{file}:1: expected a number, or {{"value": …'),
    ],
)
def test_a_reward_that_was_not_written(
    script: str, said: str, grpc_sink: Sink, command: RunCommand, tmp_path: Path
) -> None:
    """No reward is not 0: nothing is sent, one line says why. What an earlier run left there is none."""
    file = tmp_path / "rewards"
    file.write_text("1\n")
    process = command("sh", "-c", script.format(), rollout_id="r1", endpoint=grpc_sink.endpoint, reward_file=str(file))
    code, _, error = finish(process)
    assert (0, True) == (code, error.startswith(f"spanmill run: rollout r1: {said.format(file=file)}"))
    assert [] == rewards(grpc_sink)
