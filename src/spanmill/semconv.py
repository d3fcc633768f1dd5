"""Names on the wire: every name of spanmill's own, and every name that more than one part reads, is spelled here alone.

`gen_ai.*` is reused where the OpenTelemetry GenAI convention has a name; `spanmill.*` is ours. Names of one foreign
dialect alone stand in that dialect's reader.
"""

from typing import Final

# Identity: on any span, log record or resource, and in baggage.
ROLLOUT_ID: Final = "spanmill.rollout.id"
ROLLOUT_ATTEMPT: Final = "spanmill.rollout.attempt"
ROLLOUT_STATUS: Final = "spanmill.rollout.status"
ROLLOUT_STARTED: Final = "spanmill.rollout.started"
ROLLOUT_CARRIER: Final = "spanmill.rollout.carrier"
GROUP_ID: Final = "spanmill.group.id"
GROUP_SIZE: Final = "spanmill.group.size"
TASK_ID: Final = "spanmill.task.id"
MODE: Final = "spanmill.mode"
RESOURCES_ID: Final = "spanmill.resources.id"

# Of the task that a rollout works on: on the span that announces it.
TASK_INPUT: Final = "spanmill.task.input"
TASK_CLAIMS: Final = "spanmill.task.claims"
TASK_CLAIMED_AT: Final = "spanmill.task.claimed_at"

STATUSES: Final = ("succeeded", "failed", "cancelled", "unknown")
CARRIERS: Final = ("header", "baggage", "path", "api_key")
"""What a hook or gateway may have read the rollout id from, strongest first."""

# Token data of an LLM call.
PROMPT_TOKEN_IDS: Final = "spanmill.prompt.token_ids"
RESPONSE_TOKEN_IDS: Final = "spanmill.response.token_ids"
RESPONSE_LOGPROBS: Final = "spanmill.response.logprobs"
PROMPT_TOKEN_COUNT: Final = "spanmill.prompt.token_count"
RESPONSE_TOKEN_COUNT: Final = "spanmill.response.token_count"
LOGPROBS_MODE: Final = "spanmill.logprobs.mode"
POLICY_VERSION: Final = "spanmill.policy.version"
POLICY_VERSIONS: Final = "spanmill.policy.versions"
CHOICE_INDEX: Final = "spanmill.choice.index"
REQUEST_RETRY: Final = "spanmill.request.retry"
PROMPT_MULTIMODAL: Final = "spanmill.prompt.multimodal"
CAPTURE: Final = "spanmill.capture"
STOP_REASON: Final = "spanmill.response.stop_reason"
ROUTED_EXPERTS: Final = "spanmill.response.routed_experts"
ROUTED_EXPERTS_SHAPE: Final = "spanmill.response.routed_experts.shape"
ROUTED_EXPERTS_DTYPE: Final = "spanmill.response.routed_experts.dtype"

CAPTURES: Final = ("engine", "gateway", "client")
"""Who recorded the token ids, most trusted first."""

# Rewards: a span, a span event or a log record of this name.
REWARD: Final = "spanmill.reward"
REWARD_NAME: Final = "spanmill.reward.name"
REWARD_VALUE: Final = "spanmill.reward.value"
REWARD_CALL_ID: Final = "spanmill.reward.call_id"

# Info that is added later: a log record outside any trace, whose own time is 0 so that it moves no rollout's.
INFO: Final = "spanmill.info"
INFO_AT: Final = "spanmill.info.at"
INFO_CALL_IDS: Final = "spanmill.info.call_ids"

# OpenTelemetry GenAI conventions.
GEN_AI_OPERATION: Final = "gen_ai.operation.name"
GEN_AI_PROVIDER: Final = "gen_ai.provider.name"
GEN_AI_REQUEST_MODEL: Final = "gen_ai.request.model"
GEN_AI_RESPONSE_MODEL: Final = "gen_ai.response.model"
GEN_AI_RESPONSE_ID: Final = "gen_ai.response.id"
GEN_AI_FINISH_REASONS: Final = "gen_ai.response.finish_reasons"
GEN_AI_TEMPERATURE: Final = "gen_ai.request.temperature"
GEN_AI_TOP_P: Final = "gen_ai.request.top_p"
GEN_AI_TOP_K: Final = "gen_ai.request.top_k"
GEN_AI_MAX_TOKENS: Final = "gen_ai.request.max_tokens"
GEN_AI_CHOICE_COUNT: Final = "gen_ai.request.choice.count"
GEN_AI_INPUT_TOKENS: Final = "gen_ai.usage.input_tokens"
GEN_AI_OUTPUT_TOKENS: Final = "gen_ai.usage.output_tokens"
GEN_AI_CACHED_TOKENS: Final = "gen_ai.usage.cache_read.input_tokens"
GEN_AI_REQUEST_ID: Final = "gen_ai.request.id"
GEN_AI_PROMPT_TOKENS: Final = "gen_ai.usage.prompt_tokens"
GEN_AI_COMPLETION_TOKENS: Final = "gen_ai.usage.completion_tokens"
GEN_AI_SYSTEM_INSTRUCTIONS: Final = "gen_ai.system_instructions"
GEN_AI_INPUT_MESSAGES: Final = "gen_ai.input.messages"
GEN_AI_OUTPUT_MESSAGES: Final = "gen_ai.output.messages"
GEN_AI_TOOL_DEFINITIONS: Final = "gen_ai.tool.definitions"
GEN_AI_CONVERSATION_ID: Final = "gen_ai.conversation.id"
GEN_AI_COMPACTED: Final = "gen_ai.conversation.compacted"
GEN_AI_AGENT_NAME: Final = "gen_ai.agent.name"
GEN_AI_EVALUATION_RESULT: Final = "gen_ai.evaluation.result"
GEN_AI_EVALUATION_NAME: Final = "gen_ai.evaluation.name"
GEN_AI_EVALUATION_SCORE: Final = "gen_ai.evaluation.score.value"
SESSION_ID: Final = "session.id"
AGENT_NAME: Final = "agent.name"
ERROR_TYPE: Final = "error.type"
OPENINFERENCE_SPAN_KIND: Final = "openinference.span.kind"
TRACELOOP_SPAN_KIND: Final = "traceloop.span.kind"
LANGFUSE_TYPE: Final = "langfuse.observation.type"
AGENTOPS_SPAN_KIND: Final = "agentops.span.kind"
LANGSMITH_SPAN_KIND: Final = "langsmith.span.kind"
MLFLOW_SPAN_TYPE: Final = "mlflow.spanType"
LOGFIRE_SPAN_TYPE: Final = "logfire.span_type"
LOGFIRE_SCHEMA: Final = "logfire.json_schema"
LITELLM_CALL_ID: Final = "litellm.call_id"
LITELLM_HIDDEN: Final = "hidden_params"
VERCEL_OPERATION: Final = "ai.operationId"
LLM_REQUEST_TYPE: Final = "llm.request.type"
FLAT_PROMPT: Final = "gen_ai.prompt."
FLAT_COMPLETION: Final = "gen_ai.completion."

# Agent Lightning 0.3: identity and rewards are read beside ours, in adapters/identity.py and adapters/rewards.py.
AGL_ROLLOUT_ID: Final = "agentlightning.rollout_id"
AGL_ATTEMPT_ID: Final = "agentlightning.attempt_id"
AGL_ANNOTATION: Final = "agentlightning.annotation"
AGL_REWARD_PREFIX: Final = "agentlightning.reward."
AGL_LINK_PREFIX: Final = "agentlightning.link."
