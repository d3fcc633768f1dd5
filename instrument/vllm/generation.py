"""One generation of the engine while it runs: what vLLM hands out is kept, by reference, until it ends.

This runs on vLLM's event loop, so it only collects. What costs more is done in the sender's thread (`spans`).
"""

import time
from dataclasses import dataclass, field
from typing import Any

from opentelemetry.context import Context

from spanmill.instrument.vllm.policy import named_version
from spanmill.instrument.vllm.requests import Request


@dataclass(slots=True)
class Choice:
    """What one choice has sampled so far, in the pieces in which it came."""

    token_ids: list[Any] = field(default_factory=list[Any])
    logprobs: list[Any] = field(default_factory=list[Any])
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    weight_versions: Any = None
    routed_experts: Any = None


@dataclass(slots=True)
class Generation:
    """A request to the engine and what came of it."""

    request_id: str
    params: Any
    """The sampling parameters as the caller gave them."""
    model: str | None
    logprobs_mode: str | None
    request: Request | None
    """The HTTP request behind it; None when a program drives the engine itself."""
    parent: Context
    start_ns: int
    policy_before: str | None
    prompt: Any = None
    lora_name: str | None = None
    session_id: str | None = None
    adds_logprobs: bool = False
    """The caller did not ask for logprobs: it shall not see those that we asked for."""
    is_delta: bool = False
    prompt_token_ids: Any = None
    cached_tokens: int | None = None
    choices: dict[int, Choice] = field(default_factory=dict[int, Choice])
    error: BaseException | None = None
    end_ns: int = 0
    policy_after: str | None = None

    def take(self, output: Any) -> None:
        """Keep what a RequestOutput of vLLM holds, and take out of it what the caller did not ask for."""
        if self.prompt_token_ids is None:
            self.prompt_token_ids = output.prompt_token_ids
        for part in output.outputs:
            choice = self.choices.get(part.index)
            if choice is None:
                choice = self.choices[part.index] = Choice()
            if not self.is_delta:
                choice.token_ids.clear()
                choice.logprobs.clear()
            choice.token_ids.append(part.token_ids)
            choice.logprobs.append(part.logprobs)
            if self.adds_logprobs:
                part.logprobs = None
                part.cumulative_logprob = None
            if part.finish_reason is not None:
                self._finish(choice, part, output)

    def _finish(self, choice: Choice, part: Any, output: Any) -> None:
        choice.finish_reason = str(part.finish_reason)
        choice.stop_reason = part.stop_reason
        choice.weight_versions = getattr(part, "weight_versions", None)
        choice.routed_experts = getattr(part, "routed_experts", None)
        self.cached_tokens = output.num_cached_tokens

    def end(self, error: BaseException | None = None) -> None:
        """Note how it ended. vLLM goes on with its own lists if it was cut off: take what there is now."""
        self.end_ns = time.time_ns()
        self.policy_after = named_version(self.request.policy_version if self.request else None)
        self.error = error
        for choice in self.choices.values():
            if choice.finish_reason is None:
                choice.token_ids = [list(ids) for ids in choice.token_ids]

    def size(self) -> int:
        """Bytes that it holds, roughly."""
        tokens = len(self.prompt_token_ids or ()) + sum(len(i) for c in self.choices.values() for i in c.token_ids)
        body = sum(map(len, self.request.body or ())) if self.request else 0
        return 1000 + 16 * tokens + body
