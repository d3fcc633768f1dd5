"""The records that flow from left to right: Span, Call, Rollout, Triplet, Episode, and what is set aside.

Letters: P prompt tokens, R response tokens, T tokens of a sequence. None always means "not recorded", never 0.
Times are integers: `*_ns` nanoseconds, `*_at` microseconds since 1970 UTC. Records read no clock and make no ids.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

IntArray: TypeAlias = npt.NDArray[np.int32] | npt.NDArray[np.int64]
FloatArray: TypeAlias = npt.NDArray[np.float64]
TokenIds: TypeAlias = npt.NDArray[np.int32]
Logprobs: TypeAlias = npt.NDArray[np.float32]

Value: TypeAlias = "bool | int | float | str | bytes | IntArray | FloatArray | list[Value] | dict[str, Value] | None"
"""An OTLP AnyValue. An array of ints alone, or of doubles alone, is a numpy array; any other array is a list. Ints are
int32 where all of them are from 0 to 2**28 - 1, as token ids are, else int64: one array has one form."""

Attributes: TypeAlias = Mapping[str, Value]
Json: TypeAlias = Any
"""What `json.loads` returns; its shape is checked where it is read."""


class Event(NamedTuple):
    """A span event."""

    name: str
    time_ns: int
    attributes: Attributes


class Link(NamedTuple):
    """A span link."""

    trace_id: str
    span_id: str
    attributes: Attributes


def received_at(received_ns: int) -> int | None:
    """The column of that name: microseconds, or None where the time was not recorded."""
    return received_ns // 1000 if received_ns else None


@dataclass(slots=True)
class Span:
    """A span as OTLP brought it, or a log record in the same form.

    A log record has no id of its own: `span_id` is "", `parent_id` is the span it was written in, `name` its event
    name, `start_ns` and `end_ns` its time. So it stands in the tree where a child of that span would.
    """

    trace_id: str
    """32 lower-case hex digits; "" only on a log record outside any trace."""
    span_id: str
    """16 lower-case hex digits; "" on a log record."""
    parent_id: str
    """"" on a root."""
    name: str
    kind: int
    """OTLP SpanKind: 0 unspecified, 1 internal, 2 server, 3 client, 4 producer, 5 consumer."""
    start_ns: int
    end_ns: int
    """0 if the span never ended."""
    attributes: Attributes
    resource: Attributes
    """Shared by all spans of one resource; not to be changed."""
    scope: str = ""
    status: int = 0
    """0 unset, 1 ok, 2 error."""
    status_message: str = ""
    events: tuple[Event, ...] = ()
    links: tuple[Link, ...] = ()
    dropped_attributes: int = 0
    flags: int = 0
    body: Value = None
    """Of a log record."""
    received_ns: int = 0
    """When the request that brought it was received; 0 where that was not recorded."""

    @property
    def is_log(self) -> bool:
        """Whether this is a log record."""
        return not self.span_id


@dataclass(slots=True)
class Reward:
    """A reward that came by HTTP, command line or table: later than every span, in the order in which it is given."""

    rollout_id: str
    value: float
    attempt: int | None = None
    """None goes to the highest attempt."""
    call_id: str | None = None
    name: str = ""
    source: str = "http"
    """http, cli, table, or result: what an agent function returned."""
    received_ns: int = 0


@dataclass(slots=True)
class PolicyRun:
    """A run of tokens that one version of the weights sampled."""

    version: str
    start: int
    length: int


@dataclass(slots=True)
class Call:
    """One generation (one choice of one LLM call) as one span shows it, or as its spans together do."""

    span: Span
    """The span it was read from; of a joined call, the span that supplied the token ids (else the client's)."""
    dialect: str
    """The reader's module name."""
    source: str = "none"
    """Who recorded the token ids: engine, gateway, client; none if nobody did."""
    choice: int | None = None
    """Index among n choices; None where the span does not say which choice it is (vLLM's built-in spans)."""
    choices: int = 1
    """How many choices the request had, as far as this span knows."""
    response_id: str | None = None
    tool_call_ids: tuple[str, ...] = ()
    model: str | None = None
    prompt_token_ids: TokenIds | None = None
    """(P,)"""
    response_token_ids: TokenIds | None = None
    """(R,)"""
    response_logprobs: Logprobs | None = None
    """(R,) natural logarithm."""
    logprobs_mode: str | None = None
    prompt_count: int | None = None
    """Prompt tokens as the emitter of the ids declared them."""
    response_count: int | None = None
    usage_prompt: int | None = None
    """Prompt tokens as the usage of the answer states them."""
    usage_response: int | None = None
    """Sampled tokens as the usage states them: the sum over all choices."""
    policy_version: str | None = None
    policy_versions: tuple[PolicyRun, ...] = ()
    """Runs over (R,)."""
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    max_tokens: int | None = None
    finish_reason: str | None = None
    """In OpenAI's words."""
    stop_reason: str | None = None
    records_finish: bool = False
    """Whether this dialect would have recorded a finish reason, so that none means the stream was cut."""
    retry: int | None = None
    """The client's retry count of the request; None if not recorded."""
    agent: str | None = None
    routed_experts: Json = None
    multimodal: Json = None
    """Kinds and hashes of the prompt's images or audio."""
    hidden_payload: bool = False
    """The prompt had images or audio that the record has not."""
    messages: Json = None
    """Request messages in OpenAI chat shape."""
    response: Json = None
    """The assistant message in OpenAI chat shape."""
    tools: Json = None
    faults: tuple[tuple[str, str], ...] = ()
    """(reason, detail) of numbers that contradict each other or cannot be read."""
    flags: frozenset[str] = frozenset()
    metadata: dict[str, Json] = field(default_factory=dict[str, Json])


@dataclass(slots=True)
class Triplet:
    """A row of `triplets`: one LLM call and choice. The columns are documented in `schema.TRIPLETS`."""

    rollout_id: str
    attempt: int
    turn: int
    choice: int
    call_id: str
    trace_id: str
    span_id: str
    ids_source: str
    started_at: int
    ended_at: int
    dialect: str
    trainable: bool
    revision: int = 0
    group_id: str | None = None
    task_id: str | None = None
    mode: str | None = None
    parent_call_id: str | None = None
    agent: str | None = None
    model: str | None = None
    prompt_token_ids: TokenIds | None = None
    response_token_ids: TokenIds | None = None
    response_logprobs: Logprobs | None = None
    logprobs_mode: str | None = None
    policy_version: str | None = None
    policy_versions: tuple[PolicyRun, ...] = ()
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    max_tokens: int | None = None
    finish_reason: str | None = None
    stop_reason: str | None = None
    reward: float | None = None
    routed_experts: dict[str, Any] | None = None
    """{"data": bytes, "shape": list of int, "dtype": str}"""
    multimodal: str | None = None
    messages: str | None = None
    response: str | None = None
    tools: str | None = None
    flags: tuple[str, ...] = ()
    """Sorted."""
    metadata: str = "{}"


@dataclass(slots=True)
class Turn:
    """One call within an Episode: its prompt ends at `prompt_end`, its response is `[prompt_end, response_end)`."""

    call_id: str
    prompt_end: int
    response_end: int
    trained: bool
    logprobs_mode: str | None = None
    temperature: float | None = None


@dataclass(slots=True)
class Episode:
    """A row of `episodes`: one training sequence. The columns are documented in `schema.EPISODES`."""

    rollout_id: str
    attempt: int
    episode: int
    input_ids: TokenIds
    """(T,)"""
    loss_mask: npt.NDArray[np.int8]
    """(T,)"""
    prompt_length: int
    turns: tuple[Turn, ...]
    step_rewards: tuple[float | None, ...]
    truncated: bool
    revision: int = 0
    group_id: str | None = None
    task_id: str | None = None
    mode: str | None = None
    agent: str | None = None
    model: str | None = None
    logprobs: Logprobs | None = None
    """(T,)"""
    num_turns: int = 0
    reward: float | None = None
    advantage: float | None = None
    policy_versions: tuple[PolicyRun, ...] = ()
    logprobs_mode: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    finish_reason: str | None = None
    rollout_tokens_trained: int = 0
    messages: str | None = None
    tools: str | None = None
    flags: tuple[str, ...] = ()
    metadata: str = "{}"


@dataclass(slots=True)
class RewardSeen:
    """An element of `rollouts.rewards`."""

    name: str
    value: float
    call_id: str | None
    source: str
    """span, event, log, annotation, http, cli, table or result."""


@dataclass(slots=True)
class Quarantined:
    """A row of `quarantine`: a call, span or reward that cannot be used, with the reason."""

    reason: str
    detail: str
    trace_id: str
    span_id: str
    span: str
    """OTLP JSON of the span, or the reward as JSON."""
    received_at: int | None
    rollout_id: str | None = None
    attempt: int | None = None


@dataclass(slots=True)
class Rollout:
    """A row of `rollouts`, one attempt, with the rows that stand under it. Columns: `schema.ROLLOUTS`."""

    rollout_id: str
    attempt: int
    identity_source: str
    status: str
    closed_by: str
    """end, root or batch from the spans alone; the service puts idle or flush in place of batch."""
    started_at: int
    ended_at: int
    revision: int = 0
    group_id: str | None = None
    task_id: str | None = None
    mode: str | None = None
    group_size: int | None = None
    reward: float | None = None
    rewards: tuple[RewardSeen, ...] = ()
    num_calls: int = 0
    num_triplets: int = 0
    num_episodes: int = 0
    tokens_captured: int = 0
    tokens_trained: int = 0
    tokens_masked: int = 0
    tokens_superseded: int = 0
    tokens_quarantined: int = 0
    flags: tuple[str, ...] = ()
    metadata: str = "{}"
    triplets: list[Triplet] = field(default_factory=list[Triplet])
    """No column: the rows of the other tables, in their order."""
    episodes: list[Episode] = field(default_factory=list[Episode])
    quarantined: list[Quarantined] = field(default_factory=list[Quarantined])
    announced: bool = False
    """No column: the rollout said that it would report its end, and has not yet."""

    @staticmethod
    def from_result(result: object, *, rollout_id: str, attempt: int = 0) -> "Rollout":
        """A rollout of what an agent function returned.

        That may be None, a number (the final reward), Triplets, spans in any form that `spanmill.adapt` takes, or a
        Rollout. Whatever they say whose they are, they become rollout `rollout_id`. The status is what spans report,
        else unknown; nothing is made up for what the result does not tell.

        Raises TypeError for anything else, and TypeError or ValueError for an id or attempt that cannot be.
        """
        from spanmill.memory import from_result  # this one reads spans, for which it takes the stages to the left

        return from_result(result, rollout_id, attempt)
