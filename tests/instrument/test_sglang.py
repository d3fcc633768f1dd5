"""SGLang behind the gateway and before clients: what is asked of it, what is recorded, what its clients see."""

import json
from collections.abc import Callable, Generator
from typing import Any

import httpx
import openai
import pytest
from opentelemetry.sdk.trace import ReadableSpan
from served_gateway import serving
from stub_sglang import PROMPT, WORDS, Stub, ids_of, logprobs_of, stub_sglang

from spanmill import adapt
from spanmill.instrument import hosts, injector, sglang
from spanmill.instrument.asking import CHAT as CHAT_ROUTE
from spanmill.triplets.records import Rollout, Triplet

Spans = Callable[[], list[ReadableSpan]]
CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
PATH = "/v1/chat/completions"
TEXT: dict[str, Any] = {"model": "m", "prompt": "hi"}
SAMPLING: dict[str, Any] = {"temperature": 0.5, "top_p": 0.9, "max_new_tokens": 16}
STREAMED = {"return_input_ids_in_sglext": True, "return_output_ids_in_sglext": True, "logprobs": True}


@pytest.fixture
def stub() -> Generator[Stub]:
    """The model server."""
    with stub_sglang() as running:
        yield running


@pytest.fixture
def client(stub: Stub, emitted: Spans) -> Generator[httpx.Client]:
    """A client of a gateway before it."""
    with serving(stub.url) as found:
        yield found


def rows_of(emitted: Spans) -> list[Triplet]:
    """The rows of the only rollout."""
    (rollout,) = list[Rollout](adapt(emitted()))
    return sorted(rollout.triplets, key=lambda row: row.choice)


def told(row: Triplet) -> tuple[Any, ...]:
    """(choice, prompt ids, sampled ids, logprobs, reason, source of the ids) of a row."""
    return (
        row.choice,
        None if row.prompt_token_ids is None else row.prompt_token_ids.tolist(),
        None if row.response_token_ids is None else row.response_token_ids.tolist(),
        None if row.response_logprobs is None else row.response_logprobs.tolist(),
        row.finish_reason,
        row.ids_source,
    )


def truth(sample: int, *, logprobs: bool = True, source: str = "gateway") -> tuple[Any, ...]:
    """The row of a sample."""
    return (sample, PROMPT, ids_of(sample), logprobs_of(sample) if logprobs else None, "stop", source)


def parsed(answer: httpx.Response) -> Any:
    """What a client reads of an answer."""
    if answer.headers["content-type"].startswith("application/json"):
        return answer.json()
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]


def same_as_direct(client: httpx.Client, stub: Stub, path: str, body: dict[str, Any]) -> None:
    """Ask through the gateway and directly: the client must see the same."""
    through = client.post(f"/rollout/r{path}", json=body)
    direct = httpx.post(stub.url + path, json=body)
    assert (direct.status_code, parsed(direct)) == (through.status_code, parsed(through))


@pytest.mark.parametrize("n", [1, 3])
def test_a_chat(client: httpx.Client, stub: Stub, emitted: Spans, n: int) -> None:
    """Ids, logprobs and weights of every choice; SGLang says the weights of the first alone."""
    stub.versions = [{"version": "a", "start": 0, "end": 1}, {"version": "b", "start": 1, "end": 4}]
    stub.version = "b"
    body = {**CHAT, "n": n}
    same_as_direct(client, stub, PATH, body)
    assert [{**body, "return_token_ids": True, "logprobs": True, "top_logprobs": 0}, body] == stub.sent
    rows = rows_of(emitted)
    assert [truth(sample) for sample in range(n)] == [told(row) for row in rows]
    assert ["b"] + [None] * (n - 1) == [row.policy_version for row in rows]
    assert [2] + [0] * (n - 1) == [len(row.policy_versions) for row in rows]


@pytest.mark.parametrize("has_parser", [False, True], ids=["plain", "parser"])
@pytest.mark.parametrize("n", [1, 2])
def test_a_streamed_chat(client: httpx.Client, stub: Stub, emitted: Spans, n: int, has_parser: bool) -> None:
    """Refused as vLLM is asked, it goes out as SGLang is, from then on at once; its client sees nothing of it.

    Without a parser it streams no logprob of a token that shows nothing: the list has a hole, and is none.
    """
    stub.has_parser = has_parser
    body = {**CHAT, "n": n, "stream": True, "stream_options": {"include_usage": True}}
    same_as_direct(client, stub, PATH, body)
    asked = {**body, **STREAMED, "top_logprobs": 0}
    assert [{**body, "return_token_ids": True, "logprobs": True, "top_logprobs": 0}, asked, body] == stub.sent
    assert [truth(sample, logprobs=has_parser) for sample in range(n)] == [told(row) for row in rows_of(emitted)]
    stub.sent.clear()
    client.post(f"/rollout/r{PATH}", json=body)
    client.post(f"/rollout/r{PATH}", json=CHAT)
    assert [asked, {**CHAT, "return_token_ids": True, "logprobs": True, "top_logprobs": 0}] == stub.sent


def test_an_older_server(client: httpx.Client, stub: Stub, emitted: Spans) -> None:
    """One that does not know the fields of streamed chats gives text alone."""
    stub.knows_sglext = False
    same_as_direct(client, stub, PATH, {**CHAT, "stream": True})
    (row,) = rows_of(emitted)
    assert (None, None, "stop", "none") == (row.response_token_ids, row.prompt_token_ids, *told(row)[4:])


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_completions(client: httpx.Client, stub: Stub, emitted: Spans, stream: bool) -> None:
    """They are asked as vLLM's are."""
    same_as_direct(client, stub, "/v1/completions", {**TEXT, "n": 2, "stream": stream})
    assert {"return_token_ids", "logprobs"} == stub.sent[0].keys() - stub.sent[1].keys()
    assert [truth(0), truth(1)] == [told(row) for row in rows_of(emitted)]


@pytest.mark.parametrize("incremental", [False, True], ids=["cumulative", "incremental"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("n", [1, 2])
def test_generate(client: httpx.Client, stub: Stub, emitted: Spans, n: int, stream: bool, incremental: bool) -> None:
    """SGLang's own API, streamed in either form: each sample has an id of its own."""
    stub.incremental = incremental
    stub.version = "step-7"
    params = SAMPLING | ({"n": n} if n > 1 else {})
    body = {"text": "hi", "sampling_params": params} | ({"stream": True} if stream else {})
    same_as_direct(client, stub, "/generate", body)
    assert [{**body, "return_logprob": True, "return_prompt_token_ids": True}, body] == stub.sent
    rows = rows_of(emitted)
    assert [truth(sample) for sample in range(n)] == [told(row) for row in rows]
    assert ["rid0", "rid1#1"][:n] == [row.call_id for row in rows]
    (row, *_) = rows
    assert ("step-7", 0.5, 16, [{"role": "user", "content": "hi"}]) == (
        row.policy_version,
        row.temperature,
        row.max_tokens,
        json.loads(row.messages or ""),
    )
    assert {"role": "assistant", "content": "".join(WORDS)} == json.loads(row.response or "")


def test_generate_with_ids(client: httpx.Client, stub: Stub, emitted: Spans) -> None:
    """A trainer's own options win: what it asks for it gets, and the prompt's ids are those that it sent."""
    body = {"input_ids": PROMPT, "sampling_params": SAMPLING, "return_logprob": True, "return_prompt_token_ids": False}
    answer = client.post("/rollout/r/generate", json=body).json()
    assert ([body], logprobs_of(0)) == (stub.sent, [entry[0] for entry in answer["meta_info"]["output_token_logprobs"]])
    assert [truth(0)] == [told(row) for row in rows_of(emitted)]


def test_what_is_no_generate_of_sglang(client: httpx.Client, stub: Stub, emitted: Spans) -> None:
    """Another server's `/generate`, a longer path and what is no JSON pass as they are."""
    client.post("/generate", json={"inputs": "hi"})
    client.post("/inference/v1/generate", json={"text": "hi"})
    client.post("/generate", json={"text": "hi"}, headers={"x-spanmill-skip": "1"})
    assert [{"inputs": "hi"}, {"text": "hi"}, {"text": "hi"}] == stub.sent
    assert [] == emitted()


def test_the_openai_client(stub: Stub, emitted: Spans) -> None:
    """An agent's own client finds out what the server is, and asks it as it wants to be asked."""
    injector.install()
    hosts.forget()
    agent = openai.OpenAI(base_url=f"{stub.url}/v1", api_key="k", max_retries=0)
    stub.has_parser = True
    for stream in (False, True):
        answer: Any = agent.chat.completions.create(**CHAT, stream=stream)
        chunks = list(answer) if stream else [answer]
        assert all(getattr(chunk, "sglext", None) is None for chunk in chunks)
    whole, streamed = stub.sent
    assert {**CHAT, "stream": False, "return_token_ids": True, "logprobs": True, "top_logprobs": 0} == whole
    assert {**CHAT, "stream": True, **STREAMED, "top_logprobs": 0} == streamed
    assert [truth(0, source="client")] * 2 == [told(row) for rollout in adapt(emitted()) for row in rollout.triplets]


def test_a_host_that_is_named(stub: Stub, emitted: Spans, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody is probed then; the refusal tells what the server is, and the agent notices nothing."""
    injector.install()
    hosts.forget()
    monkeypatch.setenv("SPANMILL_HOSTS", "*")
    agent = openai.OpenAI(base_url=f"{stub.url}/v1", api_key="k", max_retries=0)
    stub.has_parser = True
    assert "".join(WORDS) == "".join(
        chunk.choices[0].delta.content or ""
        for chunk in agent.chat.completions.create(**CHAT, stream=True)
        if chunk.choices
    )
    assert ["return_token_ids" in body for body in stub.sent] == [True, False]
    assert [truth(0, source="client")] == [told(row) for rollout in adapt(emitted()) for row in rollout.triplets]


def test_what_is_asked_instead() -> None:
    """The example of the docstring, and what is left as it is."""
    added = {"return_token_ids": True, "logprobs": True}
    assert STREAMED == sglang.instead(CHAT_ROUTE, {"stream": True}, added)
    assert added == sglang.instead(CHAT_ROUTE, {}, added)
    assert added == sglang.instead("/completions", {"stream": True}, added)
    own = {"stream": True, "return_output_ids_in_sglext": True}
    assert {"logprobs": True, "return_input_ids_in_sglext": True} == sglang.instead(CHAT_ROUTE, own, added)


def test_prompts_of_a_batch() -> None:
    """The prompt of each sample of several prompts is the one that the request had, unless that cannot be told."""
    item: dict[str, Any] = {"text": "x", "output_ids": [7], "meta_info": {"id": "i", "completion_tokens": 1}}
    body: dict[str, Any] = {"input_ids": [[1], [2]]}

    def prompts(n: int, body: dict[str, Any]) -> list[Any]:
        return [choice["prompt_token_ids"] for choice in sglang.as_completion([item] * n, body)["choices"]]

    assert [[1], [1], [2], [2]] == prompts(4, body)
    assert [None] * 3 == prompts(3, body)
    assert [None] == prompts(1, {"input_ids": [1], "image_data": "x"})
    assert [[1]] == prompts(1, {"input_ids": [1]})
    assert [None] == prompts(1, {"text": "x"})


def test_logprobs_of_other_ids_are_none() -> None:
    """Logprobs that stand beside other ids than those that were sampled are not recorded; without ids theirs count."""
    meta = {"id": "i", "completion_tokens": 1, "output_token_logprobs": [[-1.0, 8, None]]}
    (choice,) = sglang.as_completion([{"output_ids": [7], "meta_info": meta}], {})["choices"]
    assert ([7], None) == (choice["token_ids"], choice["logprobs"])
    (choice,) = sglang.as_completion([{"meta_info": meta}], {})["choices"]
    assert ([8], {"token_logprobs": [-1.0]}) == (choice["token_ids"], choice["logprobs"])
