"""The OpenAI client, as it stands, against a server that answers like vLLM: what is recorded, what the program sees."""

import asyncio
import gc
import json
import threading
from collections.abc import Callable, Generator
from contextlib import nullcontext
from typing import Any

import openai
import pytest
from opentelemetry.sdk.trace import ReadableSpan
from pydantic import BaseModel
from stub_vllm import PROMPT, Stub, ids_of, logprobs_of, stub_vllm

from spanmill import adapt
from spanmill.instrument import Counters, counters, hosts, injector, rollout

Spans = Callable[[], list[ReadableSpan]]
MESSAGES: list[Any] = [{"role": "user", "content": "hi"}]
CHAT: dict[str, Any] = {"model": "m", "messages": MESSAGES}
ADDED = {"return_token_ids": True, "logprobs": True, "top_logprobs": 0}
MODES = pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
WORDS = "Hello world"
WITHOUT_IDS = (0, None, None, None, "stop", WORDS)


@pytest.fixture
def stub() -> Generator[Stub]:
    """A server, of which nothing is known yet."""
    hosts.forget()
    with stub_vllm() as running:
        yield running


@pytest.fixture(autouse=True)
def injected() -> None:
    """The client is patched."""
    injector.install()


def client(stub: Stub, max_retries: int = 0) -> Any:
    """A client of the server."""
    return openai.OpenAI(base_url=f"{stub.url}/v1", api_key="secret", max_retries=max_retries)


def async_client(stub: Stub) -> Any:
    """The same, async."""
    return openai.AsyncOpenAI(base_url=f"{stub.url}/v1", api_key="secret", max_retries=0)


def ask(stub: Stub, asynchronous: bool, **request: Any) -> list[Any]:
    """A chat completion: the answer, or its chunks."""
    if not asynchronous:
        with client(stub) as c:
            answer = c.chat.completions.create(**CHAT, **request)
            return list(answer) if request.get("stream") else [answer]

    async def run() -> list[Any]:
        async with async_client(stub) as c:
            answer = await c.chat.completions.create(**CHAT, **request)
            return [chunk async for chunk in answer] if request.get("stream") else [answer]

    return asyncio.run(run())


def rows(spans: list[ReadableSpan]) -> list[tuple[Any, ...]]:
    """(choice, prompt ids, sampled ids, logprobs, finish reason, text) of the rows of these spans, sorted."""
    found = [row for rollout in adapt(spans) for row in rollout.triplets]
    told = [
        (
            row.choice,
            None if row.prompt_token_ids is None else row.prompt_token_ids.tolist(),
            None if row.response_token_ids is None else row.response_token_ids.tolist(),
            None if row.response_logprobs is None else row.response_logprobs.tolist(),
            row.finish_reason,
            None if row.response is None else json.loads(row.response).get("content"),
        )
        for row in found
    ]
    return sorted(told, key=repr)


def truth(choice: int = 0, text: str | None = WORDS, finish_reason: str | None = "stop") -> tuple[Any, ...]:
    """The row of a choice that the server sampled."""
    return (choice, PROMPT, ids_of(choice), logprobs_of(choice), finish_reason, text)


def seen(answer: Any) -> Any:
    """All that the program sees of an answer, but for what names it."""
    return answer.model_dump()


@MODES
@pytest.mark.parametrize("n", [1, 2])
def test_a_whole_answer(stub: Stub, emitted: Spans, asynchronous: bool, n: int) -> None:
    """Every choice is a row with its ids and logprobs; the request asks for them and says nothing else new."""
    ask(stub, asynchronous, n=n)
    assert [truth(choice) for choice in range(n)] == rows(emitted())
    assert [{**CHAT, "n": n, **ADDED}] == stub.sent


@MODES
@pytest.mark.parametrize("n", [1, 2])
def test_a_streamed_answer(stub: Stub, emitted: Spans, asynchronous: bool, n: int) -> None:
    """The same of a stream, whose tokens come one by one."""
    ask(stub, asynchronous, n=n, stream=True)
    assert [truth(choice) for choice in range(n)] == rows(emitted())


@MODES
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_the_program_sees_what_it_would_have_seen(
    stub: Stub, emitted: Spans, asynchronous: bool, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Answers and chunks are those of a request that asks for nothing, to the last field and the number of chunks."""
    ours = ask(stub, asynchronous, n=2, stream=stream)
    monkeypatch.setenv("SPANMILL_HOSTS", "")
    plain = ask(stub, asynchronous, n=2, stream=stream)
    assert list(map(seen, plain)) == list(map(seen, ours))
    assert ["return_token_ids" in body for body in stub.sent] == [True, False]


def test_what_the_program_asks_for_it_gets(stub: Stub, emitted: Spans) -> None:
    """The program's own options win, and their answer stays whole."""
    c = client(stub)
    with_ids = c.chat.completions.create(**CHAT, extra_body={"return_token_ids": True})
    with_logprobs = c.chat.completions.create(**CHAT, logprobs=True, top_logprobs=2)
    neither = c.chat.completions.create(**CHAT, logprobs=False, extra_body={"return_token_ids": False})
    assert ids_of(0) == with_ids.choices[0].token_ids
    assert with_ids.choices[0].logprobs is None
    assert logprobs_of(0) == [entry.logprob for entry in with_logprobs.choices[0].logprobs.content]
    assert with_logprobs.choices[0].token_ids is None
    assert [
        {**CHAT, **ADDED},
        {**CHAT, **ADDED, "top_logprobs": 2},
        {**CHAT, "logprobs": False, "return_token_ids": False},
    ] == stub.sent
    assert neither.choices[0].token_ids is None
    assert [WITHOUT_IDS, truth(), truth()] == rows(emitted())


def test_completions(stub: Stub, emitted: Spans) -> None:
    """The older API, whole and streamed; with `echo` its ids would not be those of the answer alone: none is asked."""
    c = client(stub)
    c.completions.create(model="m", prompt="hi", n=2)
    list(c.completions.create(model="m", prompt="hi", stream=True))
    c.completions.create(model="m", prompt="hi", echo=True)
    assert [WITHOUT_IDS, truth(0), truth(0), truth(1)] == rows(emitted())
    assert [0, 0, None] == [body.get("logprobs") for body in stub.sent]


class Shape(BaseModel):
    """What `.parse` is to make of an answer."""

    name: str


def test_an_answer_that_does_not_parse_keeps_its_ids(stub: Stub, emitted: Spans) -> None:
    """The client raises as it would; the row is there, whole and trainable."""
    stub.text = '{"name": '
    with pytest.raises(ValueError, match="Invalid JSON"):
        client(stub).beta.chat.completions.parse(**CHAT, response_format=Shape)
    spans = emitted()
    assert [truth(text='{"name": ')] == rows(spans)
    assert [True] == [row.trainable for r in adapt(spans) for row in r.triplets]


def test_parse(stub: Stub, emitted: Spans) -> None:
    """A parsed answer is the program's; its row has the text as it came."""
    stub.text = '{"name": "x"}'
    answer = client(stub).beta.chat.completions.parse(**CHAT, response_format=Shape)
    assert Shape(name="x") == answer.choices[0].message.parsed
    assert [truth(text='{"name": "x"}')] == rows(emitted())


def test_raw_and_streaming_responses(stub: Stub, emitted: Spans) -> None:
    """`with_raw_response`, parsed and as text; `with_streaming_response`, read whole, by lines and as events."""
    completions = client(stub).chat.completions
    raw = completions.with_raw_response.create(**CHAT)
    assert WORDS == raw.parse().choices[0].message.content
    assert "token_ids" in raw.http_response.text and str(ids_of(0)[0]) not in raw.http_response.text
    with completions.with_streaming_response.create(**CHAT) as response:
        parsed = response.parse()
        assert WORDS == parsed.choices[0].message.content
    with completions.with_streaming_response.create(**CHAT, stream=True) as response:
        lines = [line for line in response.iter_lines() if line]
        assert (5, "data: [DONE]") == (len(lines), lines[-1])
    chunks = completions.with_raw_response.create(**CHAT, stream=True).parse()
    assert WORDS == "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert [truth()] * 4 == rows(emitted())


def test_the_stream_helper(stub: Stub, emitted: Spans) -> None:
    """`.stream()` gives its events and its final answer as ever."""
    with client(stub).beta.chat.completions.stream(**CHAT) as events:
        assert WORDS == "".join(event.delta for event in events if event.type == "content.delta")
        final = events.get_final_completion()
    assert WORDS == final.choices[0].message.content
    assert [truth()] == rows(emitted())


@pytest.mark.parametrize("how", ["close", "break", "with"])
def test_a_stream_that_is_left_early(stub: Stub, emitted: Spans, how: str) -> None:
    """It ends when it is closed or thrown away, with the tokens that came and no finish reason."""
    stub.delay_s = 0.05
    stream = client(stub).chat.completions.create(**CHAT, stream=True)
    with stream if how == "with" else nullcontext():
        assert [None, "Hello"] == [next(stream).choices[0].delta.content or None for _ in range(2)]
    if how == "close":
        stream.close()
    del stream
    gc.collect()
    assert [(0, PROMPT, ids_of(0)[:1], logprobs_of(0)[:1], None, "Hello")] == rows(emitted())


def test_an_async_stream_that_is_left_early(stub: Stub, emitted: Spans) -> None:
    """The same of an async one, closed in another task than the one that read it."""
    stub.delay_s = 0.05

    async def run() -> None:
        c = async_client(stub)
        stream = await c.chat.completions.create(**CHAT, stream=True)
        await anext(stream)
        await anext(stream)
        await asyncio.create_task(stream.close())

    asyncio.run(run())
    assert [(0, PROMPT, ids_of(0)[:1], logprobs_of(0)[:1], None, "Hello")] == rows(emitted())


@MODES
def test_a_server_that_is_not_vllm_is_asked_for_nothing(stub: Stub, emitted: Spans, asynchronous: bool) -> None:
    """It is asked once whether it is vLLM or SGLang; requests go as they were written and are rows without ids."""
    stub.version = None
    for _ in range(2):
        ask(stub, asynchronous)
    assert (2, [CHAT, CHAT]) == (stub.probes, stub.sent)
    assert {"traceparent", "x-spanmill-rollout-id"}.isdisjoint(stub.received[0].headers)
    assert [WITHOUT_IDS] * 2 == rows(emitted())


@MODES
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_field_that_is_refused_is_not_sent_again(
    stub: Stub, emitted: Spans, asynchronous: bool, stream: bool
) -> None:
    """After a 400 that names it the request goes as the program wrote it, which notices nothing; later without it."""
    stub.unknown = ("return_token_ids",)
    for _ in range(2):
        ask(stub, asynchronous, stream=stream)
    asked = {**CHAT, "stream": stream}
    rest = {name: value for name, value in ADDED.items() if name != "return_token_ids"}
    assert [{**asked, **ADDED}, asked, {**asked, **rest}] == stub.sent
    assert [WITHOUT_IDS] * 2 == [(*row[:3], None, *row[4:]) for row in rows(emitted())]


def test_an_error_that_is_the_programs_own_is_raised(stub: Stub, emitted: Spans) -> None:
    """A 400 that names none of our fields is not sent twice, and the call failed."""
    stub.unknown = ("seed",)
    with pytest.raises(openai.BadRequestError, match="seed"):
        client(stub).chat.completions.create(**CHAT, seed=1)
    (span,) = emitted()
    assert (1, "BadRequestError", False) == (len(stub.sent), (span.attributes or {})["error.type"], span.status.is_ok)


def test_retries_of_the_client_are_one_call(stub: Stub, emitted: Spans) -> None:
    """The client's own retries stand inside one span."""
    stub.fails = 1
    client(stub, max_retries=2).chat.completions.create(**CHAT)
    assert ([truth()], 2) == (rows(emitted()), len(stub.sent))


def test_the_list_of_hosts(stub: Stub, emitted: Spans, monkeypatch: pytest.MonkeyPatch) -> None:
    """`SPANMILL_HOSTS` decides alone: a listed server is asked unprobed, another is left alone unprobed."""
    stub.version = None
    for hosts_named in ("example.org, 127.0.0.1", stub.url.removeprefix("http://"), "*", "127.0.0.1:1", ""):
        monkeypatch.setenv("SPANMILL_HOSTS", hosts_named)
        ask(stub, asynchronous=False)
    assert (0, [True, True, True, False, False]) == (
        stub.probes,
        ["return_token_ids" in body for body in stub.sent],
    )


def test_the_request_says_whose_it_is(stub: Stub, emitted: Spans) -> None:
    """Rollout and span go along in headers, unless the program has set them itself."""
    with rollout("r/1", attempt=2):
        client(stub).chat.completions.create(**CHAT)
        client(stub).chat.completions.create(**CHAT, extra_headers={"X-Spanmill-Rollout-Id": "mine"})
    calls = [span for span in emitted() if span.name == "chat m"]
    parents = [f"{span.context.span_id:016x}" for span in calls if span.context is not None]
    headers = [request.headers for request in stub.received]
    assert ["r/1", "mine"] == [h["x-spanmill-rollout-id"] for h in headers]
    assert ["2", "0"] == [h["x-spanmill-attempt"] for h in headers]
    assert parents == [h["traceparent"].split("-")[2] for h in headers]
    assert ["r/1", "mine"] == [(span.attributes or {})["spanmill.rollout.id"] for span in calls]


def test_a_request_that_is_not_to_be_recorded(stub: Stub, emitted: Spans) -> None:
    """`x-spanmill-skip: 1` leaves it alone, and so does everything that generates nothing."""
    client(stub).chat.completions.create(**CHAT, extra_headers={"x-spanmill-skip": "1"})
    client(stub).models.with_raw_response.list()
    assert ([CHAT], []) == (stub.sent, emitted())


def test_two_rollouts_at_once_are_never_mixed(stub: Stub, emitted: Spans) -> None:
    """Threads and tasks that each run a rollout of their own, over one client."""
    c = async_client(stub)

    async def one(name: str) -> None:
        async with rollout(name):
            await c.chat.completions.create(model=name, messages=MESSAGES)

    async def run() -> None:
        await asyncio.gather(*(one(f"task-{at}") for at in range(8)))
        await c.close()

    def threaded(name: str) -> None:
        with rollout(name):
            client(stub).chat.completions.create(model=name, messages=MESSAGES)

    asyncio.run(run())
    threads = [threading.Thread(target=threaded, args=(f"thread-{at}",)) for at in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    names = sorted([f"{kind}-{at}" for kind in ("task", "thread") for at in range(8)])
    found = adapt(emitted())
    assert [(name, [name]) for name in names] == [(r.rollout_id, [t.model for t in r.triplets]) for r in found]


def test_the_programs_own_options_are_not_touched(stub: Stub, emitted: Spans) -> None:
    """What the program passes in is as it was afterwards, and nothing of ours failed."""
    body = {"seed": 1}
    headers = {"x-own": "1"}
    before = counters().ignored
    client(stub).chat.completions.create(**CHAT, extra_body=body, extra_headers=headers)
    emitted()
    assert ({"seed": 1}, {"x-own": "1"}, before) == (body, headers, Counters(*counters()).ignored)


@pytest.mark.parametrize("form", ["url", "key", "headers"])
def test_a_client_made_for_a_rollout_is_its_own(stub: Stub, emitted: Spans, form: str) -> None:
    """Wherever it is used: the server is told so, and the span says the same."""
    with rollout("mine/1", attempt=2, base_url=f"{stub.url}/v1") as r:
        given: dict[str, Any] = {
            "url": {"base_url": r.base_url},
            "key": {"api_key": r.api_key},
            "headers": {"default_headers": r.headers},
        }[form]
    options: Any = {"base_url": f"{stub.url}/v1", "api_key": "x", **given}
    with rollout("another"), openai.OpenAI(**options) as c:
        c.chat.completions.create(**CHAT)
    (call,) = (span.attributes or {} for span in emitted() if span.name.startswith("chat"))
    assert ("mine/1", 2) == (call["spanmill.rollout.id"], call["spanmill.rollout.attempt"])
    (received,) = stub.received
    assert ("mine/1", "2") == (received.headers["x-spanmill-rollout-id"], received.headers["x-spanmill-attempt"])


def test_a_process_that_is_a_rollout_may_hold_others(
    stub: Stub, emitted: Spans, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What `spanmill run` puts into the headers of every client is not what a client is made for."""
    monkeypatch.setenv("SPANMILL_ROLLOUT_ID", "process")
    with (
        rollout("inner"),
        openai.OpenAI(
            base_url=f"{stub.url}/v1", api_key="x", default_headers={"x-spanmill-rollout-id": "process"}
        ) as c,
    ):
        c.chat.completions.create(**CHAT)
    (received,) = stub.received
    assert "inner" == received.headers["x-spanmill-rollout-id"]
