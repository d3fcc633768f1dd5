"""Other instrumentors beside ours: one row per call, and what they send elsewhere goes there as before."""

import os
import subprocess
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
from otlp_sink import Sink
from stub_vllm import PROMPT, Stub, ids_of, logprobs_of, stub_vllm

from spanmill import adapt

BIN = Path(sys.executable).parent
AGENT = """
from opentelemetry import trace
from openai import OpenAI
{provider}
def ask(**options):
    return OpenAI().chat.completions.create(model="m", messages=[{{"role": "user", "content": "hi"}}], **options)

with trace.get_tracer("app").start_as_current_span("agent"):
    ask()
    ask(n=2)
    list(ask(stream=True))
"""
OWN_PROVIDER = """
import json, sys
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, ConsoleSpanExporter

trace.set_tracer_provider(TracerProvider())
def line(span):
    return json.dumps([span.name, sorted(span.attributes.items()), span.parent is None]) + "\\n"
trace.get_tracer_provider().add_span_processor(SimpleSpanProcessor(ConsoleSpanExporter(formatter=line)))
from openinference.instrumentation.openai import OpenAIInstrumentor
OpenAIInstrumentor().instrument()
"""
DISABLED = "OTEL_PYTHON_DISABLED_INSTRUMENTATIONS"


@pytest.fixture
def stub() -> Generator[Stub]:
    """A model server."""
    with stub_vllm() as running:
        yield running


def run_agent(before: tuple[str, ...], program: str, stub: Stub, sink: Sink, **environ: str) -> str:
    """What the program prints."""
    addresses = {"OPENAI_BASE_URL": f"{stub.url}/v1", "OTEL_EXPORTER_OTLP_ENDPOINT": sink.endpoint}
    env = {**os.environ, "OPENAI_API_KEY": "x", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc", **addresses, **environ}
    command = [*before, sys.executable, "-c", program]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert (0, "") == (done.returncode, done.stderr)
    return done.stdout


def rows(sink: Sink) -> list[tuple[Any, ...]]:
    """(rollout, choice, prompt ids, sampled ids, logprobs, reason) of every row, sorted."""
    return sorted(
        (
            row.rollout_id,
            row.choice,
            None if row.prompt_token_ids is None else row.prompt_token_ids.tolist(),
            None if row.response_token_ids is None else row.response_token_ids.tolist(),
            None if row.response_logprobs is None else row.response_logprobs.tolist(),
            row.finish_reason,
        )
        for rollout in adapt(sink.bodies)
        for row in rollout.triplets
    )


def truth(choice: int) -> tuple[Any, ...]:
    """The row of a choice of any of the calls."""
    return ("r", choice, PROMPT, ids_of(choice), logprobs_of(choice), "stop")


RUN = (str(BIN / "spanmill"), "run", "--rollout-id", "r", "--")
ROWS = [truth(0), truth(0), truth(0), truth(1)]


def test_one_row_per_call(stub: Stub, grpc_sink: Sink, clean_environment: None) -> None:
    """OpenInference's instrumentor, started by its entry point, and ours describe each call once."""
    stub.unique_ids = True
    run_agent(RUN, AGENT.format(provider=""), stub, grpc_sink)
    assert {"ChatCompletion", "chat m"} <= {span["name"] for span in grpc_sink.spans()}
    assert ROWS == rows(grpc_sink)


def test_a_program_that_is_traced_already(stub: Stub, grpc_sink: Sink, clean_environment: None) -> None:
    """Its own provider and instrumentor: one row per call, and its exporter gets what it got without us."""
    stub.unique_ids = True
    program = AGENT.format(provider=OWN_PROVIDER)
    ours = run_agent(RUN, program, stub, grpc_sink, **{DISABLED: "openai"})
    assert ROWS == rows(grpc_sink)
    stub.answered = 0
    alone = run_agent((), program, stub, grpc_sink)
    assert alone.splitlines() == ours.splitlines()


PRIVATE_PROVIDER = """
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, ConsoleSpanExporter
from openinference.instrumentation.openai import OpenAIInstrumentor

private = TracerProvider()
private.add_span_processor(SimpleSpanProcessor(ConsoleSpanExporter(formatter=lambda span: span.name + "\\n")))
OpenAIInstrumentor().instrument(tracer_provider=private)
"""


def test_a_program_that_instruments_itself(stub: Stub, grpc_sink: Sink, clean_environment: None) -> None:
    """An instrumentor that the program gives a provider of its own sends there, as it would without spanmill."""
    stub.unique_ids = True
    printed = run_agent(RUN, AGENT.format(provider=PRIVATE_PROVIDER), stub, grpc_sink)
    assert ["ChatCompletion"] * 3 == printed.splitlines()
    assert ROWS == rows(grpc_sink)
