"""Nothing from the environment of whoever runs the tests."""

import os

import pytest

OURS = ("SPANMILL_", "OTEL_", "VLLM_")


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment without what the doctor reads."""
    for name in list(os.environ):
        if name.startswith(OURS):
            monkeypatch.delenv(name)
