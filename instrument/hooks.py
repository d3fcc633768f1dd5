"""Callables that are told of every rollout of this process, as it starts and before it reports its end.

Registered by a call, or by entry points of an installed package, loaded when the first rollout starts:

    [project.entry-points."spanmill.on_rollout_start"]
    prepare = "my_package.hooks:prepare"
    [project.entry-points."spanmill.on_rollout_end"]
    score = "my_package.hooks:score"

A hook gets the `Rollout`; it runs inside of it, and may be async. What it raises is reported and harms nothing.
"""

import asyncio
import threading
from collections.abc import Awaitable, Callable, Generator
from contextlib import contextmanager
from contextvars import copy_context
from functools import cache
from importlib.metadata import entry_points
from inspect import isawaitable
from typing import TYPE_CHECKING, Any, Final, Literal

from spanmill.instrument.reports import guarded

if TYPE_CHECKING:
    from spanmill.instrument.rollouts import Rollout

Hook = Callable[["Rollout"], object]
When = Literal["on_rollout_start", "on_rollout_end"]

GROUP: Final = "spanmill."
"""Before the name of a moment it is the group of its entry points."""

_registered: Final[dict[When, list[Hook]]] = {"on_rollout_start": [], "on_rollout_end": []}


def on_rollout_start(hook: Hook) -> Hook:
    """Call `hook(rollout)` as each rollout of this process starts; also a decorator."""
    _registered["on_rollout_start"].append(hook)
    return hook


def on_rollout_end(hook: Hook) -> Hook:
    """Call `hook(rollout)` as each rollout of this process ends, before it reports its status; also a decorator.

    `rollout.status` is what will be reported. The hook may set another, give rewards, and add metrics.
    """
    _registered["on_rollout_end"].append(hook)
    return hook


@cache
def _installed(when: When) -> tuple[Hook, ...]:
    """The hooks of installed packages, those that can be loaded."""
    found: list[Hook] = []
    for entry in sorted(entry_points(group=GROUP + when), key=lambda e: (e.name, e.value)):
        with guarded(f"hook {entry.name} ({entry.value})"):
            found.append(entry.load())
    return tuple(found)


def hooks(when: When, *, installed: bool) -> list[Hook]:
    """The hooks of a moment, in the order of registration; those of installed packages, if wanted, before."""
    return [*(_installed(when) if installed else ()), *_registered[when]]


def call(when: When, rollout: "Rollout", *, installed: bool) -> None:
    """Call all hooks of a moment. An async one runs to its end in a thread and event loop of its own."""
    for hook in hooks(when, installed=installed):
        with _harmless(hook):
            result = hook(rollout)
            if isawaitable(result):
                _run(result)


async def call_async(when: When, rollout: "Rollout", *, installed: bool) -> None:
    """Call all hooks of a moment; async ones are awaited."""
    for hook in hooks(when, installed=installed):
        with _harmless(hook):
            result = hook(rollout)
            if isawaitable(result):
                await result


@contextmanager
def _harmless(hook: Hook) -> Generator[None]:
    """Report what a hook raises, `sys.exit` included; Ctrl-C and the cancellation of a task go on."""
    with guarded(f"hook {getattr(hook, '__qualname__', type(hook).__name__)}"):
        try:
            yield
        except SystemExit as end:
            raise RuntimeError(f"it called sys.exit({end.code!r})") from end


def _run(awaitable: Awaitable[Any]) -> None:
    """Wait for an awaitable where nothing can be awaited: this thread may have an event loop that is running."""
    raised: list[BaseException] = []

    async def wait() -> None:
        await awaitable

    def run() -> None:
        try:
            asyncio.run(wait())
        except BaseException as error:  # handed on to the thread that waits
            raised.append(error)

    thread = threading.Thread(target=copy_context().run, args=(run,), name="spanmill-hook")
    thread.start()
    thread.join()
    if raised:
        raise raised[0]
