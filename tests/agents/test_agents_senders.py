"""Programs with nothing but an OpenTelemetry SDK, an old one for Python and the one for Node, that send to `serve`."""

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from environments import in_environment
from served import QUICK, Served, wait_for

from spanmill.triplets.reader import read_rollouts, read_triplets

pytestmark = pytest.mark.agents
CALLS = 700
"""More than a batch of any SDK holds."""

SENDERS = [
    ("otel-python", "sender.py", "grpc", "gzip"),
    ("otel-python", "sender.py", "http/protobuf", "deflate"),
    ("node", "sender.mjs", "grpc", "gzip"),
    ("node", "sender.mjs", "http/protobuf", "none"),
    ("node", "sender.mjs", "http/json", "gzip"),
]


def rows(out: Path) -> list[tuple[Any, ...]]:
    """What the rows say of the calls, in order of their prompts: Node's clock gives many spans one time."""
    columns = ("call_id", "prompt_token_ids", "response_token_ids", "response_logprobs", "finish_reason", "trainable")
    return sorted(read_triplets(out).select(columns).collect().rows(), key=lambda row: len(row[1]))


@pytest.mark.parametrize(("environment", "sender", "protocol", "compression"), SENDERS)
def test_everything_that_an_sdk_sends_is_in_the_rows(
    environment: str, sender: str, protocol: str, compression: str, tmp_path: Path
) -> None:
    """Every call once, ids and logprobs as the program had them, also those that JavaScript sends as integers."""
    out = tmp_path / "out"
    with Served(out, *QUICK) as service:
        address = service.address if protocol == "grpc" else service.http_address
        variables = {
            "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://{address}",
            "OTEL_EXPORTER_OTLP_COMPRESSION": compression,
            "OTEL_BSP_MAX_QUEUE_SIZE": str(2 * CALLS),
        }
        clean = {name: value for name, value in os.environ.items() if not name.startswith("OTEL_")}
        command = in_environment(environment, Path(__file__).parent / "senders" / sender, "r", str(CALLS), protocol)
        done = subprocess.run(command, env=clean | variables, capture_output=True, text=True, timeout=120, check=False)
        assert (0, "") == (done.returncode, done.stderr)
        wait_for(lambda: list(out.glob("rollouts/*.parquet")))
        assert 0 == service.stop()
    assert [("r", "succeeded", CALLS)] == (
        read_rollouts(out).select("rollout_id", "status", "num_calls").collect().rows()
    )
    logprobs = [[-1.0, -0.5 if turn % 2 else 0.0] for turn in range(CALLS)]
    assert [
        (f"r-{turn}", list(range(turn + 1)), [turn, 7], logprobs[turn], "stop", True) for turn in range(CALLS)
    ] == rows(out)
