"""The way out: a bounded queue of finished spans, or of log records, and a thread that exports them in batches by size.

`put` costs the program a few microseconds whatever the collector does. What does not fit is dropped and counted; a
batch that the exporter could not deliver is offered again a few times, then counted as failed.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from enum import Enum
from inspect import signature
from typing import Any, Final, Generic, Protocol, TypeVar

from opentelemetry.context import _SUPPRESS_INSTRUMENTATION_KEY, attach, set_value  # pyright: ignore[reportPrivateUsage]

from spanmill.instrument.reports import report

MAX_BATCH_BYTES: Final = 3_500_000
"""A receiver with gRPC's default limit takes 4 MiB; the rest is room for resources and scopes."""

MAX_BATCH_SPANS: Final = 512
SENDS: Final = 3
"""How often a batch is offered to the exporter, which itself retries what its protocol calls transient."""

RESEND_DELAY_S: Final = 1.0
CLOSE_S: Final = 0.5
FORK_S: Final = 1.0
"""How long a fork may wait for a request under way: a child that is forked within one may never get gRPC to work."""

UNDELIVERED: Final = "undelivered"
"""The kind under which the one warning about a collector that cannot be reached is given."""

T = TypeVar("T")
In = TypeVar("In", contravariant=True)


class Exporter(Protocol[In]):
    """An exporter of the SDK, for spans or for log records."""

    def export(self, batch: Sequence[In], /) -> Enum:
        """Send a batch; what comes back is called SUCCESS if all of it was delivered."""
        ...

    def shutdown(self) -> None:
        """Close it."""
        ...


_thread = threading.local()


def _quiet_while_sending(_: logging.LogRecord) -> bool:
    """A log filter: an exporter's own complaints about our batches are replaced by one warning of ours."""
    return not getattr(_thread, "sending", False)


class Outbox(Generic[T]):
    """Finished spans on their way to one exporter.

    The exporter is made by the sending thread when the first span goes out: its imports cost the program nothing.
    `size` tells how large a span is when encoded, `delay_s` how long it may wait for others; `max_bytes` bounds what is
    held. What is said of spans here goes for log records in an outbox of theirs.
    """

    def __init__(
        self, make_exporter: Callable[[], Exporter[T]], size: Callable[[T], int], *, delay_s: float, max_bytes: int
    ) -> None:
        self._make_exporter = make_exporter
        self._size = size
        self._delay_s = delay_s
        self._max_bytes = max_bytes
        self._abandoned: list[object] = []
        self._reset()

    def _reset(self) -> None:
        self._changed = threading.Condition(threading.RLock())  # re-entrant: a signal handler may flush inside `put`
        self._queue: deque[tuple[T, int, float]] = deque()
        self._bytes = 0
        self._accepted = 0
        self._done = 0
        self._send_up_to = 0
        self._closing = False
        self._thread: threading.Thread | None = None
        self._exporter: Exporter[T] | None = None
        self._ready = threading.Event()
        self._exporting = threading.Lock()
        self._forked_within = -1
        self._held = False
        self._error: Exception | None = None
        self.emitted = 0
        self.dropped = 0
        self.failed = 0

    def before_fork(self, timeout_s: float) -> None:
        """Before a fork: wait for an import or a request under way, which would leave the child with half of it."""
        self.make_ready(timeout_s)
        stuck = self._forked_within == self._done  # an earlier fork waited for this request already
        self._held = self._exporting.acquire(timeout=0 if stuck else FORK_S)
        if not self._held:
            self._forked_within = self._done

    def after_fork_in_parent(self) -> None:
        """Go on sending."""
        if self._held:
            self._held = False
            self._exporting.release()

    def after_fork_in_child(self) -> None:
        """In a forked child: the parent sends what was queued, the child starts empty, with a connection of its own."""
        self._abandoned.append(self._exporter)  # closing it here would act on the parent's sockets
        self._reset()

    def put(self, span: T, *, at_once: bool = False) -> None:
        """Queue a finished span, or drop and count it; `at_once` does not let it wait for others. Never blocks."""
        size = self._size(span)
        with self._changed:
            if taken := not self._closing and (self._bytes + size <= self._max_bytes or not self._bytes):
                self._queue.append((span, size, time.monotonic() + self._delay_s))
                self._bytes += size
                self._accepted += 1
                if at_once:
                    self._send_up_to = self._accepted
                self._start()
                if at_once or len(self._queue) in (1, MAX_BATCH_SPANS) or self._bytes >= MAX_BATCH_BYTES:
                    self._changed.notify_all()
            else:
                self.dropped += 1
        if not taken:
            report(
                "dropped", "the collector does not keep up, or the process is ending: spans are dropped", counted=False
            )

    def flush(self, timeout_s: float) -> bool:
        """Send everything queued so far and wait for it at most this long; True if all of it was delivered."""
        with self._changed:
            target, failed = self._accepted, self.failed
            self._send_up_to = target
            self._changed.notify_all()
            delivered = self._changed.wait_for(lambda: self._done >= target, timeout_s)
            return delivered and self.failed == failed

    def hurry(self) -> None:
        """Send everything queued so far, without waiting for it."""
        with self._changed:
            self._send_up_to = self._accepted
            self._changed.notify_all()

    def make_ready(self, timeout_s: float) -> None:
        """If spans are on their way, have an exporter for them.

        As Python shuts down, one can no longer be imported, and a process that forks within the import leaves its child
        with half a module.
        """
        if self._thread is not None and not self._ready.is_set():
            self.hurry()
            self._ready.wait(timeout_s)

    def close(self, timeout_s: float) -> bool:
        """Flush, then take nothing more and end the thread; what is still here is given up and counted as failed."""
        delivered = self.flush(timeout_s)
        with self._changed:
            self._closing = True
            self._send_up_to = self._accepted
            self._changed.notify_all()
        if not delivered:
            self._report_undelivered()
            if self._exporter is not None:
                _shut_down(self._exporter)
        if self._thread is not None:
            self._thread.join(CLOSE_S)
        with self._changed:
            self.failed += len(self._queue)
            self._queue.clear()
            self._done = self._accepted  # nobody need wait for them any more
        return delivered

    def _start(self) -> None:
        if self._thread is None or not self._thread.is_alive():
            thread = threading.Thread(target=self._work, name="spanmill-outbox", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:
                report("no thread", f"the sending thread cannot start: {error}; spans stay in the queue", counted=False)
            else:
                self._thread = thread

    def _work(self) -> None:
        _thread.sending = True
        attach(set_value(_SUPPRESS_INSTRUMENTATION_KEY, True))  # so that no instrumentation traces our own requests
        while batch := self._next_batch():
            delivered = self._send([span for span, _, _ in batch])
            with self._changed:
                self._bytes -= sum(size for _, size, _ in batch)
                self._done += len(batch)
                if delivered:
                    self.emitted += len(batch)
                else:
                    self.failed += len(batch)
                self._changed.notify_all()
        if self._exporter is not None:
            _shut_down(self._exporter)

    def _next_batch(self) -> list[tuple[T, int, float]]:
        """Wait until a batch is due and take it off the queue; empty when the outbox closes."""
        with self._changed:
            while not self._is_due():
                if self._closing and not self._queue:
                    return []
                self._changed.wait(self._queue[0][2] - time.monotonic() if self._queue else None)
            batch = [self._queue.popleft()]
            size = batch[0][1]
            while self._queue and len(batch) < MAX_BATCH_SPANS and size + self._queue[0][1] <= MAX_BATCH_BYTES:
                size += self._queue[0][1]
                batch.append(self._queue.popleft())
            return batch

    def _is_due(self) -> bool:
        return bool(self._queue) and (
            self._send_up_to > self._done
            or len(self._queue) >= MAX_BATCH_SPANS
            or self._bytes >= MAX_BATCH_BYTES
            or self._queue[0][2] <= time.monotonic()
        )

    def _send(self, spans: Sequence[T]) -> bool:
        for attempt in range(SENDS):
            if self._export(spans):
                return True
            with self._changed:
                if attempt + 1 == SENDS or self._changed.wait_for(lambda: self._closing, RESEND_DELAY_S):
                    break
        self._report_undelivered()
        return False

    def _export(self, spans: Sequence[T]) -> bool:
        try:
            if self._exporter is None:
                self._exporter = self._make_exporter()
                _silence(self._exporter)
            self._ready.set()
            with self._exporting:
                return self._exporter.export(spans).name == "SUCCESS"
        except Exception as error:
            self._ready.set()
            self._error = error
            return False

    def _report_undelivered(self) -> None:
        unreachable = self._error is None or isinstance(self._error, OSError)
        why = "is the collector reachable at OTEL_EXPORTER_OTLP_ENDPOINT?" if unreachable else repr(self._error)
        report(UNDELIVERED, f"spans cannot be delivered: {why}", counted=False)


def _silence(exporter: Exporter[Any]) -> None:
    for kind in type(exporter).__mro__:
        if kind.__module__.startswith("opentelemetry."):
            logging.getLogger(kind.__module__).addFilter(_quiet_while_sending)


def _shut_down(exporter: Exporter[Any]) -> None:
    """Shut an exporter down without waiting for a request in flight."""
    if "timeout_millis" in signature(exporter.shutdown).parameters:
        exporter.shutdown(timeout_millis=0)  # pyright: ignore[reportCallIssue]
    elif not hasattr(exporter, "_export_lock"):  # gRPC of SDKs that would wait for it thirty seconds
        exporter.shutdown()
