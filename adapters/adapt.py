"""From the spans of whole components to rollouts with their rows. Pure: the same spans give the same rows."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple, cast

import numpy as np

from spanmill import semconv as sc
from spanmill.adapters import retries
from spanmill.adapters.calls import join, read_sources
from spanmill.adapters.dialects import is_call
from spanmill.adapters.divergence import Drift, find_drifts
from spanmill.adapters.episodes import make_episodes
from spanmill.adapters.forest import link
from spanmill.adapters.identity import SOURCES, Identities, Identity, Labels, number_attempts
from spanmill.adapters.info import infos_of
from spanmill.adapters.joined import Joined, calls_of, first
from spanmill.adapters.options import DEFAULTS, Options
from spanmill.adapters.order import number_turns
from spanmill.adapters.outline import outline
from spanmill.adapters.rewards import Seen, given, judge, rewards_in
from spanmill.adapters.spans import Tree
from spanmill.adapters.task import task_of
from spanmill.adapters.values import dump_json, text
from spanmill.triplets.records import Json, PolicyRun, Quarantined, Reward, Rollout, Span, Triplet, received_at
from spanmill.triplets.span_json import span_json

Key = tuple[str, int]
"""(rollout id, attempt)."""

_FLOAT32_MAX: Final = float(np.finfo(np.float32).max)
TERMINAL: Final = frozenset({"succeeded", "failed", "cancelled"})


class Adapted(NamedTuple):
    """What spans come to."""

    rollouts: list[Rollout]
    """Sorted by (rollout_id, attempt), each with its rows."""
    stray: list[Quarantined]
    """What is set aside and belongs to no rollout of these spans."""


class _Parts:
    """What belongs to one rollout attempt."""

    def __init__(self) -> None:
        self.calls: list[Joined] = []
        self.spans: list[Span] = []
        self.identities: dict[int, Identity] = {}
        """Each object once, by its Python id: most spans of a rollout share one."""
        self.rewards: list[Seen] = []


def adapt(spans: Iterable[Span], rewards: Sequence[Reward] = (), options: Options = DEFAULTS) -> Adapted:
    """The rollouts that the spans make, with Triplets, Episodes and what is quarantined.

    `spans` hold whole components (design section 9) in any order, duplicates included; several components at once give
    the rows that each gives alone. `rewards` come from requests and tables, in order; one that names a rollout which is
    not here comes back as stray, reason `unknown_rollout`.
    """
    tree = Tree(spans)
    identities = Identities(tree)
    requests = retries.cover(join(read_sources(tree, identities)))
    calls = [call for request in requests for call in calls_of(request, tree, identities)]
    parts = _sort_out(tree, identities, calls)
    stray = _hand_out(parts, rewards)
    rollouts = [_rollout(key, parts[key], tree, options) for key in sorted(parts)]
    return Adapted(rollouts, stray)


def _sort_out(tree: Tree, identities: Identities, calls: list[Joined]) -> dict[Key, _Parts]:
    """Which calls, spans and rewards belong to which rollout attempt."""
    of_span: dict[int, Identity] = {}
    for span in (*tree.spans, *tree.logs):
        identity = identities.of(span)
        if identity is not None:
            of_span[id(span)] = identity
    for call in calls:
        # All spans of a call are its rollout's, whatever a weaker source said of one of them.
        for source in call.sources:
            of_span[id(source.span)] = call.identity
    everything = [(of_span[id(s)], s.start_ns) for s in (*tree.spans, *tree.logs) if id(s) in of_span]
    numbers = number_attempts([*everything, *((c.identity, c.place.start_ns) for c in calls)])
    parts: dict[Key, _Parts] = defaultdict(_Parts)
    for call in calls:
        call.attempt = numbers[call.identity.rollout_id, call.identity.attempt]
        part = parts[call.identity.rollout_id, call.attempt]
        part.calls.append(call)
        part.identities[id(call.identity)] = call.identity
    for span in (*tree.spans, *tree.logs):
        identity = of_span.get(id(span))
        if identity is not None:
            part = parts[identity.rollout_id, numbers[identity.rollout_id, identity.attempt]]
            part.spans.append(span)
            part.identities[id(identity)] = identity
    for reward in rewards_in(tree):
        identity = of_span.get(id(reward.span))
        if identity is not None:
            parts[identity.rollout_id, numbers[identity.rollout_id, identity.attempt]].rewards.append(reward)
    return {k: p for k, p in parts.items() if p.calls or p.rewards or any(i.explicit for i in p.identities.values())}


def _hand_out(parts: Mapping[Key, _Parts], rewards: Sequence[Reward]) -> list[Quarantined]:
    """Give rewards that came apart from spans to their rollouts, without an attempt to the highest one."""
    highest: dict[str, int] = {}
    for rollout_id, attempt in parts:
        highest[rollout_id] = max(attempt, highest.get(rollout_id, attempt))
    own: dict[Key, list[Reward]] = defaultdict(list)
    stray: list[Quarantined] = []
    for reward in rewards:
        key = reward.rollout_id, reward.attempt if reward.attempt is not None else highest.get(reward.rollout_id, -1)
        if key in parts:
            own[key].append(reward)
        else:
            stray.append(_aside(reward, "unknown_rollout", f"no rollout {reward.rollout_id!r}" + _attempt_text(reward)))
    for key, mine in own.items():
        parts[key].rewards += given(mine)
    return stray


def _attempt_text(reward: Reward) -> str:
    return "" if reward.attempt is None else f" with attempt {reward.attempt}"


def _aside(reward: Reward, reason: str, detail: str) -> Quarantined:
    fields: dict[str, Json] = {"rollout_id": reward.rollout_id, "attempt": reward.attempt, "call_id": reward.call_id}
    fields |= {"name": reward.name, "value": reward.value, "source": reward.source}
    return Quarantined(
        reason, detail, "", "", dump_json(fields), received_at(reward.received_ns), reward.rollout_id, reward.attempt
    )


# ------------------------------------------------------------------ one rollout


def _rollout(key: Key, parts: _Parts, tree: Tree, options: Options) -> Rollout:
    rollout_id, attempt = key
    kept = sorted((c for c in parts.calls if not c.faults), key=lambda c: c.start_key)
    ordered, drifts = _order(kept, options)
    judged = judge(parts.rewards, [*ordered, *(c for c in parts.calls if c.faults)], tree, options)
    status, ended = _status(parts.spans)
    failed = status == "failed"
    unjudged = failed and judged.final is None and not options.train_failed
    for call in ordered:
        if failed:
            call.flags.add("rollout_failed")
    labels = _labels(parts.identities.values())
    identity_source = _strongest(parts)
    infos = infos_of(parts.spans)
    rows = {id(c): _triplet(c, rollout_id, labels, infos.pop(c.call_id, None), failed=unjudged) for c in ordered}
    rollout = Rollout(
        rollout_id=rollout_id,
        attempt=attempt,
        identity_source=identity_source,
        status=status,
        closed_by="end" if ended else "root" if _has_root(parts.spans, identity_source) else "batch",
        started_at=min((s.start_ns for s in parts.spans if s.start_ns), default=0) // 1000,
        ended_at=max((max(s.end_ns, s.start_ns) for s in parts.spans), default=0) // 1000,
        group_id=labels.group_id,
        task_id=labels.task_id,
        mode=labels.mode,
        group_size=labels.group_size,
        reward=judged.final,
        rewards=tuple(judged.seen),
        num_calls=len(parts.calls),
        metadata=dump_json(
            _metadata(parts.identities.values(), labels)
            | _infos(infos)
            | task_of(parts.spans)
            | outline(parts.spans, parts.calls)
        ),
        triplets=[rows[id(c)] for c in ordered],
        episodes=make_episodes(ordered, rows, drifts, options),
        quarantined=_quarantined(key, parts, judged.misses),
        announced=not ended and any(s.attributes.get(sc.ROLLOUT_STARTED) is True for s in parts.spans),
    )
    account(rollout, sum(c.tokens for c in parts.calls if c.faults))
    return rollout


def _order(kept: list[Joined], options: Options) -> tuple[list[Joined], dict[int, Drift]]:
    """The kept calls in turn order, with parents, divergences and retries found."""
    nodes = [c for c in kept if c.has_ids]
    links = link([c.node for c in nodes])
    for call, found in zip(nodes, links, strict=True):
        call.parent = nodes[found.parent] if found.parent is not None else None
    retries.resolve(kept, {id(c.parent) for c in nodes if c.parent is not None})
    before = {id(c): [nodes[b] for b in found.before] for c, found in zip(nodes, links, strict=True)}
    ordered = number_turns(kept, before)
    return ordered, find_drifts(ordered, options)


def _status(spans: list[Span]) -> tuple[str, bool]:
    """(status, whether the rollout reported its end). Of several reports the newest terminal one counts."""
    told = [(text(s.attributes[sc.ROLLOUT_STATUS]) or "", s) for s in spans if sc.ROLLOUT_STATUS in s.attributes]
    reports = [(status in TERMINAL, max(s.end_ns, s.start_ns), s.span_id, status) for status, s in told]
    if not reports:
        return "unknown", False
    terminal, _, _, status = max(reports, key=lambda r: r[:3])
    return (status if terminal else "unknown"), True


def _has_root(spans: list[Span], identity_source: str) -> bool:
    return identity_source == "trace" and any(not s.is_log and not s.parent_id and not is_call(s) for s in spans)


def _strongest(parts: _Parts) -> str:
    """The strongest source among the rollout's calls; without calls, among its spans."""
    sources = {c.identity.source for c in parts.calls} or {i.source for i in parts.identities.values()}
    return min(sources, key=SOURCES.index)


def _labels(identities: Iterable[Identity]) -> Labels:
    """Group, task, mode as read with the strongest identity that says them."""
    order = sorted(identities, key=lambda i: i.rank)
    return Labels(
        first(i.labels.group_id for i in order),
        first(i.labels.task_id for i in order),
        first(i.labels.mode for i in order),
        first(i.labels.group_size for i in order),
        first(i.labels.resources_id for i in order),
    )


def _metadata(identities: Iterable[Identity], labels: Labels) -> dict[str, Json]:
    made: dict[str, Json] = {}
    names = sorted({i.attempt for i in identities if isinstance(i.attempt, str)})
    if names:
        made["attempt_name"] = names[0]
    if labels.resources_id is not None:
        made["resources_id"] = labels.resources_id
    return made


def _infos(infos: dict[str | None, dict[str, Json]]) -> dict[str, Json]:
    """The rollout's own info, and that of calls which it does not have."""
    missed = {call_id: info for call_id, info in infos.items() if call_id is not None}
    own: dict[str, Json] = {"info": infos[None]} if None in infos else {}
    return own | ({"info_of_unknown_calls": missed} if missed else {})


def _quarantined(key: Key, parts: _Parts, misses: list[Seen]) -> list[Quarantined]:
    rows: list[Quarantined] = []
    for call in sorted((c for c in parts.calls if c.faults), key=lambda c: c.start_key):
        reason, detail = call.faults[0]
        details = detail + "".join(f"; {r}: {d}" for r, d in call.faults[1:])
        span = call.best.span
        rows.append(_row(key, reason, details, span))
    for reward in parts.rewards:
        if reward.number is None:
            rows.append(
                _of_reward(key, reward, "nonfinite_reward", f"reward {reward.name!r} has the value {reward.value!r}")
            )
    rows += [_of_reward(key, r, "unknown_call", f"reward {r.name!r} names the call {r.call_id!r}") for r in misses]
    return sorted(rows, key=lambda r: (r.trace_id, r.span_id, r.reason, r.detail))


def _of_reward(key: Key, reward: Seen, reason: str, detail: str) -> Quarantined:
    if reward.span is not None:
        return _row(key, reason, detail, reward.span)
    fields: dict[str, Json] = {
        "rollout_id": key[0],
        "call_id": reward.call_id,
        "name": reward.name,
        "value": str(reward.value),
    }
    return Quarantined(reason, detail, "", "", dump_json(fields), None, *key)


def _row(key: Key, reason: str, detail: str, span: Span) -> Quarantined:
    # A log record has no id of its own; the span that it was written in says where to look.
    span_id = span.span_id or span.parent_id
    return Quarantined(reason, detail, span.trace_id, span_id, span_json(span), received_at(span.received_ns), *key)


def account(rollout: Rollout, quarantined: int) -> None:
    """Account for every sampled token: captured = trained + masked + superseded + quarantined.

    `quarantined` are the tokens of the rollout's calls that have no row.
    """
    sizes = [(0 if t.response_token_ids is None else len(t.response_token_ids), t.flags) for t in rollout.triplets]
    rollout.num_triplets = len(rollout.triplets)
    rollout.num_episodes = len(rollout.episodes)
    rollout.tokens_captured = sum(size for size, _ in sizes) + quarantined
    rollout.tokens_quarantined = quarantined
    rollout.tokens_superseded = sum(size for size, flags in sizes if "superseded" in flags)
    rollout.tokens_trained = sum(int(e.loss_mask.sum(dtype=np.int64)) for e in rollout.episodes)
    rest = rollout.tokens_trained + rollout.tokens_superseded + rollout.tokens_quarantined
    rollout.tokens_masked = rollout.tokens_captured - rest
    for episode in rollout.episodes:
        episode.reward = rollout.reward
        episode.rollout_tokens_trained = rollout.tokens_trained


# ------------------------------------------------------------------ one row


def _triplet(call: Joined, rollout_id: str, labels: Labels, info: dict[str, Json] | None, *, failed: bool) -> Triplet:
    m = call.merged
    runs, runs_fit = _runs(call)
    metadata = dict(m.metadata)
    if info is not None:
        metadata["info"] = info
    if call.divergence:
        metadata["divergence"] = call.divergence
    if not runs_fit:
        metadata["policy_versions"] = "runs that do not fit the response were left out"
    return Triplet(
        rollout_id=rollout_id,
        attempt=call.attempt,
        turn=call.turn,
        choice=call.choice,
        call_id=call.call_id,
        trace_id=call.span.trace_id,
        span_id=call.span.span_id,
        ids_source=call.ids_source,
        started_at=call.place.start_ns // 1000,
        ended_at=max(call.place.end_ns, call.place.start_ns) // 1000,
        dialect=m.dialect,
        trainable=not call.blocked(failed=failed),
        group_id=labels.group_id,
        task_id=labels.task_id,
        mode=labels.mode,
        parent_call_id=call.parent.call_id if call.parent else None,
        agent=call.agent,
        model=m.model,
        prompt_token_ids=m.prompt_token_ids,
        response_token_ids=m.response_token_ids,
        response_logprobs=m.response_logprobs if m.response_token_ids is not None else None,
        logprobs_mode=m.logprobs_mode,
        policy_version=runs[-1].version if runs else m.policy_version,
        policy_versions=runs,
        temperature=_float32(m.temperature),
        top_p=_float32(m.top_p),
        top_k=_int32(m.top_k),
        max_tokens=_int32(m.max_tokens),
        finish_reason=m.finish_reason,
        stop_reason=m.stop_reason,
        reward=call.reward,
        routed_experts=cast("dict[str, Any] | None", m.routed_experts),
        multimodal=_text(m.multimodal),
        messages=_text(m.messages),
        response=_text(m.response),
        tools=_text(m.tools),
        flags=tuple(sorted(call.flags)),
        metadata=dump_json(metadata),
    )


def _int32(value: int | None) -> int | None:
    """A number that fits its column; one that does not is as good as not recorded."""
    return value if value is not None and -(2**31) <= value < 2**31 else None


def _float32(value: float | None) -> float | None:
    return value if value is not None and abs(value) <= _FLOAT32_MAX else None


def _text(value: Json) -> str | None:
    return None if value is None else dump_json(value)


def _runs(call: Joined) -> tuple[tuple[PolicyRun, ...], bool]:
    """(runs of policy versions over the response, whether those that were recorded fit it)."""
    m = call.merged
    if m.response_token_ids is None:
        return (), True
    end = 0
    for run in m.policy_versions:
        if run.start < end or run.length < 1 or run.start + run.length > call.tokens:
            return (), False
        end = run.start + run.length
    if m.policy_versions or m.policy_version is None or not call.tokens:
        return m.policy_versions, True
    return (PolicyRun(m.policy_version, 0, call.tokens),), True
