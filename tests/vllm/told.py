"""What the engine returned to a client that asked for ids and logprobs itself, out of vLLM's answers."""

from collections import defaultdict
from typing import Any

from running_vllm import MODEL, Sampled, VllmServer, as_float32, new_rollout

Json = Any

ASK = {"model": MODEL, "max_tokens": 12, "return_token_ids": True}


def _chat_logprobs(logprobs: Json) -> list[float]:
    return [entry["logprob"] for entry in logprobs["content"]]


def from_answer(answer: Json) -> list[Sampled]:
    """Choices of a whole answer, chat or completions."""
    return [
        Sampled(
            answer["id"],
            choice["index"],
            choice.get("prompt_token_ids") or answer["prompt_token_ids"],
            choice["token_ids"],
            as_float32(choice["logprobs"].get("token_logprobs") or _chat_logprobs(choice["logprobs"])),
            choice["finish_reason"],
        )
        for choice in answer["choices"]
    ]


def from_stream(events: list[Json]) -> list[Sampled]:
    """Choices of a streamed answer, chat or completions."""
    ids: dict[int, list[int]] = defaultdict(list)
    logprobs: dict[int, list[float]] = defaultdict(list)
    prompts: dict[int, list[int]] = {}
    reasons: dict[int, str] = {}
    for event in events:
        for choice in event["choices"]:
            at = choice["index"]
            if prompt := choice.get("prompt_token_ids") or event.get("prompt_token_ids"):
                prompts[at] = prompt
            ids[at] += choice.get("token_ids") or []
            if choice.get("logprobs"):
                logprobs[at] += choice["logprobs"].get("token_logprobs") or _chat_logprobs(choice["logprobs"])
            if choice["finish_reason"]:
                reasons[at] = choice["finish_reason"]
    return [Sampled(events[0]["id"], i, prompts[i], ids[i], as_float32(logprobs[i]), reasons[i]) for i in sorted(ids)]


def ask(vllm: VllmServer, path: str, body: Json, rollout_id: str, *, stream: bool) -> list[Sampled]:
    """Ask under a rollout; every choice of the answer."""
    if stream:
        return from_stream(vllm.stream(path, body, x_spanmill_rollout_id=rollout_id))
    answer = vllm.post(path, body, x_spanmill_rollout_id=rollout_id)
    assert answer.status_code == 200, answer.text
    return from_answer(answer.json())


def greedy(vllm: VllmServer, text: str) -> Sampled:
    """What chat samples greedily, from a client that asks for ids."""
    body = {**ASK, "messages": [{"role": "user", "content": text}], "temperature": 0, "logprobs": True}
    (told,) = ask(vllm, "/v1/chat/completions", body, new_rollout(), stream=False)
    return told
