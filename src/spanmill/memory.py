"""Rows without a service: spans in memory to rollouts, by the very functions that `serve` and `build` run."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, SupportsFloat, cast

from opentelemetry.sdk.trace import ReadableSpan

from spanmill import adapters
from spanmill import semconv as sc
from spanmill.adapters.from_triplets import rollout_of
from spanmill.adapters.options import Options
from spanmill.collector.decode_objects import decode_objects
from spanmill.instrument.identity import Identity
from spanmill.triplets.records import Attributes, Quarantined, Reward, Rollout, Span, Triplet
from spanmill.triplets.writer import stray_key

_OTHER_IDENTITIES = (sc.ROLLOUT_CARRIER, sc.AGL_ROLLOUT_ID, sc.AGL_ATTEMPT_ID)


class Rollouts(list[Rollout]):
    """Rollouts, sorted by (rollout_id, attempt), and in `stray` what was set aside and belongs to none of them."""

    def __init__(self, rollouts: Iterable[Rollout] = (), stray: Iterable[Quarantined] = ()) -> None:
        super().__init__(rollouts)
        self.stray = list(stray)
        """Rewards for rollouts that are not here (`unknown_rollout`), and spans that cannot be read or have no ids."""


def adapt(
    spans: object,
    *,
    rewards: Iterable[Reward] = (),
    merge: str = "prefix",
    reward_names: Sequence[str] = (),
    realign_tokens: int = 1024,
    train_failed: bool = False,
) -> Rollouts:
    """The rollouts that the spans make, each with `triplets`, `episodes` and `quarantined`; the rest is in `.stray`.

    `spans` are finished SDK spans (`ReadableSpan`), what their `to_json()` gives (text or dict), OTLP requests of
    traces or logs (bytes, protobuf messages or JSON), or lists that mix these, in any order. `rewards` come later than
    all of them. The options are those of `spanmill build`.

    Raises TypeError that says what stands where if `spans` is or holds anything else, DecodeError (a ValueError) for a
    request that does not parse, ConfigError (a ValueError) for an impossible option.
    """
    options = Options(merge, realign_tokens, frozenset(reward_names), train_failed)
    found = decode_objects(spans)
    made = adapters.adapt(found.spans, list(rewards), options)
    stray = {stray_key(q.trace_id, q.span_id, q.reason, q.detail, q.span): q for q in (*made.stray, *found.bad)}
    return Rollouts(made.rollouts, stray.values())


def from_result(result: object, rollout_id: str, attempt: int) -> Rollout:
    """See `Rollout.from_result`."""
    Identity(rollout_id, attempt)
    match result:
        case Rollout():
            return _renamed(result, rollout_id, attempt)
        case None:
            return _of_spans([], [], rollout_id, attempt)
        case list() | tuple() if isinstance(next(iter(cast("Sequence[object]", result)), None), Triplet):
            return rollout_of(_triplets(cast("Sequence[object]", result)), rollout_id, attempt)
        case Triplet():
            return rollout_of([result], rollout_id, attempt)
        case SupportsFloat() if not isinstance(result, ReadableSpan):
            reward = Reward(rollout_id, float(result), attempt, source="result")
            return _of_spans([], [reward], rollout_id, attempt)
        case _:
            return _of_spans(result, [], rollout_id, attempt)


def _triplets(found: Sequence[object]) -> list[Triplet]:
    for number, one in enumerate(found):
        if not isinstance(one, Triplet):
            raise TypeError(f"result[{number}]: found {type(one).__name__} among Triplets; expected Triplets alone")
    return cast("list[Triplet]", list(found))


def _of_spans(spans: object, rewards: list[Reward], rollout_id: str, attempt: int) -> Rollout:
    """One rollout of all these spans, whatever they say whose they are, and of none at all, too."""
    try:
        found = decode_objects(spans, "result")
    except TypeError as error:
        raise TypeError(f"{error}; or, as a result, None, a number, Triplets or a Rollout") from error
    own: Attributes = {sc.ROLLOUT_ID: rollout_id, sc.ROLLOUT_ATTEMPT: attempt}
    for span in found.spans:
        span.attributes = {k: v for k, v in span.attributes.items() if k not in _OTHER_IDENTITIES} | own
    mark = Span("", "", "", "", 0, 0, 0, own, {})
    rollout = adapters.adapt([*found.spans, mark], rewards).rollouts[0]
    rollout.quarantined += [replace(bad, rollout_id=rollout_id, attempt=attempt) for bad in found.bad]
    return rollout


def _renamed(rollout: Rollout, rollout_id: str, attempt: int) -> Rollout:
    def own(rows: list[Any]) -> list[Any]:
        return [replace(row, rollout_id=rollout_id, attempt=attempt) for row in rows]

    return replace(
        rollout,
        rollout_id=rollout_id,
        attempt=attempt,
        triplets=own(rollout.triplets),
        episodes=own(rollout.episodes),
        quarantined=own(rollout.quarantined),
    )
