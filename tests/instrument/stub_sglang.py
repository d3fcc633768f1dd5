"""A model server that answers as SGLang's source says (0.5.23): chat, completions and `/generate`, whole and streamed.

What it samples depends on the number of the sample alone, so that a test knows every token. It keeps what it was sent.
"""

import json
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import Any, cast

from stub_server import Speaking, serving

Json = dict[str, Any]

PROMPT: list[int] = [1, 2, 3]
WORDS = ("Hello", " wor", "ld", "")
"""Texts of the sampled tokens: the last is the stop token, which shows nothing."""
STOP = 2
INFO: Json = {"model_path": "m", "is_generation": True, "weight_version": "default", "tokenizer_path": "m"}
REFUSAL = (
    "return_token_ids is not supported with streaming on /v1/chat/completions. Please set stream=false when using "
    "return_token_ids=true."
)


def ids_of(sample: int) -> list[int]:
    """Sampled ids, the stop token at their end."""
    return [100 * (sample + 1) + at for at in range(len(WORDS) - 1)] + [STOP]


def logprobs_of(sample: int) -> list[float]:
    """Logprobs of a sample, exact in float32."""
    return [-0.5 * (sample + 1) - 0.25 * at for at in range(len(WORDS))]


class Stub:
    """A running server, and how it behaves."""

    def __init__(self) -> None:
        self.url = ""
        self.sent: list[Json] = []
        """Bodies of the requests."""
        self.paths: list[str] = []
        self.versions: list[Json] | None = None
        """`weight_versions` of what is sampled; None as of a server that does not track them."""
        self.version = "default"
        self.has_parser = False
        """Whether it runs with --tool-call-parser: then logprobs of tokens that show nothing have their own chunk."""
        self.incremental = False
        """Whether it runs with --incremental-streaming-output."""
        self.knows_sglext = True
        """Whether it is new enough for `return_output_ids_in_sglext`."""


def _entries(sample: int) -> list[list[Any]]:
    return [list(e) for e in zip(logprobs_of(sample), ids_of(sample), WORDS, strict=True)]


def _metadata(stub: Stub) -> Json:
    """Of the first sample alone."""
    return {"weight_version": stub.version} | ({"weight_versions": stub.versions} if stub.versions else {})


def _chat_logprobs(sample: int, at: slice) -> Json:
    pairs = list(zip(WORDS, logprobs_of(sample), strict=True))[at]
    return {"content": [{"token": w, "bytes": list(w.encode()), "logprob": p, "top_logprobs": []} for w, p in pairs]}


def _usage(n: int) -> Json:
    sampled = n * len(WORDS)
    return {
        "prompt_tokens": 3,
        "completion_tokens": sampled,
        "total_tokens": 3 + sampled,
        "prompt_tokens_details": None,
    }


def _ext(body: Json, n: int) -> Json | None:
    ext: Json = {}
    if body.get("return_input_ids_in_sglext"):
        ext["input_ids"] = PROMPT
    if body.get("return_output_ids_in_sglext"):
        ext["output_ids"] = [ids_of(sample) for sample in range(n)]
    return ext or None


def chat(stub: Stub, body: Json) -> Json:
    """`/v1/chat/completions`."""
    n = body.get("n") or 1
    choices: list[Json] = []
    for sample in range(n):
        choice: Json = {
            "index": sample,
            "message": {"role": "assistant", "content": "".join(WORDS), "reasoning_content": None},
            "logprobs": _chat_logprobs(sample, slice(None)) if body.get("logprobs") else None,
            "finish_reason": "stop",
            "matched_stop": STOP,
        }
        if body.get("return_token_ids") or body.get("return_prompt_token_ids"):
            choice["prompt_token_ids"] = PROMPT
        if body.get("return_token_ids"):
            choice["response_token_ids"] = ids_of(sample)
        if body.get("return_meta_info"):
            choice["meta_info"] = {"output_token_logprobs": _entries(sample), "weight_version": stub.version}
        choices.append(choice)
    answer = {"id": "rid0", "object": "chat.completion", "created": 1, "model": body["model"], "choices": choices}
    answer |= {"usage": _usage(n), "metadata": _metadata(stub)}
    ext = _ext(body, n) if stub.knows_sglext else None
    return answer | ({"sglext": ext} if ext else {})


def chat_chunks(stub: Stub, body: Json) -> Iterator[Json]:
    """The same, streamed: every sample's chunks with an id of its own, then the reasons, `sglext`, and usage."""
    n = body.get("n") or 1

    def chunk(sample: int, delta: Json, **more: Any) -> Json:
        delta = {"reasoning_content": None} | delta
        choice = {"index": sample, "delta": delta, "logprobs": None, "finish_reason": None, "matched_stop": None} | more
        head = {"id": f"rid{sample}", "object": "chat.completion.chunk", "created": 1, "model": body["model"]}
        return head | {"choices": [choice]}

    for sample in range(n):
        yield chunk(sample, {"role": "assistant", "content": ""})
    for at, word in enumerate(WORDS):
        for sample in range(n):
            probs = _chat_logprobs(sample, slice(at, at + 1)) if body.get("logprobs") else None
            if word:
                yield chunk(sample, {"content": word}, logprobs=probs)
            elif probs and stub.has_parser:
                yield chunk(sample, {}, logprobs=probs)
    for sample in range(n):
        yield chunk(sample, {}, finish_reason="stop", matched_stop=STOP)
    tail: Json = {"id": "rid0", "object": "chat.completion.chunk", "created": 1, "model": body["model"], "choices": []}
    ext = _ext(body, n) if stub.knows_sglext else None
    if ext:
        yield tail | {"usage": None, "sglext": ext}
    options: Json = body.get("stream_options") or {}
    if options.get("include_usage"):
        yield tail | {"usage": _usage(n)}


def _text_choice(body: Json, sample: int, at: slice) -> Json:
    probs = None
    if body.get("logprobs") is not None:
        pairs = list(zip(WORDS, logprobs_of(sample), strict=True))[at]
        probs = {"text_offset": [-1] * len(pairs), "token_logprobs": [p for _, p in pairs]}
        probs |= {"tokens": [w for w, _ in pairs], "top_logprobs": [None] * len(pairs)}
    choice: Json = {
        "index": sample,
        "text": "".join(WORDS[at]),
        "logprobs": probs,
        "finish_reason": None,
        "matched_stop": None,
    }
    if body.get("return_token_ids"):
        choice["token_ids"] = ids_of(sample)[at]
        if not at.start:
            choice["prompt_token_ids"] = PROMPT
    return choice


def completion(stub: Stub, body: Json) -> Json:
    """`/v1/completions`."""
    n = body.get("n") or 1
    ended = {"finish_reason": "stop", "matched_stop": STOP}
    choices = [_text_choice(body, sample, slice(0, len(WORDS))) | ended for sample in range(n)]
    head = {"id": "rid0", "object": "text_completion", "created": 1, "model": body["model"], "choices": choices}
    return head | {"usage": _usage(n), "metadata": _metadata(stub)}


def completion_chunks(stub: Stub, body: Json) -> Iterator[Json]:
    """The same, streamed."""
    for at in range(len(WORDS)):
        for sample in range(body.get("n") or 1):
            last = at == len(WORDS) - 1
            ended = {"finish_reason": "stop", "matched_stop": STOP} if last else {}
            choice = _text_choice(body, sample, slice(at, at + 1)) | ended
            head = {"id": f"rid{sample}", "object": "text_completion", "created": 1, "model": body["model"]}
            yield head | {"choices": [choice], "usage": None}


def _sample(stub: Stub, body: Json, sample: int, at: slice, *, ended: bool = True) -> Json:
    meta: Json = {
        "id": f"rid{sample}",
        "finish_reason": {"type": "stop", "matched": STOP} if ended else None,
        "prompt_tokens": 3,
        "weight_version": stub.version,
        "num_retractions": 0,
    }
    if body.get("return_logprob"):
        meta |= {"input_token_logprobs": [], "output_token_logprobs": [[*e[:2], None] for e in _entries(sample)][at]}
        meta["output_token_logprobs_length"] = at.stop
    meta |= {"completion_tokens": at.stop, "cached_tokens": 0, "e2e_latency": 0.5}
    if stub.versions:
        meta["weight_versions"] = stub.versions
    item: Json = {"text": "".join(WORDS[at]), "output_ids": ids_of(sample)[at], "meta_info": meta}
    return item | ({"prompt_token_ids": PROMPT} if body.get("return_prompt_token_ids") else {})


def samples_of(body: Json) -> tuple[int, bool]:
    """(how many samples a request to `/generate` asks for, whether they come as a list)."""
    given: Any = body.get("text", body.get("input_ids"))
    prompts = cast("list[Any]", given) if isinstance(given, list) else [given]
    several = isinstance(given, list) and not isinstance(prompts[0], int)
    params: Json = body["sampling_params"]
    n = int(params.get("n", 1))
    return n * (len(prompts) if several else 1), several or n > 1


def generate(stub: Stub, body: Json) -> Any:
    """`/generate`."""
    n, is_list = samples_of(body)
    items = [_sample(stub, body, sample, slice(0, len(WORDS))) for sample in range(n)]
    return items if is_list else items[0]


def generate_events(stub: Stub, body: Json) -> Iterator[Json]:
    """The same, streamed: all so far, or with --incremental-streaming-output what is new."""
    n, is_list = samples_of(body)
    for at in range(1, len(WORDS) + 1):
        for sample in range(n):
            part = slice(at - 1 if stub.incremental else 0, at)
            item = _sample(stub, body, sample, part, ended=at == len(WORDS))
            yield item | ({"index": sample} if is_list else {})


@contextmanager
def stub_sglang() -> Generator[Stub]:
    """A running stub."""
    stub = Stub()
    whole = {"/v1/chat/completions": chat, "/v1/completions": completion, "/generate": generate}
    streamed = {
        "/v1/chat/completions": chat_chunks,
        "/v1/completions": completion_chunks,
        "/generate": generate_events,
    }

    class Handler(Speaking):
        def do_GET(self) -> None:
            known = self.path == "/model_info"
            self.send_json(200 if known else 404, INFO if known else {"detail": "Not Found"})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            stub.sent.append(body)
            stub.paths.append(self.path)
            if self.path not in whole:
                self.send_json(404, {"detail": "Not Found"})
            elif self.path.endswith("/chat/completions") and body.get("stream") and body.get("return_token_ids"):
                self.send_json(400, {"object": "error", "message": REFUSAL, "type": "BadRequestError", "code": 400})
            elif body.get("stream"):
                self.send_events(streamed[self.path](stub, body))
            else:
                self.send_json(200, whole[self.path](stub, body))

    with serving(Handler) as stub.url:
        yield stub
