"""Programs that know nothing of spanmill, started by `spanmill run` or `opentelemetry-instrument`."""

import os
import subprocess
import sys
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pytest
from otlp_sink import Sink
from stub_vllm import Stub, ids_of, stub_vllm

from spanmill.instrument.run import AUTO

BIN = Path(sys.executable).parent
RUN = (str(BIN / "spanmill"), "run", "--rollout-id", "r", "--")
OTEL = (str(BIN / "opentelemetry-instrument"),)
ROLLOUT = "spanmill.rollout.id"
DISABLED = "OTEL_PYTHON_DISABLED_INSTRUMENTATIONS"

AGENT = """
import subprocess, sys
from concurrent.futures import ThreadPoolExecutor
from openai import OpenAI

def ask(text):
    answer = OpenAI().chat.completions.create(model="m", messages=[{"role": "user", "content": text}])
    return answer.choices[0].message.content

with ThreadPoolExecutor() as pool:
    print(list(pool.map(ask, sys.argv[1:3])))
if len(sys.argv) > 3:
    subprocess.run([sys.executable, __file__, sys.argv[3]], check=True)
"""

TRACED = """
from opentelemetry import trace
from openai import OpenAI

early = trace.get_tracer("early")
with early.start_as_current_span("before"):
    pass
{provider}
with early.start_as_current_span("agent"), trace.get_tracer("late").start_as_current_span("step"):
    OpenAI().chat.completions.create(model="m", messages=[{{"role": "user", "content": "hi"}}])
"""

OWN_PROVIDER = """
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, ConsoleSpanExporter

assert isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider)
own = TracerProvider(resource=Resource({"service.name": "own"}))
trace.set_tracer_provider(own)
assert trace.get_tracer_provider() is own
own.add_span_processor(SimpleSpanProcessor(ConsoleSpanExporter(formatter=lambda span: span.name + "\\n")))
"""

Launch = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def stub() -> Generator[Stub]:
    """A model server."""
    with stub_vllm() as running:
        yield running


@pytest.fixture
def launch(stub: Stub, grpc_sink: Sink, tmp_path: Path, clean_environment: None) -> Launch:
    """Runs a Python program to its end as words before it say, with a collector and a model server.

    No other instrumentor of the client runs, unless `OTEL_PYTHON_DISABLED_INSTRUMENTATIONS` says otherwise.
    """

    def run(before: tuple[str, ...], program: str, *arguments: str, **environ: str) -> Any:
        script = tmp_path / "agent.py"
        script.write_text(program)
        addresses = {"OPENAI_BASE_URL": f"{stub.url}/v1", "OTEL_EXPORTER_OTLP_ENDPOINT": grpc_sink.endpoint}
        others = {"OPENAI_API_KEY": "x", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc", DISABLED: "openai"}
        env = {**os.environ, **others, **addresses, **environ}
        command = [*before, sys.executable, str(script), *arguments]
        return subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)

    return run


def told(sink: Sink) -> list[tuple[str, str | None, int]]:
    """(name, rollout, how many ids) of the spans that arrived, sorted."""

    def rollout(span: dict[str, Any]) -> str | None:
        return span["attributes"].get(ROLLOUT) or span["resource"].get(ROLLOUT)

    return sorted(
        (s["name"], rollout(s), s["attributes"].get("spanmill.response.token_count", 0)) for s in sink.spans()
    )


def test_spanmill_run(launch: Launch, grpc_sink: Sink, stub: Stub) -> None:
    """Threads, executors and a child process: every call is a row of the one rollout, in its one trace."""
    done = launch(RUN, AGENT, "a", "b", "c")
    assert (0, "['Hello world', 'Hello world']\n['Hello world']\n", "") == (done.returncode, done.stdout, done.stderr)
    calls = [("chat m", "r", len(ids_of(0)))] * 3
    assert [*calls, ("rollout", "r", 0), ("spanmill.rollout.started", "r", 0)] == told(grpc_sink)
    assert 1 == len({span["trace_id"] for span in grpc_sink.spans()})
    assert ["r"] * 3 == [request.headers["x-spanmill-rollout-id"] for request in stub.received]


@pytest.mark.parametrize("variable", ["SPANMILL_ROLLOUT_ID=r", "OTEL_RESOURCE_ATTRIBUTES=spanmill.rollout.id=r"])
def test_opentelemetry_instrument(launch: Launch, grpc_sink: Sink, variable: str) -> None:
    """The entry points alone do the same; the environment says whose the process is."""
    name, _, value = variable.partition("=")
    done = launch(OTEL, AGENT, "a", "b", "c", **{name: value})
    assert (0, "") == (done.returncode, done.stderr)
    assert [("chat m", "r", len(ids_of(0)))] * 3 == told(grpc_sink)


@pytest.mark.parametrize("before", [RUN, OTEL], ids=["run", "opentelemetry-instrument"])
def test_a_program_without_a_provider(launch: Launch, grpc_sink: Sink, before: tuple[str, ...]) -> None:
    """Whatever it traces goes to the collector, too."""
    done = launch(before, TRACED.format(provider=""), SPANMILL_ROLLOUT_ID="r")
    assert (0, "") == (done.returncode, done.stderr)
    spans = {span["name"]: span for span in grpc_sink.spans()}
    assert {"before": "r", "agent": "r", "step": "r", "chat m": "r"} == {
        name: rollout for name, rollout, _ in told(grpc_sink) if "rollout" not in name
    }
    assert (spans["step"]["span_id"], spans["agent"]["span_id"]) == (
        spans["chat m"]["parent_id"],
        spans["step"]["parent_id"],
    )


@pytest.mark.parametrize("before", [RUN, OTEL], ids=["run", "opentelemetry-instrument"])
def test_a_program_with_its_own_provider(launch: Launch, grpc_sink: Sink, before: tuple[str, ...]) -> None:
    """Its provider is installed as if we were not there, also for tracers made before; the collector gets a copy."""
    done = launch(before, TRACED.format(provider=OWN_PROVIDER), SPANMILL_ROLLOUT_ID="r")
    assert (0, "step\nagent\n", "") == (done.returncode, done.stdout, done.stderr)
    assert {"before": "r", "agent": "r", "step": "r", "chat m": "r"} == {
        name: rollout for name, rollout, _ in told(grpc_sink) if "rollout" not in name
    }


def test_the_sitecustomize_of_the_program_runs(launch: Launch, tmp_path: Path) -> None:
    """Ours makes way for the one that Python would have run."""
    folder = tmp_path / "site"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text("print('theirs', __name__)")
    path = os.pathsep.join([AUTO, str(folder)])
    done = launch((), "import sitecustomize; print(sitecustomize.__file__)", PYTHONPATH=path)
    assert (0, f"theirs sitecustomize\n{folder}/sitecustomize.py\n", "") == (done.returncode, done.stdout, done.stderr)


def test_a_python_without_spanmill(clean_environment: None) -> None:
    """It starts as ever."""
    base = Path(sys.base_prefix) / "bin" / "python3"
    env = {**os.environ, "PYTHONPATH": AUTO}
    code = "import importlib.util as u; print(u.find_spec('spanmill'))"
    done = subprocess.run([str(base), "-c", code], env=env, capture_output=True, text=True, check=False)
    assert (0, "None\n", "") == (done.returncode, done.stdout, done.stderr)


def test_no_collector_no_harm(launch: Launch) -> None:
    """With nobody to send to, the program prints and ends as ever."""
    done = launch(OTEL, AGENT, "a", "b", OTEL_EXPORTER_OTLP_ENDPOINT="http://127.0.0.1:9", SPANMILL_EXIT_TIMEOUT="0.3")
    assert (0, "['Hello world', 'Hello world']\n") == (done.returncode, done.stdout)
