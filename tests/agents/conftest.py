"""A real vLLM with a tiny model that calls tools; its plugin tells what was sampled."""

import os
from collections.abc import Generator
from pathlib import Path

import pytest
from otlp_sink import Sink, grpc_receiver
from running_vllm import VllmServer, make_model, running_server


@pytest.fixture(scope="session")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Generator[VllmServer]:
    """The engine. Its model is trained first, which takes some minutes, unless `SPANMILL_TOOL_MODEL` is its folder."""
    made = os.environ.get("SPANMILL_TOOL_MODEL")
    model = Path(made) if made else make_model("tool_model.py", tmp_path_factory.mktemp("tools"))
    with running_server(model, "--enable-auto-tool-choice", "--tool-call-parser", "hermes") as server:
        yield server


@pytest.fixture
def collected() -> Generator[Sink]:
    """What the agents send: another receiver than the engine's."""
    with grpc_receiver() as sink:
        yield sink
