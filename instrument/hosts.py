"""Which servers are asked for token ids: those that `SPANMILL_HOSTS` names, else those that answer as vLLM or SGLang.

    SPANMILL_HOSTS    hosts or host:port, with commas between; `*` for all, empty for none. Nobody is probed then.

Without it a server is asked for `/version` and then for `/model_info`, once, by requests of our own without the
agent's key.
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

from spanmill.instrument.sglang import STREAMED

HOSTS: Final = "SPANMILL_HOSTS"
PROBE_S: Final = 2.0
"""How long a server may take to say what it is."""

RETRY_S: Final = 30.0
"""After that a server that could not be reached is asked again."""

HOSTED: Final = ("api.openai.com", ".openai.azure.com", "api.anthropic.com")
"""Services that are known to be neither: they are never probed."""

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
    """Ask the server what it is, and remember the answer. Takes twice `PROBE_S` at most."""
    parts = urlsplit(url)
    known = host(url)
    base = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"
    known.gives_ids = _is_vllm(_get(f"{base}/version"))
    if known.gives_ids is False and _is_sglang(_get(f"{base}/model_info")):
        known.gives_ids = True
        known.refused.add(STREAMED)
    known.asked_at = time.monotonic()
    return bool(known.gives_ids)


def _get(url: str) -> dict[str, object] | None:
    """The object that a server answers, an empty one for any other answer; None if nobody answers."""
    try:
        with build_opener().open(Request(url), timeout=PROBE_S) as answer:
            found = json.loads(answer.read(_MAX_ANSWER))
    except HTTPError as error:
        return None if error.code >= 500 else {}
    except (OSError, HTTPException):
        return None
    except ValueError:
        return {}
    return cast("dict[str, object]", found) if isinstance(found, dict) else {}


def _is_vllm(found: dict[str, object] | None) -> bool | None:
    """Whether `/version` answers `{"version": "0.32.0"}` and nothing else, as vLLM does."""
    if found is None:
        return None
    version = found.get("version")
    return list(found) == ["version"] and isinstance(version, str) and _VERSION.match(version) is not None


def _is_sglang(found: dict[str, object] | None) -> bool:
    """Whether `/model_info` answers as SGLang does."""
    return found is not None and {"model_path", "is_generation", "weight_version"} <= found.keys()


def forget() -> None:
    """Ask every server anew."""
    with _lock:
        _hosts.clear()
