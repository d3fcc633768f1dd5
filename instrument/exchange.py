"""One request to a model server and its answer on their way through: what is asked for more, and the span of it all.

Used where requests pass by: in client libraries (`injector`) and in the gateway.
"""

import json
from collections.abc import Mapping
from typing import Any, Final, cast

from opentelemetry.context import Context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from spanmill.instrument import identity, provider
from spanmill.instrument.asking import CHAT, COMPLETIONS, is_empty_chunk, missing, strip
from spanmill.instrument.calls import Attributes, Call
from spanmill.instrument.chunks import Chunks
from spanmill.instrument.replies import Reply, request_of
from spanmill.instrument.reports import guarded

Object = dict[str, Any]

_TRACE: Final = TraceContextTextMapPropagator()


class Exchange:
    """A request with a body of one of the generating routes, as its client wrote it.

    `body` is what the client asks for, `added` are the fields to send beside the client's own: none until `ask` decides
    that the server takes them.
    """

    def __init__(
        self,
        route: str,
        body: Mapping[str, Any],
        *,
        capture: str = "client",
        around: Context | None = None,
        others: Attributes | None = None,
    ) -> None:
        self.route = route
        self.added: Object = {}
        self.body = body
        self._chunks: Chunks | Reply = Chunks() if route in (CHAT, COMPLETIONS) else Reply(route)
        self._streamed = False
        self._ended = True
        operation = "text_completion" if route == COMPLETIONS else "chat"
        self._around = provider.ambient() if around is None else around
        self._call = Call(request_of(route, body), operation, capture=capture, others=others)
        self._inside = self._call.begin(self._around)
        self._ended = False

    def ask(self, refused: set[str]) -> None:
        """Ask for ids and logprobs, but for the fields that the server is known to refuse."""
        self.added = {name: value for name, value in missing(self.route, self.body).items() if name not in refused}

    def headers(self) -> dict[str, str]:
        """What tells the server's own instrumentation whose request this is and which span it stands under."""
        carrier: dict[str, str] = {}
        if self._inside is not None:
            _TRACE.inject(carrier, self._inside)
        own = identity.from_baggage(self._around) or identity.from_environment()
        return carrier | (identity.headers(own) if own is not None else {})

    def whole(self, content: bytes) -> bytes:
        """Record an answer that came whole; returns it as the client would have got it."""
        with guarded("answer"):
            answer = _object(content)
            if answer is not None:
                self._record(answer)
                if strip(answer, self.added):
                    return json.dumps(answer, separators=(",", ":")).encode()
        return content

    def event(self, data: bytes) -> bytes | None:
        """Record the data of one event of a streamed answer; returns what the client is to get, None if nothing."""
        self._streamed = True
        with guarded("answer"):
            chunk = _object(data)
            if chunk is not None:
                self._chunks.add(chunk)
                if strip(chunk, self.added):
                    if is_empty_chunk(chunk, self.route):
                        return None
                    return json.dumps(chunk, separators=(",", ":")).encode()
        return data

    def _record(self, answer: Object) -> None:
        found = answer if self.route in (CHAT, COMPLETIONS) else Reply(self.route).of(answer)
        if found.get("choices"):
            self._call.from_response(found)

    def end(self, error: BaseException | None = None) -> None:
        """The answer is there, or will never be: end the span. Only the first call counts."""
        if self._ended:
            return
        self._ended = True
        if self._streamed:
            with guarded("answer"):
                answer = self._chunks.answer()
                if answer.get("choices"):
                    self._call.from_response(answer)
        self._call.end(error)

    def __del__(self) -> None:
        self.end()  # nobody read the answer to its end


def _object(content: bytes) -> Object | None:
    """A JSON object; None for anything else, which is none of our business."""
    try:
        found = json.loads(content)
    except ValueError:
        return None
    return cast("Object", found) if isinstance(found, dict) else None
