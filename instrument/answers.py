"""What an OpenAI-compatible answer says of each of its choices: chat and completions, as objects or as dicts.

vLLM and SGLang put ids in different places. Only what the answer holds is taken: `return_token_ids` and `logprobs` must
have been asked for.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, cast

UNNAMED: Final = "default"
"""What vLLM and SGLang call weights that nobody gave a version."""


@dataclass(frozen=True, slots=True)
class Choice:
    """One sampled choice. None means that the answer does not say."""

    index: int
    prompt_token_ids: Any = None
    """(P,)"""
    response_token_ids: Any = None
    """(R,)"""
    logprobs: list[Any] | None = None
    """(R,) natural logarithm; an element is None where the answer has none."""
    finish_reason: str | None = None
    message: Any = None
    """The assistant message in OpenAI chat shape."""
    policy_versions: list[dict[str, Any]] | None = None
    """Runs over (R,): {"version", "start", "length"}."""
    policy_version: str | None = None
    """Of the weights that sampled the last token."""
    response_id: str | None = None
    """Of this choice alone, where the server gives each its own."""


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer as a whole."""

    choices: list[Choice]
    response_id: str | None = None
    model: str | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    """The sum over all choices."""
    is_text_completion: bool = False


def _get(source: Any, name: str) -> Any:
    return cast("Mapping[str, Any]", source).get(name) if isinstance(source, Mapping) else getattr(source, name, None)


def read_answer(response: Any) -> Answer:
    """An answer of `chat.completions.create` or `completions.create`. Raises TypeError if it has no choices."""
    choices = _get(response, "choices")
    if not isinstance(choices, (list, tuple)):
        raise TypeError(f"expected an answer with choices, found {type(response).__name__}")
    items = cast("list[Any]", choices)
    usage = _get(response, "usage")
    return Answer(
        choices=[_choice(item, position, response) for position, item in enumerate(items)],
        response_id=_get(response, "id"),
        model=_get(response, "model"),
        prompt_tokens=_get(usage, "prompt_tokens"),
        completion_tokens=_get(usage, "completion_tokens"),
        is_text_completion=bool(items) and _get(items[0], "message") is None,
    )


def _choice(source: Any, position: int, response: Any) -> Choice:
    own = _get(source, "index")
    index = position if own is None else int(own)
    ext, metadata = _get(response, "sglext"), _get(response, "metadata") if position == 0 else None
    ids = _first(_get(source, "token_ids"), _get(source, "response_token_ids"))
    logprobs = _logprobs(_get(source, "logprobs"))
    if ids is None and isinstance(listed := _get(ext, "output_ids"), list) and index < len(cast("list[Any]", listed)):
        ids = cast("list[Any]", listed)[index]
        if logprobs is not None and len(logprobs) != len(ids):
            logprobs = None  # SGLang streams none for tokens that show no text: a list with a hole is not a list
    version = _first(_get(source, "weight_version"), _get(metadata, "weight_version"))
    message = _get(source, "message")
    text = _get(source, "text")
    if message is None and isinstance(text, str):
        message = {"role": "assistant", "content": text}
    return Choice(
        index=index,
        prompt_token_ids=_first(
            _get(source, "prompt_token_ids"), _get(response, "prompt_token_ids"), _get(ext, "input_ids")
        ),
        response_token_ids=ids,
        logprobs=logprobs,
        finish_reason=_get(source, "finish_reason"),
        message=message,
        policy_versions=_policy_versions(_first(_get(source, "weight_versions"), _get(metadata, "weight_versions"))),
        policy_version=None if version in (None, UNNAMED) else str(version),
        response_id=_get(source, "response_id"),
    )


def _first(*values: Any) -> Any:
    return next((value for value in values if value is not None), None)


def _logprobs(source: Any) -> list[Any] | None:
    """Of the sampled tokens: `content[].logprob` (chat) or `token_logprobs` (completions)."""
    content = _get(source, "content")
    if isinstance(content, (list, tuple)):
        items = cast("list[Any]", content)
        if all(type(item) is dict for item in items):  # as they come off the wire: three times as fast
            return [item.get("logprob") for item in items]
        return [_get(item, "logprob") for item in items]
    flat = _get(source, "token_logprobs")
    return list(cast("list[Any]", flat)) if isinstance(flat, (list, tuple)) else None


def _policy_versions(source: Any) -> list[dict[str, Any]] | None:
    """Runs from `weight_versions`, in which the server states `[start, end)` over the response tokens."""
    if not isinstance(source, (list, tuple)) or not source:
        return None
    if all(_get(s, "version") == UNNAMED for s in cast("list[Any]", source)):
        return None
    runs = ((str(_get(s, "version")), int(_get(s, "start")), int(_get(s, "end"))) for s in cast("list[Any]", source))
    return [{"version": version, "start": start, "length": end - start} for version, start, end in runs]
