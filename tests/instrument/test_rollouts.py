import asyncio
import re
import threading
from collections.abc import Callable
from typing import Any

import pytest
from opentelemetry import baggage, trace
from opentelemetry.sdk.trace import ReadableSpan

from spanmill.instrument import call, reward, rollout, tracer_provider

Spans = Callable[[], list[ReadableSpan]]
STARTED = "spanmill.rollout.started"
IDENTITY = ("spanmill.rollout.id", "spanmill.rollout.attempt", "spanmill.group.id", "spanmill.task.id", "spanmill.mode")


def attributes(span: ReadableSpan) -> dict[str, Any]:
    """A span's attributes."""
    return dict(span.attributes or {})


def rows(spans: list[ReadableSpan]) -> list[tuple[Any, ...]]:
    """(name, rollout id, status) of every span."""
    return [
        (s.name, attributes(s).get("spanmill.rollout.id"), attributes(s).get("spanmill.rollout.status")) for s in spans
    ]


def statuses(spans: list[ReadableSpan]) -> dict[Any, Any]:
    """Status by rollout id."""
    return {row[1]: row[2] for row in rows(spans) if row[0] == "rollout"}


def test_a_rollout_announces_itself_and_reports_its_end(emitted: Spans) -> None:
    """The start is a span of no length at once, the end a span with the status; both say whose they are."""
    with rollout("r1", attempt=2, group_id="g", task_id="t", mode="train", group_size=4, resources_id="v1") as r:
        announced = emitted()
        assert ("r1", 2) == (r.id, r.attempt)
    spans = emitted()
    own = {
        "spanmill.rollout.id": "r1",
        "spanmill.rollout.attempt": 2,
        "spanmill.group.id": "g",
        "spanmill.task.id": "t",
        "spanmill.mode": "train",
        "spanmill.group.size": 4,
        "spanmill.resources.id": "v1",
    }
    assert [{STARTED: True, **own}] == [attributes(s) for s in announced]
    assert announced[0].start_time == announced[0].end_time
    assert {"spanmill.rollout.status": "succeeded", **own} == attributes(spans[-1])
    assert [STARTED, "rollout"] == [s.name for s in spans]
    assert spans[1].context is not None and spans[0].parent is not None
    assert spans[1].context.span_id == spans[0].parent.span_id


def test_every_span_started_inside_learns_the_rollout(emitted: Spans) -> None:
    """Spans of any tracer of the provider carry the identity; those outside carry none."""
    tracer = tracer_provider().get_tracer("somebody")
    with rollout("r1", group_id="g"), tracer.start_as_current_span("outer"), tracer.start_as_current_span("inner"):
        pass
    tracer.start_span("outside").end()
    found = {s.name: [attributes(s).get(name) for name in IDENTITY] for s in emitted()}
    own = ["r1", 0, "g", None, None]
    assert {STARTED: own, "inner": own, "outer": own, "rollout": own, "outside": [None] * 5} == found


def test_the_rollout_is_in_baggage_inside_and_gone_after(emitted: Spans) -> None:
    """HTTP instrumentation finds the identity in the baggage of the current context."""
    with rollout("r1", attempt=1):
        inside = dict(baggage.get_all())
    assert {"spanmill.rollout.id": "r1", "spanmill.rollout.attempt": "1"} == inside
    assert ({}, trace.INVALID_SPAN) == (dict(baggage.get_all()), trace.get_current_span())


def test_a_rollout_inside_a_rollout_is_its_own(emitted: Spans) -> None:
    """The nearest rollout wins, inherits nothing but its place in the trace, and ends for itself."""
    with rollout("outer", attempt=3, group_id="g"):
        reward(1)
        with rollout() as inner, pytest.raises(KeyError), rollout("innermost"):
            reward(2)
            raise KeyError
        reward(3)
    spans = emitted()
    rewarded = {attributes(s)["spanmill.reward.value"]: attributes(s) for s in spans if s.name == "spanmill.reward"}
    assert ["outer", "innermost", "outer"] == [rewarded[v]["spanmill.rollout.id"] for v in (1, 2, 3)]
    assert ("g", None) == (rewarded[1]["spanmill.group.id"], rewarded[2].get("spanmill.group.id"))
    assert {"outer": "succeeded", inner.id: "succeeded", "innermost": "failed"} == statuses(spans)
    assert 1 == len({s.context.trace_id for s in spans if s.context is not None})


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (ValueError("x"), "failed"),
        (SystemExit(3), "failed"),
        (SystemExit("text"), "failed"),
        (SystemExit(0), "succeeded"),
        (SystemExit(None), "succeeded"),
        (KeyboardInterrupt(), "cancelled"),
        (asyncio.CancelledError(), "cancelled"),
        (GeneratorExit(), "cancelled"),
    ],
    ids=repr,
)
def test_what_leaves_the_block_decides_the_status(error: BaseException, status: str, emitted: Spans) -> None:
    """Failed on an exception, cancelled on a cancellation, succeeded on a good exit; the exception goes on."""
    with pytest.raises(type(error)), rollout("r1"):
        raise error
    assert {"r1": status} == statuses(emitted())


def test_a_status_that_was_set_wins(emitted: Spans) -> None:
    """The program knows best; what is no status is ignored."""
    with rollout("a") as a:
        a.status = "failed"
    with pytest.raises(ValueError), rollout("b") as b:
        b.status = "cancelled"
        raise ValueError
    with rollout("c") as c:
        c.status = "splendid"
    assert {"a": "failed", "b": "cancelled", "c": "succeeded"} == statuses(emitted())


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"rollout_id": 5, "attempt": "1", "task_id": 7}, ("5", 1, "7", None)),
        ({"rollout_id": "r", "attempt": -1, "task_id": ["x"], "group_size": 0}, ("r", 0, None, None)),
        ({"rollout_id": "r", "attempt": True, "task_id": ""}, ("r", 0, None, None)),
    ],
)
def test_a_wrong_value_never_stops_the_agent(
    emitted: Spans, arguments: dict[str, Any], expected: tuple[str, int, str | None, int | None]
) -> None:
    """A number is taken as an id and back; what cannot be used is left out, and the rollout goes on."""
    with rollout(**arguments) as r:
        own = r.identity
    assert own is not None
    assert expected == (own.rollout_id, own.attempt, own.task_id, own.group_size)


@pytest.mark.parametrize("rollout_id", ["", 1.5, [], True])
def test_a_wrong_rollout_id_becomes_a_random_one(emitted: Spans, rollout_id: Any) -> None:
    """What cannot be an id is never written as one."""
    with rollout(rollout_id) as r:
        assert re.fullmatch("[0-9a-f]{32}", r.id)


def test_a_rollout_is_entered_once(emitted: Spans) -> None:
    """A block that is entered twice would be two rollouts of one id."""
    with rollout("r") as r, pytest.raises(RuntimeError), r:
        pass


def test_async_rollouts_at_once_are_never_mixed(emitted: Spans) -> None:
    """Fifty rollouts in one loop: every span inside one, over awaits and tasks of its own, is that one's."""

    async def call_model(name: str) -> None:
        await asyncio.sleep(0.001)
        async with call(name):
            await asyncio.sleep(0.001)

    async def agent(number: int) -> None:
        async with rollout(f"r{number}"):
            await asyncio.gather(call_model(f"r{number}"), asyncio.create_task(call_model(f"r{number}")))
            await asyncio.to_thread(reward, number)

    async def main() -> None:
        await asyncio.gather(*(agent(number) for number in range(50)))

    asyncio.run(main())
    spans = emitted()
    assert 50 * 5 == len(spans)
    assert [] == [s.name for s in spans if s.name.startswith("chat") and s.name != f"chat {attributes(s)[IDENTITY[0]]}"]
    rewards = [attributes(s) for s in spans if s.name == "spanmill.reward"]
    assert {f"r{i}": float(i) for i in range(50)} == {a[IDENTITY[0]]: a["spanmill.reward.value"] for a in rewards}
    assert {f"r{i}": "succeeded" for i in range(50)} == statuses(spans)


def test_rollouts_in_threads_at_once_are_never_mixed(emitted: Spans) -> None:
    """Fifty rollouts in fifty threads."""
    together = threading.Barrier(50)

    def agent(number: int) -> None:
        with rollout(f"r{number}"):
            together.wait(30)
            with call(f"r{number}"):
                reward(number)

    threads = [threading.Thread(target=agent, args=(number,)) for number in range(50)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    spans = emitted()
    assert 50 * 4 == len(spans)
    assert [] == [s.name for s in spans if s.name.startswith("chat") and s.name != f"chat {attributes(s)[IDENTITY[0]]}"]
    assert {f"r{i}": "succeeded" for i in range(50)} == statuses(spans)


def test_a_cancelled_task_is_a_cancelled_rollout(emitted: Spans) -> None:
    """A rollout whose task is cancelled says so, others go on."""

    async def agent(name: str, seconds: float) -> None:
        async with rollout(name):
            await asyncio.sleep(seconds)

    async def main() -> None:
        slow = asyncio.create_task(agent("slow", 60))
        await asyncio.gather(agent("quick", 0.01))
        slow.cancel()
        with pytest.raises(asyncio.CancelledError):
            await slow

    asyncio.run(main())
    assert {"slow": "cancelled", "quick": "succeeded"} == statuses(emitted())


def test_a_decorated_function_is_a_rollout_at_every_call(emitted: Spans) -> None:
    """Plain and async functions, each call with an id of its own and the given parts."""

    @rollout(mode="val")
    def agent(value: int) -> int:
        return value + 1

    @rollout(mode="val")
    async def async_agent(value: int) -> int:
        return value + 2

    assert (2, 3, 3) == (agent(1), agent(2), asyncio.run(async_agent(1)))
    ended = [attributes(s) for s in emitted() if s.name == "rollout"]
    assert (3, ["val"] * 3) == (len({a["spanmill.rollout.id"] for a in ended}), [a["spanmill.mode"] for a in ended])


def test_without_an_id_the_environment_names_the_rollout(emitted: Spans, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process's own rollout, announced and ended here as nobody else does; one inside it is a new one."""
    monkeypatch.setenv("SPANMILL_ROLLOUT_ID", "job")
    monkeypatch.setenv("SPANMILL_ATTEMPT", "2")
    with rollout(task_id="t") as own, rollout() as inner:
        assert 32 == len(inner.id)
    assert ("job", 2, "t") == (own.id, own.attempt, own.identity and own.identity.task_id)
    assert {"job": "succeeded", inner.id: "succeeded"} == statuses(emitted())


def test_under_spanmill_run_the_command_reports_start_and_end(emitted: Spans, monkeypatch: pytest.MonkeyPatch) -> None:
    """One announcement and one end: the block in the child adds a status only if it fails or sets one."""
    monkeypatch.setenv("SPANMILL_ROLLOUT_ID", "job")
    monkeypatch.setenv("SPANMILL_RUN", "job")
    with rollout():
        reward(1)
    with rollout() as told:
        told.status = "failed"
    with pytest.raises(ValueError), rollout():
        raise ValueError
    with rollout(attempt=1):
        pass
    assert [
        ("spanmill.reward", "job", None),
        ("rollout", "job", None),
        ("rollout", "job", "failed"),
        ("rollout", "job", "failed"),
        (STARTED, "job", None),
        ("rollout", "job", "succeeded"),
    ] == rows(emitted())


def test_a_trace_handed_down_by_the_parent_process_goes_on(emitted: Spans, monkeypatch: pytest.MonkeyPatch) -> None:
    """TRACEPARENT and BAGGAGE of the environment stand where the program itself has no span and no rollout."""
    monkeypatch.setenv("TRACEPARENT", "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01")
    monkeypatch.setenv("BAGGAGE", "spanmill.rollout.id=a%2Fb,spanmill.rollout.attempt=3")
    reward(1)
    with rollout("own"):
        reward(2)
    first, *_, end = emitted()
    assert ("a/b", 3) == (attributes(first)["spanmill.rollout.id"], attributes(first)["spanmill.rollout.attempt"])
    assert ("own", 0) == (attributes(end)["spanmill.rollout.id"], attributes(end)["spanmill.rollout.attempt"])
    assert [0xB7AD6B7169203331] * 2 == [s.parent.span_id for s in (first, end) if s.parent is not None]
