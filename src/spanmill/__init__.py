"""OpenTelemetry spans into training data for language-model reinforcement learning.

    read_rollouts, read_triplets, read_episodes    a dataset's tables as polars LazyFrames, newest revision only

Names are imported when they are first asked for: an instrumented process that imports `spanmill` loads neither polars
nor grpc.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from spanmill.triplets.reader import read_episodes, read_rollouts, read_triplets

    __version__: str

__all__ = ["__version__", "read_episodes", "read_rollouts", "read_triplets"]

_HOMES = {
    "read_episodes": "spanmill.triplets.reader",
    "read_rollouts": "spanmill.triplets.reader",
    "read_triplets": "spanmill.triplets.reader",
}
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
