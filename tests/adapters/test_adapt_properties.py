"""What must hold of every rollout, however its spans came."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
from agent_spans import call, reward, rollout, span
from hypothesis import given, settings
from hypothesis import strategies as st

from spanmill.adapters import Options, adapt
from spanmill.triplets.records import Rollout, Span, Value
from spanmill.triplets.table import rows_to_tables

OPTIONS = st.builds(Options, merge=st.sampled_from(["prefix", "none", "realign"]), realign_tokens=st.integers(1, 3))


def tables(rollouts: Sequence[Rollout]) -> dict[str, list[dict[str, object]]]:
    """All rows, without when they were received."""
    made = {name: table.to_pylist() for name, table in rows_to_tables(rollouts).items()}
    return {n: [{k: v for k, v in row.items() if k != "received_at"} for row in rows] for n, rows in made.items()}


@st.composite
def component(draw: st.DrawFn) -> list[Span]:
    """Spans of one to three rollouts: agents, calls that extend each other, engine spans, retries, rewards, damage."""
    rng = random.Random(draw(st.integers(0, 2**32)))
    spans: list[Span] = []
    number = iter(range(1, 10_000))
    for r in range(draw(st.integers(1, 3))):
        root = next(number)
        status = rng.choice(["succeeded", "failed", None])
        spans.append(rollout(root, f"rollout-{rng.choice([r, r, 0])}", trace=r + 1, status=status))
        parents = [root]
        histories: list[list[int]] = [[1]]
        for turn in range(draw(st.integers(0, 6))):
            if rng.random() < 0.2:
                agent = next(number)
                spans.append(
                    span(
                        agent,
                        {"gen_ai.operation.name": "invoke_agent", "gen_ai.agent.name": f"agent-{agent}"},
                        trace=r + 1,
                        parent=rng.choice(parents),
                        start=turn,
                    )
                )
                parents.append(agent)
            prompt = [*rng.choice(histories), *rng.choices([1, 2, 3], k=rng.randrange(3))]
            response = rng.choices([1, 2, 3], k=rng.randrange(4))
            histories.append(prompt + response)
            spans += _call(rng, number, r + 1, rng.choice(parents), turn, prompt, response)
            if rng.random() < 0.3:
                value = rng.choice([1.0, 0, True, float("nan")])
                spans.append(reward(next(number), value, trace=r + 1, parent=rng.choice(parents), start=turn * 20 + 15))
    return spans


def _call(
    rng: random.Random,
    number: Iterator[int],
    trace: int,
    parent: int,
    turn: int,
    prompt: list[int],
    response: list[int],
) -> list[Span]:
    client, at = next(number), turn * 20
    kind = rng.random()
    if kind < 0.5:
        return [call(client, prompt, response, trace=trace, parent=parent, start=at, end=at + 10)]
    if kind < 0.6:
        wrong: dict[str, Value] = {"spanmill.response.token_count": len(response) + 1}
        return [call(client, prompt, response, trace=trace, parent=parent, start=at, attributes=wrong)]
    answered = {"gen_ai.response.id": f"r{client}"} if kind < 0.8 else {}
    text = {"gen_ai.operation.name": "chat", "gen_ai.request.model": "m", **answered}
    spans = [span(client, text, trace=trace, parent=parent, start=at, end=at + 10)]
    for _ in range(rng.choice([1, 1, 2, 3])):
        engine = next(number)
        sampled = response if rng.random() < 0.5 else [*response, 2]
        spans.append(
            call(
                engine,
                prompt,
                sampled,
                capture="engine",
                response_id=f"r{rng.choice([client, engine])}",
                trace=trace,
                parent=client,
                start=at + 1,
                end=at + 9,
            )
        )
    return spans


@settings(max_examples=60)
@given(component(), OPTIONS, st.randoms(use_true_random=False))
def test_any_order_and_duplication_gives_the_same_rows(spans: list[Span], options: Options, rng: random.Random) -> None:
    """Arrival order and repeated delivery never change a row."""
    again = [*spans, *(replace(s, received_ns=7) for s in rng.sample(spans, len(spans) // 2))]
    rng.shuffle(again)
    assert tables(adapt(spans, options=options).rollouts) == tables(adapt(again, options=options).rollouts)


@settings(max_examples=60)
@given(component(), OPTIONS)
def test_every_sampled_token_is_accounted_for(spans: list[Span], options: Options) -> None:
    """Captured tokens are those of all calls, and each is trained, masked, superseded or quarantined once."""
    for r in adapt(spans, options=options).rollouts:
        assert r.tokens_captured == r.tokens_trained + r.tokens_masked + r.tokens_superseded + r.tokens_quarantined
        assert r.tokens_trained == sum(int(e.loss_mask.sum()) for e in r.episodes)
        assert min(r.tokens_trained, r.tokens_masked, r.tokens_superseded, r.tokens_quarantined) >= 0
        kept = sum(t.response_token_ids.size for t in r.triplets if t.response_token_ids is not None)
        assert r.tokens_captured == kept + r.tokens_quarantined


@settings(max_examples=60)
@given(component(), OPTIONS)
def test_a_trained_token_stands_where_the_model_sampled_it(spans: list[Span], options: Options) -> None:
    """Each turn's slice of an Episode is that call's prompt and answer, and every trainable call is trained once."""
    for r in adapt(spans, options=options).rollouts:
        rows = {t.call_id: t for t in r.triplets}
        trained: list[str] = []
        for e in r.episodes:
            inside = set[int]()
            for turn in e.turns:
                row = rows[turn.call_id]
                assert row.prompt_token_ids is not None and row.response_token_ids is not None
                whole = [*row.prompt_token_ids.tolist(), *row.response_token_ids.tolist()]
                assert whole[: turn.response_end] == e.input_ids.tolist()[: turn.response_end]
                expected = [1 if turn.trained else 0] * (turn.response_end - turn.prompt_end)
                assert expected == e.loss_mask.tolist()[turn.prompt_end : turn.response_end]
                inside.update(range(turn.prompt_end, turn.response_end))
                trained += [turn.call_id] if turn.trained else []
            assert not [i for i, m in enumerate(e.loss_mask.tolist()) if m and i not in inside]
        assert sorted(t.call_id for t in r.triplets if t.trainable) == sorted(trained)


BAD: dict[str, list[Value]] = {
    "spanmill.prompt.token_ids": [["1", "2"], [1.5], [-7, 2], [2**31], [True], [1, None], "text", b"odd"],
    "spanmill.response.token_ids": [["1"], [-1, -1], [2**40, 3], [None], {"a": 1}, b"\xff\xff\xff\xff"],
    "spanmill.response.logprobs": [[float("nan")], [0.5], ["x"], [None], [True], b"odd"],
}


@settings(max_examples=150)
@given(component(), OPTIONS, st.randoms(use_true_random=False))
def test_what_stands_for_damage_gets_into_no_row(spans: list[Span], options: Options, rng: random.Random) -> None:
    """Whatever numbers of some spans are damaged or missing: every id in a row is one, every logprob a number."""
    twice = [
        replace(s, span_id=f"f{s.span_id[1:]}", parent_id=s.span_id) for s in spans if BAD.keys() & s.attributes.keys()
    ]
    damaged = list[Span]()
    for one in (*spans, *twice):
        attributes = dict(one.attributes)
        for name in BAD.keys() & attributes.keys():
            if rng.random() < 0.3:
                attributes[name] = rng.choice(BAD[name])
            elif rng.random() < 0.2:
                del attributes[name]
        damaged.append(replace(one, attributes=attributes))
    for r in adapt(damaged, options=options).rollouts:
        ids = [i for t in r.triplets for i in (t.prompt_token_ids, t.response_token_ids) if i is not None]
        assert [] == [i for i in (*ids, *(e.input_ids for e in r.episodes)) if i.size and i.min() < 0]
        logprobs = [t.response_logprobs for t in r.triplets if t.response_logprobs is not None]
        assert [] == [values for values in logprobs if not np.all(np.isfinite(values))]


@settings(max_examples=40)
@given(component(), component())
def test_components_together_give_the_rows_that_each_gives_alone(one: list[Span], other: list[Span]) -> None:
    """What else is adapted in the same pass never changes a rollout."""

    def moved(s: Span) -> Span:
        attributes = {
            k: f"other-{v}" if k in ("spanmill.rollout.id", "gen_ai.response.id") else v
            for k, v in s.attributes.items()
        }
        return replace(s, trace_id="f" + s.trace_id[1:], attributes=attributes)

    other = [moved(s) for s in other]
    alone = [*adapt(one).rollouts, *adapt(other).rollouts]
    assert tables(sorted(alone, key=lambda r: (r.rollout_id, r.attempt))) == tables(adapt([*one, *other]).rollouts)
