"""What the doctor says of a model server: by its answers, and of one that runs in this process."""

import json
import threading
from collections.abc import Generator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import Any

import pytest

from spanmill.doctor.finding import Finding
from spanmill.doctor.vllm import Server, diagnose, examine, fetch
from spanmill.instrument.vllm import plugin


def _status(**more: object) -> dict[str, object]:
    active = ["vllm.v1.engine.async_llm.AsyncLLM.generate"]
    known: dict[str, object] = {
        "spanmill": "1",
        "vllm": "0.32.0",
        "active": active,
        "logprobs_mode": "processed_logprobs",
        "counters": {},
    }
    return known | more


@pytest.mark.parametrize(
    ("status", "version", "environ", "levels"),
    [
        (_status(), "0.32.0", {}, ["ok", "ok", "ok"]),
        (_status(logprobs_mode="raw_logprobs"), "0.32.0", {}, ["ok", "ok", "warning"]),
        (_status(logprobs_mode="raw_logits"), "0.32.0", {}, ["ok", "ok", "error"]),
        (_status(active=[]), "0.32.0", {}, ["ok", "error", "ok"]),
        (_status(counters={"dropped": 0, "failed": 3}), "0.32.0", {}, ["ok", "ok", "ok", "error"]),
        (_status(), "0.99.0", {}, ["warning", "ok", "ok"]),
        (_status(), "0.10.2", {}, ["warning", "ok", "ok"]),
        (None, "0.33.0", {}, ["ok", "error"]),
        (None, None, {}, ["error"]),
    ],
)
def test_diagnosis(
    status: dict[str, object] | None, version: str | None, environ: dict[str, str], levels: list[str]
) -> None:
    """The doctor tells a healthy plugin from raw logprobs, logits, lost spans, unknown versions and no plugin."""
    assert levels == [finding.level for finding in diagnose(Server(status, version), environ)]


@pytest.mark.parametrize(
    ("environ", "word"),
    [
        ({"VLLM_PLUGINS": "other"}, "VLLM_PLUGINS"),
        ({"VLLM_USE_RUST_FRONTEND": "1"}, "RUST"),
        ({"SPANMILL_VLLM": "0"}, "SPANMILL_VLLM"),
        ({"VLLM_PLUGINS": "spanmill"}, "install"),
    ],
)
def test_why_the_plugin_is_not_there(environ: dict[str, str], word: str) -> None:
    """With the environment that vLLM was started in, the doctor says which variable keeps the plugin out."""
    (found,) = [f for f in diagnose(Server(None, "0.32.0"), environ) if f.level == "error"]
    assert word in found.do


def test_status_of_an_engine() -> None:
    """The status has what the doctor reads."""
    engine = SimpleNamespace(model_config=SimpleNamespace(logprobs_mode="processed_logprobs"))
    found = diagnose(Server(plugin.status(engine), "0.32.0"), {})
    assert Finding("ok", "logprobs are those of the distribution that was sampled from") in found


@contextmanager
def answering(answers: dict[str, Any]) -> Generator[str]:
    """The URL of a server that answers these paths with JSON, all others with 404."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = json.dumps(answers.get(self.path, {"detail": "Not Found"})).encode()
            self.send_response(200 if self.path in answers else 404)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            """Keep the test's output clean."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_a_server_is_asked() -> None:
    """A server is asked for vLLM's version and for the plugin's status, by whatever base URL."""
    with answering({"/version": {"version": "0.32.0"}, "/spanmill/status": _status()}) as url:
        assert [Server(_status(), "0.32.0")] * 2 == [fetch(url), fetch(f"{url}/v1/")]
        assert ["ok", "ok", "ok"] == [finding.level for finding in examine(url, {})]


def test_what_is_no_vllm() -> None:
    """SGLang is told what to do, another server that it is none, and an address without a server is an error."""
    with answering({"/model_info": {"model_path": "m", "is_generation": True}}) as url:
        assert [("warning", "put `spanmill gateway` before it")] == [(f.level, f.do) for f in examine(url, {})]
    with answering({"/version": ["x"], "/model_info": "x"}) as url:
        assert ["error"] == [f.level for f in examine(url, {})]
    for nobody in ("http://127.0.0.1:9", "127.0.0.1:8000", "http://[", ""):
        assert ["error"] == [f.level for f in examine(nobody, {})]
