import logging
import subprocess
import sys
from types import ModuleType, SimpleNamespace

import pytest

from spanmill.instrument.reports import forget_reports
from spanmill.instrument.vllm import plugin
from spanmill.instrument.vllm.doctor import Finding, diagnose


def test_unknown_vllm(caplog: pytest.LogCaptureFixture) -> None:
    """A vLLM whose names are others is left as it is, and one line says which name is missing."""
    forget_reports()
    module = ModuleType("vllm.v1.engine.async_llm")
    engine = type("AsyncLLM", (), {"generate_all": lambda self: 1})  # pyright: ignore[reportUnknownLambdaType, reportUnknownArgumentType]
    module.AsyncLLM = engine  # pyright: ignore[reportAttributeAccessIssue]
    before = dict(vars(engine))
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            plugin._patcher(plugin.HOOKS[module.__name__])(module)  # pyright: ignore[reportPrivateUsage]
    assert before == dict(vars(engine))
    assert ["AsyncLLM.generate" in record.message for record in caplog.records] == [True]


def test_registering_imports_no_vllm() -> None:
    """Processes that import no engine's front end are left alone: the plugin imports none of it, nor gRPC."""
    code = (
        "import sys; from spanmill.instrument.vllm import register; register(); register(); "
        "print([m for m in ('vllm', 'torch', 'starlette', 'grpc', 'numpy') if m in sys.modules])"
    )
    assert "[]\n" == subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout


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
    assert levels == [finding.level for finding in diagnose(status, version, environ)]


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
    (found,) = [f for f in diagnose(None, "0.32.0", environ) if f.level == "error"]
    assert word in found.text


def test_status_of_an_engine() -> None:
    """The status has what the doctor reads."""
    engine = SimpleNamespace(model_config=SimpleNamespace(logprobs_mode="processed_logprobs"))
    found = diagnose(plugin.status(engine), "0.32.0")
    assert Finding("ok", "logprobs are those of the distribution that was sampled from") in found
