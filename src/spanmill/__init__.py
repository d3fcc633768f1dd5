"""OpenTelemetry spans into training data for language-model reinforcement learning.

In an agent, whose install need not have the collector:

    rollout, call, reward                          emit: what belongs together, what was sampled, what it was worth
    on_rollout_start, on_rollout_end               hooks: what else is to be done for every rollout
    configure, flush, counters, tracer_provider    where spans go, that they have gone, how many were lost, for others
    RecordStore                                    a running collector's rollouts: list, get, patch, drain

With `spanmill[collector]`:

    adapt                                          spans in memory to Rollouts with their Triplets and Episodes
    Rollout, Triplet, Episode, Reward, Rollouts    what that takes and gives; Rollout.from_result for agent functions
    read_rollouts, read_triplets, read_episodes    a dataset's tables as polars LazyFrames, newest revision only
    follow, News                                   a dataset's rollouts as they are written, each once
    select                                         rules that choose rollouts and Episodes, as polars expressions
    export, Fill                                   a dataset in the form that a trainer reads

Names are imported when they are first asked for: an instrumented process that imports `spanmill` loads neither polars
nor grpc.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from spanmill.instrument import (
        call,
        configure,
        counters,
        flush,
        on_rollout_end,
        on_rollout_start,
        reward,
        rollout,
        tracer_provider,
    )
    from spanmill.instrument.record_store import RecordStore
    from spanmill.memory import Rollouts, adapt
    from spanmill.triplets import select
    from spanmill.triplets.exports import Fill, export
    from spanmill.triplets.follow import News, follow
    from spanmill.triplets.reader import read_episodes, read_rollouts, read_triplets
    from spanmill.triplets.records import Episode, Reward, Rollout, Triplet

    __version__: str

__all__ = [
    "Episode",
    "Fill",
    "News",
    "RecordStore",
    "Reward",
    "Rollout",
    "Rollouts",
    "Triplet",
    "__version__",
    "adapt",
    "call",
    "configure",
    "counters",
    "export",
    "flush",
    "follow",
    "on_rollout_end",
    "on_rollout_start",
    "read_episodes",
    "read_rollouts",
    "read_triplets",
    "reward",
    "rollout",
    "select",
    "tracer_provider",
]

_NAMES = {
    "spanmill.instrument": (
        "call",
        "configure",
        "counters",
        "flush",
        "on_rollout_end",
        "on_rollout_start",
        "reward",
        "rollout",
        "tracer_provider",
    ),
    "spanmill.instrument.record_store": ("RecordStore",),
    "spanmill.memory": ("Rollouts", "adapt"),
    "spanmill.triplets": ("select",),
    "spanmill.triplets.exports": ("Fill", "export"),
    "spanmill.triplets.follow": ("News", "follow"),
    "spanmill.triplets.reader": ("read_episodes", "read_rollouts", "read_triplets"),
    "spanmill.triplets.records": ("Episode", "Reward", "Rollout", "Triplet"),
}
_HOMES = {name: module for module, names in _NAMES.items() for name in names}
"""The module that each public name comes from."""


if not TYPE_CHECKING:  # a type checker would take any name for granted

    def __getattr__(name: str) -> Any:
        """Import a public name from its module (PEP 562)."""
        if name == "__version__":
            from importlib.metadata import version

            return version("spanmill")
        if name not in _HOMES:
            raise AttributeError(f"module 'spanmill' has no attribute {name!r}")
        return getattr(import_module(_HOMES[name]), name)
