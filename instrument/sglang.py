"""What SGLang must be asked for so that its answers hold token ids and logprobs, and what it answers.

By its source, 0.5.23. Its OpenAI routes know vLLM's `return_token_ids`, but for streamed chats, which they refuse with
it and for which there are fields of their own. Its own route `/generate` is an API of another shape. Pure.

    chat            choices[].prompt_token_ids, choices[].response_token_ids
    chat, streamed  a last chunk with sglext.input_ids and sglext.output_ids (a list for each choice)
    completions     as vLLM: choices[].prompt_token_ids, choices[].token_ids
    /generate       output_ids, prompt_token_ids, meta_info.output_token_logprobs: [logprob, id, text] for each token
"""

from collections.abc import Mapping
from typing import Any, Final, cast

from spanmill.instrument.asking import CHAT, IDS, LOGPROBS

Object = dict[str, Any]

GENERATE: Final = "/generate"

STREAMED: Final = "return_token_ids with stream"
"""Among the fields that a server refuses: it is SGLang, which refuses this one in streamed chats alone."""
REFUSAL: Final = "return_token_ids is not supported with streaming"
STREAMED_IDS: Final = {"return_input_ids_in_sglext": "input_ids", "return_output_ids_in_sglext": "output_ids"}
"""The fields of streamed chats, and where each is answered in `sglext`."""

RETURN_LOGPROB: Final = "return_logprob"
RETURN_PROMPT: Final = "return_prompt_token_ids"
_ENTRIES: Final = "output_token_logprobs"
_LOGPROBS: Final = (
    "input_token_logprobs",
    _ENTRIES,
    "output_token_logprobs_length",
    "input_top_logprobs",
    "output_top_logprobs",
    "input_token_ids_logprobs",
    "output_token_ids_logprobs",
)
"""What `return_logprob` adds to `meta_info`."""


# ------------------------------------------------------------------ what is asked for


def is_generate(body: Mapping[str, Any]) -> bool:
    """Whether a request to `/generate` is one of SGLang's: other servers have such a route, with other fields."""
    return "text" in body or "input_ids" in body


def missing(body: Mapping[str, Any]) -> Object:
    """The fields to add to a request to `/generate`."""
    return {name: True for name in (RETURN_LOGPROB, RETURN_PROMPT) if body.get(name) is None}


def instead(route: str, body: Mapping[str, Any], added: Object) -> Object:
    """The fields to add to a request in place of vLLM's, known that the server is SGLang.

    instead("/chat/completions", {"stream": True}, {"return_token_ids": True, "logprobs": True})
    == {"logprobs": True, "return_input_ids_in_sglext": True, "return_output_ids_in_sglext": True}
    """
    if route != CHAT or IDS not in added or not body.get("stream"):
        return added
    own = {name: True for name in STREAMED_IDS if body.get(name) is None}
    return {name: value for name, value in added.items() if name != IDS} | own


def request_of(body: Mapping[str, Any]) -> Object:
    """What a request to `/generate` asks for, as the arguments of `spanmill.call`; None where it does not say."""
    params: object = body.get("sampling_params")
    said = cast("Object", params) if isinstance(params, dict) else {}
    text = body.get("text")
    return {
        **{name: said.get(name) for name in ("temperature", "top_p", "top_k", "n")},
        "max_tokens": said.get("max_new_tokens"),
        "messages": [{"role": "user", "content": text}] if isinstance(text, str) else None,
    }


# ------------------------------------------------------------------ what is answered


def is_answer(answer: Mapping[str, Any]) -> bool:
    """Whether an answer of the OpenAI routes, or a chunk of one, is SGLang's."""
    choices = cast("list[Object]", answer.get("choices") or [])
    return "sglext" in answer or any("matched_stop" in choice for choice in choices)


def strip(answer: Object, added: Mapping[str, Any]) -> bool:
    """Take what was added for us out of an answer or a chunk of one; whether it changed.

    Ids that nobody asked for have no key in SGLang's answers, logprobs have null.
    """
    choices = cast("list[Object]", answer.get("choices") or [])
    changed = False
    if IDS in added:
        for choice in choices:
            for name in ("prompt_token_ids", "response_token_ids", "token_ids"):
                changed |= choice.pop(name, None) is not None
    ext = cast("Object | None", answer.get("sglext"))
    if ext is not None:
        for field, name in STREAMED_IDS.items():
            changed |= field in added and ext.pop(name, None) is not None
        if not ext:
            del answer["sglext"]
    if LOGPROBS in added:
        for choice in choices:
            changed |= choice.get(LOGPROBS) is not None
            choice[LOGPROBS] = None
    return changed


def is_empty_chunk(chunk: Mapping[str, Any]) -> bool:
    """Whether nothing is left of a chunk that held only what was added for us."""
    if chunk.get("usage") is not None or "sglext" in chunk:
        return False
    choices = cast("list[Object]", chunk.get("choices") or [])
    deltas = [cast("Object", choice.get("delta") or {}) for choice in choices]
    says_nothing = all(value in (None, "") for delta in deltas for value in delta.values())
    return says_nothing and all(choice.get("finish_reason") is None and "text" not in choice for choice in choices)


# ------------------------------------------------------------------ /generate


def items_of(answer: Any) -> list[Object]:
    """The samples of an answer of `/generate`: one, or a list for several prompts or samples; none if it is none."""
    found = cast("list[Any]", answer) if isinstance(answer, list) else [answer]
    return [
        item for item in found if isinstance(item, dict) and isinstance(cast("Object", item).get("meta_info"), dict)
    ]


def strip_items(items: list[Object], added: Mapping[str, Any]) -> bool:
    """`strip` for samples of `/generate`, which have no key for what nobody asked for."""
    changed = False
    for item in items:
        if RETURN_PROMPT in added:
            changed |= item.pop("prompt_token_ids", None) is not None
        if RETURN_LOGPROB in added:
            for name in _LOGPROBS:
                changed |= cast("Object", item["meta_info"]).pop(name, None) is not None
    return changed


class Generated:
    """A streamed answer of `/generate`, event by event.

    An event holds all that was sampled so far or, under `--incremental-streaming-output`, what was sampled since the
    one before; `completion_tokens` tells which.
    """

    def __init__(self, body: Mapping[str, Any]) -> None:
        self._body = body
        self._samples: dict[int, Object] = {}

    def add(self, event: Object) -> None:
        """Add the next event."""
        for item in items_of(event):
            at = int(item.get("index") or 0)
            before = self._samples.get(at)
            meta: Object = {**item["meta_info"]}  # logprobs may be taken out of the event
            ids = cast("list[int]", item.get("output_ids") or [])
            item = {**item, "meta_info": meta}
            if before is not None and len(ids) != meta.get("completion_tokens"):
                earlier = cast("Object", before["meta_info"])
                item["output_ids"] = [*(before.get("output_ids") or []), *ids]
                item["text"] = str(before.get("text") or "") + str(item.get("text") or "")
                meta[_ENTRIES] = [*(earlier.get(_ENTRIES) or []), *(meta.get(_ENTRIES) or [])]
            self._samples[at] = item

    def answer(self) -> Object:
        """The answer as far as it came."""
        return as_completion([self._samples[at] for at in sorted(self._samples)], self._body)


def as_completion(items: list[Object], body: Mapping[str, Any]) -> Object:
    """Samples of `/generate` as a completion of vLLM would give them, each with an id of its own."""
    metas = [cast("Object", item["meta_info"]) for item in items]
    counts = [count for meta in metas if isinstance(count := meta.get("completion_tokens"), int)]
    usage: Object = {
        "prompt_tokens": metas[0].get("prompt_tokens") if len(metas) == 1 else None,
        "completion_tokens": sum(counts) if counts and len(counts) == len(metas) else None,
    }
    n = len(items)
    return {"choices": [_choice(item, at, n, body) for at, item in enumerate(items)], "usage": usage}


def _choice(item: Object, at: int, n: int, body: Mapping[str, Any]) -> Object:
    meta = cast("Object", item["meta_info"])
    entries = cast("list[list[Any]]", meta.get(_ENTRIES) or [])
    ids = item.get("output_ids")
    named = [entry[1] for entry in entries]
    if ids is None and entries:
        ids = named
    reason = meta.get("finish_reason")
    return {
        "index": at,
        "text": item.get("text"),
        "response_id": meta.get("id"),
        "token_ids": ids,
        "prompt_token_ids": item.get("prompt_token_ids") or _asked_ids(body, at, n),
        "logprobs": {"token_logprobs": [entry[0] for entry in entries]} if entries and named == ids else None,
        "finish_reason": cast("Object", reason).get("type") if isinstance(reason, dict) else reason,
        "weight_versions": meta.get("weight_versions"),
        "weight_version": meta.get("weight_version"),
    }


def _asked_ids(body: Mapping[str, Any], at: int, n: int) -> Any:
    """The prompt's ids as the request has them, where it has no text and no images that would become tokens."""
    given = body.get("input_ids")
    media = any(body.get(name) for name in ("image_data", "video_data", "audio_data", "session_params"))
    if not isinstance(given, list) or not given or media:
        return None
    if not isinstance(given[0], list):
        return cast("list[int]", given)
    prompts = cast("list[list[int]]", given)
    return prompts[at * len(prompts) // n] if n % len(prompts) == 0 else None
