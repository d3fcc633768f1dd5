"""A model server that answers as vLLM does, for tests of clients: chat and completions, whole and streamed.

What it samples depends on the number of the choice alone, so that a test knows every token. It keeps what it was sent.
"""

import json
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from stub_server import Speaking, serving

Json = dict[str, Any]

PROMPT: list[int] = [1, 2, 3]
WORDS = ("Hello", " wor", "", "ld")
"""Texts of the sampled tokens: the third shows nothing by itself, as half a character does."""


class Received(NamedTuple):
    """A request."""

    path: str
    headers: dict[str, str]
    body: Json


def ids_of(choice: int) -> list[int]:
    """Sampled ids of a choice."""
    return [100 * (choice + 1) + at for at in range(len(WORDS))]


def logprobs_of(choice: int) -> list[float]:
    """Logprobs of a choice, exact in float32."""
    return [-0.5 * (choice + 1) - 0.25 * at for at in range(len(WORDS))]


class Stub:
    """A running server, and how it behaves."""

    def __init__(self) -> None:
        self.url = ""
        self.received: list[Received] = []
        self.probes = 0
        self.version: Json | None = {"version": "0.32.0"}
        """What `/version` answers; None for 404."""
        self.unknown: tuple[str, ...] = ()
        """Fields that are refused with 400."""
        self.fails = 0
        """How many requests are answered with 500 first."""
        self.text: str | None = None
        """The whole text of every answer, in place of `WORDS`."""
        self.delay_s = 0.0
        """Before each chunk but the first."""
        self.unique_ids = False
        """Whether each answer has an id of its own, as vLLM's have."""
        self.answered = 0

    def head(self, body: Json, *, chat: bool) -> Json:
        """Id, kind and model of the next answer."""
        self.answered += 1
        number = self.answered if self.unique_ids else 1
        kind = ("chat.completion.chunk" if body.get("stream") else "chat.completion") if chat else "text_completion"
        return {
            "id": f"{'chatcmpl' if chat else 'cmpl'}-{number}",
            "object": kind,
            "created": 1,
            "model": body["model"],
        }

    @property
    def sent(self) -> list[Json]:
        """Bodies of the requests."""
        return [request.body for request in self.received]


def _chat_logprobs(choice: int, at: slice) -> Json:
    entries = zip(WORDS[at], logprobs_of(choice)[at], strict=True)
    return {"content": [{"token": w, "logprob": p, "bytes": list(w.encode()), "top_logprobs": []} for w, p in entries]}


def _text_logprobs(choice: int, at: slice) -> Json:
    pairs = list(zip(WORDS[at], logprobs_of(choice)[at], strict=True))
    return {
        "text_offset": [0] * len(pairs),
        "token_logprobs": [p for _, p in pairs],
        "tokens": [w for w, _ in pairs],
        "top_logprobs": [{w: p} for w, p in pairs],
    }


def _choice(body: Json, choice: int, at: slice, *, chat: bool) -> Json:
    """What of a choice both forms of an answer have."""
    ids = body.get("return_token_ids")
    asks = body.get("logprobs") if chat else body.get("logprobs") is not None
    logprobs = (_chat_logprobs if chat else _text_logprobs)(choice, at) if asks else None
    own = {} if chat else {"prompt_token_ids": PROMPT if ids and at.start == 0 else None}
    return {"index": choice, "logprobs": logprobs, "token_ids": ids_of(choice)[at] if ids else None, **own}


def whole(stub: Stub, body: Json, *, chat: bool) -> Json:
    """An answer that is not streamed."""
    text = "".join(WORDS) if stub.text is None else stub.text
    said = {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
    everything = slice(0, len(WORDS))
    n = body.get("n") or 1
    choices = [
        {**_choice(body, c, everything, chat=chat), **said, "finish_reason": "stop", "stop_reason": None}
        for c in range(n)
    ]
    ids = {"prompt_token_ids": PROMPT if body.get("return_token_ids") else None} if chat else {}
    tokens = n * len(WORDS)
    usage = {"prompt_tokens": len(PROMPT), "completion_tokens": tokens, "total_tokens": len(PROMPT) + tokens}
    return {**stub.head(body, chat=chat), "choices": choices, "usage": usage, **ids}


def chunks(stub: Stub, body: Json, *, chat: bool) -> Iterator[Json]:
    """A streamed answer. Tokens that show nothing make a chunk only for who asks for ids."""
    head, n = stub.head(body, chat=chat), body.get("n") or 1
    ids = body.get("return_token_ids")
    for c in range(n if chat else 0):
        first = {"index": c, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
        yield {**head, "choices": [first], "prompt_token_ids": PROMPT if ids else None}
    for at, word in enumerate(WORDS):
        for c in range(n):
            last = at == len(WORDS) - 1
            if chat and not word and not ids:
                continue
            said = {"delta": {"content": word} if word else {}} if chat else {"text": word}
            sampled = _choice(body, c, slice(at, at + 1), chat=chat)
            yield {**head, "choices": [{**sampled, **said, "finish_reason": "stop" if last else None}]}
    options: Json = body.get("stream_options") or {}
    if options.get("include_usage"):
        tokens = n * len(WORDS)
        usage = {"prompt_tokens": len(PROMPT), "completion_tokens": tokens, "total_tokens": len(PROMPT) + tokens}
        yield {**head, "choices": [], "usage": usage}


@contextmanager
def stub_vllm() -> Generator[Stub]:
    """A running stub."""
    stub = Stub()

    class Handler(Speaking):
        def do_GET(self) -> None:
            stub.probes += 1
            self.send_json(404 if stub.version is None else 200, stub.version or {"detail": "Not Found"})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            stub.received.append(Received(self.path, {k.lower(): v for k, v in self.headers.items()}, body))
            refused = [name for name in stub.unknown if name in body]
            if refused:
                self.send_json(400, {"error": {"message": f"Unrecognized request argument supplied: {refused[0]}"}})
            elif stub.fails:
                stub.fails -= 1
                self.send_json(500, {"error": {"message": "try again"}})
            elif body.get("stream"):
                self.send_events(chunks(stub, body, chat=self.path.endswith("/chat/completions")), stub.delay_s)
            else:
                self.send_json(200, whole(stub, body, chat=self.path.endswith("/chat/completions")))

    with serving(Handler) as stub.url:
        yield stub
