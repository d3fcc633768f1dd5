"""`spanmill.call`: one LLM call with its exact token ids and logprobs, a span per sampled choice."""

from collections.abc import Callable, Iterable, Mapping
from contextvars import Token
from types import TracebackType
from typing import Any, Final, TypeVar

from opentelemetry import trace
from opentelemetry.context import Context, attach, detach
from opentelemetry.trace import Span, SpanKind, Status, StatusCode
from opentelemetry.util.types import AttributeValue

from spanmill.instrument import provider
from spanmill.instrument.answers import read_answer
from spanmill.instrument.packing import token_attributes
from spanmill.instrument.reports import guarded, report
from spanmill.instrument.texts import json_text, to_json
from spanmill.semconv import (
    CAPTURE,
    CHOICE_INDEX,
    ERROR_TYPE,
    GEN_AI_CHOICE_COUNT,
    GEN_AI_FINISH_REASONS,
    GEN_AI_INPUT_MESSAGES,
    GEN_AI_INPUT_TOKENS,
    GEN_AI_MAX_TOKENS,
    GEN_AI_OPERATION,
    GEN_AI_OUTPUT_MESSAGES,
    GEN_AI_OUTPUT_TOKENS,
    GEN_AI_REQUEST_MODEL,
    GEN_AI_RESPONSE_ID,
    GEN_AI_RESPONSE_MODEL,
    GEN_AI_TEMPERATURE,
    GEN_AI_TOOL_DEFINITIONS,
    GEN_AI_TOP_K,
    GEN_AI_TOP_P,
    LOGPROBS_MODE,
    POLICY_VERSION,
    POLICY_VERSIONS,
)

Attributes = dict[str, AttributeValue]
T = TypeVar("T", int, float, str)

CHAT: Final = "chat"
TEXT_COMPLETION: Final = "text_completion"


def request_attributes(
    *,
    model: str | None = None,
    messages: object = None,
    tools: object = None,
    temperature: float | None = None,
    top_p: float | None = None,
    top_k: int | None = None,
    max_tokens: int | None = None,
    n: int | None = None,
) -> Attributes:
    """Attributes of an LLM call span for what was asked: messages and tools in OpenAI chat shape."""
    found: dict[str, str | int | float | None] = {
        GEN_AI_REQUEST_MODEL: _as(str, model, "model"),
        GEN_AI_TEMPERATURE: _as(float, temperature, "temperature"),
        GEN_AI_TOP_P: _as(float, top_p, "top_p"),
        GEN_AI_TOP_K: _as(int, top_k, "top_k"),
        GEN_AI_MAX_TOKENS: _as(int, max_tokens, "max_tokens"),
        GEN_AI_CHOICE_COUNT: _as(int, n, "n"),
        GEN_AI_TOOL_DEFINITIONS: json_text(tools, "tools"),
        GEN_AI_INPUT_MESSAGES: json_text(messages, "messages"),
    }
    return {name: value for name, value in found.items() if value is not None}


def answer_attributes(
    *,
    response_id: str | None = None,
    model: str | None = None,
    finish_reason: str | None = None,
    response: object = None,
    policy_version: str | int | None = None,
    policy_versions: list[dict[str, Any]] | None = None,
    logprobs_mode: str | None = None,
    prompt_tokens: int | None = None,
    completion_tokens: int | None = None,
) -> Attributes:
    """Attributes of an LLM call span for one choice of the answer, but for its tokens (`packing.token_attributes`)."""
    message = {"role": "assistant", "content": response} if isinstance(response, str) else response
    found: dict[str, AttributeValue | None] = {
        GEN_AI_RESPONSE_ID: _as(str, response_id, "response_id"),
        GEN_AI_RESPONSE_MODEL: _as(str, model, "model"),
        GEN_AI_FINISH_REASONS: None if finish_reason is None else [str(finish_reason)],
        GEN_AI_OUTPUT_MESSAGES: None if message is None else json_text([message], "response"),
        POLICY_VERSION: None if policy_version is None else str(policy_version),
        POLICY_VERSIONS: to_json(policy_versions, "policy_versions"),
        LOGPROBS_MODE: _as(str, logprobs_mode, "logprobs_mode"),
        GEN_AI_INPUT_TOKENS: _as(int, prompt_tokens, "prompt_tokens"),
        GEN_AI_OUTPUT_TOKENS: _as(int, completion_tokens, "completion_tokens"),
    }
    return {name: value for name, value in found.items() if value is not None}


def _as(kind: Callable[[Any], T], value: object, what: str) -> T | None:
    """`value` as a number or text of this kind; None if it is none, which is reported."""
    if value is None:
        return None
    try:
        if kind is not str or isinstance(value, str):
            return kind(value)
    except (TypeError, ValueError, OverflowError):
        pass  # reported below, like text that is none
    report(f"call {what}", f"call: {what}: found {type(value).__name__} {value!r}; it is left out")
    return None


class Call:
    """An LLM call that is going on: what `with spanmill.call(...) as c` gives. Sync and async.

    Whatever is recorded last for a choice counts. Recording raises nothing: what cannot be recorded is reported once.
    """

    def __init__(
        self, request: Mapping[str, Any], operation: str, *, capture: str = "client", others: Attributes | None = None
    ) -> None:
        self._request = request
        self._operation = operation
        self._capture = capture
        self._others = others or {}
        self._attributes: Attributes = {}
        self._choices: dict[int, Span] = {}
        self._span: Span | None = None
        self._start_ns: int | None = None
        self._around: Context | None = None
        self._token: Token[Context] | None = None

    def __enter__(self) -> "Call":
        context = self.begin()
        if context is not None:
            self._token = attach(context)
        return self

    def begin(self, around: Context | None = None) -> Context | None:
        """Start the span under `around` (default: where the code runs) without making it the current one.

        Returns the context inside the call. `end` must be called then.
        """
        with guarded("call start"):
            self._attributes = {
                CAPTURE: self._capture,
                GEN_AI_OPERATION: self._operation,
                **request_attributes(**self._request),
                **self._others,
            }
            self._around = provider.ambient() if around is None else around
            self._span = self._start()
            return trace.set_span_in_context(self._span, self._around)
        return None

    def _start(self) -> Span:
        name = f"{self._operation} {self._attributes.get(GEN_AI_REQUEST_MODEL, '')}".rstrip()
        span = provider.tracer().start_span(
            name, self._around, SpanKind.CLIENT, attributes=self._attributes, start_time=self._start_ns
        )
        self._start_ns = getattr(span, "start_time", None)
        return span

    def _span_of(self, choice: int) -> Span | None:
        """The span of a choice: the call's own for the first that is recorded, one beside it for every other."""
        if choice not in self._choices and self._span is not None:
            span = self._start() if self._choices else self._span
            span.set_attribute(CHOICE_INDEX, int(choice))
            self._choices[choice] = span
        return self._choices.get(choice)

    def record(
        self,
        *,
        prompt_token_ids: Iterable[int] | None = None,
        response_token_ids: Iterable[int] | None = None,
        logprobs: Iterable[float] | None = None,
        finish_reason: str | None = None,
        response: object = None,
        response_id: str | None = None,
        policy_version: str | int | None = None,
        policy_versions: list[dict[str, Any]] | None = None,
        logprobs_mode: str | None = None,
        model: str | None = None,
        choice: int = 0,
    ) -> None:
        """Record one choice: (P,) prompt ids, (R,) sampled ids, (R,) natural logarithms of their probabilities.

        Ids and logprobs may be lists, tuples, arrays, numpy arrays or torch tensors. `response` is the assistant
        message in OpenAI chat shape, or its text. `policy_versions` are runs over the response,
        `{"version", "start", "length"}`. An answer without `finish_reason` counts as cut off and is not trained on.
        """
        self._record(
            choice,
            token_data=(prompt_token_ids, response_token_ids, logprobs),
            finish_reason=finish_reason,
            response=response,
            response_id=response_id,
            policy_version=policy_version,
            policy_versions=policy_versions,
            logprobs_mode=logprobs_mode,
            model=model,
        )

    def _record(self, choice: int, *, token_data: tuple[Any, Any, Any], **answer: Any) -> None:
        with guarded("call record"):
            span = self._span_of(choice)
            if span is None:
                report(
                    "record outside", "call.record: the call is not going on: record inside `with spanmill.call(...)`"
                )
                return
            found = {**token_attributes(*token_data), **answer_attributes(**answer)}
            span.set_attributes(found)  # pyright: ignore[reportArgumentType]  bytes, where the SDK keeps them

    def from_response(
        self, response: Any, *, policy_version: str | int | None = None, logprobs_mode: str | None = None
    ) -> None:
        """Record every choice of an OpenAI-compatible answer, chat or completions, object or dict.

        Token ids are there if the request asked for them (vLLM: `return_token_ids`), logprobs likewise.
        """
        with guarded("call answer"):
            answer = read_answer(response)
            if answer.is_text_completion and self._operation == CHAT:
                self._operation = self._attributes[GEN_AI_OPERATION] = TEXT_COMPLETION
                if self._span is not None:
                    self._span.set_attribute(GEN_AI_OPERATION, TEXT_COMPLETION)
            if len(answer.choices) > 1:
                self._attributes[GEN_AI_CHOICE_COUNT] = len(answer.choices)
                if self._span is not None:
                    self._span.set_attribute(GEN_AI_CHOICE_COUNT, len(answer.choices))
            for choice in answer.choices:
                self._record(
                    choice.index,
                    token_data=(choice.prompt_token_ids, choice.response_token_ids, choice.logprobs),
                    finish_reason=choice.finish_reason,
                    response=choice.message,
                    response_id=choice.response_id or answer.response_id,
                    policy_version=choice.policy_version if policy_version is None else policy_version,
                    policy_versions=choice.policy_versions,
                    logprobs_mode=logprobs_mode,
                    model=answer.model,
                    prompt_tokens=answer.prompt_tokens,
                    completion_tokens=answer.completion_tokens,
                )

    def call_id(self, choice: int = 0) -> str:
        """The `call_id` of a choice that was recorded, for `spanmill.reward(..., call_id=...)`; "" if it was not."""
        span = self._choices.get(choice)
        if span is None:
            return ""
        attributes: Mapping[str, object] = getattr(span, "attributes", None) or {}
        own = attributes.get(GEN_AI_RESPONSE_ID) or trace.format_span_id(span.get_span_context().span_id)
        return f"{own}#{choice}" if choice else str(own)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with guarded("call end"):
            if self._token is not None:
                token, self._token = self._token, None
                detach(token)
        self.end(error)

    def end(self, error: BaseException | None = None) -> None:
        """End the spans of the call: a failed one if there is an error and nothing was recorded before."""
        with guarded("call end"):
            span, self._span = self._span, None
            if span is None:
                return
            if error is not None:
                span.record_exception(error)
                if not self._choices:  # else the answer is complete: what failed is what the program did with it
                    span.set_attribute(ERROR_TYPE, type(error).__qualname__)
                    span.set_status(Status(StatusCode.ERROR, str(error)))
            for each in dict.fromkeys([span, *self._choices.values()]):
                each.end()

    async def __aenter__(self) -> "Call":
        return self.__enter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.__exit__(kind, error, traceback)


def call(
    model: str | None = None,
    *,
    messages: object = None,
    tools: object = None,
    temperature: float | None = None,
    top_p: float | None = None,
    top_k: int | None = None,
    max_tokens: int | None = None,
    n: int | None = None,
    operation: str = CHAT,
) -> Call:
    """A block (`with` or `async with`) around one LLM call: `record` or `from_response` inside it what was sampled.

    `messages` and `tools` are in OpenAI chat shape. The call belongs to the rollout around it. An exception that leaves
    the block before anything was recorded makes the call a failed one; a later one does not spoil a complete answer.

        with spanmill.call("policy", messages=messages, temperature=1.0) as c:
            answer = client.chat.completions.create(..., logprobs=True, extra_body={"return_token_ids": True})
            c.from_response(answer)
    """
    request = {
        "model": model,
        "messages": messages,
        "tools": tools,
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "max_tokens": max_tokens,
        "n": n,
    }
    return Call(request, operation)
