"""What can be said of a running model server from outside: is the plugin in it, does it record what training needs?"""

import json
import re
from collections.abc import Mapping
from http.client import HTTPException
from typing import Any, Final, NamedTuple, cast
from urllib.error import HTTPError
from urllib.request import ProxyHandler, build_opener

from spanmill.doctor.finding import Finding, error, ok, warning
from spanmill.instrument.vllm.middleware import STATUS
from spanmill.instrument.vllm.plugin import TESTED

GENERATE: Final = "vllm.v1.engine.async_llm.AsyncLLM.generate"
TIMEOUT_S: Final = 5.0
MAX_ANSWER: Final = 2**20

Object = Mapping[str, Any]


class Server(NamedTuple):
    """What a server answers of itself; None where it answers nothing of the kind."""

    status: Object | None
    """The plugin's `/spanmill/status`."""
    version: str | None
    """vLLM's `/version`."""
    sglang: Object | None = None
    """SGLang's `/model_info`."""


def examine(url: str, environ: Mapping[str, str]) -> list[Finding]:
    """What there is to say of the model server at `url`, started in the environment `environ` as far as that shows."""
    try:
        return diagnose(fetch(url), environ)
    except (OSError, ValueError) as failure:
        reason = getattr(failure, "reason", failure)
        return [error(f"no model server answers at {url}: {reason}", "give its base URL, such as http://host:8000")]


def fetch(url: str) -> Server:
    """What the server at a base URL answers. Raises OSError if none answers there, ValueError for what is no URL."""
    base = url.rstrip("/").removesuffix("/v1")
    version = _get(f"{base}/version")
    status = _get(f"{base}{STATUS}")
    sglang = None if version or status else _get(f"{base}/model_info") or _get(f"{base}/get_model_info")
    return Server(status, None if version is None else str(version.get("version")), sglang)


def _get(url: str) -> Object | None:
    try:
        with build_opener(ProxyHandler({})).open(url, timeout=TIMEOUT_S) as answer:
            content = json.loads(answer.read(MAX_ANSWER))
    except HTTPError:
        return None
    except (UnicodeDecodeError, json.JSONDecodeError, HTTPException):
        return None
    return cast("Object", content) if isinstance(content, dict) else None


def diagnose(server: Server, environ: Mapping[str, str]) -> list[Finding]:
    """What the answers of a running server mean, with the environment that it was started in, if known."""
    status, version, sglang = server
    if sglang is not None and "model_path" in sglang:
        return [warning("this is SGLang, which has no plugin of spanmill", "put `spanmill gateway` before it")]
    if version is None and status is None:
        return [error("this is no vLLM: /version is not answered as vLLM does", "put `spanmill gateway` before it")]
    found = [_version(version or str((status or {}).get("vllm")))]
    if status is None:
        return [*found, error("the spanmill plugin is not loaded: no generation is recorded", _why_not(environ))]
    if GENERATE in status.get("active", ()):
        found.append(ok(f"the spanmill plugin {status.get('spanmill')} records every generation"))
    else:
        found.append(
            error("the spanmill plugin is loaded but records nothing", "vLLM's log says which of its names is missing")
        )
    found.append(_mode(str(status.get("logprobs_mode"))))
    counts = cast("Mapping[str, int]", status.get("counters", {}))
    lost = {name: n for name in ("dropped", "failed") if (n := counts.get(name, 0))}
    if lost:
        said = ", ".join(f"{n} {name}" for name, n in lost.items())
        found.append(
            error(f"spans are lost ({said})", "see that vLLM's OTEL_EXPORTER_OTLP_ENDPOINT is the collector's")
        )
    return found


def _why_not(environ: Mapping[str, str]) -> str:
    allowed = environ.get("VLLM_PLUGINS")
    if allowed is not None and "spanmill" not in allowed.split(","):
        return f"VLLM_PLUGINS is {allowed!r}: add spanmill to it"
    if environ.get("VLLM_USE_RUST_FRONTEND", "0") not in ("", "0"):
        return "VLLM_USE_RUST_FRONTEND runs no Python plugin: unset it, or use `spanmill gateway`"
    if environ.get("SPANMILL_VLLM") == "0":
        return "SPANMILL_VLLM is 0: unset it"
    return (
        "install spanmill into the environment that vLLM runs in; if it is, VLLM_PLUGINS must name it where it is set, "
        "and VLLM_USE_RUST_FRONTEND must be unset"
    )


def _mode(mode: str) -> Finding:
    if mode == "processed_logprobs":
        return ok("logprobs are those of the distribution that was sampled from")
    if mode == "raw_logprobs":
        return warning(
            "logprobs are raw: where temperature, top-p, top-k or penalties differ from the defaults they are not "
            "those of the distribution that was sampled from",
            "start vLLM with --logprobs-mode processed_logprobs",
        )
    return error(
        f"--logprobs-mode {mode} gives logits: no logprobs are recorded", "use --logprobs-mode processed_logprobs"
    )


def _version(version: str) -> Finding:
    number = re.match(r"(\d+)\.(\d+)", version)
    oldest, newest = (tuple(map(int, t.split("."))) for t in TESTED)
    if number is not None and oldest <= (int(number[1]), int(number[2])) <= newest:
        return ok(f"vLLM {version}")
    return warning(
        f"vLLM {version} is outside of what is tested, {TESTED[0]} to {TESTED[1]}",
        "see in its log and here whether the plugin is active",
    )
