import asyncio
import subprocess
import sys
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan

from spanmill import on_rollout_end, on_rollout_start, reward, rollout
from spanmill.instrument import Rollout, hooks

Spans = Callable[[], list[ReadableSpan]]


@pytest.fixture(autouse=True)
def no_hooks(monkeypatch: pytest.MonkeyPatch) -> Generator[None]:
    """Each test has hooks of its own."""
    monkeypatch.setattr(hooks, "_registered", {"on_rollout_start": [], "on_rollout_end": []})
    hooks._installed.cache_clear()  # pyright: ignore[reportPrivateUsage]
    yield
    hooks._installed.cache_clear()  # pyright: ignore[reportPrivateUsage]


def told(spans: list[ReadableSpan]) -> list[tuple[Any, ...]]:
    """(name, rollout, status, reward's name and value) of every span."""
    names = ("rollout.id", "rollout.status", "reward.name", "reward.value")
    return [(s.name, *((s.attributes or {}).get(f"spanmill.{name}") for name in names)) for s in spans]


def test_hooks_are_called_in_order_with_the_rollout(emitted: Spans) -> None:
    """Start hooks inside of the begun rollout, end hooks with the status that it will report."""
    seen: list[tuple[Any, ...]] = []
    on_rollout_start(lambda r: seen.append(("first", r.id, r.status)))
    on_rollout_start(lambda r: seen.append(("second", r.id, r.status)))
    on_rollout_end(lambda r: seen.append(("end", r.id, r.status)))
    with rollout("a"):
        seen.append(("inside",))
    with pytest.raises(ValueError), rollout("b"):
        raise ValueError
    expected = [("first", "a", None), ("second", "a", None), ("inside",), ("end", "a", "succeeded")]
    assert [*expected, ("first", "b", None), ("second", "b", None), ("end", "b", "failed")] == seen


def test_an_end_hook_rewards_and_decides(emitted: Spans) -> None:
    """Its rewards, metrics and status are the rollout's, and come before its end."""

    def score(r: Rollout) -> None:
        reward(0.5)
        r.reward(1, name="final")
        r.metrics["steps"] = 3
        r.status = "failed"

    assert score is on_rollout_end(score)
    with rollout("a"):
        pass
    assert [
        ("spanmill.rollout.started", "a", None, None, None),
        ("spanmill.reward", "a", None, None, 0.5),
        ("spanmill.reward", "a", None, "final", 1.0),
        ("spanmill.reward", "a", None, "steps", 3.0),
        ("rollout", "a", "failed", None, None),
    ] == told(emitted())


@pytest.mark.parametrize("error", [ValueError("x"), SystemExit(3)], ids=repr)
@pytest.mark.parametrize("is_async", [False, True])
def test_a_hook_that_fails_harms_nothing(
    error: BaseException, is_async: bool, emitted: Spans, caplog: pytest.LogCaptureFixture
) -> None:
    """The rollout goes on, other hooks are called, one warning names the hook."""

    def broken(_: Rollout) -> None:
        raise error

    async def broken_async(_: Rollout) -> None:
        raise error

    seen: list[str] = []
    for register in (on_rollout_start, on_rollout_end):
        register(broken_async if is_async else broken)
        register(lambda r: seen.append(r.id))
    with rollout("plain"):
        pass

    async def main() -> None:
        async with rollout("async"):
            pass

    asyncio.run(main())
    assert ["plain"] * 2 + ["async"] * 2 == seen
    assert {("plain", "succeeded"), ("async", "succeeded")} == {r[1:3] for r in told(emitted()) if r[0] == "rollout"}
    assert "broken" in caplog.text


def test_async_hooks(emitted: Spans) -> None:
    """Awaited in an async rollout, in its loop; run to their end in a plain one, also where a loop is running."""
    loops: list[object] = []

    async def end(r: Rollout) -> None:
        await asyncio.sleep(0)
        reward(1)
        loops.append(asyncio.get_running_loop())

    on_rollout_end(end)

    async def main() -> asyncio.AbstractEventLoop:
        async with rollout("async"):
            pass
        with rollout("within"):
            pass
        return asyncio.get_running_loop()

    loop = asyncio.run(main())
    with rollout("plain"):
        pass
    assert [True, False, False] == [found is loop for found in loops]
    rewarded = [row[1] for row in told(emitted()) if row[0] == "spanmill.reward"]
    assert ["async", "within", "plain"] == rewarded


def test_a_task_cancelled_within_a_hook_ends_its_rollout(emitted: Spans) -> None:
    """A start hook that waits for ever is cancelled with its task: the rollout was cancelled, and is not left open."""

    async def wait(_: Rollout) -> None:
        await asyncio.sleep(60)

    on_rollout_start(wait)

    async def agent() -> None:
        async with rollout("a"):
            pass

    async def main() -> None:
        task = asyncio.create_task(agent())
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert ("rollout", "a", "cancelled", None, None) == told(emitted())[-1]


PACKAGE = """
def begin(rollout): print("begin", rollout.id, rollout.attempt, flush=True)
def end(rollout): print("end", rollout.id, rollout.status, flush=True)
"""
ENTRY_POINTS = """
[spanmill.on_rollout_start]
one = hooked_package:begin
[spanmill.on_rollout_end]
one = hooked_package:end
two = hooked_package:missing
"""


@pytest.fixture
def hooked(tmp_path: Path) -> str:
    """A folder for `PYTHONPATH` with an installed package that has hooks, one of them broken."""
    (tmp_path / "hooked_package.py").write_text(PACKAGE)
    info = tmp_path / "hooked_package-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: hooked-package\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(ENTRY_POINTS)
    return str(tmp_path)


def test_hooks_of_installed_packages(start: Callable[..., subprocess.Popen[str]], hooked: str) -> None:
    """Found by entry point and called for every rollout; one that cannot be loaded is reported and left out."""
    program = "import spanmill\nwith spanmill.rollout('a'): pass\nwith spanmill.rollout('b', attempt=1): pass"
    process = start(program, PYTHONPATH=hooked, SPANMILL_EXIT_TIMEOUT="0")
    out, err = process.communicate(timeout=60)
    assert (0, ["begin a 0", "end a succeeded", "begin b 1", "end b succeeded"]) == (
        process.returncode,
        out.split("\n")[:-1],
    )
    assert "hook two (hooked_package:missing) failed" in err


def test_under_spanmill_run_installed_hooks_are_called_once(
    start: Callable[..., subprocess.Popen[str]], hooked: str
) -> None:
    """By the process that reports start and end, not again by the command's own block; a program's own hooks are."""
    agent = "import spanmill\nspanmill.on_rollout_end(lambda r: print('own', r.status))\nwith spanmill.rollout(): pass"
    program = f"from spanmill.instrument.run import run\nrun([{sys.executable!r}, '-c', {agent!r}], rollout_id='a')"
    process = start(program, PYTHONPATH=hooked, SPANMILL_EXIT_TIMEOUT="0")
    assert "begin a 0\nown succeeded\nend a succeeded\n" == process.communicate(timeout=60)[0]
