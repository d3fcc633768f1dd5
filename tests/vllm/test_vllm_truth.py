"""What the rows say is what the engine returned to a client that asked for ids itself, in every API."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from running_vllm import MESSAGES, MODEL, Sampled, VllmServer, new_rollout
from told import ASK, ask, greedy

pytestmark = pytest.mark.vllm

STREAMS = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
CHOICES = pytest.mark.parametrize("n", [1, 3])


@STREAMS
@CHOICES
@pytest.mark.parametrize("top", [0, 3])
def test_chat(vllm: VllmServer, n: int, stream: bool, top: int) -> None:
    """Chat: ids and logprobs of each choice, whether the client asks for other likely tokens or not."""
    rollout_id = new_rollout()
    body = {**ASK, "messages": MESSAGES, "n": n, "logprobs": True, "top_logprobs": top, "temperature": 1.3}
    told = ask(vllm, "/v1/chat/completions", body, rollout_id, stream=stream)
    assert sorted(told) == vllm.sampled(rollout_id, n)


@STREAMS
@CHOICES
def test_completions(vllm: VllmServer, n: int, stream: bool) -> None:
    """Completions with several prompts: the choices are numbered as the client's answer numbers them."""
    rollout_id = new_rollout()
    body = {**ASK, "prompt": ["hello world", "the quick brown fox", "the"], "n": n, "logprobs": 2}
    told = ask(vllm, "/v1/completions", body, rollout_id, stream=stream)
    assert sorted(told) == vllm.sampled(rollout_id, 3 * n)


@STREAMS
@CHOICES
def test_a_client_that_asks_for_nothing(vllm: VllmServer, n: int, stream: bool) -> None:
    """The rows of a client that asks for no ids and no logprobs are those of one that does."""
    asking, silent = new_rollout(), new_rollout()
    body = {"model": MODEL, "messages": MESSAGES, "max_tokens": 12, "n": n, "seed": 7, "stream": stream}
    told = ask(
        vllm, "/v1/chat/completions", {**body, **ASK, "logprobs": True, "top_logprobs": 1}, asking, stream=stream
    )
    answer = vllm.post("/v1/chat/completions", body, x_spanmill_rollout_id=silent)
    assert answer.status_code == 200
    assert 'logprob"' not in answer.text
    rows = [row._replace(response_id=told[0].response_id) for row in vllm.sampled(silent, n)]
    assert sorted(told) == rows


@STREAMS
def test_responses(vllm: VllmServer, stream: bool) -> None:
    """Responses: the client's response id, and the tokens that the engine itself reports in its messages."""
    rollout_id = new_rollout()
    body = {"model": MODEL, "input": "the lazy dog", "max_output_tokens": 12, "temperature": 0}
    if stream:
        events = vllm.stream("/v1/responses", body, x_spanmill_rollout_id=rollout_id)
        answer = next(e["response"] for e in events if e["type"] in ("response.completed", "response.incomplete"))
    else:
        answer = vllm.post("/v1/responses", body, x_spanmill_rollout_id=rollout_id).json()
    told = greedy(vllm, "the lazy dog")
    assert [told._replace(response_id=answer["id"])] == vllm.sampled(rollout_id, 1)
    assert len(told.response_ids) == answer["usage"]["output_tokens"]


@STREAMS
def test_messages(vllm: VllmServer, stream: bool) -> None:
    """Anthropic's Messages: the API gives its client no ids; the rows have them, under the client's response id."""
    rollout_id = new_rollout()
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "over the dog"}],
        "max_tokens": 12,
        "temperature": 0,
    }
    if stream:
        events = vllm.stream("/v1/messages", body, x_spanmill_rollout_id=rollout_id)
        response_id = next(e["message"]["id"] for e in events if e["type"] == "message_start")
    else:
        response_id = vllm.post("/v1/messages", body, x_spanmill_rollout_id=rollout_id).json()["id"]
    told = greedy(vllm, "over the dog")
    assert [told._replace(response_id=response_id)] == vllm.sampled(rollout_id, 1)


def test_concurrent_rollouts(vllm: VllmServer) -> None:
    """64 rollouts at once, with n = 2, streamed and not: each has its own calls and no other's."""

    def run(i: int) -> tuple[str, list[Sampled]]:
        rollout_id = new_rollout()
        body = {**ASK, "messages": [{"role": "user", "content": f"fox {i}"}], "n": 2, "logprobs": True}
        return rollout_id, ask(vllm, "/v1/chat/completions", body, rollout_id, stream=i % 2 == 0)

    with ThreadPoolExecutor(16) as pool:
        told = dict(pool.map(run, range(64)))
    assert {rollout_id: vllm.sampled(rollout_id, 2) for rollout_id in told} == {r: sorted(s) for r, s in told.items()}
