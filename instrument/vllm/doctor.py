"""What can be said of a running vLLM from outside: is the plugin in it, and does it record what training needs?"""

import json
import re
from collections.abc import Mapping
from http.client import HTTPException
from typing import Any, Final, Literal, NamedTuple, cast
from urllib.error import HTTPError
from urllib.request import urlopen

from spanmill.instrument.vllm.middleware import STATUS
from spanmill.instrument.vllm.plugin import TESTED

GENERATE: Final = "vllm.v1.engine.async_llm.AsyncLLM.generate"


class Finding(NamedTuple):
    """Something that the doctor found."""

    level: Literal["ok", "warning", "error"]
    """An error loses data, a warning may."""
    text: str


def fetch(url: str, timeout_s: float = 5.0) -> tuple[Mapping[str, Any] | None, str | None]:
    """(status of the plugin, version of vLLM) from a running server's base URL; None for what it does not answer.

    Raises OSError if no server answers there.
    """
    base = url.rstrip("/").removesuffix("/v1")
    version = _get(f"{base}/version", timeout_s)
    status = _get(f"{base}{STATUS}", timeout_s)
    return status, None if version is None else str(version.get("version"))


def _get(url: str, timeout_s: float) -> Mapping[str, Any] | None:
    try:
        with urlopen(url, timeout=timeout_s) as answer:
            content = json.loads(answer.read(2**20))
    except HTTPError:
        return None
    except (ValueError, HTTPException):
        return None
    return cast("Mapping[str, Any]", content) if isinstance(content, dict) else None


def diagnose(
    status: Mapping[str, Any] | None, version: str | None, environ: Mapping[str, str] | None = None
) -> list[Finding]:
    """What the answers of a running vLLM mean (`fetch`), with the environment that it was started in, if known."""
    if version is None and status is None:
        return [Finding("error", "this is no vLLM: /version is not answered as vLLM does")]
    found = [_version(version or str((status or {}).get("vllm")))]
    if status is None:
        return [*found, Finding("error", f"the spanmill plugin is not loaded: {_why_not(environ or {})}")]
    if GENERATE in status.get("active", ()):
        found.append(Finding("ok", f"the spanmill plugin {status.get('spanmill')} records every generation"))
    else:
        found.append(
            Finding("error", "the spanmill plugin is loaded but records nothing: vLLM's log says what is missing")
        )
    found.append(_mode(str(status.get("logprobs_mode"))))
    counts = cast("Mapping[str, int]", status.get("counters", {}))
    lost = {name: n for name in ("dropped", "failed") if (n := counts.get(name, 0))}
    if lost:
        said = ", ".join(f"{n} {name}" for name, n in lost.items())
        found.append(
            Finding("error", f"spans are lost ({said}): is the collector at OTEL_EXPORTER_OTLP_ENDPOINT there?")
        )
    return found


def _why_not(environ: Mapping[str, str]) -> str:
    allowed = environ.get("VLLM_PLUGINS")
    if allowed is not None and "spanmill" not in allowed.split(","):
        return f"VLLM_PLUGINS is {allowed!r}: add spanmill to it"
    if environ.get("VLLM_USE_RUST_FRONTEND", "0") not in ("", "0"):
        return "VLLM_USE_RUST_FRONTEND runs no Python plugin: unset it, or use spanmill gateway"
    if environ.get("SPANMILL_VLLM") == "0":
        return "SPANMILL_VLLM is 0: unset it"
    return (
        "install spanmill into the environment that vLLM runs in; if it is, VLLM_PLUGINS must name it where it is set, "
        "and VLLM_USE_RUST_FRONTEND must be unset"
    )


def _mode(mode: str) -> Finding:
    if mode == "processed_logprobs":
        return Finding("ok", "logprobs are those of the distribution that was sampled from")
    if mode == "raw_logprobs":
        return Finding(
            "warning",
            "logprobs are raw: where temperature, top-p, top-k or penalties differ from the defaults they are not "
            "those of the distribution that was sampled from; start vLLM with --logprobs-mode processed_logprobs",
        )
    return Finding("error", f"--logprobs-mode {mode} gives logits: no logprobs are recorded")


def _version(version: str) -> Finding:
    number = re.match(r"(\d+)\.(\d+)", version)
    oldest, newest = (tuple(map(int, t.split("."))) for t in TESTED)
    if number is not None and oldest <= (int(number[1]), int(number[2])) <= newest:
        return Finding("ok", f"vLLM {version}")
    return Finding("warning", f"vLLM {version} is outside of what is tested, {TESTED[0]} to {TESTED[1]}")
