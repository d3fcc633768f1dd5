"""What an HTTP request to vLLM says beside its body: whose rollout it is, its trace, whether it is recorded at all.

Pure: from headers and raw path to values. What is malformed is reported and ignored, never guessed.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final
from urllib.parse import unquote_to_bytes

from opentelemetry import baggage, trace
from opentelemetry.context import Context
from opentelemetry.propagators.textmap import Getter
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from spanmill.instrument import identity
from spanmill.instrument.identity import Identity
from spanmill.instrument.provider import PROPAGATOR
from spanmill.instrument.reports import report
from spanmill.instrument.vllm import policy
from spanmill.semconv import ROLLOUT_ID

SKIP: Final = "x-spanmill-skip"
RETRY: Final = "x-stainless-retry-count"

OPERATIONS: Final = {
    "/v1/chat/completions": "chat",
    "/v1/chat/completions/batch": "chat",
    "/v1/responses": "chat",
    "/v1/messages": "chat",
    "/v1/completions": "text_completion",
    "/inference/v1/generate": "text_completion",
}
"""Routes whose generations are recorded, and what each does. No other route is."""

PREFIX: Final = re.compile(rb"/rollout/([^/]+)(?:/attempt/([^/]+))?(/.*)", re.DOTALL)
KEY: Final = re.compile(r"sk-rollout-([^.:\s]+)(?:\.([^:\s]*))?(?::(.*))?", re.DOTALL)


@dataclass(slots=True)
class Request:
    """A request as far as it says something about rollouts."""

    path: str
    """The route, without the rollout's prefix."""
    operation: str | None = None
    """What the route does; None if it is not recorded."""
    identity: Identity | None = None
    carrier: str | None = None
    parent: Context = field(default_factory=Context)
    """The client's span, and no baggage: what was read from it stands in `identity`."""
    retry: int | None = None
    policy_version: str | None = None
    body: list[bytes] | None = None
    """The request's body; None if it is not kept."""
    first: Context | None = None
    """The first span that was made of it, where there is no client's span to stand under."""

    @property
    def is_recorded(self) -> bool:
        """Whether its generations become spans."""
        return self.operation is not None


class _Headers(Getter[Mapping[str, str]]):
    def get(self, carrier: Mapping[str, str], key: str) -> list[str] | None:
        value = carrier.get(key)
        return None if value is None else [value]

    def keys(self, carrier: Mapping[str, str]) -> list[str]:
        return list(carrier)


_GETTER: Final = _Headers()
_TRACE: Final = TraceContextTextMapPropagator()


def read_request(path: str, headers: Mapping[str, str], in_path: Identity | None) -> Request:
    """A request from its route, its headers (names in lower case) and the identity that its path prefix held."""
    found, carrier = _identity(headers, in_path)
    return Request(
        path=path,
        operation=None if headers.get(SKIP) == "1" else OPERATIONS.get(path),
        identity=found,
        carrier=carrier,
        parent=_TRACE.extract(headers, Context(), _GETTER),
        retry=_count(headers.get(RETRY)),
        policy_version=headers.get(policy.HEADER),
    )


def _identity(headers: Mapping[str, str], in_path: Identity | None) -> tuple[Identity | None, str | None]:
    """The strongest carrier's identity: header, baggage, path, API key."""
    if (found := identity.read(lambda f: headers.get(f.header))) is not None:
        return found, "header"
    if ROLLOUT_ID in headers.get("baggage", ""):
        context = PROPAGATOR.extract(headers, Context(), _GETTER)
        if baggage.get_baggage(ROLLOUT_ID, context) and (found := identity.from_baggage(context)) is not None:
            return found, "baggage"
    if in_path is not None:
        return in_path, "path"
    for key in (_bearer(headers.get("authorization", "")), headers.get("x-api-key", "")):
        if (found := read_key(key)) is not None:
            return found, "api_key"
    return None, None


def _bearer(authorization: str) -> str:
    scheme, _, key = authorization.partition(" ")
    return key if scheme.lower() == "bearer" else ""


def read_key(key: str) -> Identity | None:
    """The identity in an API key `sk-rollout-<id>[.<attempt>][:<key>]`; the id percent-encoded, `.` included.

    read_key("sk-rollout-a%2Fb.2:secret") == Identity("a/b", 2)
    """
    if not key.startswith("sk-rollout-"):
        return None
    found = KEY.fullmatch(key)
    if found is None:
        report("api key", "an API key that starts with sk-rollout- names no rollout: expected sk-rollout-<id>[.<n>]")
        return None
    return _named("API key", found[1].encode(), None if found[2] is None else found[2].encode())


def inner_key(key: str) -> str | None:
    """The key for vLLM itself in such an API key, or None: `inner_key("sk-rollout-a:secret") == "secret"`."""
    found = KEY.fullmatch(key)
    return None if found is None else found[3]


def read_path(raw_path: bytes) -> tuple[Identity | None, bytes]:
    """(identity, path without it) of a raw path `/rollout/<id>[/attempt/<n>]/…`; any other comes back as it is."""
    found = PREFIX.fullmatch(raw_path)
    if found is None:
        return None, raw_path
    return _named("path", found[1], found[2]), found[3]


def _named(what: str, rollout: bytes, attempt: bytes | None) -> Identity | None:
    try:
        if attempt is not None and not attempt.isdigit():
            raise ValueError(f"the attempt is {attempt!r}")
        number = 0 if attempt is None else int(attempt)
        return Identity(unquote_to_bytes(rollout).decode(), number)
    except (ValueError, TypeError) as error:
        report(f"rollout in {what}", f"the {what} holds no rollout id and attempt, it is ignored: {error}")
        return None


def _count(text: str | None) -> int | None:
    if text is None:
        return None
    if text.isdecimal():
        return int(text)
    report("retry count", f"{RETRY}: expected a number, found {text!r}; it is ignored")
    return None


def is_valid(context: Context) -> bool:
    """Whether a context holds somebody's span."""
    return trace.get_current_span(context).get_span_context().is_valid
