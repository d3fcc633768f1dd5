"""One request to a model server and its answer on their way through: what is asked for more, and the span of it all.

Used where requests pass by: in client libraries (`injector`) and in the gateway.
"""

import json
from collections.abc import Mapping
from typing import Any, Final, cast

from opentelemetry.context import Context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from spanmill.instrument import asking, identity, provider, sglang
from spanmill.instrument.asking import CHAT, COMPLETIONS, LOGPROBS, missing, named_in
from spanmill.instrument.calls import Attributes, Call
from spanmill.instrument.chunks import Chunks
from spanmill.instrument.parsing import parse
from spanmill.instrument.replies import Reply, request_of
from spanmill.instrument.reports import guarded
from spanmill.instrument.sglang import GENERATE, STREAMED

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
        self._chunks = _chunks(route, body)
        self._streamed = False
        self._ended = True
        operation = "text_completion" if route in (COMPLETIONS, GENERATE) else "chat"
        self._around = provider.ambient() if around is None else around
        self._call = Call(request_of(route, body), operation, capture=capture, others=others)
        self._inside = self._call.begin(self._around)
        self._ended = False

    def ask(self, refused: set[str]) -> None:
        """Ask for ids and logprobs, but for the fields that the server is known to refuse."""
        added = sglang.missing(self.body) if self.route == GENERATE else missing(self.route, self.body)
        if STREAMED in refused:
            added = sglang.instead(self.route, self.body, added)
        self.added = {name: value for name, value in added.items() if name not in refused}

    def refuse(self, message: str, refused: set[str]) -> bool:
        """Note which of the added fields the server refuses in `message`; whether the request is to go out again.

        Then it goes with what is in `added` now: nothing, or what the server takes in their place.
        """
        if sglang.REFUSAL in message and STREAMED not in refused:
            refused.add(STREAMED)
            self.ask(refused)
            return True
        named = named_in(message, self.added)
        refused |= named
        if named:
            self.added = {}
        return bool(named)

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
            answer = parse(content, with_logprobs=self.route != CHAT or LOGPROBS not in self.added)
            if self.route == GENERATE:
                changed = self._record_samples(answer)
            else:
                changed = isinstance(answer, dict) and self._record(cast("Object", answer))
            if changed:
                return json.dumps(answer, separators=(",", ":")).encode()
        return content

    def event(self, data: bytes) -> bytes | None:
        """Record the data of one event of a streamed answer; returns what the client is to get, None if nothing."""
        self._streamed = True
        with guarded("answer"):
            found = parse(data)
            if isinstance(found, dict):
                chunk = cast("Object", found)
                self._chunks.add(chunk)
                of_sglang = self.route == CHAT and sglang.is_answer(chunk)
                if self._strip(chunk):
                    if (of_sglang and sglang.is_empty_chunk(chunk)) or asking.is_empty_chunk(chunk, self.route):
                        return None
                    return json.dumps(chunk, separators=(",", ":")).encode()
        return data

    def _record(self, answer: Object) -> bool:
        """Record a whole answer; whether something of it was added for us, and is out of it now."""
        found = answer if self.route in (CHAT, COMPLETIONS) else Reply(self.route).of(answer)
        if found.get("choices"):
            self._call.from_response(found)
        return self._strip(answer)

    def _record_samples(self, answer: Any) -> bool:
        samples = sglang.items_of(answer)
        if samples:
            self._call.from_response(sglang.as_completion(samples, self.body))
        return sglang.strip_items(samples, self.added)

    def _strip(self, answer: Object) -> bool:
        if self.route == GENERATE:
            return sglang.strip_items(sglang.items_of(answer), self.added)
        return (sglang if sglang.is_answer(answer) else asking).strip(answer, self.added)

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


def _chunks(route: str, body: Mapping[str, Any]) -> Chunks | Reply | sglang.Generated:
    """What puts a streamed answer together."""
    if route == GENERATE:
        return sglang.Generated(body)
    return Chunks() if route in (CHAT, COMPLETIONS) else Reply(route)
