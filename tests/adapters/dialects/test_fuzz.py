import random

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mutated_spans import mutated, real_spans, some_spans

from spanmill.adapters import adapt
from spanmill.adapters.dialects import READERS, is_call, read
from spanmill.adapters.keys import keys, signal
from spanmill.triplets.table import rows_to_tables

SEEDS = st.integers(min_value=0, max_value=2**32)
UNHURRIED = settings(max_examples=150, suppress_health_check=[HealthCheck.too_slow])


@UNHURRIED
@given(SEEDS)
def test_no_reader_raises_on_any_span(seed: int) -> None:
    """Each reader that recognises a mutated real span reads it; a value of a wrong type is None, never an error."""
    rng = random.Random(seed)
    for _ in range(10):
        span = mutated(rng.choice(real_spans()), rng)
        for reader in READERS:
            if not span.is_log and reader.recognises(span):
                calls = reader.read(span)
                assert all(c.dialect == reader.__name__.rpartition(".")[2] for c in calls)
        assert is_call(span) or not read(span)
        keys(span)
        signal(span)


@UNHURRIED
@given(SEEDS)
def test_rows_of_mutated_spans_account_for_every_token(seed: int) -> None:
    """Whatever the spans hold, they become tables, and captured = trained + masked + superseded + quarantined."""
    adapted = adapt(some_spans(random.Random(seed), 12))
    for rollout in adapted.rollouts:
        parts = (rollout.tokens_trained, rollout.tokens_masked, rollout.tokens_superseded, rollout.tokens_quarantined)
        assert rollout.tokens_captured == sum(parts)
        assert min(parts) >= 0
        asked = [q for q in rollout.quarantined if q.reason not in ("nonfinite_reward", "unknown_call")]
        assert rollout.num_calls == len(rollout.triplets) + len(asked)
        assert not [q.detail for q in rollout.quarantined if q.reason == "unreadable_span"]
    rows_to_tables(adapted.rollouts, adapted.stray)


@UNHURRIED
@given(SEEDS)
def test_rows_of_mutated_spans_do_not_depend_on_order(seed: int) -> None:
    """The same odd spans in another order give the same rows."""
    rng = random.Random(seed)
    spans = some_spans(rng, 8)
    shuffled = rng.sample(spans, len(spans))
    assert repr(adapt(spans)) == repr(adapt(shuffled))
