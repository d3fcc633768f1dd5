"""A rollout's id in the forms that any OpenAI or Anthropic client can be given: URL, API key, request headers.

The vLLM plugin and the gateway read them (`instrument.vllm.requests`). Pure: from identities to texts.

    with_path("http://host:8000/v1", Identity("a/b", 2)) == "http://host:8000/rollout/a%2Fb/attempt/2/v1"
    api_key(Identity("a/b", 2), "secret") == "sk-rollout-a%2Fb.2:secret"
"""

from typing import Final
from urllib.parse import quote, urlsplit, urlunsplit

from opentelemetry.baggage.propagation import W3CBaggagePropagator
from opentelemetry.context import Context

from spanmill.errors import ConfigError
from spanmill.instrument import identity
from spanmill.instrument.identity import Identity
from spanmill.semconv import ROLLOUT_ID

VERSION: Final = "/v1"
KEY: Final = "sk-rollout-"
"""How an API key begins that names a rollout."""

_BAGGAGE: Final = W3CBaggagePropagator()
_ID_HEADER: Final = next(field.header for field in identity.FIELDS if field.attribute == ROLLOUT_ID)


def _encoded(rollout_id: str) -> str:
    """Percent-encoded, `/` and `.` included: `.` ends the id in a key, and proxies resolve `..` in a path."""
    return quote(rollout_id, safe="").replace(".", "%2E")


def check_url(base_url: str) -> None:
    """Raises ConfigError for what is no URL of a server."""
    parts = urlsplit(base_url)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise ConfigError(f"base_url: expected a URL such as http://127.0.0.1:8000/v1, found {base_url!r}")


def with_path(base_url: str, own: Identity) -> str:
    """`base_url`, of a model server or gateway, with the rollout in its path; `/v1` stays last where it was."""
    parts = urlsplit(base_url)
    path = parts.path.rstrip("/")
    root = path.removesuffix(VERSION)
    attempt = f"/attempt/{own.attempt}" if own.attempt else ""
    return urlunsplit(parts._replace(path=f"{root}/rollout/{_encoded(own.rollout_id)}{attempt}{path[len(root) :]}"))


def api_key(own: Identity, key: str | None = None) -> str:
    """An API key that names the rollout; `key` is the one that the server itself shall see."""
    attempt = f".{own.attempt}" if own.attempt else ""
    return f"{KEY}{_encoded(own.rollout_id)}{attempt}" + (f":{key}" if key else "")


def headers(own: Identity) -> dict[str, str]:
    """Request headers with all that is known of a rollout; an id that no header can hold is in baggage."""
    plain = identity.headers(own)
    if _ID_HEADER not in plain:
        _BAGGAGE.inject(plain, identity.to_baggage(own, Context()))
    return plain
