"""From the spans of a request to its calls, one per choice: token data from the best source, text from the client."""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Final, TypeVar

import numpy as np

from spanmill.adapters import checks
from spanmill.adapters.calls import ENGINE_SIDE, Request, same_response
from spanmill.adapters.forest import Node
from spanmill.adapters.identity import Identities, Identity
from spanmill.adapters.spans import Tree, agent_name
from spanmill.adapters.values import Fault
from spanmill.triplets.records import Call, Json, Span, TokenIds

T = TypeVar("T")

_NO_IDS: Final = np.zeros(0, np.int32)
TELLING: Final = {"client": 0, "text": 1, "gateway": 2, "engine": 3}
"""Whose messages are taken first: the agent's side knows what it asked."""


@dataclass(slots=True, eq=False)
class Joined:
    """One call and choice, all its spans together."""

    request: Request
    choice: int
    sources: list[Call]
    best: Call
    """The source that the token data comes from."""
    merged: Call
    """The values that the row gets."""
    place: Span
    """The span at the client's side that says where in the tree and when the call was."""
    identity: Identity
    agent: str | None
    agent_span: tuple[str, str] | None
    """Trace and span id of the agent's span."""
    flags: set[str] = field(default_factory=set[str])
    unproven: bool = False
    """Attributes were lost, and with them the counts that would prove the ids."""
    faults: list[Fault] = field(default_factory=list[Fault])
    attempt: int = 0
    turn: int = -1
    reward: float | None = None
    parent: "Joined | None" = None
    divergence: dict[str, Json] | None = None

    @property
    def call_id(self) -> str:
        """The response id, else the hex id of the span; `#choice` behind it for choices above 0."""
        name = self.merged.response_id or self.span.span_id
        return f"{name}#{self.choice}" if self.choice else name

    @property
    def span(self) -> Span:
        """The span that supplied the token ids, or their damage; else the call's at the client's side."""
        best = self.best
        told = best.response_token_ids is not None or best.prompt_token_ids is not None or best.faults
        return best.span if told else self.place

    @property
    def ids_source(self) -> str:
        """Who recorded the answer ids: engine, gateway, client, or none."""
        return self.best.source if self.best.response_token_ids is not None else "none"

    @property
    def tokens(self) -> int:
        """Sampled tokens that were recorded."""
        return self.response.size

    @property
    def prompt(self) -> TokenIds:
        """(P,) prompt ids; empty where they were not recorded, so ask `has_ids` first."""
        ids = self.merged.prompt_token_ids
        return _NO_IDS if ids is None else ids

    @property
    def response(self) -> TokenIds:
        """(R,) sampled ids; empty where they were not recorded."""
        ids = self.merged.response_token_ids
        return _NO_IDS if ids is None else ids

    @property
    def node(self) -> Node:
        """The call as the forest sees it."""
        return Node(self.prompt, self.response, self.merged.model, self.agent_span)

    @property
    def has_ids(self) -> bool:
        """Whether prompt and answer ids are known."""
        return self.merged.prompt_token_ids is not None and self.merged.response_token_ids is not None

    @property
    def start_key(self) -> tuple[int, str, int, str, int]:
        """Orders calls that have nothing to do with each other; retries share a client span and go by their own."""
        own = self.span
        return self.place.start_ns, self.place.span_id, own.start_ns, own.span_id, self.choice

    def blocked(self, *, failed: bool) -> bool:
        """Whether the call may not be trained; `failed`: its rollout failed and nothing judged it."""
        return self.unproven or failed or bool(self.flags & checks.BLOCKING)


def calls_of(request: Request, tree: Tree, identities: Identities) -> list[Joined]:
    """The calls of a request, lowest choice first."""
    sources = [c for s in (*request.sources, *request.covered_by) for c in s.calls]
    covering = {id(c) for s in request.covered_by for c in s.calls}
    choices = sorted({c.choice for c in sources if c.choice is not None and id(c) not in covering})
    if not choices:
        # Built-in engine spans alone: they do not say which choice they are, so they are counted through.
        for number, call in enumerate(c for c in sources if id(c) not in covering):
            call.choice = number
        choices = sorted({c.choice for c in sources if c.choice is not None and id(c) not in covering})
    made = [
        _join([c for c in sources if c.choice in (choice, None)], covering, choice, request, tree, identities)
        for choice in choices
    ]
    siblings = [j.best for j in made]
    for joined in made:
        own = [c for c in joined.sources if id(c) not in covering]
        joined.faults = checks.faults(joined.best, own, siblings)
        joined.flags |= checks.flags(joined.best, joined.sources, joined.merged)
        joined.unproven = checks.is_unproven(joined.best)
        if request.superseded:
            joined.flags.add("superseded")
    return made


def _join(
    sources: list[Call], covering: set[int], choice: int, request: Request, tree: Tree, identities: Identities
) -> Joined:
    own = [c for c in sources if id(c) not in covering]
    best = checks.supplier(own)
    client = [c for c in sources if c.source not in ENGINE_SIDE]
    place, agent, agent_span = _place(client or sources, tree)
    merged = best if len(sources) == 1 else _merge(best, own, sources)
    identity = _identity(client, sources, identities)
    joined = Joined(request, choice, sources, best, merged, place, identity, agent, agent_span)
    if any((c.span.trace_id, c.span.span_id) in tree.conflicting for c in sources):
        joined.flags.add("conflicting_duplicate")
    if tree.is_orphan(place):
        joined.flags.add("orphan")
    if any(tree.under_reward(c.span) for c in sources):
        joined.flags.add("reward_call")
    return joined


def _merge(best: Call, own: list[Call], sources: list[Call]) -> Call:
    """Token data and sampling from the most trusted source that knows them, messages from the agent's side.

    Numbers that contradict each other are taken from no other source than the best, whose faults are the call's.
    """
    by_trust = [best, *sorted((c for c in own if c is not best), key=lambda c: (checks.trust(c), *_when(c)))]
    sound = [c for c in by_trust if c is best or not c.faults]
    telling = sorted(sources, key=lambda c: (TELLING[c.source], *_when(c)))
    return replace(
        best,
        prompt_token_ids=first(c.prompt_token_ids for c in sound),
        response_logprobs=first(c.response_logprobs for c in sound if c is best or same_response(c, best)),
        response_id=first(c.response_id for c in telling if any(c is o for o in own)),
        model=first(c.model for c in by_trust),
        logprobs_mode=first(c.logprobs_mode for c in by_trust),
        policy_version=first(c.policy_version for c in by_trust),
        temperature=first(c.temperature for c in by_trust),
        top_p=first(c.top_p for c in by_trust),
        top_k=first(c.top_k for c in by_trust),
        max_tokens=first(c.max_tokens for c in by_trust),
        finish_reason=first(c.finish_reason for c in by_trust),
        stop_reason=first(c.stop_reason for c in by_trust),
        multimodal=first(c.multimodal for c in by_trust),
        hidden_payload=any(c.hidden_payload for c in sources) and all(c.hidden_payload for c in sources if c.messages),
        routed_experts=first(c.routed_experts for c in by_trust),
        messages=first(c.messages for c in telling),
        response=first(c.response for c in telling),
        tools=first(c.tools for c in telling),
        metadata={k: v for c in reversed(telling) for k, v in c.metadata.items()},
    )


def _when(call: Call) -> tuple[int, str]:
    return call.span.start_ns, call.span.span_id


def first(values: Iterable[T | None]) -> T | None:
    """The first value that is known."""
    return next((v for v in values if v is not None), None)


def _place(client: list[Call], tree: Tree) -> tuple[Span, str | None, tuple[str, str] | None]:
    """(span, agent's name, agent's span): of several client spans the one under an agent, else the outermost."""
    found: list[tuple[bool, tuple[int, str], Span, str | None, tuple[str, str] | None]] = []
    for call in client:
        above = next(((name, a) for a in tree.ancestors(call.span) if (name := agent_name(a)) is not None), None)
        name = call.agent or (above[0] if above else None)
        found.append(
            (name is None, _when(call), call.span, name, (above[1].trace_id, above[1].span_id) if above else None)
        )
    _, _, span, name, agent_span = min(found, key=lambda f: f[:2])
    return span, name, agent_span


def _identity(client: list[Call], sources: list[Call], identities: Identities) -> Identity:
    """The strongest identity among the call's spans; between equally strong ones the client's."""
    order = [*client, *(c for c in sources if c.source in ENGINE_SIDE)]
    own = [i for c in order if (i := identities.explicit(c.span))]
    if len(own) == 1:
        return own[0]
    if own:
        return min(own, key=lambda i: i.rank)
    weak = [i for c in order if (i := identities.weak(c.span))]
    return min(weak, key=lambda i: i.rank)
