"""gRPC calls without the threads of grpc's own Python server: one thread takes them as they come.

That server hands every call from thread to thread, which took half of the CPU time of receiving (docs/design has the
figures). Beneath it is grpc's completion queue, which tells one thread what has happened in any call. It has no public
name, and nothing else of grpc can do this; this file is the only one that knows it.
"""

import logging
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any, Final

from google.rpc.code_pb2 import OK, UNAVAILABLE
from grpc._cython import cygrpc  # pyright: ignore[reportMissingTypeStubs]

_core: Any = cygrpc
"""grpcio has no types."""
_TICK_S: Final = 0.5
_REQUEST: Final = "request"
_ENDED: Final = "ended"
_SHUTDOWN: Final = "shutdown"
_ACCEPTED_AT_ONCE: Final = 64
"""New calls that are taken without asking again for each."""
_EVENTS_AT_ONCE: Final = 256

_log = logging.getLogger(__name__)


class Call:
    """A call with one message, or none, and one answer."""

    def __init__(self, event: Any) -> None:
        self._call = event.call
        self.method: str = event.call_details.method.decode("latin-1")
        self.metadata: Sequence[tuple[str, str | bytes]] = event.invocation_metadata

    def receive(self, then: "Callable[[Call, bytes | None], None]") -> None:
        """Have `then` called with the message when all of it is there; None if none comes."""
        self._call.start_server_batch((_core.ReceiveMessageOperation(0),), (then, self))

    def answer(self, body: bytes) -> None:
        """End with success; from any thread."""
        self._end((_core.SendMessageOperation(body, 0),), OK, "", ())

    def refuse(self, code: int, message: str, trailers: Sequence[tuple[str, str | bytes]] = ()) -> None:
        """End with an error; from any thread."""
        self._end((), code, message, tuple(trailers))

    def cancel(self) -> None:
        """Give up a message that does not come."""
        self._call.cancel()

    def _end(self, send: tuple[Any, ...], code: int, message: str, trailers: tuple[Any, ...]) -> None:
        status = _core.SendStatusFromServerOperation(trailers, code, message.encode(), 0)
        first, last = _core.SendInitialMetadataOperation(None, 0), _core.ReceiveCloseOnServerOperation(0)
        self._call.start_server_batch((first, *send, status, last), (_ENDED, self))


class CallServer:
    """Calls `begin` with each new call, `idle` when nothing has happened since, and `tick` now and then.

    All three and what calls wait for run in one thread.
    """

    def __init__(
        self,
        options: Sequence[tuple[str, object]],
        begin: Callable[[Call], None],
        idle: Callable[[], None],
        tick: Callable[[], None],
    ) -> None:
        self._begin, self._idle, self._tick = begin, idle, tick
        self._queue = _core.CompletionQueue()
        self._server = _core.Server(tuple(options), False)
        self._server.register_completion_queue(self._queue)
        self._open = 0
        """Calls that have not ended; this and the next two are the one thread's alone."""
        self._asked = 0
        """New calls that may still come."""
        self._shut = False
        """Nor can any more be asked for."""
        self._stopping = False
        self._stop_lock = threading.Lock()
        """A server that is told to stop must not be asked for calls."""
        self._stopped = threading.Event()

    def listen(self, address: str, credentials: Any = None) -> int:
        """The port, of `grpc.ServerCredentials` or plain; 0 if the address cannot be had."""
        try:
            if credentials is None:
                return self._server.add_http2_port(address.encode())
            return self._server.add_http2_port(address.encode(), credentials._credentials)
        except RuntimeError:
            return 0

    def start(self) -> None:
        """Take calls."""
        self._server.start()
        threading.Thread(target=self._run, name="spanmill-grpc", daemon=True).start()

    def stop(self, grace_s: float) -> threading.Event:
        """Take no further call, and cancel those that have not ended after a while; set when all have."""
        with self._stop_lock:
            self._stopping = True
            self._server.shutdown(self._queue, (_SHUTDOWN, None))

        def cancel() -> None:
            if not self._stopped.wait(grace_s):
                self._server.cancel_all_calls()

        threading.Thread(target=cancel, name="spanmill-grpc-stop", daemon=True).start()
        return self._stopped

    def _ask(self) -> None:
        with self._stop_lock:
            if not self._stopping:
                self._server.request_call(self._queue, self._queue, (_REQUEST, None))
                self._asked += 1

    def _run(self) -> None:
        for _ in range(_ACCEPTED_AT_ONCE):
            self._ask()
        ticked = time.monotonic()
        while self._asked or self._open or not self._shut:
            self._happened(self._queue.poll(time.time() + _TICK_S))
            # What else has happened meanwhile; then there is time to write it down.
            for _ in range(_EVENTS_AT_ONCE):
                if not self._happened(self._queue.poll(0)):
                    break
            # This thread is the only one: whatever happens, it goes on.
            try:
                self._idle()
                if time.monotonic() - ticked >= _TICK_S:
                    ticked = time.monotonic()
                    self._tick()
            except Exception as error:
                _report(error)
        self._server.destroy()
        self._stopped.set()

    def _happened(self, event: Any) -> bool:
        """See to an event; False if it is that nothing has happened."""
        if event.completion_type == _core.CompletionType.queue_timeout:
            return False
        what, call = event.tag
        if what is _REQUEST:
            self._asked -= 1
            self._ask()
            if event.success:
                self._open += 1
                call = Call(event)
                self._guarded(self._begin, call)
        elif what is _ENDED:
            self._open -= 1
        elif what is _SHUTDOWN:
            self._shut = True
        else:
            self._guarded(what, call, event.batch_operations[0].message())
        return True

    def _guarded(self, function: Callable[..., None], call: Call, *message: bytes | None) -> None:
        try:
            function(call, *message)
        except Exception as error:
            _report(error)
            call.refuse(UNAVAILABLE, f"unforeseen {type(error).__name__}: send it again later")


def _report(error: Exception) -> None:
    # Without its message, which may hold a piece of a span.
    where = "".join(traceback.format_tb(error.__traceback__))
    _log.error("unforeseen %s while a gRPC call was handled\n%s", type(error).__name__, where)
