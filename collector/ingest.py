"""What the gRPC and the HTTP receiver share: raw bytes in, one structural check, the journal, an answer.

Every answer has a code of google.rpc. UNAVAILABLE means "send it again later" to every sender; INVALID_ARGUMENT and
RESOURCE_EXHAUSTED (without RetryInfo) mean "never". So whatever is not known to be the sender's fault is UNAVAILABLE.
"""

import logging
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from types import TracebackType
from typing import Final, NamedTuple, Self

from google.protobuf.duration_pb2 import Duration
from google.rpc.code_pb2 import INVALID_ARGUMENT, OK, RESOURCE_EXHAUSTED, UNAUTHENTICATED, UNAVAILABLE
from google.rpc.error_details_pb2 import RetryInfo
from google.rpc.status_pb2 import Status
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse

from spanmill.collector.compression import inflate
from spanmill.collector.decode import check
from spanmill.collector.decoded import Checked
from spanmill.collector.figures import COUNTS, Figures
from spanmill.collector.forward import Forwarder, Request
from spanmill.collector.journal import JournalWriter, Kind, Position, Record
from spanmill.errors import DecodeError, JournalError

RETRY_AFTER_S: Final = 1
"""What a sender is asked to wait; the Python exporter gives up after 10 s."""
RETRY_INFO: Final = RetryInfo(retry_delay=Duration(seconds=RETRY_AFTER_S))

_MESSAGE_CHARACTERS: Final = 500
"""A gRPC message travels in a header."""

_log = logging.getLogger(__name__)


class Answer(NamedTuple):
    """What a sender is told."""

    code: int = OK
    """A google.rpc.Code."""
    message: str = ""
    """Of an error, or of a partial success."""
    rejected: int = 0
    """Spans of a request that succeeded, but not for these."""

    @property
    def retryable(self) -> bool:
        """Whether the sender is to try again."""
        return self.code == UNAVAILABLE

    def success(self) -> ExportTraceServiceResponse:
        """The body of a success. An ExportLogsServiceResponse differs only where something was rejected, and no log
        record ever is.
        """
        response = ExportTraceServiceResponse()
        if self.rejected:
            response.partial_success.rejected_spans = self.rejected
            response.partial_success.error_message = self.message
        return response

    def status(self) -> Status:
        """The body of an error."""
        status = Status(code=self.code, message=self.message)
        if self.retryable:
            status.details.add().Pack(RETRY_INFO)
        return status


class CheckedRequest(NamedTuple):
    """A request that is to be stored."""

    kind: Kind
    body: bytes
    checked: Checked
    then: "Callable[[Answer], object]"
    """Is told the answer, in the journal's thread."""


class Lease:
    """A request's share of the byte budget, given back at the end of its `with` block."""

    def __init__(self, ingest: "Ingest") -> None:
        self._ingest = ingest
        self._bytes = 0

    def grow(self, size: int) -> bool:
        """Takes `size` more bytes; False if the budget has them not. A request that is alone always gets them."""
        with self._ingest.lock:
            others = self._ingest.inflight - self._bytes
            if others and self._ingest.inflight + size > self._ingest.max_inflight_bytes:
                return False
            self._ingest.inflight += size
            self._ingest.figures.put("inflight_bytes", self._ingest.inflight)
        self._bytes += size
        return True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()

    def end(self) -> None:
        """Gives it back; once."""
        with self._ingest.lock:
            self._ingest.inflight -= self._bytes
            self._ingest.figures.put("inflight_bytes", self._ingest.inflight)


class Ingest:
    """The journal's door: limits, counters, and the way from bytes to an answer. Thread-safe."""

    def __init__(
        self,
        journal: JournalWriter,
        max_message_bytes: int,
        max_inflight_bytes: int,
        forwarder: Forwarder | None = None,
        figures: Figures | None = None,
    ) -> None:
        self.journal = journal
        self.figures = figures or Figures()
        journal.on_sync = self.figures.synced
        self.forwarder = forwarder
        self.max_message_bytes = max_message_bytes
        self.max_inflight_bytes = max_inflight_bytes
        self.lock = threading.Lock()
        self.inflight = 0
        """Bytes received and neither on disk nor refused."""
        self.refusing: str | None = None
        """Why nothing is taken at the moment, though it will be again; None if all is well."""
        self.room = 1 << 62
        """Bytes that may be written until the disk is looked at again."""
        self.unready: str | None = None
        """Why what is taken is not made into rows at the moment; None if all is well."""

    def lease(self) -> Lease:
        """A share of the byte budget for one request, empty at first."""
        return Lease(self)

    def counts(self) -> dict[str, int]:
        """What came so far to this process, by `figures.COUNTS`; what never came is left out."""
        return {name: number for name, number in self.figures.own(COUNTS).items() if number}

    def count(self, name: str, number: int = 1) -> None:
        """Adds to a counter."""
        self.figures.add(name, number)

    def unpacked(self, encoding: str | None, body: bytes, lease: Lease) -> bytes | Answer:
        """The body without its compression, or why not. Raises DecodeError."""
        if encoding is None:
            return body
        chunks: list[bytes] = []
        size = 0
        for chunk in inflate(encoding, body):
            size += len(chunk)
            if size > self.max_message_bytes:
                return self.too_large()
            if not lease.grow(len(chunk)):
                return self.overloaded()
            chunks.append(chunk)
        return b"".join(chunks)

    def begin(self, kind: Kind, body: bytes) -> "tuple[Checked, Future[Position] | None]":
        """Checks a request and hands it to the journal; None for the future if there is nothing to keep.

        A request with rejected spans is journaled as it is: they end in quarantine. Raises DecodeError.
        """
        checked = self.check(kind, body)
        return checked, self.journal.append_async(kind, body, time.time_ns()) if checked.spans else None

    def store(self, kind: Kind, body: bytes) -> Answer:
        """Checks a request, and returns the answer once it is on disk. Raises DecodeError or JournalError."""
        checked = self.check(kind, body)
        if checked.spans:
            self.journal.append(kind, body, time.time_ns())
        return self.accepted(kind, checked, body)

    def store_all(self, requests: "Sequence[CheckedRequest]") -> None:
        """Store requests that have been checked and hold spans; each is told its answer when it is on disk."""
        now_ns = time.time_ns()
        self.journal.submit([Record(one.kind, now_ns, one.body, partial(self._stored, one)) for one in requests])

    def _stored(self, request: "CheckedRequest", outcome: Position | JournalError) -> None:
        if isinstance(outcome, JournalError):
            request.then(self.failed(outcome))
        else:
            request.then(self.accepted(request.kind, request.checked, request.body))

    def check(self, kind: Kind, body: bytes) -> Checked:
        """What a request holds, if it is to be stored. Raises DecodeError."""
        checked = check(kind, body)
        if checked.spans:
            with self.lock:
                self.room -= len(body)
        return checked

    def accepted(self, kind: Kind, checked: Checked, body: bytes) -> Answer:
        """The answer to a request that is on disk, from where it also goes to where all are passed on."""
        items = "log_records" if kind in (Kind.LOGS_PROTO, Kind.LOGS_JSON) else "spans"
        self.count("requests")
        self.count(items, checked.spans)
        self.count("accepted_bytes", len(body))
        self.pass_on("traces" if items == "spans" else "logs", body, is_json=kind in (Kind.TRACES_JSON, Kind.LOGS_JSON))
        if checked.rejected == 0:
            return Answer()
        self.count("rejected_spans", checked.rejected)
        message = f"{checked.rejected} spans have no valid trace id and span id; they are quarantined"
        return Answer(message=message, rejected=checked.rejected)

    def ignored(self, body: bytes, *, is_json: bool) -> None:
        """Counts a request with metrics: nobody here needs them."""
        self.count("ignored_metrics")
        self.pass_on("metrics", body, is_json=is_json)

    def pass_on(self, signal: str, body: bytes, *, is_json: bool) -> None:
        """Gives a request to the forwarder, if there is one."""
        if self.forwarder is not None:
            self.forwarder.offer(Request(signal, is_json, body))

    def too_large(self) -> Answer:
        """The answer to a request over the limit."""
        self.count("too_large")
        size = self.max_message_bytes >> 20
        return Answer(RESOURCE_EXHAUSTED, f"the request has more than {size} MiB: raise --max-message-mib")

    def closed(self) -> Answer | None:
        """The answer to any request while nothing can be taken; None if one can."""
        if self.refusing is None and self.room > 0:
            return None
        self.count("refused")
        return Answer(UNAVAILABLE, f"{self.refusing or 'the disk fills up'}: send it again later")

    def unauthenticated(self) -> Answer:
        """The answer to a request without a token."""
        self.count("unauthenticated")
        return Answer(UNAUTHENTICATED, "a bearer token is needed: Authorization: Bearer TOKEN")

    def overloaded(self) -> Answer:
        """The answer to a request that the byte budget has no room for."""
        self.count("overloaded")
        return Answer(UNAVAILABLE, "too much is waiting to be written: send it again later")

    def stalled(self, seconds: float) -> Answer:
        """The answer to a request whose body did not come within `seconds`."""
        self.count("stalled")
        return Answer(UNAVAILABLE, f"the request was not sent within {seconds:g} s: send it again")

    def failed(self, error: Exception) -> Answer:
        """The answer to a request that `error` ended."""
        match error:
            case DecodeError():
                self.count("malformed")
                return Answer(INVALID_ARGUMENT, str(error)[:_MESSAGE_CHARACTERS])
            case JournalError():
                self.count("unwritten")
                return Answer(UNAVAILABLE, str(error)[:_MESSAGE_CHARACTERS])
            case _:
                self.count("unforeseen")
                # Without its message, which may hold a piece of a span.
                where = "".join(traceback.format_tb(error.__traceback__))
                _log.error("unforeseen %s while a request was stored\n%s", type(error).__name__, where)
                return Answer(UNAVAILABLE, f"unforeseen {type(error).__name__}: send it again later")
