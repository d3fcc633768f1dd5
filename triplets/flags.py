"""What flags and reasons mean, in words: the one place where they are explained to people."""

from typing import Final

FLAGS: Final = {
    # a call is set aside in quarantine: its numbers contradict each other
    "length_mismatch": "Log probabilities and response ids differ in number.",
    "token_count_mismatch": "There are more or fewer ids than the declared count or the usage says.",
    "id_logprob_shift": "The tokens beside the log probabilities are not the response ids.",
    "nonfinite_logprob": "A log probability is NaN, infinite or more than 0.00001 above 0.",
    "bad_token_id": "A token id is no whole number from 0 to 2147483647.",
    "truncated_attribute": "An array, base64 or JSON text was cut on its way.",
    "conflicting_ids": "Two spans of the call recorded different token ids.",
    "unreadable_span": "The reader of this dialect failed on the span; this is a fault of spanmill.",
    # a call is kept, and not trained
    "no_token_ids": "The sampled token ids were not recorded.",
    "no_prompt_ids": "The prompt's token ids were not recorded.",
    "empty_response": "Nothing was sampled.",
    "ambiguous_retry": "One of several generations of a request; which one the agent used cannot be told.",
    "superseded": "A retry came after this generation; the agent did not use it.",
    "aborted": "The answer has no finish reason: it was cut off.",
    "error": "The call failed.",
    "undelivered": "The agent lost the connection or gave up and never saw the answer.",
    "multimodal_without_payload": "The prompt had images or audio that the record has not.",
    "reward_call": "A call of the judge that computes a reward, not of the agent.",
    "rollout_failed": "The rollout failed; its calls are trained only if it has a final reward.",
    # a call is kept and trained
    "client_error": "The agent's side failed on the answer, which is complete.",
    "no_logprobs": "Log probabilities were not recorded.",
    "prompt_ids_repeated": "The prompt's ids stood there once per choice; one copy is taken.",
    "dropped_attributes": "The sender dropped attributes of a span; its texts may be incomplete.",
    "tool_call_incomplete": "The length limit fell inside a tool call.",
    "orphan": "The span's parent never came.",
    "late": "Came after the rollout was closed.",
    "conflicting_duplicate": "Sent twice with different content; the more complete is taken.",
    # an Episode
    "mixed_sampling": "The turns were sampled with different parameters.",
    "realigned": "Turns were joined although the last tokens of an answer came back changed.",
    # a rollout
    "moved": "Its spans turned out to belong to another rollout, named in metadata.moved_to.",
    # a reward or span is set aside in quarantine
    "nonfinite_reward": "A reward is NaN, infinite or no number.",
    "unknown_call": "A reward names a call that its rollout does not have.",
    "unknown_rollout": "A reward names a rollout that never came.",
    "bad_span_id": "A span without a valid trace id and span id.",
    "undecodable_span": "A span or log record that does not parse inside.",
    "expired": "A span for a rollout whose other spans are gone already.",
}
"""Each flag and each reason of a quarantine, in a sentence."""


def in_words(flag: str) -> str:
    """What a flag or reason means; of one that a newer spanmill wrote, nothing is known."""
    return FLAGS.get(flag, "Not known to this version of spanmill.")
