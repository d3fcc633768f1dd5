"""Merging a rollout's calls into training sequences (design section 7).

A1: [1 2 3] -> [4 5]                        sub-agent: B1: [9 9] -> [8]
A2: [1 2 3 4 5 6] -> [7]      extends A1    B2: [9 9 8 7] -> [6]     extends B1
A3: [1 2 3 4 6] -> [5]        does not (5 was cut): a new root
episodes: A1+A2 = 1 2 3 4 5 6 7   mask 0 0 0 1 1 0 1
          A3    = 1 2 3 4 6 5     mask 0 0 0 0 0 1
          B1+B2 = 9 9 8 7 6       mask 0 0 1 0 1
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, TypeVar, cast

import numpy as np

from spanmill.adapters.divergence import Drift
from spanmill.adapters.joined import Joined
from spanmill.adapters.options import Options
from spanmill.adapters.values import dump_json
from spanmill.triplets.records import Episode, Json, Logprobs, PolicyRun, Triplet, Turn

V = TypeVar("V")


class _Step(NamedTuple):
    call: Joined
    end: int
    """Where the call's tokens end in this sequence: before a drift, or at the end of its answer."""


def make_episodes(
    calls: Sequence[Joined], rows: Mapping[int, Triplet], drifts: Mapping[int, Drift], options: Options
) -> list[Episode]:
    """One Episode per leaf that can be trained, in the order (turn, choice) of the leaves.

    `calls` are the rollout's kept calls in order; `rows` their Triplets and `drifts` their realigned parents, by the
    Python id of the call. A call on several paths is trained in the first of them.
    """
    trained: set[int] = set()
    episodes: list[Episode] = []
    for path in _paths(calls, rows, drifts, options):
        trains = [rows[id(s.call)].trainable and id(s.call) not in trained for s in path]
        trained.update(id(s.call) for s, t in zip(path, trains, strict=True) if t)
        episodes.append(_episode(len(episodes), path, trains, rows))
    return episodes


def _paths(
    calls: Sequence[Joined], rows: Mapping[int, Triplet], drifts: Mapping[int, Drift], options: Options
) -> list[list[_Step]]:
    """The way from its root to each leaf; leaves that cannot be trained are pruned until each leaf can be."""
    nodes = [c for c in calls if c.has_ids]
    if options.merge == "none":
        return [[_Step(c, _end(c))] for c in nodes if rows[id(c)].trainable]
    inner = _inner((c for c in nodes if rows[id(c)].trainable), drifts)
    return [_path(c, drifts) for c in nodes if rows[id(c)].trainable and id(c) not in inner]


def _inner(calls: Iterable[Joined], drifts: Mapping[int, Drift]) -> set[int]:
    """The Python ids of what stands above the calls; each is come to once."""
    found: set[int] = set()
    for call in calls:
        above = _parent(call, drifts)
        while above is not None and id(above) not in found:
            found.add(id(above))
            above = _parent(above, drifts)
    return found


def _parent(call: Joined, drifts: Mapping[int, Drift]) -> Joined | None:
    drift = drifts.get(id(call))
    return drift.parent if drift else call.parent


def _path(leaf: Joined, drifts: Mapping[int, Drift]) -> list[_Step]:
    steps = [_Step(leaf, _end(leaf))]
    call = leaf
    while (above := _parent(call, drifts)) is not None:
        drift = drifts.get(id(call))
        steps.append(_Step(above, drift.at if drift else _end(above)))
        call = above
    return steps[::-1]


def _end(call: Joined) -> int:
    return call.prompt.size + call.tokens


def _episode(number: int, path: list[_Step], trains: list[bool], rows: Mapping[int, Triplet]) -> Episode:
    leaf = path[-1].call
    row = rows[id(leaf)]
    ids = np.concatenate((leaf.prompt, leaf.response))
    mask = np.zeros(ids.size, np.int8)
    values: Logprobs | None = np.zeros(ids.size, np.float32)
    turns: list[Turn] = []
    runs: list[PolicyRun] = []
    for (call, end), train in zip(path, trains, strict=True):
        start = call.prompt.size
        turn = rows[id(call)]
        turns.append(Turn(turn.call_id, start, end, train, turn.logprobs_mode, turn.temperature))
        if not train:
            continue
        mask[start:end] = 1
        runs += [r for run in turn.policy_versions if (r := _shift(run, start, end)) is not None]
        if turn.response_logprobs is None:
            values = None
        elif values is not None:
            values[start:end] = turn.response_logprobs[: end - start]
    sampled = [rows[id(s.call)] for s, t in zip(path, trains, strict=True) if t]
    flags: set[str] = set()
    if any(_end(s.call) != s.end for s in path):
        flags.add("realigned")
    settings = [
        [t.logprobs_mode for t in sampled],
        [t.temperature for t in sampled],
        [t.top_p for t in sampled],
        [t.top_k for t in sampled],
    ]
    if any(len({v for v in values_of if v is not None}) > 1 for values_of in settings):
        flags.add("mixed_sampling")
    return Episode(
        rollout_id=row.rollout_id,
        attempt=row.attempt,
        episode=number,
        input_ids=ids,
        loss_mask=mask,
        prompt_length=path[0].call.prompt.size,
        turns=tuple(turns),
        step_rewards=tuple(rows[id(s.call)].reward for s in path),
        truncated=row.finish_reason == "length",
        group_id=row.group_id,
        task_id=row.task_id,
        mode=row.mode,
        agent=row.agent,
        model=row.model,
        logprobs=values,
        num_turns=len(path),
        policy_versions=_joined_runs(runs),
        logprobs_mode=_common([t.logprobs_mode for t in sampled]),
        temperature=_common([t.temperature for t in sampled]),
        top_p=_common([t.top_p for t in sampled]),
        top_k=_common([t.top_k for t in sampled]),
        finish_reason=row.finish_reason,
        messages=_conversation(leaf.merged.messages, leaf.merged.response),
        tools=row.tools,
        flags=tuple(sorted(flags)),
    )


def _shift(run: PolicyRun, start: int, end: int) -> PolicyRun | None:
    """A run over the response as a run over the sequence, cut where the call's trained tokens end."""
    first, last = start + run.start, min(start + run.start + run.length, end)
    return PolicyRun(run.version, first, last - first) if last > first else None


def _joined_runs(runs: list[PolicyRun]) -> tuple[PolicyRun, ...]:
    """Maximal runs over adjacent trained tokens, also over a turn's border; a gap ends one."""
    joined: list[PolicyRun] = []
    for run in runs:
        last = joined[-1] if joined else None
        if last is not None and last.version == run.version and last.start + last.length == run.start:
            joined[-1] = PolicyRun(last.version, last.start, last.length + run.length)
        else:
            joined.append(run)
    return tuple(joined)


def _common(values: list[V]) -> V | None:
    """The value that all trained turns share, or None."""
    return values[0] if all(v == values[0] for v in values) else None


def _conversation(messages: Json, response: Json) -> str | None:
    if messages is None and response is None:
        return None
    asked = cast("list[Json]", messages) if isinstance(messages, list) else []
    return dump_json([*asked, response] if response is not None else asked)
