"""Answers in the hands of an HTTP client, httpx or httpx2: read as the program reads them, without what was added."""

from collections.abc import AsyncGenerator, AsyncIterator, Generator, Iterator
from functools import cache
from typing import Any, Final, cast
from weakref import WeakSet

from spanmill.instrument import provider
from spanmill.instrument.asking import Object
from spanmill.instrument.exchange import Exchange
from spanmill.instrument.sse import Events

EVENT_STREAM: Final = "text/event-stream"

_streaming: WeakSet[Exchange] = WeakSet()


def read_along(response: Any, exchange: Exchange) -> None:
    """Record the answer in a response of httpx or httpx2, and put in its place what the program asked for.

    One that is still open is read along as the program reads it, until it ends, is closed or is thrown away.
    """
    if hasattr(response, "_content"):
        _replace(response, exchange.whole(response.content))
    else:
        _watch(response, exchange)


def is_open(exchange: Exchange) -> bool:
    """Whether the answer is still being read: then it ends the exchange itself."""
    return exchange in _streaming


def _end_streams() -> None:
    """The process ends with streams that nobody read to their end."""
    for left in list(_streaming):
        left.end()


provider.on_process_end.append(_end_streams)


def _replace(response: Any, content: bytes) -> None:
    if content is not response.content:
        response._content = content
        cast("Object", vars(response)).pop("_text", None)
        if "content-length" in response.headers and "content-encoding" not in response.headers:
            response.headers["content-length"] = str(len(content))


def _watch(response: Any, exchange: Exchange) -> None:
    is_stream = response.headers.get("content-type", "").startswith(EVENT_STREAM)
    response.spanmill_reading = _Reading(exchange, is_stream)
    response.__class__ = _watched(cast("type[Any]", type(response)))
    _streaming.add(exchange)


@cache
def _watched(kind: type[Any]) -> type[Any]:
    """The class of a response, whose every way to its bytes or to its end leads past its `spanmill_reading`."""

    def iter_bytes(self: Any, chunk_size: int | None = None) -> Iterator[bytes]:
        return _read(self.spanmill_reading, kind.iter_bytes(self, chunk_size))

    def aiter_bytes(self: Any, chunk_size: int | None = None) -> AsyncIterator[bytes]:
        return _read_async(self.spanmill_reading, kind.aiter_bytes(self, chunk_size))

    def close(self: Any) -> None:
        kind.close(self)
        self.spanmill_reading.closed()

    async def aclose(self: Any) -> None:
        await kind.aclose(self)
        self.spanmill_reading.closed()

    ours = {"iter_bytes": iter_bytes, "aiter_bytes": aiter_bytes, "close": close, "aclose": aclose}
    return type(kind.__name__, (kind,), {**ours, "__module__": kind.__module__, "__qualname__": kind.__qualname__})


class _Reading:
    """The reading of one open response."""

    def __init__(self, exchange: Exchange, is_stream: bool) -> None:
        self._exchange = exchange
        self._events = Events(exchange.event) if is_stream else None
        self._whole = bytearray()
        self.is_inside = False

    def feed(self, data: bytes) -> bytes:
        """The next bytes of the response in, those for the program out."""
        if self._events is not None:
            return self._events.feed(data)
        self._whole += data
        return b""

    def rest(self) -> bytes:
        """The response has come to its end."""
        return self._events.close() if self._events is not None else self._exchange.whole(bytes(self._whole))

    def closed(self) -> None:
        """The response was closed: by the program, or by itself after its last byte, which is still to be read."""
        if not self.is_inside:
            self.end()

    def end(self, error: BaseException | None = None) -> None:
        """Nothing more will be read."""
        _streaming.discard(self._exchange)
        self._exchange.end(error)


def _failure(error: BaseException) -> BaseException | None:
    """What ended the reading, unless it was the program that had read enough."""
    return None if isinstance(error, GeneratorExit) else error


def _read(reading: _Reading, source: Iterator[bytes]) -> Generator[bytes]:
    try:
        while True:
            reading.is_inside = True
            data = next(source, None)
            reading.is_inside = False
            if data is None:
                break
            if passed := reading.feed(data):
                yield passed
        if passed := reading.rest():
            yield passed
    except BaseException as error:
        reading.end(_failure(error))
        raise
    reading.end()


async def _read_async(reading: _Reading, source: AsyncIterator[bytes]) -> AsyncGenerator[bytes]:
    try:
        while True:
            reading.is_inside = True
            data = await anext(source, None)
            reading.is_inside = False
            if data is None:
                break
            if passed := reading.feed(data):
                yield passed
        if passed := reading.rest():
            yield passed
    except BaseException as error:
        reading.end(_failure(error))
        raise
    reading.end()
