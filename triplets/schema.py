"""The column spec: every column of every table is named, typed and explained here and nowhere else.

The Arrow schema, the polars schema and `docs/reference/schema.md` are rendered from it. Letters: P prompt tokens,
R response tokens, T tokens of a sequence. Null means "not recorded", never 0.
"""

from dataclasses import dataclass
from typing import Any, Final, cast

import polars as pl
import pyarrow as pa

SCHEMA_VERSION: Final = "1"
"""Written into every file; a reader refuses a newer one."""


@dataclass(frozen=True)
class Column:
    """A column: what it is called, which Arrow type it has, whether it may be null, its unit, and what it means."""

    name: str
    type: pa.DataType
    meaning: str
    nullable: bool = False
    unit: str = ""


@dataclass(frozen=True)
class TableSpec:
    """A table: its folder's name, what one row is, and its columns in order."""

    name: str
    row: str
    columns: tuple[Column, ...]


def _list(element: pa.DataType, nullable: bool = False) -> pa.DataType:
    """`element` is Parquet's own name for it, so a file reads back with exactly the type that was written."""
    return pa.list_(pa.field("element", element, nullable=nullable))


def _struct(nullable: tuple[str, ...] = (), **fields: pa.DataType) -> pa.DataType:
    """A struct of which only the fields named in `nullable` may be null."""
    return pa.struct([pa.field(name, kind, nullable=name in nullable) for name, kind in fields.items()])


STRING: Final = pa.string()
BOOL: Final = pa.bool_()
INT32: Final = pa.int32()
INT64: Final = pa.int64()
FLOAT: Final = pa.float32()
DOUBLE: Final = pa.float64()
TIME: Final = pa.timestamp("us", "UTC")
STRINGS: Final = _list(STRING)
TOKEN_IDS: Final = _list(INT32)
MASK: Final = _list(pa.int8())
LOGPROBS: Final = _list(FLOAT)
POLICY_RUNS: Final = _list(_struct(version=STRING, start=INT32, length=INT32))
REWARDS: Final = _list(_struct(("call_id",), name=STRING, value=DOUBLE, call_id=STRING, source=STRING))
TURNS: Final = _list(
    _struct(
        ("logprobs_mode", "temperature"),
        call_id=STRING,
        prompt_end=INT32,
        response_end=INT32,
        trained=BOOL,
        logprobs_mode=STRING,
        temperature=FLOAT,
    )
)
ROUTED_EXPERTS: Final = _struct(data=pa.binary(), shape=_list(INT32), dtype=STRING)

_KEYS = (
    Column("rollout_id", STRING, "The rollout."),
    Column("attempt", INT32, "0 for the first run of the rollout."),
    Column(
        "revision",
        INT32,
        "0, and 1 more each time late spans or rewards changed the rows; only the highest stays in the dataset.",
    ),
    Column("group_id", STRING, "The GRPO group.", nullable=True),
    Column("task_id", STRING, "The row of the task dataset.", nullable=True),
    Column("mode", STRING, "`train`, `val` or `test`.", nullable=True),
)
_FLAGS = Column("flags", STRINGS, "What was noticed, sorted; see the list of flags.")
_METADATA = Column("metadata", STRING, "A JSON object: all that has no column.")
_FINISH = "in OpenAI's words whatever came in: `stop`, `length`, `tool_calls`, `content_filter`, `abort`, `error`."

ROLLOUTS: Final = TableSpec(
    "rollouts",
    "one attempt of a rollout",
    (
        *_KEYS,
        Column(
            "group_size",
            INT32,
            "How many rollouts the group was meant to have, so that a missing member is seen.",
            nullable=True,
            unit="rollouts",
        ),
        Column(
            "identity_source",
            STRING,
            "What decided `rollout_id`: `span`, `ancestor`, `carrier`, `resource`, `foreign`, `linked`, `trace_peer`, "
            "`conversation` or `trace`.",
        ),
        Column("status", STRING, "`succeeded`, `failed`, `cancelled` or `unknown`."),
        Column(
            "closed_by", STRING, "What ended the waiting for more spans: `end`, `root`, `idle`, `flush` or `batch`."
        ),
        Column("started_at", TIME, "Start of the earliest span."),
        Column("ended_at", TIME, "End of the latest span."),
        Column("reward", DOUBLE, "The final reward; null = never rewarded.", nullable=True),
        Column("rewards", REWARDS, "Every reward seen, in order."),
        Column(
            "num_calls",
            INT32,
            "LLM calls, each choice counted, kept in `triplets` or set aside in `quarantine`.",
            unit="calls",
        ),
        Column("num_triplets", INT32, "Rows in `triplets`.", unit="rows"),
        Column("num_episodes", INT32, "Rows in `episodes`.", unit="rows"),
        Column(
            "tokens_captured",
            INT64,
            "Sampled tokens of all calls; always the sum of the four that follow.",
            unit="tokens",
        ),
        Column("tokens_trained", INT64, "Of these, in the loss of exactly one Episode.", unit="tokens"),
        Column("tokens_masked", INT64, "Of these, kept but in no loss.", unit="tokens"),
        Column("tokens_superseded", INT64, "Of these, of generations that the agent did not use.", unit="tokens"),
        Column("tokens_quarantined", INT64, "Of these, of calls set aside in `quarantine`.", unit="tokens"),
        _FLAGS,
        _METADATA,
    ),
)

TRIPLETS: Final = TableSpec(
    "triplets",
    "one LLM call and choice",
    (
        *_KEYS,
        Column("turn", INT32, "0-based position of the call in the rollout."),
        Column("choice", INT32, "Index among the n sampled choices of the request."),
        Column(
            "call_id",
            STRING,
            "The response id, or without one the span id as hex; `#<choice>` appended when `choice` > 0.",
        ),
        Column("parent_call_id", STRING, "The call whose prompt and response this prompt extends.", nullable=True),
        Column("trace_id", STRING, "Of the span that supplied the token ids, else of the call.", unit="hex"),
        Column("span_id", STRING, "As `trace_id`.", unit="hex"),
        Column("agent", STRING, "Name of the nearest agent span.", nullable=True),
        Column("model", STRING, "Model name, LoRA name included.", nullable=True),
        Column(
            "prompt_token_ids",
            TOKEN_IDS,
            "(P,) exactly as the model saw them; null = not recorded.",
            nullable=True,
            unit="token ids",
        ),
        Column(
            "response_token_ids",
            TOKEN_IDS,
            "(R,) as sampled, the stop token included if it was sampled; null = not recorded.",
            nullable=True,
            unit="token ids",
        ),
        Column(
            "response_logprobs",
            LOGPROBS,
            "(R,) logprob of each sampled token; null (the whole list) = not recorded.",
            nullable=True,
            unit="natural log",
        ),
        Column(
            "logprobs_mode",
            STRING,
            "`raw` or `processed` (after temperature and penalties).",
            nullable=True,
        ),
        Column("ids_source", STRING, "Who recorded the token ids: `engine`, `gateway`, `client`, or `none`."),
        Column("policy_version", STRING, "The weights that sampled the last token.", nullable=True),
        Column("policy_versions", POLICY_RUNS, "Runs over (R,) by the weights that sampled them."),
        Column("temperature", FLOAT, "Sampling parameter.", nullable=True),
        Column("top_p", FLOAT, "Sampling parameter.", nullable=True),
        Column("top_k", INT32, "Sampling parameter.", nullable=True),
        Column("max_tokens", INT32, "Limit on the response.", nullable=True, unit="tokens"),
        Column("finish_reason", STRING, f"Why the response ended, {_FINISH}", nullable=True),
        Column("stop_reason", STRING, "The stop string or token that ended it.", nullable=True),
        Column("reward", DOUBLE, "Step reward of this call.", nullable=True),
        Column(
            "routed_experts",
            ROUTED_EXPERTS,
            "For router replay: the experts chosen, as the engine returned them.",
            nullable=True,
        ),
        Column("multimodal", STRING, "JSON: kinds and hashes of the prompt's images or audio.", nullable=True),
        Column("messages", STRING, "JSON: the request's messages in OpenAI chat shape.", nullable=True),
        Column("response", STRING, "JSON: the assistant message in OpenAI chat shape.", nullable=True),
        Column("tools", STRING, "JSON: the tool definitions in OpenAI chat shape.", nullable=True),
        Column("started_at", TIME, "Start of the call."),
        Column("ended_at", TIME, "End of the call."),
        Column("dialect", STRING, "The reader that recognised the span which supplied the token ids."),
        Column("trainable", BOOL, "False = kept, never in a loss."),
        _FLAGS,
        _METADATA,
    ),
)

EPISODES: Final = TableSpec(
    "episodes",
    "one training sequence: calls that extend each other, as one row of tokens",
    (
        *_KEYS,
        Column("agent", STRING, "Name of the agent that made the calls.", nullable=True),
        Column("model", STRING, "Model name, LoRA name included.", nullable=True),
        Column("episode", INT32, "0-based within the rollout."),
        Column("input_ids", TOKEN_IDS, "(T,) the whole sequence.", unit="token ids"),
        Column("loss_mask", MASK, "(T,) 1 = the policy sampled it and it is trained here, else 0."),
        Column(
            "logprobs",
            LOGPROBS,
            "(T,) 0.0 where `loss_mask` is 0; null (the whole list) if any trained token has none.",
            nullable=True,
            unit="natural log",
        ),
        Column("prompt_length", INT32, "Length of the first prompt.", unit="tokens"),
        Column(
            "turns",
            TURNS,
            "The calls in order: the prompt of each is `input_ids[:prompt_end]`, its response "
            "`input_ids[prompt_end:response_end]`.",
        ),
        Column("num_turns", INT32, "Length of `turns`.", unit="calls"),
        Column("reward", DOUBLE, "The rollout's final reward.", nullable=True),
        Column("step_rewards", _list(DOUBLE, nullable=True), "One per turn; null = that call has none."),
        Column("advantage", DOUBLE, "Only if the environment recorded one.", nullable=True),
        Column("policy_versions", POLICY_RUNS, "Runs over (T,) by the weights that sampled them, trained tokens only."),
        Column(
            "logprobs_mode",
            STRING,
            "As in `triplets`; null when the turns differ (flag `mixed_sampling`).",
            nullable=True,
        ),
        Column("temperature", FLOAT, "Sampling parameter; null when the turns differ.", nullable=True),
        Column("top_p", FLOAT, "Sampling parameter; null when the turns differ.", nullable=True),
        Column("top_k", INT32, "Sampling parameter; null when the turns differ.", nullable=True),
        Column("finish_reason", STRING, f"Of the last turn, {_FINISH}", nullable=True),
        Column("truncated", BOOL, "The last turn stopped at a length limit."),
        Column(
            "rollout_tokens_trained",
            INT64,
            "Denominator per rollout: `rollouts.tokens_trained`, the same on every row of the rollout.",
            unit="tokens",
        ),
        Column("messages", STRING, "JSON: the whole conversation in OpenAI chat shape.", nullable=True),
        Column("tools", STRING, "JSON: the tool definitions in OpenAI chat shape.", nullable=True),
        _FLAGS,
        _METADATA,
    ),
)

QUARANTINE: Final = TableSpec(
    "quarantine",
    "one call, span or reward that cannot be used, with the reason",
    (
        Column("rollout_id", STRING, "The rollout it belongs to; null = none could be told.", nullable=True),
        Column("attempt", INT32, "As `rollout_id`.", nullable=True),
        Column("reason", STRING, "Why it was set aside; see the list of flags."),
        Column("detail", STRING, "The numbers behind the reason, for people."),
        Column("trace_id", STRING, "Of the span whose numbers failed; empty on a reward.", unit="hex"),
        Column("span_id", STRING, "As `trace_id`.", unit="hex"),
        Column(
            "span",
            STRING,
            "The span or log record as an OTLP/JSON export request, which `spanmill build` reads again; "
            "a reward as JSON.",
        ),
        Column(
            "received_at",
            TIME,
            "When it was received; null = not recorded, as in files that `spanmill build` reads.",
            nullable=True,
        ),
    ),
)

TABLES: Final = (ROLLOUTS, TRIPLETS, EPISODES, QUARANTINE)
"""Every table. A part is committed by its file in `rollouts`, which is renamed last."""


def arrow_schema(table: TableSpec) -> pa.Schema:
    """The Arrow schema of a table, without file metadata."""
    return pa.schema([pa.field(c.name, c.type, nullable=c.nullable) for c in table.columns])


def polars_schema(table: TableSpec) -> pl.Schema:
    """The schema of a table as polars reads it; polars knows no nullability."""
    return cast(pl.DataFrame, pl.from_arrow(arrow_schema(table).empty_table())).schema


def type_text(kind: Any) -> str:
    """An Arrow type in words: `list<struct<name: string, call_id: string?>>`; `?` marks what may be null."""
    if pa.types.is_list(kind):
        return f"list<{field_text(kind.value_field)}>"
    if pa.types.is_struct(kind):
        return f"struct<{', '.join(f'{f.name}: {field_text(f)}' for f in kind)}>"
    return "timestamp[us, UTC]" if pa.types.is_timestamp(kind) else str(kind)


def field_text(field: Any) -> str:
    """The type of an Arrow field (or of a Column) in words, with `?` where it may be null."""
    return type_text(field.type) + ("?" if field.nullable else "")
