"""One call, several spans: which spans describe the same generation (design section 5).

A request is a set of spans that describe one generation, all its choices together. Evidence joins requests, strongest
first: equal response ids, equal tool-call ids, one LLM span above the other, equal output and input at the same time.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from spanmill.adapters.dialects import read
from spanmill.adapters.identity import Identities
from spanmill.adapters.messages import answer_text, as_object, as_objects
from spanmill.adapters.spans import Tree
from spanmill.adapters.values import dump_json
from spanmill.triplets.records import Call, Json, Span

ENGINE_SIDE: Final = ("engine", "gateway")
_NUMBERED: Final = re.compile(r"(.+)-(\d+)", re.DOTALL)


@dataclass(slots=True, eq=False)
class Source:
    """One LLM span with the calls that it describes."""

    span: Span
    calls: list[Call]
    rollout_id: str | None
    """The rollout that the span itself names, by sources 1 to 5."""
    home: str
    """The rollout it would have by itself."""
    told_by: tuple[str, int] = ("", 0)
    """What carries `rollout_id`, and off which place of the request a hook read it."""
    above: "Source | None" = None
    """The nearest LLM span above."""

    @property
    def engine_side(self) -> bool:
        """Whether an engine or gateway emitted it; clocks and copies of such spans say nothing about the client's."""
        return self.calls[0].source in ENGINE_SIDE

    def is_above(self, other: "Source") -> bool:
        """Whether this LLM span is an ancestor of the other."""
        above = other.above
        while above is not None:
            if above is self:
                return True
            above = above.above
        return False


@dataclass(slots=True, eq=False)
class Request:
    """The spans of one generation."""

    sources: list[Source]
    superseded: bool = False
    """A generation that the agent did not use."""
    covered_by: list[Source] = field(default_factory=list[Source])
    """Client spans that may or may not be about this generation: they give messages and agent, never ids."""

    @property
    def response_ids(self) -> set[str]:
        """Real response ids of its spans."""
        return {c.response_id for s in self.sources for c in s.calls if c.response_id}

    @property
    def has_client(self) -> bool:
        """Whether a client's span shows that the agent made the call."""
        return any(not s.engine_side for s in self.sources)


def read_sources(tree: Tree, identities: Identities) -> list[Source]:
    """All LLM spans, in the tree's order."""
    made: dict[int, Source] = {}
    for span in tree.spans:
        calls = read(span)
        for call in calls:
            if call.choice is not None and not 0 <= call.choice < 2**31:
                call.choice = None  # no index of a choice; it counts for the request alone
        if calls:
            own = identities.explicit(span)
            home = identities.of(span)
            made[id(span)] = Source(
                span,
                calls,
                own.rollout_id if own else None,
                home.rollout_id if home else "",
                (own.source, own.carrier) if own else ("", 0),
            )
    for source in made.values():
        source.above = next((made[id(a)] for a in tree.ancestors(source.span) if id(a) in made), None)
    return list(made.values())


def join(sources: list[Source]) -> list[Request]:
    """Requests, each with all spans that describe it, in the order of their first spans."""
    _read_suffixes(sources)
    joined = _Joins(sources)
    for members in _by(sources, lambda s: {c.response_id for c in s.calls if c.response_id}).values():
        _join_by_response_id(members, joined)
    for members in _by(sources, lambda s: {i for c in s.calls for i in c.tool_call_ids}).values():
        _join_by_tool_call(members, joined)
    _join_choices(sources, joined)
    _join_by_tree(sources, joined)
    _join_by_output(sources, joined)
    return joined.requests()


class _Joins:
    """Disjoint sets of sources."""

    def __init__(self, sources: list[Source]) -> None:
        self._order = {id(s): i for i, s in enumerate(sources)}
        self._sources = sources
        self._up = list(range(len(sources)))
        self._members = [[i] for i in range(len(sources))]

    def find(self, source: Source) -> int:
        at = self._order[id(source)]
        while self._up[at] != at:
            self._up[at] = self._up[self._up[at]]
            at = self._up[at]
        return at

    def members(self, source: Source) -> list[Source]:
        return [self._sources[i] for i in self._members[self.find(source)]]

    def union(self, a: Source, b: Source) -> None:
        x, y = sorted((self.find(a), self.find(b)))
        if x != y:
            self._up[y] = x
            self._members[x] = sorted(self._members[x] + self._members[y])
            self._members[y] = []

    def requests(self) -> list[Request]:
        return [Request([self._sources[i] for i in m]) for m in self._members if m]


def _by(sources: Iterable[Source], keys: Callable[[Source], Iterable[str]]) -> dict[str, list[Source]]:
    groups: dict[str, list[Source]] = defaultdict(list)
    for source in sources:
        for key in sorted(keys(source)):
            groups[key].append(source)
    return {key: members for key, members in sorted(groups.items()) if len(members) > 1}


def _read_suffixes(sources: list[Source]) -> None:
    """Read `ID-1`, as an engine numbers the prompts of one completions request, as choice n + c of client id `ID`."""
    known = {c.response_id for s in sources if not s.engine_side for c in s.calls if c.response_id}
    for source in sources:
        for call in source.calls if source.engine_side else ():
            numbered = _NUMBERED.fullmatch(call.response_id or "")
            if numbered and call.response_id not in known and numbered[1] in known:
                call.response_id = numbered[1]
                if call.choice is not None:
                    call.choice += int(numbered[2]) * call.choices


# ------------------------------------------------------------------ comparing two spans


def _compatible(a: Source, b: Source) -> bool:
    """Whether the rollouts are equal or one is unknown.

    What a hook read off a request may be stale or of another place than what the client's spans carry: then the
    stronger of the two decides for the call (design section 15 a).
    """
    if a.rollout_id is None or b.rollout_id is None or a.rollout_id == b.rollout_id:
        return True
    return "carrier" in (a.told_by[0], b.told_by[0]) and a.told_by != b.told_by


def _overlap(a: Source, b: Source) -> bool:
    return a.span.start_ns <= _end(b.span) and b.span.start_ns <= _end(a.span)


def _end(span: Span) -> int:
    return max(span.end_ns, span.start_ns)


def same_response(a: Call, b: Call) -> bool:
    """Whether both recorded the same answer ids."""
    x, y = a.response_token_ids, b.response_token_ids
    return x is not None and y is not None and np.array_equal(x, y)


def _contradict(a: Source, b: Source) -> bool:
    """Whether two spans cannot describe one generation: for a common choice, ids, texts or counts differ."""
    return any(
        _calls_contradict(x, y) for x in a.calls for y in b.calls if x.choice is not None and x.choice == y.choice
    )


def _calls_contradict(x: Call, y: Call) -> bool:
    if x.response_token_ids is not None and y.response_token_ids is not None:
        return not same_response(x, y)
    if x.tool_call_ids and y.tool_call_ids:
        return not set(x.tool_call_ids) & set(y.tool_call_ids)
    one, other = answer_text(x.response), answer_text(y.response)
    if one is not None and other is not None:
        return one.strip() != other.strip()
    return _count_differs(x, y) or _count_differs(y, x)


def _count_differs(x: Call, y: Call) -> bool:
    one_choice = x.choices == 1 and y.choices == 1
    return (
        one_choice
        and x.usage_response is not None
        and y.response_token_ids is not None
        and x.usage_response != y.response_token_ids.size
    )


def _ids_differ(a: Iterable[Source], b: Iterable[Source]) -> bool:
    """Whether both sides have real response ids, and no common one."""
    one = {c.response_id for s in a for c in s.calls if c.response_id}
    other = {c.response_id for s in b for c in s.calls if c.response_id}
    return bool(one and other) and not one & other


# ------------------------------------------------------------------ evidence, strongest first


def _join_by_response_id(members: list[Source], joined: _Joins) -> None:
    """Join the spans that show one response id, unless it turns out to be a constant.

    Spans of one generation at the client's side contain or at least overlap one another; a second group of spans with
    the same id in the same rollout is another generation, and then the id is none (design section 15 w).
    """
    clusters: list[list[Source]] = []
    for source in members:
        if not source.engine_side:
            _cluster(
                source,
                clusters,
                lambda s, o: o.is_above(s) or s.is_above(o) or (_overlap(s, o) and not _contradict(s, o)),
            )
    client_clusters = len(clusters)
    for source in members:
        if source.engine_side:
            _place_engine(source, clusters, client_clusters)
    for home in sorted({c[0].home for c in clusters}):
        at_home = [c for c in clusters if c[0].home == home]
        if len(at_home) > 1:
            for source in (s for c in at_home for s in c):
                for call in source.calls:
                    call.response_id = None
        else:
            for source in at_home[0][1:]:
                joined.union(at_home[0][0], source)


def _cluster(source: Source, clusters: list[list[Source]], alike: Callable[[Source, Source], bool]) -> None:
    for cluster in clusters:
        if all(_compatible(source, other) for other in cluster) and any(alike(source, other) for other in cluster):
            cluster.append(source)
            return
    clusters.append([source])


def _place_engine(source: Source, clusters: list[list[Source]], client_clusters: int) -> None:
    """An engine's span joins the client's call of its id: the one above it, or the only one that there is."""
    possible = [c for c in clusters[:client_clusters] if all(_compatible(source, other) for other in c)]
    below = [c for c in possible if any(other.is_above(source) for other in c)]
    equal = [c for c in possible if source.rollout_id and any(other.rollout_id == source.rollout_id for other in c)]
    nearest = below or equal or possible
    if len(nearest) == 1:
        nearest[0].append(source)
    elif possible:
        clusters.append([source])  # two calls may be meant: linking needs exactly one
    else:
        engines = clusters[client_clusters:]
        for cluster in engines:
            if all(_compatible(source, o) and not _contradict(source, o) for o in cluster):
                cluster.append(source)
                return
        clusters.append([source])


def _join_by_tool_call(members: list[Source], joined: _Joins) -> None:
    """Join the spans whose answers make the tool call of one id, unless two generations of a rollout show it."""
    for home in sorted({s.home for s in members}):
        named = [s for s in members if s.rollout_id in (None, home) or s.home == home]
        pairs = [(a, b) for i, a in enumerate(named) for b in named[i + 1 :] if joined.find(a) != joined.find(b)]
        if any(not _one_generation(a, b, joined) for a, b in pairs):
            continue
        for a, b in pairs:
            joined.union(a, b)


def _one_generation(a: Source, b: Source, joined: _Joins) -> bool:
    if not _compatible(a, b) or _contradict(a, b) or _ids_differ(joined.members(a), joined.members(b)):
        return False
    return a.engine_side or b.engine_side or _overlap(a, b)


def _join_choices(sources: list[Source], joined: _Joins) -> None:
    """Join our own spans, one per choice, of a request whose answer had no id: they begin together at one place."""
    beside: dict[tuple[str, str, int], list[Source]] = defaultdict(list)
    for source in sources:
        call, span = source.calls[0], source.span
        if call.dialect == "spanmill" and call.response_id is None:
            beside[span.trace_id, span.parent_id, span.start_ns].append(source)
    for group in beside.values():
        choices = {s.calls[0].choice for s in group}
        if len(group) > 1 and len(choices) == len(group) and all(_same_prompt(group[0], s) for s in group):
            for source in group[1:]:
                joined.union(group[0], source)


def _same_prompt(a: Source, b: Source) -> bool:
    x, y = a.calls[0].prompt_token_ids, b.calls[0].prompt_token_ids
    return x is None and y is None if x is None or y is None else np.array_equal(x, y)


def _join_by_tree(sources: list[Source], joined: _Joins) -> None:
    """Join an LLM span with the nearest one above it if no response ids differ and the outputs agree.

    Several generations below one client span without an id are retries: they are told apart later.
    """
    below: dict[int, list[Source]] = defaultdict(list)
    for source in sources:
        above = source.above
        if above is None or joined.find(above) == joined.find(source) or _contradict(above, source):
            continue
        if not _ids_differ(joined.members(above), joined.members(source)) or _same_tokens(above, source):
            below[id(above)].append(source)
    for source in reversed(sources):
        candidates = below.get(id(source), [])
        generations = {joined.find(c) for c in candidates}
        rivals = any(
            _ids_differ(joined.members(a), joined.members(b)) or _contradict(a, b)
            for a in candidates
            for b in candidates
        )
        if len(generations) == 1 or not rivals:
            for candidate in candidates:
                joined.union(source, candidate)


def _same_tokens(a: Source, b: Source) -> bool:
    """Whether both recorded the same prompt and answer ids: a proxy between them wrote a response id of its own."""
    known = a.calls[0].prompt_token_ids is not None
    return known and same_response(a.calls[0], b.calls[0]) and _same_prompt(a, b)


def _join_by_output(sources: list[Source], joined: _Joins) -> None:
    """Join spans of one rollout that show the same output and last input, one inside the other in time."""
    alike: dict[tuple[str, str, str], list[Source]] = defaultdict(list)
    for source in sources:
        call = source.calls[0]
        if len(source.calls) > 1 or call.response is None or call.messages is None:
            continue
        output, last = _output_key(call.response), _last_input(call.messages)
        if output and last:
            alike[source.home, output, last].append(source)
    for _, group in sorted(alike.items()):
        for source in group:
            outside = [
                o for o in group if o is not source and _inside(source.span, o.span) and _may_be_one(source, o, joined)
            ]
            if len({joined.find(o) for o in outside}) == 1:
                joined.union(outside[0], source)


def _may_be_one(a: Source, b: Source, joined: _Joins) -> bool:
    return _compatible(a, b) and not _ids_differ(joined.members(a), joined.members(b)) and not _contradict(a, b)


def _inside(inner: Span, outer: Span) -> bool:
    return outer.start_ns <= inner.start_ns and _end(inner) <= _end(outer)


def _output_key(message: Json) -> str | None:
    functions = [c.get("function") for c in as_objects(as_object(message).get("tool_calls"))]
    said = answer_text(message)
    return dump_json([said.strip() if said else None, functions]) if said or functions else None


def _last_input(messages: Json) -> str | None:
    asked = as_objects(messages)
    return dump_json([asked[-1].get("role"), answer_text(asked[-1])]) if asked else None


def nearest_requests(requests: list[Request]) -> Iterator[tuple[Request, Source]]:
    """Each request with an engine's span, and the client's span of another request right above it."""
    for request in requests:
        for source in request.sources:
            if source.engine_side and source.above is not None and source.above not in request.sources:
                yield request, source.above
                break
