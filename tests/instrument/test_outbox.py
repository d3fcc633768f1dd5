import threading
import time
from collections.abc import Sequence
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from otlp_sink import Sink

from spanmill.instrument import outbox
from spanmill.instrument.exporters import make_exporter, target
from spanmill.instrument.outbox import Outbox
from spanmill.instrument.reports import forget_reports
from spanmill.instrument.spansize import span_size

TRACER = TracerProvider(shutdown_on_exit=False).get_tracer("test")
FOUR_MIB = 4 * 2**20


def make_span(name: str, size: int = 0) -> ReadableSpan:
    """A finished span with an attribute of `size` bytes."""
    span = TRACER.start_span(name, attributes={"data": "a" * size})
    span.end()
    assert isinstance(span, ReadableSpan)
    return span


class Exporter(SpanExporter):
    """Keeps the names of each batch; answers what it is told to, once it may."""

    def __init__(self, *answers: SpanExportResult | Exception) -> None:
        self.answers = list(answers)
        self.batches: list[list[str]] = []
        self.may = threading.Event()
        self.may.set()
        self.shut_down = 0

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Take a batch."""
        self.batches.append([span.name for span in spans])
        self.may.wait(30)
        answer = self.answers.pop(0) if self.answers else SpanExportResult.SUCCESS
        if isinstance(answer, Exception):
            raise answer
        return answer

    def shutdown(self) -> None:
        """Count it."""
        self.shut_down += 1
        self.may.set()


def make_outbox(exporter: SpanExporter, **settings: Any) -> Outbox[ReadableSpan]:
    """An outbox with a delay that no test waits for."""
    return Outbox(lambda: exporter, span_size, **{"delay_s": 60, "max_bytes": 2**30, **settings})


def counts(box: Outbox[Any]) -> tuple[int, int, int]:
    """(emitted, dropped, failed)."""
    return box.emitted, box.dropped, box.failed


@pytest.fixture(autouse=True)
def quick_resend(monkeypatch: pytest.MonkeyPatch) -> None:
    """No waiting between the tries to send a batch."""
    monkeypatch.setattr(outbox, "RESEND_DELAY_S", 0.01)


def test_spans_wait_for_each_other_and_go_in_order() -> None:
    """One batch for what comes within the delay; a span that must go at once takes the others along."""
    exporter = Exporter()
    box = make_outbox(exporter)
    box.put(make_span("a"))
    box.put(make_span("b"))
    assert [] == exporter.batches
    box.put(make_span("c"), at_once=True)
    assert box.flush(10)
    assert ([["a", "b", "c"]], (3, 0, 0)) == (exporter.batches, counts(box))


def test_the_delay_sends_without_being_asked() -> None:
    """A lone span leaves when its delay is over."""
    exporter = Exporter()
    box = make_outbox(exporter, delay_s=0.05)
    box.put(make_span("a"))
    until = time.monotonic() + 10
    while not exporter.batches and time.monotonic() < until:
        time.sleep(0.01)
    assert [["a"]] == exporter.batches


def test_a_batch_has_at_most_512_spans() -> None:
    """More spans are more batches, none lost, in order."""
    exporter = Exporter()
    box = make_outbox(exporter)
    for number in range(1200):
        box.put(make_span(str(number)))
    assert box.flush(20)
    assert [str(n) for n in range(1200)] == [name for batch in exporter.batches for name in batch]
    assert (512, 1200) == (max(map(len, exporter.batches)), box.emitted)


def test_no_request_exceeds_what_a_default_receiver_takes(grpc_sink: Sink) -> None:
    """Many large spans go in requests of less than 4 MiB, all of them arrive, and a request is not needlessly small."""
    box = make_outbox(make_exporter(target(grpc_sink.endpoint)))
    for number in range(60):
        box.put(make_span(str(number), 300_000))
    assert box.flush(60)
    assert [str(n) for n in range(60)] == [span["name"] for span in grpc_sink.spans()]
    assert max(map(len, grpc_sink.bodies)) <= FOUR_MIB
    assert (60, 0, 0) == counts(box)
    assert len(grpc_sink.bodies) <= 60 // 11 + 2


def test_a_span_that_is_too_large_alone_goes_alone() -> None:
    """It cannot be cut, and takes nobody with it."""
    exporter = Exporter()
    box = make_outbox(exporter)
    for name, size in (("a", 10), ("large", 2 * FOUR_MIB), ("b", 10)):
        box.put(make_span(name, size))
    assert box.flush(10)
    assert [["a"], ["large"], ["b"]] == exporter.batches


def test_a_full_queue_drops_and_counts_and_never_blocks() -> None:
    """While the collector hangs, memory stays bounded and putting stays quick; what was taken still arrives."""
    exporter = Exporter()
    exporter.may.clear()
    box = make_outbox(exporter, max_bytes=1_000_000)
    span = make_span("s", 100_000)
    began = time.monotonic()
    for _ in range(1000):
        box.put(span)
    took = time.monotonic() - began
    assert (0, 991, 0) == counts(box)
    assert took < 5
    assert not box.flush(0.05)
    exporter.may.set()
    assert box.flush(10)
    assert (9, 991, 0) == counts(box)


def test_a_span_larger_than_the_queue_is_taken_when_the_queue_is_empty() -> None:
    """The bound never makes a span impossible to send."""
    exporter = Exporter()
    box = make_outbox(exporter, max_bytes=1000)
    box.put(make_span("large", 100_000))
    assert box.flush(10)
    assert (1, 0, 0) == counts(box)


def test_a_batch_that_failed_is_sent_again() -> None:
    """A collector that comes back in time has lost nothing."""
    exporter = Exporter(SpanExportResult.FAILURE, SpanExportResult.FAILURE)
    box = make_outbox(exporter)
    box.put(make_span("a"))
    assert box.flush(10)
    assert ([["a"]] * 3, (1, 0, 0)) == (exporter.batches, counts(box))


@pytest.mark.parametrize("answers", [[SpanExportResult.FAILURE] * 3, [ValueError("no UTF-8")] * 3])
def test_a_batch_that_cannot_be_delivered_is_counted(answers: list[Any], caplog: pytest.LogCaptureFixture) -> None:
    """It is given up after some tries, said once, and the next batch goes on."""
    forget_reports()
    exporter = Exporter(*answers)
    box = make_outbox(exporter)
    box.put(make_span("a"))
    assert not box.flush(10)
    box.put(make_span("b"))
    assert box.flush(10)
    assert (["b"], (1, 0, 1)) == (exporter.batches[-1], counts(box))
    assert 1 == len([r for r in caplog.records if "cannot be" in r.getMessage()])


def test_closing_delivers_what_is_queued_and_takes_nothing_more() -> None:
    """Closing sends the rest and shuts the exporter down once; a later span is counted as dropped."""
    exporter = Exporter()
    box = make_outbox(exporter)
    box.put(make_span("a"))
    assert box.close(10)
    box.put(make_span("late"))
    assert ([["a"]], (1, 1, 0), 1) == (exporter.batches, counts(box), exporter.shut_down)


def test_closing_gives_up_a_collector_that_hangs() -> None:
    """The wait is bounded, and what is left is counted as failed."""
    exporter = Exporter()
    exporter.may.clear()
    box = make_outbox(exporter)
    for name in "abc":
        box.put(make_span(name, 3_000_000))
    began = time.monotonic()
    assert not box.close(0.2)
    assert time.monotonic() - began < 5
    assert 3 == sum(counts(box))


def test_an_exporter_that_cannot_be_made_is_no_error_of_the_program() -> None:
    """A protocol that there is no exporter for costs the spans, which are counted, and nothing else."""

    def broken() -> SpanExporter:
        raise ModuleNotFoundError("No module named 'grpc'")

    box = Outbox(broken, span_size, delay_s=60, max_bytes=2**20)
    box.put(make_span("a"))
    assert not box.flush(10)
    assert (0, 0, 1) == counts(box)
