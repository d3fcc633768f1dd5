"""A real vLLM with a tiny model that calls tools; its plugin tells what was sampled."""

from collections.abc import Generator

import pytest
from otlp_sink import Sink, grpc_receiver
from running_vllm import VllmServer, copied_tool_model, running_server


@pytest.fixture(scope="session")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Generator[VllmServer]:
    """The engine."""
    model = copied_tool_model(tmp_path_factory.mktemp("tools"))
    with running_server(model, "--enable-auto-tool-choice", "--tool-call-parser", "hermes") as server:
        yield server


@pytest.fixture
def collected() -> Generator[Sink]:
    """What the agents send: another receiver than the engine's."""
    with grpc_receiver() as sink:
        yield sink
