"""Which weights sample: said by vLLM itself, else by whoever loads them; never guessed."""

import os
from typing import Any, Final, cast

from spanmill.instrument.reports import report

ENV: Final = "SPANMILL_POLICY_VERSION"
HEADER: Final = "x-spanmill-policy-version"
UNNAMED: Final = "default"
"""What vLLM calls weights that nobody gave a version."""

_named: str | None = None


def set_policy_version(version: str | int | None) -> None:
    """Name the weights that sample from now on in this process; None: not known any more.

    Call it while no generation is running, as weights are loaded. vLLM from 0.32 on keeps track by itself
    (`update_weight_version`), also of weights that change during a generation; what it says comes first.
    """
    global _named
    _named = None if version is None else str(version)


def named_version(header: str | None = None) -> str | None:
    """The version that was set, else the environment's, else the request header's, else None."""
    return _named or os.environ.get(ENV) or header or None


def versions(said: Any, before: str | None, after: str | None) -> tuple[str | None, list[dict[str, Any]] | None]:
    """(version that sampled the last token, runs over the response tokens), each None if it is not known.

    `said` are vLLM's spans `[start, end)`; `before` and `after` is what the process was told when the generation
    began and ended: if that changed in between, nobody knows which tokens are whose.

        versions([("a", 0, 2), ("b", 2, 5)], None, None)
        == ("b", [{"version": "a", "start": 0, "length": 2}, {"version": "b", "start": 2, "length": 3}])
    """
    runs: list[dict[str, Any]] = [
        {"version": str(_part(s, 0, "version")), "start": start, "length": end - start}
        for s in cast("list[Any]", said or [])
        if (end := int(_part(s, 2, "end"))) > (start := int(_part(s, 1, "start")))
    ]
    if any(run["version"] != UNNAMED for run in runs):
        return runs[-1]["version"], runs
    if before != after:
        report("policy change", "set_policy_version was called during a generation: its version is not recorded")
        return None, None
    return before, None


def _part(span: Any, position: int, name: str) -> Any:
    return cast("tuple[Any, ...]", span)[position] if isinstance(span, tuple) else getattr(span, name)
