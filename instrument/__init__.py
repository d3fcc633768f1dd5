"""Emitting spans from inside agents and engines. Imports neither grpc, polars, pyarrow nor numpy."""

from spanmill.instrument.calls import Call, call
from spanmill.instrument.hooks import on_rollout_end, on_rollout_start
from spanmill.instrument.identity import Identity
from spanmill.instrument.provider import Counters, configure, counters, flush, tracer_provider
from spanmill.instrument.rewards import reward
from spanmill.instrument.rollouts import Rollout, rollout

__all__ = [
    "Call",
    "Counters",
    "Identity",
    "Rollout",
    "call",
    "configure",
    "counters",
    "flush",
    "on_rollout_end",
    "on_rollout_start",
    "reward",
    "rollout",
    "tracer_provider",
]
