from collections.abc import Callable
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, SpanLimits, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ParentBased
from otlp_sink import Sink

from spanmill.instrument import call, configure, flush, reward, rollout
from spanmill.instrument.exporters import make_exporter, target

Spans = Callable[[], list[ReadableSpan]]


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> Callable[[TracerProvider], TracerProvider]:
    """Makes a provider the program's own, as `set_tracer_provider` would, for this test alone."""

    def use(provider: TracerProvider) -> TracerProvider:
        monkeypatch.setattr(trace, "get_tracer_provider", lambda: provider)
        return provider

    return use


def names(spans: Any) -> list[str]:
    """Names of spans, sorted."""
    return sorted(span.name for span in spans)


def test_the_programs_spans_learn_their_rollout_and_reach_the_collector(
    emitted: Spans, program: Callable[[TracerProvider], TracerProvider]
) -> None:
    """Its spans go where they went before, unchanged, and to us too, under our rollout; ours do not go there."""
    backend = InMemorySpanExporter()
    provider = program(TracerProvider(shutdown_on_exit=False))
    provider.add_span_processor(SimpleSpanProcessor(backend))
    for _ in range(2):
        with rollout("r"), provider.get_tracer("app").start_as_current_span("db"), call("m"):
            pass
    provider.get_tracer("app").start_span("outside").end()
    assert ["db", "db", "outside"] == names(backend.get_finished_spans())
    assert [{}, {}, {}] == [dict(span.attributes or {}) for span in backend.get_finished_spans()]
    ours = emitted()
    assert sorted(["chat m", "db", "rollout", "spanmill.rollout.started"] * 2 + ["outside"]) == names(ours)
    assert ["r"] * 8 == [(s.attributes or {}).get("spanmill.rollout.id") for s in ours if s.name != "outside"]


def test_the_programs_sampler_and_limits_do_not_touch_ours(
    emitted: Spans, program: Callable[[TracerProvider], TracerProvider], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rollouts, calls and token data are whole whatever the program or its environment samples, limits or cuts."""
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "always_off")
    program(
        TracerProvider(
            sampler=ParentBased(ALWAYS_OFF), span_limits=SpanLimits(max_attributes=1), shutdown_on_exit=False
        )
    )
    with rollout("r"), call("m") as c:
        c.record(prompt_token_ids=range(1000), response_token_ids=range(1000), logprobs=[-0.5] * 1000)
    _, made, _ = emitted()
    attributes = made.attributes or {}
    assert (1000, 1000, 0) == (
        attributes["spanmill.prompt.token_count"],
        attributes["spanmill.response.token_count"],
        made.dropped_attributes,
    )


def test_nothing_is_sent_twice_to_the_same_collector(
    grpc_sink: Sink, program: Callable[[TracerProvider], TracerProvider]
) -> None:
    """A program that exports to our collector itself keeps doing so alone; its spans carry the rollout there."""
    configure(endpoint=grpc_sink.endpoint)
    provider = program(TracerProvider(shutdown_on_exit=False))
    provider.add_span_processor(BatchSpanProcessor(make_exporter(target(grpc_sink.endpoint))))
    with rollout("r"), provider.get_tracer("app").start_as_current_span("db"):
        pass
    assert provider.force_flush() and flush(20)
    provider.shutdown()
    assert [("db", "r"), ("rollout", "r"), ("spanmill.rollout.started", "r")] == sorted(
        (span["name"], span["attributes"].get("spanmill.rollout.id")) for span in grpc_sink.spans()
    )


def test_a_provider_that_shuts_down_does_not_take_us_with_it(
    emitted: Spans, program: Callable[[TracerProvider], TracerProvider]
) -> None:
    """Our way out outlives the program's provider."""
    provider = program(TracerProvider(shutdown_on_exit=False))
    with rollout("r"):
        pass
    assert provider.force_flush()
    provider.shutdown()
    reward(1)
    assert ["rollout", "spanmill.reward", "spanmill.rollout.started"] == names(emitted())


def test_a_processor_of_the_program_that_raises_stays_its_own(
    emitted: Spans, program: Callable[[TracerProvider], TracerProvider]
) -> None:
    """What else hangs on the program's provider does not reach our spans."""

    class Broken(SpanProcessor):
        def on_start(self, span: Any, parent_context: Any = None) -> None:
            raise ValueError("broken")

    program(TracerProvider(shutdown_on_exit=False)).add_span_processor(Broken())
    with rollout("r"):
        reward(1)
    assert ["rollout", "spanmill.reward", "spanmill.rollout.started"] == names(emitted())


def test_a_provider_that_cannot_be_joined_costs_nothing_else(emitted: Spans, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program's provider that refuses a processor is its own affair: our spans go out."""

    class Refusing:
        def add_span_processor(self, _: SpanProcessor) -> None:
            raise RuntimeError("no more")

    refusing = Refusing()
    monkeypatch.setattr(trace, "get_tracer_provider", lambda: refusing)
    with rollout("r"):
        reward(1)
    assert ["rollout", "spanmill.reward", "spanmill.rollout.started"] == names(emitted())
