"""One HTTP connection: bounded headers and paths, and no place for senders that never say anything."""

import asyncio
from http import HTTPStatus
from typing import Any, Final

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from spanmill.collector.ingest import RETRY_AFTER_S

MAX_HEAD_BYTES: Final = 64 << 10
"""Of a request line and all headers."""
MAX_PATH_BYTES: Final = 8 << 10
HEAD_TIMEOUT_S: Final = 30.0
"""A sender that has opened a connection or begun a request has said by then what it wants."""
MOST_CONNECTIONS: Final = 4096
"""Further ones are answered 503, which senders take as a reason to come again."""
DRAIN_BYTES: Final = 256 << 20
DRAIN_S: Final = 10.0
"""What a sender still sends of a request that was answered already is read and dropped up to these two, so that the
answer reaches it: to hang up on data that was not read resets the connection.
"""


class BoundedConnection(HttpToolsProtocol):
    """uvicorn's protocol, which by itself takes headers of any size and waits for them for ever."""

    _head_bytes = 0
    """Of the request whose head is on its way."""
    _in_head = True
    _refused = False
    _dropped_bytes = 0
    """Of what came behind its answer."""
    _timer: asyncio.TimerHandle | None = None
    """Of the head, or of what is dropped."""

    def connection_made(self, transport: Any) -> None:
        """Also for a connection over which nothing ever comes."""
        super().connection_made(transport)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Nothing more will come."""
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Bytes of heads and bodies, in any pieces."""
        if self._refused:
            self._drop(len(data))
            return
        if self._in_head:
            self._head_bytes += len(data)
        super().data_received(data)
        if self._in_head and self._head_bytes > MAX_HEAD_BYTES:
            self._refuse(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)

    def on_message_begin(self) -> None:
        """A head begins."""
        super().on_message_begin()
        self._in_head = True
        self._await_head()

    def on_headers_complete(self) -> None:
        """A head is whole."""
        self._stop_timer()
        self._in_head = False
        self._head_bytes = 0
        if len(self.connections) > MOST_CONNECTIONS:
            self._refuse(HTTPStatus.SERVICE_UNAVAILABLE, f"retry-after: {RETRY_AFTER_S}\r\n")
        elif len(self.url) > MAX_PATH_BYTES:
            self._refuse(HTTPStatus.REQUEST_URI_TOO_LONG)
        elif len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers) > MAX_HEAD_BYTES:
            self._refuse(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)
        else:
            super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """A piece of a body."""
        if self._refused:
            return
        if self.cycle.response_complete:
            self._drop(len(body))
        else:
            super().on_body(body)

    def on_message_complete(self) -> None:
        """The end of a body."""
        self._stop_timer()
        self._dropped_bytes = 0
        if not self._refused:
            super().on_message_complete()

    def _await_head(self) -> None:
        self._stop_timer()
        self._timer = self.loop.call_later(HEAD_TIMEOUT_S, self.transport.close)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _drop(self, size: int) -> None:
        if self._timer is None:
            self._timer = self.loop.call_later(DRAIN_S, self.transport.close)
        self._dropped_bytes += size
        if self._dropped_bytes > DRAIN_BYTES:
            self.transport.close()

    def _refuse(self, status: HTTPStatus, headers: str = "") -> None:
        """Answer what cannot be read on, drop what follows, and hang up."""
        self._refused = True
        if self.transport.is_closing():
            return
        line = f"HTTP/1.1 {status.value} {status.phrase}\r\nconnection: close\r\n{headers}content-length: 0\r\n\r\n"
        self.transport.write(line.encode())
        if self.transport.can_write_eof():
            self.transport.write_eof()  # the sender sees that nothing more comes, and hangs up
            self._drop(0)
        else:
            self.transport.close()
