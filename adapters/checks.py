"""What may be trained on (design section 6): faults that contradict, flags that block, flags that inform."""

import json
import re
from collections.abc import Iterable, Mapping
from typing import Final, cast

import numpy as np

from spanmill import semconv as sc
from spanmill.adapters.calls import ENGINE_SIDE
from spanmill.adapters.messages import has_media
from spanmill.adapters.values import Fault
from spanmill.triplets.records import Call, Json, Span

BLOCKING: Final = frozenset(
    {
        "no_token_ids",
        "no_prompt_ids",
        "empty_response",
        "ambiguous_retry",
        "superseded",
        "aborted",
        "error",
        "undelivered",
        "multimodal_without_payload",
        "reward_call",
    }
)
"""Flags of calls that are kept and never trained. `rollout_failed` blocks as well, unless the rollout was judged."""

TRUST: Final = {"engine": 0, "gateway": 1, "client": 2, "text": 3}
"""Whose token data is taken first."""

_UNDELIVERED: Final = re.compile(
    r"time_?d?_?out|connect|cancel|reset|closed|broken_?pipe|readerror|writeerror|protocolerror|networkerror|deadline|unavailable",
    re.IGNORECASE,
)
"""Error types of a client that lost the answer: timeout, lost connection, cancellation."""


def trust(call: Call) -> int:
    """Rank of who recorded a call's data; lower is better."""
    return TRUST[call.source]


def supplier(sources: Iterable[Call]) -> Call:
    """The source of the token data: the most trusted with answer ids, else with damage, else with a prompt."""

    def key(call: Call) -> tuple[int, int, bool, int, str]:
        if call.response_token_ids is not None:
            level = 0
        elif call.faults:
            level = 1
        else:
            level = 2 if call.prompt_token_ids is not None else 3
        return (
            level,
            trust(call) if level < 3 else 0,
            call.response_logprobs is None,
            call.span.start_ns,
            call.span.span_id,
        )

    several = list(sources)
    return several[0] if len(several) == 1 else min(several, key=key)


def faults(best: Call, sources: Iterable[Call], siblings: Iterable[Call]) -> list[Fault]:
    """Contradictions among a call's numbers. `siblings` are the best sources of all choices of the request."""
    found = list(best.faults)
    ids, probs = best.response_token_ids, best.response_logprobs
    if ids is not None and probs is not None and ids.size != probs.size:
        found.append(("length_mismatch", f"{ids.size} response ids, {probs.size} logprobs"))
    judges = [best, *(s for s in sources if s is not best and trust(s) < trust(best))]
    found += _count_faults(best, judges, list(siblings))
    found += _conflicts(best, sources)
    return found


def _count_faults(best: Call, judges: list[Call], siblings: list[Call]) -> list[Fault]:
    """Ids are judged by the counts of the span that supplied them and of better sources, never of weaker ones."""
    found: list[Fault] = []
    for judge in judges:
        counts = (
            ("prompt", best.prompt_token_ids, judge.prompt_count),
            ("response", best.response_token_ids, judge.response_count),
        )
        for what, ids, declared in (*counts, ("prompt", best.prompt_token_ids, judge.usage_prompt)):
            if ids is not None and declared is not None and ids.size != declared:
                found.append(("token_count_mismatch", f"{ids.size} {what} ids, {declared} declared by {judge.source}"))
        sampled = _sampled(best, judge, siblings)
        if sampled is not None and judge.usage_response not in sampled:
            found.append(("token_count_mismatch", f"{sampled[-1]} response ids, usage says {judge.usage_response}"))
    return found


def _sampled(best: Call, judge: Call, siblings: list[Call]) -> tuple[int, ...] | None:
    """Token numbers that a usage may state; None if nothing can be compared. Over n choices a usage is a sum."""
    own = best.response_token_ids
    if own is None or judge.usage_response is None or judge.choice is None:
        return None
    n = max(judge.choices, len(siblings))
    if n == 1:
        return (own.size,)
    lengths = [s.response_token_ids.size for s in siblings if s.response_token_ids is not None]
    if len(lengths) < n:
        return None
    # An emitter of one span per choice may state that choice's own number.
    return (own.size, sum(lengths)) if judge.dialect == "spanmill" else (sum(lengths),)


def _conflicts(best: Call, sources: Iterable[Call]) -> list[Fault]:
    for other in sources:
        if other is best or other.choice is None:
            continue
        for what, mine, theirs in (
            ("prompt", best.prompt_token_ids, other.prompt_token_ids),
            ("response", best.response_token_ids, other.response_token_ids),
        ):
            if mine is None or theirs is None or np.array_equal(mine, theirs):
                continue
            # A client that left the stream early has the beginning of what the engine sampled.
            left_early = (
                what == "response" and other.finish_reason is None and np.array_equal(mine[: theirs.size], theirs)
            )
            if not left_early:
                return [("conflicting_ids", f"{best.source} and {other.source} recorded different {what} ids")]
    return []


def flags(best: Call, sources: list[Call], merged: Call) -> set[str]:
    """Flags of a call that stand in its spans; retries, rewards and the rollout add theirs."""
    found = set(best.flags)
    if merged.response_token_ids is None:
        found.add("no_token_ids")
    else:
        found |= _flags_of_ids(best, merged)
    if best.span.status == 2 or merged.finish_reason == "error":
        found.add("error")
    for other in sources:
        if other is best:
            continue
        found |= other.flags & {"truncated_attribute", "dropped_attributes"}
        found |= (
            {"truncated_attribute"}
            if any(reason == "truncated_attribute" for reason, _ in other.faults)
            else set[str]()
        )
        found |= {"dropped_attributes"} if other.span.dropped_attributes else set[str]()
        if other.span.status == 2 and other.source not in ENGINE_SIDE and best.source in ENGINE_SIDE:
            found.add("undelivered" if was_lost(other) else "client_error")
    if best.span.dropped_attributes:
        found.add("dropped_attributes")
    found_media, hidden = has_media(merged.messages)
    if hidden or merged.hidden_payload or (bool(merged.multimodal) and not found_media):
        found.add("multimodal_without_payload")
    if merged.finish_reason == "length" and _cut_tool_call(merged.response):
        found.add("tool_call_incomplete")
    return found


def _flags_of_ids(best: Call, merged: Call) -> set[str]:
    found: set[str] = set()
    ids = merged.response_token_ids
    if merged.prompt_token_ids is None:
        found.add("no_prompt_ids")
    if ids is not None and not ids.size:
        found.add("empty_response")
    elif merged.response_logprobs is None:
        found.add("no_logprobs")
    if merged.finish_reason == "abort" or (merged.finish_reason is None and best.records_finish):
        found.add("aborted")
    return found


def is_unproven(call: Call) -> bool:
    """Whether the span that supplied the ids lost attributes and does not say any more how many ids there should be."""
    if not call.span.dropped_attributes:
        return False
    prompt = call.prompt_count if call.prompt_count is not None else call.usage_prompt
    response = call.response_count if call.response_count is not None else call.usage_response
    return response is None or (prompt is None and call.prompt_token_ids is not None)


def was_lost(call: Call) -> bool:
    """Whether a failed client never saw the answer: timed out, lost connection or cancelled, and shows nothing."""
    shows = call.response_id or call.response_token_ids is not None or call.response or call.finish_reason
    return not shows and any(_UNDELIVERED.search(t) for t in _error_types(call.span))


def _error_types(span: Span) -> list[str]:
    named = [span.attributes.get(sc.ERROR_TYPE)]
    named += [e.attributes.get("exception.type") for e in span.events if e.name == "exception"]
    return [t for t in named if isinstance(t, str)] or [span.status_message]


def _cut_tool_call(message: Json) -> bool:
    made = cast("Mapping[str, Json]", message).get("tool_calls") if isinstance(message, dict) else None
    for call in cast("list[Json]", made) if isinstance(made, list) else ():
        function = cast("Mapping[str, Json]", call).get("function") if isinstance(call, dict) else None
        arguments = cast("Mapping[str, Json]", function).get("arguments") if isinstance(function, dict) else None
        try:
            json.loads(arguments) if isinstance(arguments, str) else None
        except ValueError:
            return True
    return False
