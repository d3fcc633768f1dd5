"""The pipeline that every emitter of spanmill shares: one TracerProvider of our own, one outbox, one exporter.

Our spans are made by our own provider, whatever the program uses, so that its sampler, its attribute limits and the
spans-not-bytes batches of its exporter cannot cost token data, and so that its telemetry is not flooded with ours. A
provider that the program has set gets our processor too: its spans learn their rollout, a copy goes to the collector.

    SPANMILL_EXIT_TIMEOUT    seconds that the end of the process may wait for the collector (5)
    SPANMILL_QUEUE_MIB       what may wait for the collector (128)
    OTEL_BSP_SCHEDULE_DELAY  milliseconds that a span may wait for others (1000)
"""

import atexit
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from functools import cached_property
from types import FrameType
from typing import Any, Final, NamedTuple, TypeVar, cast

from opentelemetry import baggage, trace
from opentelemetry.attributes import BoundedAttributes
from opentelemetry.baggage.propagation import W3CBaggagePropagator
from opentelemetry.context import Context, get_current
from opentelemetry.propagators.composite import CompositePropagator
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, Span, SpanLimits, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SpanExporter
from opentelemetry.sdk.trace.id_generator import IdGenerator, RandomIdGenerator
from opentelemetry.sdk.trace.sampling import ALWAYS_ON
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from spanmill.instrument import identity
from spanmill.instrument.exporters import Target, make_exporter, make_log_exporter, target
from spanmill.instrument.outbox import Exporter, Outbox
from spanmill.instrument.reports import forget_reports, guarded, ignored, report
from spanmill.instrument.spansize import log_size, span_size
from spanmill.semconv import ROLLOUT_ID, ROLLOUT_STARTED

T = TypeVar("T")
SCOPE: Final = "spanmill"
ATTRIBUTE_LIMIT: Final = 10_000
"""Flattened dialects reach OpenTelemetry's default of 128 at some sixty messages, then lose the oldest attributes."""


class Counters(NamedTuple):
    """What became of the spans of this process, and of what it was told to record."""

    emitted: int
    """Spans that the collector has acknowledged."""
    dropped: int
    """Spans that found the queue full."""
    failed: int
    """Spans that could not be delivered."""
    ignored: int
    """Values that could not be recorded: a reward that is no number, ids that are no ids."""


class RandomIds(IdGenerator):
    """Trace and span ids from the operating system: agents seed `random`, and equal ids would make spans duplicates."""

    def generate_span_id(self) -> int:
        """64 random bits, not all 0."""
        return int.from_bytes(os.urandom(8), "big") or self.generate_span_id()

    def generate_trace_id(self) -> int:
        """128 random bits, not all 0."""
        return int.from_bytes(os.urandom(16), "big") or self.generate_trace_id()

    def is_trace_id_random(self) -> bool:
        """They are."""
        return True


class RolloutProcessor(SpanProcessor):
    """Says of every span whose rollout it is, by baggage or else by the process, and hands it to the outbox.

    A process's own rollout stands in the span's resource already, in most programs. On spans of a provider of the
    program nothing is written: what goes to us is a copy. Only a program that sends to our collector itself sends it
    with the rollout on it, and nothing comes from us.
    """

    def __init__(self, program: object = None) -> None:
        self._program = program
        self._of_process = identity.from_environment()
        self._open: dict[int, identity.Identity] = {}
        """Whose the program's unfinished spans are, by span id."""

    @cached_property
    def _exports(self) -> bool:
        return not _sends_to(self._program, _pipeline().host)  # asked late: exporters are added one after the other

    def on_start(self, span: Span, parent_context: Context | None = None) -> None:
        """Note the identity, whole, unless the span has one of its own."""
        with guarded("identity"):
            found = identity.from_baggage(parent_context)
            if found is None and ROLLOUT_ID not in span.resource.attributes:
                found = self._of_process
            if found is None or ROLLOUT_ID in (span.attributes or {}):
                return
            if self._program is None or not self._exports:
                span.set_attributes(identity.attributes(found))
            elif span.context is not None:
                self._open[span.context.span_id] = found

    def on_end(self, span: ReadableSpan) -> None:
        """Queue the span if it was sampled."""
        context = span.get_span_context()
        if context is None:
            return
        found = self._open.pop(context.span_id, None)
        if self._exports and context.trace_flags.sampled:
            with guarded("queueing a span"):
                _hook_child_end()
                told = span if found is None else _of_rollout(span, found)
                _pipeline().outbox.put(told, at_once=ROLLOUT_STARTED in (span.attributes or {}))

    def shutdown(self) -> None:
        """Send what is queued; the pipeline outlives a provider of the program."""
        if self._exports:
            _pipeline().outbox.hurry()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        """Send what is queued and wait for it."""
        return not self._exports or _pipeline().outbox.flush(timeout_millis / 1000)


def _of_rollout(span: ReadableSpan, own: identity.Identity) -> ReadableSpan:
    """A copy of a finished span that says whose it is."""
    told = BoundedAttributes(attributes={**identity.attributes(own), **(span.attributes or {})})
    told.dropped = span.dropped_attributes
    return ReadableSpan(
        name=span.name,
        context=span.context,
        parent=span.parent,
        resource=span.resource,
        attributes=told,
        events=span.events,
        links=span.links,
        kind=span.kind,
        status=span.status,
        start_time=span.start_time,
        end_time=span.end_time,
        instrumentation_scope=span.instrumentation_scope,
    )


class _Pipeline:
    """The state of the process: made once, at the first use."""

    def __init__(self, to: Target) -> None:
        self.outbox = _span_outbox(to)
        self.logs: Outbox[Any] | None = None
        """Made for the first log record."""
        self.to: Target | None = to
        """None for an exporter of the program's own."""
        self.host = to.host
        own = identity.from_environment()
        self.provider = TracerProvider(
            sampler=ALWAYS_ON,
            resource=Resource.create(identity.attributes(own) if own is not None else {}),
            shutdown_on_exit=False,
            id_generator=RandomIds(),
            span_limits=SpanLimits(
                max_attributes=ATTRIBUTE_LIMIT,
                max_span_attributes=ATTRIBUTE_LIMIT,
                max_attribute_length=SpanLimits.UNSET,
                max_span_attribute_length=SpanLimits.UNSET,
            ),
        )
        self.provider.add_span_processor(RolloutProcessor())
        self.tracer = self.provider.get_tracer(SCOPE)
        self.served: list[object] = [self.provider]
        """Providers that have our processor."""
        self.sigterm_is_hooked = False
        self.child_end_is_hooked = False

    def outboxes(self) -> list[Outbox[Any]]:
        """Of spans, and of log records if there were any."""
        return [self.outbox, *([] if self.logs is None else [self.logs])]


PROPAGATOR: Final = CompositePropagator([TraceContextTextMapPropagator(), W3CBaggagePropagator()])
"""Between our own processes, whatever propagators the program uses."""

HANDED_DOWN: Final = ("traceparent", "tracestate", "baggage")
"""What a parent process sets in the environment, in capitals."""

_made: _Pipeline | None = None
_making = threading.Lock()
on_process_end: Final[list[Callable[[], None]]] = []
"""Called when the process is about to end, before the last flush."""


def _number(name: str, default: float) -> float:
    text = os.environ.get(name, "")
    try:
        value = float(text or default)
    except ValueError:
        value = -1.0
    if value < 0:
        report(f"environment {name}", f"{name}: expected a number >= 0, found {text!r}; {default:g} is used")
        return default
    return value


def exit_timeout_s() -> float:
    """How long the end of the process may wait for the collector."""
    return _number("SPANMILL_EXIT_TIMEOUT", 5)


def _outbox(make: Callable[[], Exporter[T]], size: Callable[[T], int]) -> Outbox[T]:
    delay_s = _number("OTEL_BSP_SCHEDULE_DELAY", 1000) / 1000
    return Outbox(make, size, delay_s=delay_s, max_bytes=int(_number("SPANMILL_QUEUE_MIB", 128) * 2**20))


def _span_outbox(to: Target) -> Outbox[ReadableSpan]:
    return _outbox(lambda: make_exporter(to), span_size)


def _pipeline() -> _Pipeline:
    global _made
    if _made is None:
        with _making:
            if _made is None:
                _made = _Pipeline(target())
                atexit.register(close)
                before_shutdown = getattr(threading, "_register_atexit", None)  # as concurrent.futures ends its threads
                if before_shutdown is not None:
                    before_shutdown(_make_ready)
                os.register_at_fork(
                    before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child
                )
    return _made


def configure(*, endpoint: str | None = None, exporter: SpanExporter | None = None) -> None:
    """Send spans somewhere else than the environment says: to an OTLP endpoint (a URL), or to any exporter.

    Spans that are queued already still go where they were meant to, which may take as long as at the end of the
    process; the counters start anew. An exporter is called from a thread of ours. For spans in memory:
    `configure(exporter=InMemorySpanExporter())`, later `flush()`.
    """
    pipeline = _pipeline()
    to = target(endpoint)
    before = pipeline.outboxes()
    pipeline.outbox = _span_outbox(to) if exporter is None else _outbox(lambda: exporter, span_size)
    pipeline.logs = None
    pipeline.to = to if exporter is None else None
    pipeline.host = to.host if exporter is None else ""
    _close(before, exit_timeout_s())


def put_log(record: Any) -> None:
    """Queue a log record (`ReadableLogRecord`) for where the spans go, unless that is an exporter for spans alone."""
    pipeline = _pipeline()
    to = pipeline.to
    if to is None:
        return
    if pipeline.logs is None:
        with _making:
            if pipeline.logs is None:
                pipeline.logs = _outbox(lambda: make_log_exporter(to), log_size)
    _hook_child_end()
    pipeline.logs.put(record)


def tracer_provider() -> TracerProvider:
    """Our provider: for instrumentors (`instrument(tracer_provider=...)`), or to set as the program's own."""
    return _pipeline().provider


def tracer() -> trace.Tracer:
    """The tracer that makes spanmill's spans, with the program's provider and SIGTERM taken care of."""
    pipeline = _pipeline()
    join(trace.get_tracer_provider())
    if not pipeline.sigterm_is_hooked and threading.current_thread() is threading.main_thread():
        pipeline.sigterm_is_hooked = True
        _hook_sigterm()
    return pipeline.tracer


def join(program: object) -> None:
    """Give a provider of the program our processor, once; one that takes no processors is left alone."""
    add: Callable[[SpanProcessor], None] | None = getattr(program, "add_span_processor", None)
    if add is None:
        return
    pipeline = _pipeline()
    if any(program is known for known in pipeline.served):
        return
    pipeline.served.append(program)
    with guarded("joining the program's provider"):
        add(RolloutProcessor(program))
        if type(getattr(program, "id_generator", None)) is RandomIdGenerator:
            cast("TracerProvider", program).id_generator = RandomIds()


def _sends_to(provider: object, host: str) -> bool:
    """Whether the provider exports to `host` already: then a copy from us would be every span twice."""
    processors: tuple[Any, ...] = getattr(getattr(provider, "_active_span_processor", None), "_span_processors", ())
    endpoints = (getattr(getattr(p, "span_exporter", None), "_endpoint", None) for p in processors)
    return any(isinstance(e, str) and (e.partition("://")[2] or e).partition("/")[0] == host for e in endpoints)


def ambient() -> Context:
    """The current context, or, where it knows no span and no rollout, the one that the parent process handed down.

    A parent hands it down as `TRACEPARENT` and `BAGGAGE` in the environment.
    """
    current = get_current()
    if (
        trace.get_current_span(current).get_span_context().is_valid
        or baggage.get_baggage(ROLLOUT_ID, current) is not None
    ):
        return current
    carrier = {name: value for name in HANDED_DOWN if (value := os.environ.get(name.upper()))}
    return PROPAGATOR.extract(carrier, current) if carrier else current


def flush(timeout_s: float = 30.0) -> bool:
    """Send every finished span now and wait for the collector at most `timeout_s`; True if it took them all."""
    return _made is None or _all_sent(_made.outboxes(), lambda outbox, left_s: outbox.flush(left_s), timeout_s)


def close(timeout_s: float | None = None) -> bool:
    """End the rollouts that are still open, flush, and emit nothing more; True if the collector took everything.

    Called by itself when the process ends. The default timeout is `SPANMILL_EXIT_TIMEOUT`.
    """
    if _made is None:
        return True
    for call in on_process_end:
        call()
    return _close(_made.outboxes(), exit_timeout_s() if timeout_s is None else timeout_s)


def _close(outboxes: list[Outbox[Any]], timeout_s: float) -> bool:
    return _all_sent(outboxes, lambda outbox, left_s: outbox.close(left_s), timeout_s)


def _all_sent(outboxes: list[Outbox[Any]], send: Callable[[Outbox[Any], float], bool], timeout_s: float) -> bool:
    """Whether `send` sent everything in all of them, which together may take so long."""
    until = time.monotonic() + timeout_s
    return all([send(outbox, max(0.0, until - time.monotonic())) for outbox in outboxes])


def destination() -> str:
    """Host and port that spans go to; "" for an exporter of the program's own."""
    return _pipeline().host


def counters() -> Counters:
    """What became of this process's spans so far."""
    boxes = _made.outboxes() if _made is not None else []
    return Counters(
        sum(box.emitted for box in boxes),
        sum(box.dropped for box in boxes),
        sum(box.failed for box in boxes),
        ignored(),
    )


def _hook_child_end() -> None:
    """In a child of `multiprocessing`, which ends without `atexit`: flush where that module ends."""
    pipeline = _pipeline()
    if pipeline.child_end_is_hooked:
        return
    pipeline.child_end_is_hooked = True
    util = sys.modules.get("multiprocessing.util")
    process = sys.modules.get("multiprocessing.process")
    if util is not None and process is not None and process.parent_process() is not None:
        util.Finalize(None, close, exitpriority=0)


def _make_ready() -> None:
    for outbox in _made.outboxes() if _made is not None else ():
        outbox.make_ready(exit_timeout_s())


def _before_fork() -> None:
    for outbox in _made.outboxes() if _made is not None else ():
        outbox.before_fork(exit_timeout_s())


def _after_fork_in_parent() -> None:
    for outbox in _made.outboxes() if _made is not None else ():
        outbox.after_fork_in_parent()


def _after_fork_in_child() -> None:
    global _making
    _making = threading.Lock()
    forget_reports()
    if _made is not None:
        _made.child_end_is_hooked = False
        for outbox in _made.outboxes():
            outbox.after_fork_in_child()


def _hook_sigterm() -> None:
    """Flush when the process is told to end, then do what it would have done."""
    before = signal.getsignal(signal.SIGTERM)
    if before is not signal.SIG_DFL and not callable(before):
        return  # ignored, or handled by C code that we could not hand on to

    def handle(number: int, frame: FrameType | None) -> None:
        if callable(before):
            flush(exit_timeout_s())
            before(number, frame)
            return
        close()
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    signal.signal(signal.SIGTERM, handle)
