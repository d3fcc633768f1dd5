"""The vLLM plugin: every generation of every client becomes a span with exact token ids and logprobs.

Nothing here imports vLLM: what vLLM imports is patched when it imports it. Installed beside vLLM, the plugin is on.
"""

from spanmill.instrument.vllm.hooks import skip
from spanmill.instrument.vllm.plugin import register
from spanmill.instrument.vllm.policy import set_policy_version
from spanmill.instrument.vllm.sender import counters, flush

__all__ = ["counters", "flush", "register", "set_policy_version", "skip"]
