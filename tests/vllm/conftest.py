"""A real vLLM on a CPU with a tiny model, beside a receiver that keeps what the plugin in it emits."""

from collections.abc import Generator
from pathlib import Path

import pytest
from otlp_sink import grpc_receiver
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


@pytest.fixture(scope="session")
def wide_vllm(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Generator[VllmServer]:
    """VLLM with tools, a LoRA adapter, stored responses and the tokens-in, tokens-out route, that exports over gRPC."""
    adapter = make_model("lora_adapter.py", tmp_path_factory.mktemp("adapter"))
    options = ["--enable-auto-tool-choice", "--tool-call-parser", "hermes", "--enable-scale-out"]
    options += ["--enable-lora", "--max-lora-rank", "8", "--lora-modules", f"adapter={adapter}"]
    with running_server(
        tiny_model,
        *options,
        receiver=grpc_receiver,
        VLLM_ENABLE_RESPONSES_API_STORE="1",
        OTEL_EXPORTER_OTLP_PROTOCOL="grpc",
    ) as server:
        yield server
