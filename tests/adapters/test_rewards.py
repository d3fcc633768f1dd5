from typing import Any

from agent_spans import call, event, reward, rollout, span

from spanmill.adapters import adapt
from spanmill.triplets.records import Link, Reward, Rollout, Span, Value

FIRST: Any = {"parent": 1, "start": 0, "end": 10}
SECOND: Any = {"parent": 1, "start": 20, "end": 30}


def one(*spans: Span, rewards: tuple[Reward, ...] = ()) -> Rollout:
    """The one rollout that the spans make."""
    (made,) = adapt([rollout(1, "r"), *spans], rewards).rollouts
    return made


def steps(made: Rollout) -> list[float | None]:
    """Step rewards by turn."""
    return [t.reward for t in made.triplets]


def test_a_span_link_names_the_call() -> None:
    """A reward that links to a call's span is that call's, whatever ran since."""
    first, second = call(2, [1], [2], **FIRST), call(3, [1, 2, 3], [4], **SECOND)
    linked = reward(4, 0.5, parent=1, start=40, links=(Link(first.trace_id, first.span_id, {}),))
    made = one(first, second, linked)
    assert ([0.5, None], None) == (steps(made), made.reward)


def test_a_failed_call_never_takes_a_reward_in_anothers_place() -> None:
    """The reward after a failed call goes to the last call that worked."""
    worked = call(2, [1], [2], **FIRST)
    failed = call(3, [1, 2], [3], status=2, **SECOND)
    assert [0.5, None] == steps(one(worked, failed, reward(4, 0.5, parent=1, start=40)))


def test_a_reward_stays_under_its_own_parent_first() -> None:
    """Of two agents, the reward under one goes to that one's last call, though the other's ended later."""
    agents = [span(n, {"gen_ai.operation.name": "invoke_agent"}, parent=1, end=100) for n in (10, 11)]
    mine = call(2, [1], [2], parent=10, start=0, end=10)
    others = call(3, [5], [6], parent=11, start=20, end=30)
    assert [0.5, None] == steps(one(*agents, mine, others, reward(4, 0.5, parent=10, start=40)))


def test_an_event_on_the_rollout_is_untargeted() -> None:
    """A reward event on a span that is no call counts for the rollout and for the last call below that span."""
    root = rollout(1, "r")
    root.events = (event("spanmill.reward", {"spanmill.reward.value": 1}, at=50),)
    (made,) = adapt([root, call(2, [1], [2], **FIRST)]).rollouts
    assert ([1.0], 1.0) == (steps(made), made.reward)


def test_of_several_finals_the_newest_counts() -> None:
    """The rollout's reward is the last one named final, though an unnamed one came later."""
    given = [(3, 0.25, "final", 40), (4, 0.75, "final", 50), (5, 0.5, None, 60)]
    spans = [reward(n, v, reward_name=name, parent=1, start=at) for n, v, name, at in given]
    assert 0.75 == one(call(2, [1], [2], **FIRST), *spans).reward


def test_a_posted_reward_is_later_than_every_span() -> None:
    """A reward by HTTP without a call replaces the rollout's reward and is no call's."""
    made = one(call(2, [1], [2], **FIRST), reward(3, 0.25, parent=1, start=40), rewards=(Reward("r", 1.0),))
    assert ([0.25], 1.0) == (steps(made), made.reward)


def test_posted_rewards_of_one_name_are_one_write() -> None:
    """By HTTP the newest value of one (attempt, call, name) counts, and stands in the list once."""
    posted = (Reward("r", 0.25, name="final"), Reward("r", 0.5, name="final"))
    made = one(call(2, [1], [2], **FIRST), rewards=posted)
    assert ([("final", 0.5)], 0.5) == ([(r.name, r.value) for r in made.rewards], made.reward)


def test_a_posted_reward_goes_to_the_highest_attempt() -> None:
    """Without an attempt the newest run of the rollout is meant."""
    again = rollout(9, "r", trace=2, start=100)
    again.attributes = {**again.attributes, "spanmill.rollout.attempt": 1}
    found = adapt([rollout(1, "r"), again], [Reward("r", 1.0)]).rollouts
    assert [(0, None), (1, 1.0)] == [(r.attempt, r.reward) for r in found]


def test_a_reward_for_a_call_that_is_not_there_is_said_aloud() -> None:
    """It stands in the list, is nobody's reward, and has a row in quarantine."""
    made = one(call(2, [1], [2], **FIRST), reward(3, 0.5, call_id="nobody", parent=1, start=40))
    assert ([None], None, ["unknown_call"]) == (steps(made), made.reward, [q.reason for q in made.quarantined])


def test_only_the_first_dimension_of_an_annotation_counts() -> None:
    """Agent Lightning's index 0 is the reward, its name `primary` means `reward`; other dimensions are listed only."""
    values: dict[str, Value] = {"agentlightning.reward.0.name": "primary", "agentlightning.reward.0.value": 0.5}
    values |= {"agentlightning.reward.1.name": "final", "agentlightning.reward.1.value": 9.0}
    made = one(call(2, [1], [2], **FIRST), span(3, values, name="agentlightning.annotation", parent=1, start=40))
    assert ([0.5], 0.5) == (steps(made), made.reward)
    assert [("reward", 0.5), ("final", 9.0)] == [(r.name, r.value) for r in made.rewards]


def test_an_annotation_link_names_the_call() -> None:
    """A link by response id is a call's step reward."""
    values: dict[str, Value] = {
        "agentlightning.reward.0.value": 0.5,
        "agentlightning.link.0.key_match": "gen_ai.response.id",
    }
    values |= {"agentlightning.link.0.value_match": "r2"}
    calls = call(2, [1], [2], **FIRST), call(3, [1, 2, 3], [4], **SECOND)
    assert [0.5, None] == steps(one(*calls, span(4, values, name="agentlightning.annotation", parent=1, start=40)))


def test_a_judge_in_an_evaluator_span_is_not_trained() -> None:
    """Calls below a span that computes a reward are kept and flagged, not trained."""
    evaluator = span(5, {"openinference.span.kind": "EVALUATOR"}, parent=1, start=40)
    made = one(call(2, [1], [2], **FIRST), evaluator, call(3, [7], [8], parent=5, start=41))
    assert [(True, ()), (False, ("reward_call",))] == [(t.trainable, t.flags) for t in made.triplets]


def test_an_evaluation_without_a_score_is_no_reward() -> None:
    """An evaluation that only has a label neither counts nor is set aside."""
    judged = call(2, [1], [2], **FIRST)
    judged.events = (
        event("gen_ai.evaluation.result", {"gen_ai.evaluation.name": "final", "gen_ai.evaluation.score.label": "ok"}),
    )
    made = one(judged)
    assert ((), []) == (made.rewards, made.quarantined)
