"""Several generations of one call: which of them the agent used (design sections 5 and 15 m)."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import pairwise

from spanmill.adapters.calls import Request, Source, nearest_requests
from spanmill.adapters.joined import Joined


def cover(requests: list[Request]) -> list[Request]:
    """Find the generations below a client span that is about another one, or about one of them.

    If the client reports a response id, the generation of that id is the call and the others are superseded. If it
    reports none, it covers them all, and is no request of its own.
    """
    owner = {id(source): request for request in requests for source in request.sources}
    retried: dict[int, tuple[Source, list[Request]]] = {}
    for request, client in nearest_requests(requests):
        if request.has_client:
            continue
        answered = owner[id(client)]
        if answered.response_ids:
            request.superseded = any(s.engine_side for s in answered.sources)
            request.covered_by = [client] if request.superseded else []
        else:
            retried.setdefault(id(client), (client, []))[1].append(request)
    absorbed: set[int] = set()
    for client, generations in retried.values():
        if len(generations) > 1:
            absorbed.add(id(owner[id(client)]))
            for generation in generations:
                generation.covered_by = [client]
    return [r for r in requests if id(r) not in absorbed]


def resolve(calls: Sequence[Joined], extended: set[int]) -> None:
    """Flag the generations of one prompt that the agent did not use, or of which nobody can tell.

    `calls` are a rollout's calls without contradictions, `extended` the Python ids of those that a later prompt
    extends. Only generations are looked at that have no client span of their own: a client span per answer makes honest
    samples.
    """
    for group in _groups(calls):
        counts = [c.best.retry for c in group]
        if all(n is not None for n in counts):
            for earlier, later in pairwise(group):
                if later.best.retry:
                    earlier.flags.add("superseded")
        elif used := [c for c in group if id(c) in extended]:
            for call in group:
                if call not in used:
                    call.flags.add("superseded")
        else:
            for call in group:
                call.flags.add("ambiguous_retry")


def _groups(calls: Iterable[Joined]) -> list[list[Joined]]:
    groups: dict[tuple[object, ...], list[Joined]] = defaultdict(list)
    for call in calls:
        if (
            call.request.has_client
            or call.request.superseded
            or not call.has_ids
            or call.merged.prompt_token_ids is None
        ):
            continue
        covering = tuple(id(s) for s in call.request.covered_by)
        key = (covering, None if covering else call.agent_span, call.prompt.size, call.choice)
        groups[key].append(call)
    alike = (same for group in groups.values() if len(group) > 1 for same in _of_one_prompt(group))
    return [sorted(g, key=lambda c: c.start_key) for g in alike if len(g) > 1]


def _of_one_prompt(calls: Iterable[Joined]) -> Iterable[list[Joined]]:
    """The calls, those with equal prompts together."""
    groups: dict[bytes, list[Joined]] = defaultdict(list)
    for call in calls:
        groups[call.prompt.tobytes()].append(call)
    return groups.values()
