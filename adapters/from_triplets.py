"""From Triplets that a program made itself to a rollout with its Episodes, by the functions that spans go through."""

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final, cast

from spanmill.adapters import checks
from spanmill.adapters.adapt import account
from spanmill.adapters.calls import Request
from spanmill.adapters.divergence import find_drifts
from spanmill.adapters.episodes import make_episodes
from spanmill.adapters.forest import link
from spanmill.adapters.identity import Identity, Labels
from spanmill.adapters.joined import Joined, first
from spanmill.adapters.options import DEFAULTS, Options
from spanmill.adapters.values import Fault, logprobs, token_ids
from spanmill.triplets.records import Call, Json, Quarantined, Rollout, Span, Triplet
from spanmill.triplets.span_json import span_json

_INTERNAL: Final = 1


def rollout_of(triplets: Sequence[Triplet], rollout_id: str, attempt: int, options: Options = DEFAULTS) -> Rollout:
    """The rollout that the Triplets make, in the order of their turns and choices.

    They stay as they are but for rollout and attempt, `parent_call_id` and the type of their arrays (lists will do).
    What may be trained is what they say; one whose numbers contradict each other (design section 6) is quarantined.
    There is no final reward: theirs are step rewards.
    """
    calls, rows, rejected = list[Joined](), dict[int, Triplet](), list[tuple[Joined, Quarantined]]()
    for given in sorted(triplets, key=lambda t: (t.turn, t.choice)):
        call = _joined(given, rollout_id, attempt)
        if call.faults:
            rejected.append((call, _aside(call, rollout_id, attempt)))
        else:
            calls.append(call)
            rows[id(call)] = _row(given, call, rollout_id, attempt)
    nodes = [call for call in calls if call.has_ids]
    for call, found in zip(nodes, link([call.node for call in nodes]), strict=True):
        call.parent = nodes[found.parent] if found.parent is not None else None
        rows[id(call)].parent_call_id = call.parent.call_id if call.parent else None
    own = list(rows.values())
    rollout = Rollout(
        rollout_id=rollout_id,
        attempt=attempt,
        identity_source="span",
        status="unknown",
        closed_by="batch",
        started_at=min((t.started_at for t in own if t.started_at), default=0),
        ended_at=max((t.ended_at for t in own), default=0),
        group_id=first(t.group_id for t in own),
        task_id=first(t.task_id for t in own),
        mode=first(t.mode for t in own),
        num_calls=len(triplets),
        triplets=own,
        episodes=make_episodes(calls, rows, find_drifts(calls, options), options),
        quarantined=[row for _, row in rejected],
    )
    account(rollout, sum(call.tokens for call, _ in rejected))
    return rollout


def _joined(given: Triplet, rollout_id: str, attempt: int) -> Joined:
    """The Triplet as the call that it would be the row of."""
    prompt = token_ids(_value(given.prompt_token_ids), "prompt_token_ids")
    response = token_ids(_value(given.response_token_ids), "response_token_ids")
    probs = logprobs(_value(given.response_logprobs), "response_logprobs")
    found: list[Fault] = [f for f in (prompt.fault, response.fault, probs.fault) if f is not None]
    span = Span(
        given.trace_id,
        given.span_id,
        "",
        "triplet",
        _INTERNAL,
        given.started_at * 1000,
        given.ended_at * 1000,
        {},
        {},
    )
    call = Call(
        span,
        given.dialect,
        given.ids_source if given.ids_source in checks.TRUST else "text",
        given.choice,
        response_id=given.call_id.removesuffix(f"#{given.choice}"),
        model=given.model,
        prompt_token_ids=prompt.ids,
        response_token_ids=response.ids,
        response_logprobs=probs.values,
        messages=_json(given.messages),
        response=_json(given.response),
        faults=tuple(found),
    )
    agent = (given.agent, "") if given.agent else None
    identity = Identity(rollout_id, "span", attempt, labels=Labels(given.group_id, given.task_id, given.mode))
    joined = Joined(Request([]), given.choice, [call], call, call, span, identity, given.agent, agent)
    joined.faults = checks.faults(call, [call], [call])
    joined.turn, joined.attempt = given.turn, attempt
    return joined


def _row(given: Triplet, call: Joined, rollout_id: str, attempt: int) -> Triplet:
    return replace(
        given,
        rollout_id=rollout_id,
        attempt=attempt,
        prompt_token_ids=call.merged.prompt_token_ids,
        response_token_ids=call.merged.response_token_ids,
        response_logprobs=call.merged.response_logprobs,
        parent_call_id=None,
        trainable=given.trainable and call.has_ids and bool(call.tokens),
    )


def _aside(call: Joined, rollout_id: str, attempt: int) -> Quarantined:
    (reason, detail), *more = call.faults
    details = detail + "".join(f"; {r}: {d}" for r, d in more)
    span = call.span
    return Quarantined(reason, details, span.trace_id, span.span_id, span_json(span), 0, rollout_id, attempt)


def _value(found: object) -> Any:
    """Token data as attributes have it: arrays and lists stay, tuples become lists."""
    return list(cast("tuple[object, ...]", found)) if isinstance(found, tuple) else found


def _json(text: str | None) -> Json:
    return None if text is None else json.loads(text)
