import logging
import subprocess
import sys
from types import ModuleType

import pytest

from spanmill.instrument.reports import forget_reports
from spanmill.instrument.vllm import plugin


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
