"""Which weights sample: said by vLLM itself, else by whoever loads them; never guessed.

A version that is set holds in all processes of a vLLM: they share a small file, which the first of them names in the
environment of the others. Every generation reads it as it begins and as it ends.
"""

import atexit
import multiprocessing
import os
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, cast
from uuid import uuid4

from spanmill.instrument.answers import UNNAMED
from spanmill.instrument.reports import guarded, report

ENV: Final = "SPANMILL_POLICY_VERSION"
FILE: Final = "SPANMILL_POLICY_FILE"
"""Set by the plugin, for the processes that vLLM starts."""
HEADER: Final = "x-spanmill-policy-version"
_named: str | None = None


def share() -> None:
    """Share the version with the processes that this one starts, or with the one that started this.

    A server that a program starts as a command of its own shares nothing with the program, nor with other servers.
    """
    if FILE in os.environ and multiprocessing.parent_process() is not None:
        return
    path = os.path.join(tempfile.gettempdir(), f"spanmill-policy-{uuid4().hex}")
    os.environ[FILE] = path
    atexit.register(_forget, path, os.getpid())


def _forget(path: str, owner: int) -> None:
    if os.getpid() == owner:
        with suppress(OSError):
            os.unlink(path)


def set_policy_version(version: str | int | None) -> None:
    """Name the weights that sample from now on, in all processes of this vLLM; None: not known any more.

    Call it as weights are loaded, in whichever of them does. A generation that is running then gets no version: nobody
    knows which of its tokens are whose. vLLM from 0.32 on keeps track by itself (`update_weight_version`), of those
    too; what it says comes first.
    """
    global _named
    _named = None if version is None else str(version)
    path = os.environ.get(FILE)
    if path is None:
        return
    with guarded("policy version"):
        if _named is None:
            Path(path).unlink(missing_ok=True)
            return
        new = f"{path}.{os.getpid()}"
        with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as file:
            file.write(_named)
        os.replace(new, path)


def named_version(header: str | None = None) -> str | None:
    """The version that was set, else the environment's, else the request header's, else None."""
    return _set_version() or os.environ.get(ENV) or header or None


def _set_version() -> str | None:
    path = os.environ.get(FILE)
    if path is None:
        return _named
    try:
        with open(path, encoding="utf-8") as file:
            return file.read()
    except FileNotFoundError:
        return None


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
        report("policy change", "the policy version changed during a generation: its version is not recorded")
        return None, None
    return before, None


def _part(span: Any, position: int, name: str) -> Any:
    return cast("tuple[Any, ...]", span)[position] if isinstance(span, tuple) else getattr(span, name)
