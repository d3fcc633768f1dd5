"""Around vLLM's engines: which generations are recorded, what is asked of the engine for it, and what its caller sees.

`AsyncLLM.generate` serves every API of `vllm serve`; `LLMEngine` stands behind `LLM.generate` and `LLM.chat`.
"""

import copy
import re
import time
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import contextmanager
from contextvars import ContextVar
from inspect import signature
from typing import Any, Final, cast
from weakref import WeakKeyDictionary

from spanmill.instrument import provider
from spanmill.instrument.reports import guarded, report
from spanmill.instrument.vllm import sender
from spanmill.instrument.vllm.generation import Generation
from spanmill.instrument.vllm.middleware import current_request
from spanmill.instrument.vllm.policy import named_version

_skipping: ContextVar[bool] = ContextVar("spanmill_vllm_skip", default=False)

BEAM_LEG: Final = re.compile(r".*-[0-9a-f]+-beam-\d+|beam_search-[0-9a-f]+-\d+", re.DOTALL)
"""The request id of one step of one beam; the second form is that of vLLM 0.11."""

POSITIONAL: Final = ("prompt", "sampling_params", "request_id")


@contextmanager
def skip() -> Generator[None]:
    """Generations that are started inside this block are not recorded: evaluation, judges, warm-up."""
    token = _skipping.set(True)
    try:
        yield
    finally:
        _skipping.reset(token)


def generate(wrapped: Callable[..., Any], engine: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Around `AsyncLLM.generate`."""
    generation = None
    with guarded("vLLM generate"):
        given = dict(zip(POSITIONAL, args, strict=False)) | kwargs
        generation = begin(engine, given["prompt"], given["sampling_params"], given["request_id"], kwargs)
        if generation is not None and generation.adds_logprobs:
            asking = given | {"sampling_params": with_logprobs(given["sampling_params"])}
            if hasattr(given["prompt"], "sampling_params"):
                asking["prompt"] = _ready_made_with_logprobs(given["prompt"])
            args, kwargs = (*(asking.pop(name) for name in POSITIONAL), *args[len(POSITIONAL) :]), asking
    outputs = wrapped(*args, **kwargs)
    return outputs if generation is None else recorded(outputs, generation)


def begin(engine: Any, prompt: Any, params: Any, request_id: Any, options: dict[str, Any]) -> Generation | None:
    """A generation that is about to start; None if it is not to be recorded.

    Not recorded: pooling, routes that are no LLM calls of an agent, requests that say so, legs of a beam search, legs
    of disaggregated serving that only prefill, inputs that are still streaming in.
    """
    request = current_request.get()
    if _skipping.get() or (request is not None and not request.is_recorded):
        return None
    if not hasattr(params, "logprobs") or not hasattr(params, "max_tokens") or hasattr(prompt, "__aiter__"):
        return None
    if BEAM_LEG.fullmatch(str(request_id)) and params.max_tokens == 1 and (params.logprobs or 0) >= 2:
        return None
    extra: dict[str, Any] = getattr(params, "extra_args", None) or {}
    transfer: dict[str, Any] = extra.get("kv_transfer_params") or {}
    if transfer.get("do_remote_decode"):
        return None
    config = engine.model_config
    named: Any = getattr(config, "served_model_name", None)
    lora = options.get("lora_request")
    return Generation(
        request_id=str(request_id),
        params=params,
        model=named if isinstance(named, str) or not named else str(named[0]),
        logprobs_mode=_mode(config),
        request=request,
        parent=provider.ambient() if request is None else request.parent,
        start_ns=time.time_ns(),
        policy_before=named_version(request.policy_version if request else None),
        prompt=prompt,
        lora_name=None if lora is None else str(lora.lora_name),
        session_id=options.get("session_id") or None,
        adds_logprobs=not _asks_for_logprobs(params),
        is_delta=getattr(params.output_kind, "name", "") == "DELTA",
    )


def _mode(config: Any) -> str | None:
    """`raw_logprobs` and the like; what vLLM had before it could be chosen was raw."""
    mode = getattr(config, "logprobs_mode", "raw_logprobs")
    return str(getattr(mode, "value", mode))


def _asks_for_logprobs(params: Any) -> bool:
    return params.logprobs is not None or bool(getattr(params, "logprob_token_ids", None))


def with_logprobs(params: Any) -> Any:
    """A copy of sampling parameters that asks for the logprobs of the sampled tokens alone.

    In vLLM's flat form, where it has one, which makes no dict per token; not if prompt logprobs, whose form the caller
    would see, were asked for.
    """
    asking = copy.copy(params)
    asking.logprobs = 0
    if hasattr(asking, "flat_logprobs") and params.prompt_logprobs is None:
        asking.flat_logprobs = True
    return asking


def _ready_made_with_logprobs(prompt: Any) -> Any:
    """The same for the engine's own request, which vLLM's API makes of the prompt in 0.12 to 0.16."""
    asking = copy.copy(prompt)
    asking.sampling_params = with_logprobs(prompt.sampling_params)
    return asking


async def recorded(outputs: AsyncGenerator[Any, None], generation: Generation) -> AsyncGenerator[Any, None]:
    """Hand the outputs of `AsyncLLM.generate` on and keep what they hold; emit when they end, however they do."""
    error = None
    try:
        async for output in outputs:
            try:
                generation.take(output)
            except Exception as unreadable:  # `guarded` costs more than all else here, once for each token
                _report_unreadable(unreadable)
            yield output
    except BaseException as raised:
        error = raised
        raise
    finally:
        try:
            await outputs.aclose()
        finally:
            finish(generation, error)


def _report_unreadable(error: Exception) -> None:
    """An output of vLLM that is not what we know: what it holds is not recorded."""
    report("vLLM output", f"an output of vLLM cannot be read, it is not recorded: {error!r}")


def finish(generation: Generation, error: BaseException | None = None) -> None:
    """End a generation and give it to the sender."""
    with guarded("ending a generation"):
        generation.end(error)
        sender.send(generation)


_running: "WeakKeyDictionary[Any, dict[str, Generation]]" = WeakKeyDictionary()
"""By engine and request id, the generations that `LLMEngine` works at."""


def add_request(wrapped: Callable[..., Any], engine: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Around `LLMEngine.add_request`."""
    generation = None
    with guarded("vLLM add_request"):
        given = signature(wrapped).bind(*args, **kwargs).arguments
        params = given["params"]
        generation = begin(engine, given["prompt"], params, given["request_id"], given)
        if generation is not None and generation.adds_logprobs:
            args, kwargs = (), given | {"params": with_logprobs(params)}
            if hasattr(given["prompt"], "sampling_params"):
                kwargs["prompt"] = _ready_made_with_logprobs(given["prompt"])
    added = wrapped(*args, **kwargs)
    if generation is not None:
        _running.setdefault(engine, {})[generation.request_id] = generation
    return added


def step(wrapped: Callable[..., Any], engine: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Around `LLMEngine.step`."""
    outputs = wrapped(*args, **kwargs)
    running = _running.get(engine, {})
    for output in cast("list[Any]", outputs) if running else ():
        generation = running.get(str(output.request_id))
        if generation is not None:
            with guarded("reading vLLM's output"):
                generation.take(output)
            if output.finished:
                finish(running.pop(generation.request_id))
    return outputs


def abort_request(wrapped: Callable[..., Any], engine: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Around `LLMEngine.abort_request`: what was sampled until now is recorded."""
    running = _running.get(engine, {})
    aborted: Any = args[0] if args else kwargs.get("request_ids", kwargs.get("request_id", ()))
    for request_id in [aborted] if isinstance(aborted, str) else aborted:
        if str(request_id) in running:
            finish(running.pop(str(request_id)))
    return wrapped(*args, **kwargs)


def beam_search(wrapped: Callable[..., Any], llm: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Around `LLM.beam_search`, whose legs are no generations."""
    with skip():
        return wrapped(*args, **kwargs)
