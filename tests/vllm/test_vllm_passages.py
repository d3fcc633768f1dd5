"""What the gateway and the client see of a real vLLM's answers, beside what the plugin in it saw of the same calls."""

from collections.abc import Generator
from typing import Any

import httpx
import pytest
from openai import OpenAI
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from running_vllm import MODEL, VllmServer, new_rollout
from served_gateway import serving

from spanmill import adapt, rollout
from spanmill.instrument import configure, flush, injector
from spanmill.triplets.records import Rollout

pytestmark = pytest.mark.vllm

COMMON: dict[str, Any] = {"model": MODEL, "temperature": 0.7}
CHAT: dict[str, Any] = {**COMMON, "messages": [{"role": "user", "content": "hello world"}]}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {**CHAT, "max_tokens": 8, "n": 2},
    "/v1/completions": {**COMMON, "prompt": "hello world", "max_tokens": 8},
    "/v1/responses": {**COMMON, "input": "hello world", "max_output_tokens": 8},
    "/v1/messages": {**CHAT, "max_tokens": 8},
}
Row = tuple[str, list[int] | None, list[int] | None, list[float] | None]


@pytest.fixture
def seen() -> InMemorySpanExporter:
    """What the gateway or the client of this process emits."""
    exporter = InMemorySpanExporter()
    configure(exporter=exporter)
    return exporter


@pytest.fixture
def gateway(vllm: VllmServer, seen: InMemorySpanExporter) -> Generator[str]:
    """The address of a gateway before vLLM."""
    with serving(vllm.url) as client:
        yield str(client.base_url)


def rows(found: Rollout) -> list[Row]:
    """(call, prompt ids, sampled ids, logprobs) of each row."""
    return sorted(
        (
            row.call_id,
            None if row.prompt_token_ids is None else row.prompt_token_ids.tolist(),
            None if row.response_token_ids is None else row.response_token_ids.tolist(),
            None if row.response_logprobs is None else row.response_logprobs.tolist(),
        )
        for row in found.triplets
    )


def compare(vllm: VllmServer, seen: InMemorySpanExporter, name: str, calls: int) -> tuple[list[Row], list[Row]]:
    """(rows by the passage alone, rows by the engine alone), after both together came to the engine's."""
    by_engine = rows(vllm.rollout(name, calls))
    assert flush(20)
    spans = [span for span in seen.get_finished_spans() if "gen_ai.operation.name" in (span.attributes or {})]
    (together,) = (r for r in adapt([*vllm.sink.bodies, *spans]) if r.rollout_id == name)
    assert ([], by_engine) == (together.quarantined, rows(together))
    (alone,) = adapt(spans)
    return rows(alone), by_engine


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("path", BODIES)
def test_the_gateway_sees_what_the_engine_sampled(
    vllm: VllmServer, gateway: str, seen: InMemorySpanExporter, path: str, stream: bool
) -> None:
    """Ids and logprobs, but for the Messages API, which gives none; by the response id both are one call in any API."""
    name, body = new_rollout(), BODIES[path]
    answer = httpx.post(f"{gateway}/rollout/{name}{path}", json={**body, "stream": stream}, timeout=60)
    assert 200 == answer.status_code
    by_gateway, by_engine = compare(vllm, seen, name, body.get("n", 1))
    if path == "/v1/messages":
        by_engine = [(call, None, None, None) for call, *_ in by_engine]
    elif path == "/v1/responses" and stream:  # a token that shows no text has no logprob there: then there are none
        by_engine = [
            (call, prompt, ids, logprobs if told[3] is not None else None)
            for told, (call, prompt, ids, logprobs) in zip(by_gateway, by_engine, strict=True)
        ]
    assert by_engine == by_gateway


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_the_responses_api_of_the_client(vllm: VllmServer, seen: InMemorySpanExporter, stream: bool) -> None:
    """Its own span has the ids, and is one call with the engine's."""
    injector.install()
    name = new_rollout()
    client: Any = OpenAI(base_url=f"{vllm.url}/v1", api_key="none", max_retries=0)
    with rollout(name):
        answer = client.responses.create(model=MODEL, input="hello world", max_output_tokens=8, stream=stream)
        for _ in answer if stream else ():
            pass
    by_client, by_engine = compare(vllm, seen, name, 1)
    assert [row[:3] for row in by_engine] == [row[:3] for row in by_client]
