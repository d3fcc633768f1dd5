"""Rewards posted to a collector over HTTP, and what it says became of them."""

import json
import ssl
from collections.abc import Iterable, Iterator, Mapping
from http.client import HTTPException
from itertools import islice
from typing import Any, Final, NamedTuple, cast
from urllib.error import HTTPError
from urllib.request import HTTPSHandler, ProxyHandler, Request, build_opener

from spanmill.errors import CollectorError
from spanmill.instrument import credentials
from spanmill.instrument.exporters import with_scheme

DEFAULT_ENDPOINT: Final = "http://127.0.0.1:4318"
TIMEOUT_S: Final = 30.0
_BATCH: Final = 10_000
"""Rewards in one request: far below what a collector takes at once."""

_SHOWN: Final = 5

RewardFields = Mapping[str, Any]
"""`rollout_id`, `value` and, where they are known, `attempt`, `call_id` and `name`."""


class Posted(NamedTuple):
    """What became of rewards."""

    stored: int
    """How many are on the collector's disk: all that were given."""
    waiting: tuple[str, ...] | None
    """Rollouts that the collector has not seen so far, for which their rewards wait; None if it cannot tell."""


def post_rewards(
    rewards: Iterable[RewardFields], endpoint: str = DEFAULT_ENDPOINT, *, token: str | None = None
) -> Posted:
    """Post rewards to a collector's HTTP address, as of the command line, and return once all are stored.

    `token` is the collector's bearer token; without one, and for headers and certificates, the environment counts
    (`credentials`). Raises ConfigError for credentials that cannot work, and CollectorError if the collector cannot be
    reached, does not answer in time or refuses the rewards; those before may be stored.
    """
    base = with_scheme(endpoint).rstrip("/").removesuffix("/v1/traces").removesuffix("/v1/rewards")
    headers = {**credentials.request_headers(token), "content-type": "application/json"}
    stored, waiting, told = 0, dict[str, None](), True
    for batch in _batches(rewards):
        answer = _post(f"{base}/v1/rewards", headers, json.dumps(batch).encode())
        stored += cast("int", answer["accepted"])
        told = told and "waiting" in answer
        waiting |= dict.fromkeys(cast("list[str]", answer.get("waiting", [])))
    return Posted(stored, tuple(waiting) if told else None)


def said(posted: Posted) -> str:
    """What became of the rewards, in a sentence."""
    many = posted.stored != 1
    text = f"{posted.stored} reward{'s' if many else ''} stored"
    if not posted.waiting:
        return text
    names = [name if name.isprintable() else repr(name) for name in posted.waiting[:_SHOWN]]
    more = len(posted.waiting) - len(names)
    which = ", ".join(names) + (f" and {more} more" if more else "")
    if not many:
        return f"{text}; it waits for rollout {which}, which the collector has not seen yet"
    return f"{text}; those for {which} wait: the collector has not seen such rollouts yet"


def _batches(rewards: Iterable[RewardFields]) -> Iterator[list[dict[str, Any]]]:
    fields = ({name: value for name, value in reward.items() if value is not None} for reward in rewards)
    ours = ({**reward, "source": "cli"} for reward in fields)
    while batch := list(islice(ours, _BATCH)):
        yield batch


def _post(url: str, headers: Mapping[str, str], body: bytes) -> dict[str, Any]:
    request = Request(url, body, dict(headers))
    direct = [ProxyHandler({})] if "//127.0.0.1" in url or "//localhost" in url else []
    secure = [HTTPSHandler(context=credentials.tls())] if url.startswith("https:") else []
    opener = build_opener(*direct, *secure)
    try:
        with opener.open(request, timeout=TIMEOUT_S) as answer:
            found = json.loads(answer.read())
    except HTTPError as error:
        how = "; --token-file FILE or SPANMILL_TOKEN gives a token" if error.code == 401 else ""
        raise CollectorError(
            f"the collector at {url} refuses the rewards: {error.code} {_reason(error)}{how}"
        ) from error
    except TimeoutError as error:
        raise CollectorError(f"the collector at {url} does not answer within {TIMEOUT_S:g} s") from error
    except (HTTPException, ValueError) as error:
        raise CollectorError(f"{url} is no HTTP address of a collector; `spanmill serve` prints it as http=") from error
    except OSError as error:
        cause = getattr(error, "reason", error)
        if isinstance(cause, TimeoutError):
            raise CollectorError(f"the collector at {url} does not answer within {TIMEOUT_S:g} s") from error
        if isinstance(cause, ssl.SSLError):
            why = getattr(cause, "verify_message", None) or cause.reason or cause
            raise CollectorError(f"the collector at {url} cannot be trusted, or speaks no TLS: {why}") from error
        why = getattr(cause, "strerror", None) or cause
        raise CollectorError(f"no collector answers at {url}: {why}") from error
    if not isinstance(found, dict) or "accepted" not in found:
        raise CollectorError(f"{url} is no HTTP address of a collector; `spanmill serve` prints it as http=")
    return cast("dict[str, Any]", found)


def _reason(error: HTTPError) -> str:
    """What the collector said, else what HTTP calls it."""
    try:
        return str(json.loads(error.read())["message"])
    except (ValueError, TypeError, KeyError, OSError):
        return error.reason
