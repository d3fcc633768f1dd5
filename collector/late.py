"""What comes for rollouts whose spans are gone: pure. Rewards make the next revision of the committed rows, spans are
set aside: with them alone a rollout would be made of what is left of it.
"""

import math
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import replace

from spanmill.adapters import Adapted, keys
from spanmill.collector.assemble import RolloutKey
from spanmill.triplets.records import Quarantined, Reward, RewardSeen, Rollout, Span, received_at
from spanmill.triplets.span_json import span_json


def without_expired(
    spans: Iterable[Span], adapted: Adapted, expired: Container[RolloutKey]
) -> tuple[list[Rollout], list[Span]]:
    """The rollouts of `adapted`, made from `spans`, that have not expired, and the spans of the others."""
    rollouts = [row for row in adapted.rollouts if (row.rollout_id, row.attempt) not in expired]
    late = [row for row in adapted.rollouts if (row.rollout_id, row.attempt) in expired]
    if not late or not rollouts:
        return rollouts, list(spans) if late else []
    calls = {(r.trace_id, r.span_id) for row in late for r in (*row.triplets, *row.quarantined)}
    kept = {row.rollout_id for row in rollouts}
    names = {("rollout", row.rollout_id) for row in late if row.rollout_id not in kept}
    return rollouts, [s for s in spans if (s.trace_id, s.span_id) in calls or not names.isdisjoint(keys(s))]


def expired_row(span: Span) -> Quarantined:
    """The row of a span of a rollout that has expired."""
    rollout_id = next((value for kind, value in keys(span) if kind == "rollout"), None)
    detail = "its rollout was written, and then spans of it were removed from the journal"
    return Quarantined(
        "expired", detail, span.trace_id, span.span_id, span_json(span), received_at(span.received_ns), rollout_id
    )


def rewarded(
    rollout: Rollout, rewards: Sequence[Reward], counts: Callable[[str], bool]
) -> tuple[Rollout, list[tuple[Reward, str]]]:
    """The rollout with rewards that came apart from its spans, in order, and those that cannot be taken, and why.

    As when its spans were put together: one (call, name) is one write, the newest; a reward without a call is the final
    one, if its name `counts`, one with a call that call's. What may be trained stays as it was.
    """
    seen = list(rollout.rewards)
    final = rollout.reward
    steps: dict[str, float] = {}
    # A call may be named by its id or by its span's.
    call_of = {triplet.span_id: triplet.call_id for triplet in rollout.triplets}
    call_of |= {triplet.call_id: triplet.call_id for triplet in rollout.triplets}
    refused = list[tuple[Reward, str]]()
    for reward in rewards:
        if not math.isfinite(reward.value):
            refused.append((reward, "nonfinite_reward"))
            continue
        if reward.call_id is not None and reward.call_id not in call_of:
            refused.append((reward, "unknown_call"))
            continue
        call_id = None if reward.call_id is None else call_of[reward.call_id]
        seen = [one for one in seen if not _same_write(one, reward, call_id)]
        seen.append(RewardSeen(reward.name, float(reward.value), call_id, reward.source))
        if not counts(reward.name):
            continue
        if call_id is None:
            final = float(reward.value)
        else:
            steps[call_id] = float(reward.value)
    return _with(rollout, final, steps, tuple(seen)), refused


def aside(reward: Reward, reason: str, span: str, received_at: int | None) -> Quarantined:
    """The row of a reward that cannot be taken."""
    detail = {
        "nonfinite_reward": f"reward {reward.name!r} has the value {reward.value!r}",
        "unknown_call": f"reward {reward.name!r} names the call {reward.call_id!r}",
    }[reason]
    return Quarantined(reason, detail, "", "", span, received_at, reward.rollout_id, reward.attempt)


def _same_write(one: RewardSeen, reward: Reward, call_id: str | None) -> bool:
    return one.source in ("http", "cli") and (one.name, one.call_id) == (reward.name, call_id)


def _with(rollout: Rollout, final: float | None, steps: dict[str, float], seen: tuple[RewardSeen, ...]) -> Rollout:
    triplets = [replace(row, reward=steps.get(row.call_id, row.reward)) for row in rollout.triplets]
    episodes = [
        replace(
            row,
            reward=final,
            step_rewards=tuple(
                steps.get(turn.call_id, before) for turn, before in zip(row.turns, row.step_rewards, strict=True)
            ),
        )
        for row in rollout.episodes
    ]
    return replace(rollout, reward=final, rewards=seen, triplets=triplets, episodes=episodes)
