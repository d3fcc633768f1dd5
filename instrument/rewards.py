"""`spanmill.reward`: a span of no length that says what something was worth."""

import time
from typing import Final, SupportsFloat

from opentelemetry.context import Context

from spanmill.instrument import identity, provider
from spanmill.instrument.reports import guarded, report
from spanmill.semconv import REWARD, REWARD_CALL_ID, REWARD_NAME, REWARD_VALUE, ROLLOUT_ATTEMPT, ROLLOUT_ID

COUNTED: Final = ("", "reward", "final")
"""Names of rewards that count; any other is a metric."""


def reward(
    value: SupportsFloat,
    *,
    name: str | None = None,
    call_id: str | None = None,
    rollout_id: str | None = None,
    attempt: int | None = None,
    context: Context | None = None,
) -> None:
    """Reward the rollout that this code runs in, or, inside `spanmill.call`, that call.

    `name` is None or "reward" for rewards that count, "final" for the rollout's own, anything else for a metric.
    `call_id` names the call that is meant (`Call.call_id()`); `rollout_id` and `attempt` another rollout than the
    current one. `value` is an int, float, bool or anything else with a `float()`; NaN and infinity are sent as they
    are and quarantined by the collector. What is no number is reported once, counted and not sent: nothing is raised.
    """
    with guarded("reward"):
        number = _number(value)
        if number is None:
            report(
                "reward value", f"reward: expected a number, found {type(value).__name__} {value!r}; it is not recorded"
            )
            return
        attributes: dict[str, str | int | float] = {REWARD_VALUE: number}
        attributes |= {
            key: str(text) for key, text in ((REWARD_NAME, name), (REWARD_CALL_ID, call_id)) if text is not None
        }
        tracer = provider.tracer()
        here = provider.ambient() if context is None else context
        if rollout_id is not None:
            attributes[ROLLOUT_ID] = rollout_id
            if attempt is not None:
                attributes[ROLLOUT_ATTEMPT] = attempt
            own = identity.from_baggage(here)
            if own is None or own.rollout_id != rollout_id:
                here = Context()  # a reward of another rollout is no part of this one's tree
        now = time.time_ns()
        tracer.start_span(REWARD, here, attributes=attributes, start_time=now).end(now)


def _number(value: object) -> float | None:
    """`value` as a float; None for what is no number, text included."""
    if isinstance(value, (str, bytes)) or not isinstance(value, SupportsFloat):
        return None
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return None
