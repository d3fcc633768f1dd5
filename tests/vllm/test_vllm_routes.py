"""What vLLM does when more of it is turned on: tools, LoRA, stored responses, tokens in and out, batches; over gRPC."""

import json
from typing import Any

import pytest
from running_vllm import MESSAGES, MODEL, Sampled, VllmServer, as_float32, from_row, new_rollout
from told import ASK, ask, from_answer, greedy

from spanmill import semconv as sc

pytestmark = pytest.mark.vllm

Json = Any

CHAT = "/v1/chat/completions"
GENERATE = "/inference/v1/generate"
PARAMETERS = {"type": "object", "properties": {"item": {"enum": ["fig", "plum"]}}, "required": ["item"]}
TOOL = {"type": "function", "function": {"name": "look", "description": "A price.", "parameters": PARAMETERS}}
STREAMS = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
CHOICES = pytest.mark.parametrize("n", [1, 3])


def _called(events: list[Json]) -> set[str]:
    """The tools that an answer calls, whole or in pieces."""
    found: set[str] = set()
    for choice in (choice for event in events for choice in event["choices"]):
        message: Json = choice.get("delta") or choice.get("message") or {}  # a last piece may say nothing
        found |= {call["function"]["name"] for call in message.get("tool_calls") or () if call["function"].get("name")}
    return found


@STREAMS
@CHOICES
def test_tool_calls(wide_vllm: VllmServer, n: int, stream: bool) -> None:
    """Of an answer that calls a tool every sampled id is recorded, also those that no client is shown.

    vLLM's stream leaves out ids of what its tool parser holds back, so that the client that is told everything asks for
    the same answer in one piece.
    """
    asking, mine = new_rollout(), new_rollout()
    choice = {"type": "function", "function": {"name": "look"}}
    body = {**ASK, "messages": MESSAGES, "tools": [TOOL], "tool_choice": choice, "n": n, "seed": 5, "max_tokens": 300}
    told = ask(wide_vllm, CHAT, {**body, "logprobs": True, "top_logprobs": 1}, asking, stream=False)
    if stream:
        events = wide_vllm.stream(CHAT, body, x_spanmill_rollout_id=mine)
    else:
        events = [wide_vllm.post(CHAT, body, x_spanmill_rollout_id=mine).json()]
    assert {"look"} == _called(events)
    rows = wide_vllm.rollout(mine, n).triplets
    assert sorted(each._replace(response_id=events[0]["id"]) for each in told) == sorted(map(from_row, rows))
    assert [[TOOL]] * n == [json.loads(row.tools or "null") for row in rows]


@STREAMS
def test_lora(wide_vllm: VllmServer, stream: bool) -> None:
    """A LoRA adapter's name is the model's; its answers are not those of the base model."""
    rollout_id = new_rollout()
    body = {**ASK, "model": "adapter", "messages": MESSAGES, "temperature": 0, "logprobs": True}
    told = ask(wide_vllm, CHAT, body, rollout_id, stream=stream)
    (row,) = wide_vllm.rollout(rollout_id, 1).triplets
    assert (told, "adapter") == ([from_row(row)], row.model)
    assert told[0].response_ids != greedy(wide_vllm, str(MESSAGES[0]["content"])).response_ids


def test_stored_responses(wide_vllm: VllmServer) -> None:
    """A response that goes on from a stored one has the whole conversation in its prompt, and an id of its own."""
    rollout_id = new_rollout()
    body = {"model": MODEL, "max_output_tokens": 12, "temperature": 0, "store": True}
    mine = {"x_spanmill_rollout_id": rollout_id}
    first = wide_vllm.post("/v1/responses", {**body, "input": "the fox"}, **mine).json()
    going_on = {**body, "input": "the dog", "previous_response_id": first["id"]}
    second = wide_vllm.post("/v1/responses", going_on, **mine).json()
    said = "".join(part["text"] for item in first["output"] for part in item["content"])
    talk = [("user", "the fox"), ("assistant", said), ("user", "the dog")]
    asked = [{"role": role, "content": text} for role, text in talk]
    more = {**ASK, "messages": asked, "temperature": 0, "logprobs": True}
    (told,) = ask(wide_vllm, CHAT, more, new_rollout(), stream=False)
    expected = [greedy(wide_vllm, "the fox")._replace(response_id=first["id"]), told._replace(response_id=second["id"])]
    assert sorted(expected) == wide_vllm.sampled(rollout_id, 2)


@STREAMS
@CHOICES
def test_tokens_in_tokens_out(wide_vllm: VllmServer, n: int, stream: bool) -> None:
    """Ids that come as ids go into the record as ids, under the request id that the client is told."""
    rollout_id = new_rollout()
    prompt = [5, 100, 7, 42]
    sampling = {"max_tokens": 9, "n": n, "logprobs": 1, "seed": 3, "temperature": 1.0}
    body = {"model": MODEL, "token_ids": prompt, "sampling_params": sampling}
    if stream:
        events = wide_vllm.stream(GENERATE, body, x_spanmill_rollout_id=rollout_id)
    else:
        events = [wide_vllm.post(GENERATE, body, x_spanmill_rollout_id=rollout_id).json()]
    told: dict[int, Sampled] = {}
    for event in events:
        for choice in event["choices"]:
            at = choice["index"]
            known = told.setdefault(at, Sampled(event["request_id"], at, prompt, [], [], None))
            logprobs = as_float32([entry["logprob"] for entry in choice["logprobs"]["content"]])
            told[at] = known._replace(
                response_ids=known.response_ids + choice["token_ids"],
                logprobs=known.logprobs + logprobs,
                finish_reason=choice["finish_reason"],
            )
    assert sorted(told.values()) == wide_vllm.sampled(rollout_id, n)


def test_batch_of_conversations(wide_vllm: VllmServer) -> None:
    """Several conversations in one request are as many choices of one response, each with its own prompt."""
    rollout_id = new_rollout()
    texts = ["the fox", "the lazy dog", "hello"]
    conversations = [[{"role": "user", "content": text}] for text in texts]
    body = {"model": MODEL, "messages": conversations, "max_tokens": 12, "temperature": 0}
    answer = wide_vllm.post(f"{CHAT}/batch", body, x_spanmill_rollout_id=rollout_id).json()
    told = [greedy(wide_vllm, text)._replace(response_id=answer["id"], choice=i) for i, text in enumerate(texts)]
    assert told == wide_vllm.sampled(rollout_id, 3)


def test_disaggregated_prefill(wide_vllm: VllmServer) -> None:
    """The leg that only prefills for another engine is no call; the one that decodes is."""
    rollout_id = new_rollout()
    body = {**ASK, "messages": MESSAGES, "logprobs": True, "max_tokens": 1}
    mine = {"x_spanmill_rollout_id": rollout_id}
    prefill = {**body, "kv_transfer_params": {"do_remote_decode": True, "do_remote_prefill": False}}
    assert wide_vllm.post(CHAT, prefill, **mine).status_code == 200
    decode = {**body, "kv_transfer_params": {"do_remote_decode": False, "do_remote_prefill": True}}
    told = from_answer(wide_vllm.post(CHAT, decode, **mine).json())
    assert told == wide_vllm.sampled(rollout_id, 1)


def test_grpc(wide_vllm: VllmServer) -> None:
    """Over gRPC spans arrive with packed ids, as bytes."""
    rollout_id = new_rollout()
    wide_vllm.post(CHAT, {**ASK, "messages": MESSAGES}, x_spanmill_rollout_id=rollout_id)
    wide_vllm.rollout(rollout_id, 1)
    (span,) = [s for s in wide_vllm.spans() if s.attributes.get(sc.ROLLOUT_ID) == rollout_id]
    assert isinstance(span.attributes[sc.RESPONSE_TOKEN_IDS], bytes)
    assert any("grpc" in headers.get("user-agent", "") for headers in wide_vllm.sink.headers)
