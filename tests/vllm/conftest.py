"""A real vLLM on a CPU with a tiny model, beside a receiver that keeps what the plugin in it emits."""

from collections.abc import Generator
from pathlib import Path

import pytest
from running_vllm import VllmServer, make_model, running_server


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny random model."""
    return make_model("tiny_model.py", tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def vllm(tiny_model: Path) -> Generator[VllmServer]:
    """VLLM as a user starts it."""
    with running_server(tiny_model) as server:
        yield server


@pytest.fixture(scope="session")
def vllm_with_key(tiny_model: Path) -> Generator[VllmServer]:
    """VLLM that checks an API key, gives processed logprobs, and lets weights be renamed."""
    options = ("--api-key", "secret", "--logprobs-mode", "processed_logprobs")
    with running_server(tiny_model, *options, VLLM_SERVER_DEV_MODE="1") as server:
        yield server
