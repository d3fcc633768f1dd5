import json
from types import SimpleNamespace as Like
from typing import Any

import numpy as np
import pytest
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from spanmill.adapters.adapt import adapt
from spanmill.collector.decode import decode_traces
from spanmill.instrument import provider
from spanmill.instrument.identity import Identity
from spanmill.instrument.reports import ignored
from spanmill.instrument.vllm import policy
from spanmill.instrument.vllm.generation import Choice, Generation
from spanmill.instrument.vllm.requests import Request
from spanmill.instrument.vllm.spans import client_id, emit, sampled_logprobs
from spanmill.triplets.records import Triplet


def _flat(*positions: dict[int, float]) -> Any:
    """Logprobs in vLLM's flat form."""
    ends = [sum(map(len, positions[: i + 1])) for i in range(len(positions))]
    return _Flat(
        start_indices=[0, *ends[:-1]],
        end_indices=ends,
        token_ids=[i for p in positions for i in p],
        logprobs=[v for p in positions for v in p.values()],
    )


class _Flat(Like):
    def __len__(self) -> int:
        return len(self.start_indices)


def _dicts(*positions: dict[int, float]) -> Any:
    return [{i: Like(logprob=v) for i, v in p.items()} for p in positions]


@pytest.mark.parametrize("form", [_flat, _dicts])
def test_logprobs_go_by_id(form: Any) -> None:
    """A token's logprob is the one of its id, wherever vLLM puts it among the likely tokens."""
    choice = Choice([[5, 6], [7]], [form({5: -1.0, 9: -0.5}, {9: -0.1, 6: -3.0}), form({8: -0.2, 9: -0.3, 7: -4.0})])
    assert [-1.0, -3.0, -4.0] == sampled_logprobs(choice, 3)


@pytest.mark.parametrize("form", [_flat, _dicts])
def test_a_list_with_a_hole_is_none(form: Any) -> None:
    """One logprob that is missing makes all of them unknown, and shifts none."""
    assert sampled_logprobs(Choice([[5, 6]], [form({5: -1.0}, {9: -0.1})]), 2) is None
    assert sampled_logprobs(Choice([[5, 6]], [form({5: -1.0})]), 2) is None
    assert sampled_logprobs(Choice([[5], [6]], [form({5: -1.0}), None]), 2) is None


def _generation(path: str, request_id: str, n: int = 1) -> Generation:
    return Generation(request_id, Like(n=n), None, None, Request(path) if path else None, Context(), 0, None)


@pytest.mark.parametrize(
    ("path", "request_id", "n", "wanted"),
    [
        ("/v1/chat/completions", "chatcmpl-a-1", 2, ("chatcmpl-a-1", 0)),
        ("/v1/completions", "cmpl-a-0", 2, ("cmpl-a", 0)),
        ("/v1/completions", "cmpl-a-1-2", 3, ("cmpl-a-1", 6)),
        ("/v1/chat/completions/batch", "chatcmpl-a_2", 1, ("chatcmpl-a", 2)),
        ("/v1/responses", "resp_a_0", 1, ("resp_a", 0)),
        ("/v1/responses", "resp_a_1", 1, ("resp_a_1", 0)),
        ("/v1/messages", "chatcmpl-a", 1, ("chatcmpl-a", 0)),
        ("", "cmpl-a-0", 1, ("cmpl-a-0", 0)),
    ],
)
def test_response_ids(path: str, request_id: str, n: int, wanted: tuple[str, int]) -> None:
    """The engine's request id becomes the response id and choice number that the client sees."""
    assert wanted == client_id(_generation(path, request_id, n))


def test_ids_of_a_program_that_counts() -> None:
    """Where a program numbers its own requests, no two of them have one response id."""
    ids = {client_id(_generation("", "0"))[0] for _ in range(100)}
    assert 100 == len(ids)


def test_policy_versions_of_vllm() -> None:
    """VLLM's spans over the response become runs; weights that nobody named have no version."""
    said = [Like(version="a", start=0, end=2), Like(version="b", start=2, end=5), Like(version="c", start=5, end=5)]
    runs = [{"version": "a", "start": 0, "length": 2}, {"version": "b", "start": 2, "length": 3}]
    assert ("b", runs) == policy.versions(said, "x", "x")
    assert (None, None) == policy.versions([("default", 0, 3)], None, None)
    assert ("x", None) == policy.versions([("default", 0, 3)], "x", "x")


def test_policy_version_that_was_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was set comes before the environment, that before the header; a change meanwhile leaves it unknown."""
    assert "h" == policy.named_version("h")
    monkeypatch.setenv("SPANMILL_POLICY_VERSION", "e")
    assert "e" == policy.named_version("h")
    policy.set_policy_version(3)
    assert "3" == policy.named_version("h")
    policy.set_policy_version(None)
    before = ignored()
    assert (None, None) == policy.versions(None, "1", "2")
    assert before + 1 == ignored()


def _row(generation: Generation) -> Triplet:
    """The row that a generation's only span comes to."""
    exporter = InMemorySpanExporter()
    provider.configure(exporter=exporter)
    emit(generation)
    provider.flush()
    request = encode_spans(exporter.get_finished_spans()).SerializeToString()
    ((row,),) = [rollout.triplets for rollout in adapt(decode_traces(request).spans).rollouts]
    return row


def _ended(prompt: Any, **choice: Any) -> Generation:
    params = Like(n=1, temperature=1.0, top_p=1.0, top_k=0, max_tokens=4, output_kind=Like(name="FINAL_ONLY"))
    request = Request("/v1/chat/completions", "chat", Identity(f"r-{id(prompt)}"), "header")
    generation = Generation(
        "chatcmpl-a", params, "m", "processed_logprobs", request, Context(), 1, None, prompt=prompt, end_ns=2
    )
    ids = [5, 6]
    generation.choices[0] = Choice([ids], [_flat({5: -1.0}, {6: -2.0})], "stop", **choice)
    return generation


def test_media_as_vllm_hashes_them() -> None:
    """Images and audio of a prompt stand in the row by kind and by the hash under which vLLM knows them."""
    row = _row(_ended({"prompt_token_ids": [1, 2], "mm_hashes": {"image": ["aa", "bb"], "audio": ["cc"]}}))
    hashes = [("image", "aa"), ("image", "bb"), ("audio", "cc")]
    assert [{"kind": kind, "hash": value} for kind, value in hashes] == json.loads(row.multimodal or "null")
    assert ("multimodal_without_payload",) == row.flags  # the images themselves are on no span


def test_routed_experts() -> None:
    """The experts that each token was routed to come out as the engine's own array: bytes, shape and type."""
    experts = np.arange(12, dtype=np.int16).reshape(2, 3, 2)
    row = _row(_ended({"prompt_token_ids": [1]}, routed_experts=experts))
    assert {"data": experts.tobytes(), "shape": [2, 3, 2], "dtype": "int16"} == row.routed_experts


def test_logprobs_that_are_logits() -> None:
    """Where vLLM gives logits in their place there are no logprobs: they are not passed off as such."""
    generation = _ended({"prompt_token_ids": [1]})
    generation.logprobs_mode = "raw_logits"
    row = _row(generation)
    assert (None, None, ("no_logprobs",)) == (row.response_logprobs, row.logprobs_mode, row.flags)
