"""Which servers are asked for token ids: those that `SPANMILL_HOSTS` names, else those that answer as vLLM does.

    SPANMILL_HOSTS    hosts or host:port, with commas between; `*` for all, empty for none. Nobody is probed then.

Without it a server is asked for `/version` once, by a request of our own without the agent's key.
"""

import json
import os
import re
import threading
import time
from dataclasses import dataclass, field
from http.client import HTTPException
from typing import Final, cast
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import Request, build_opener

HOSTS: Final = "SPANMILL_HOSTS"
PROBE_S: Final = 2.0
"""How long a server may take to say what it is."""

RETRY_S: Final = 30.0
"""After that a server that could not be reached is asked again."""

HOSTED: Final = ("api.openai.com", ".openai.azure.com", "api.anthropic.com")
"""Services that are known not to be vLLM: they are never probed."""

_VERSION: Final = re.compile(r"v?\d+\.\d+")
_MAX_ANSWER: Final = 4096


@dataclass(slots=True)
class Host:
    """What is known of a server."""

    gives_ids: bool | None = None
    """None: it could not be asked."""
    asked_at: float = 0.0
    refused: set[str] = field(default_factory=set[str])
    """Fields that it does not take."""


_hosts: dict[str, Host] = {}
_lock = threading.Lock()


def host(url: str) -> Host:
    """What is known so far of the server of a URL."""
    parts = urlsplit(url)
    with _lock:
        return _hosts.setdefault(f"{parts.scheme}://{parts.netloc}", Host())


def decided(url: str) -> bool | None:
    """Whether the server gives ids; None if it must be asked (`probe`, which blocks)."""
    parts = urlsplit(url)
    said = os.environ.get(HOSTS)
    if said is not None:
        names = {name.strip() for name in said.split(",")}
        return not names.isdisjoint(("*", parts.netloc.rpartition("@")[2], parts.hostname or ""))
    if (parts.hostname or "").endswith(HOSTED) or parts.scheme not in ("http", "https"):
        return False
    known = host(url)
    if known.gives_ids is None and known.asked_at and time.monotonic() - known.asked_at < RETRY_S:
        return False
    return known.gives_ids


def probe(url: str) -> bool:
    """Ask the server whether it is vLLM, and remember the answer. Takes `PROBE_S` at most."""
    parts = urlsplit(url)
    known = host(url)
    known.gives_ids = _is_vllm(f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}/version")
    known.asked_at = time.monotonic()
    return bool(known.gives_ids)


def _is_vllm(url: str) -> bool | None:
    """Whether `/version` answers `{"version": "0.32.0"}` and nothing else, as vLLM does; None if nobody answers."""
    try:
        with build_opener().open(Request(url), timeout=PROBE_S) as answer:
            found = json.loads(answer.read(_MAX_ANSWER))
    except HTTPError as error:
        return None if error.code >= 500 else False
    except (OSError, HTTPException):
        return None
    except ValueError:
        return False
    if not isinstance(found, dict) or list(cast("dict[str, object]", found)) != ["version"]:
        return False
    return isinstance(found["version"], str) and _VERSION.match(found["version"]) is not None


def forget() -> None:
    """Ask every server anew."""
    with _lock:
        _hosts.clear()
