"""The rollout goes along into threads, executors and child processes."""

import asyncio
import json
import multiprocessing
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from places import here, send_here

from spanmill.instrument import contexts, reward, rollout

Spans = Callable[[], list[ReadableSpan]]
ROLLOUT = "spanmill.rollout.id"
PRINT_ENVIRONMENT = (sys.executable, "-c", "import json, os; print(json.dumps(dict(os.environ)))")


def child_environment(env: dict[str, str] | None = None) -> dict[str, str]:
    """The environment that a child process finds."""
    return json.loads(subprocess.run(PRINT_ENVIRONMENT, capture_output=True, check=True, env=env).stdout)


def test_threads(emitted: Spans) -> None:
    """A thread, a subclass of one and a timer run where they were started; one started outside runs outside."""
    found: dict[str, tuple[str, str]] = {}

    class Own(threading.Thread):
        def run(self) -> None:
            found["own"] = here()

    with rollout("r"):
        expected = here()
        threads: list[threading.Thread] = [threading.Thread(target=lambda: found.update(thread=here())), Own()]
        threads.append(threading.Timer(0, lambda: found.update(timer=here())))
        for thread in threads:
            thread.start()
    threads.append(threading.Thread(target=lambda: found.update(outside=here())))
    threads[-1].start()
    for thread in threads:
        thread.join()
    assert {name: expected for name in ("thread", "own", "timer")} | {"outside": ("None", "0" * 16)} == found


def test_executors(emitted: Spans) -> None:
    """Work runs where it was submitted, whoever started the worker; an exception comes back as ever."""
    with ThreadPoolExecutor(1) as pool:
        with rollout("a"):
            expected = [here()]
            futures = [pool.submit(here)]
        with rollout("b"):
            expected.append(here())
            futures.append(pool.submit(here))
        futures.append(pool.submit(here))
        broken = pool.submit(lambda: 1 / 0)
        assert [*expected, ("None", "0" * 16)] == [future.result() for future in futures]
        with pytest.raises(ZeroDivisionError):
            broken.result()


def test_asyncio(emitted: Spans) -> None:
    """Tasks, `to_thread` and the event loop's own executor."""

    async def run() -> tuple[tuple[str, str], list[tuple[str, str]]]:
        async with rollout("r"):
            loop = asyncio.get_running_loop()
            work = (asyncio.to_thread(here), loop.run_in_executor(None, here))
            return here(), [await asyncio.create_task(_soon()), *(await asyncio.gather(*work))]

    async def _soon() -> tuple[str, str]:
        return here()

    expected, found = asyncio.run(run())
    assert [expected] * 3 == found


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_process_pools(emitted: Spans, method: str) -> None:
    """Work in another process runs under the rollout that submitted it."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context(method)) as pool:
        with rollout("a"):
            expected = [here()]
            found = [pool.submit(here).result()]
        with rollout("b"):
            expected.append(here())
            found += pool.map(here, [0])
    assert expected == found


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_processes(emitted: Spans, method: str) -> None:
    """A process runs where it was started."""
    context: Any = multiprocessing.get_context(method)
    receiving, sending = context.Pipe(duplex=False)
    with rollout("r"):
        expected = here()
        process = context.Process(target=send_here, args=(sending,))
        process.start()
    assert receiving.poll(60)
    assert expected == receiving.recv()
    process.join()


def test_a_childs_environment(emitted: Spans) -> None:
    """It names the rollout in every form, whether the program gives an environment or not."""
    with rollout("r/1", attempt=2):
        span = here()[1]
        inherited, given = child_environment(), child_environment(env={"PATH": os.environ["PATH"], "X": "1"})
    for env in (inherited, given):
        assert ("r/1", "2", "r/1", span) == (
            env["SPANMILL_ROLLOUT_ID"],
            env["SPANMILL_ATTEMPT"],
            env["SPANMILL_RUN"],
            env["TRACEPARENT"].split("-")[2],
        )
        assert "spanmill.rollout.id=r%2F1" in env["OTEL_RESOURCE_ATTRIBUTES"]
        assert "x-spanmill-rollout-id: r/1" in env["OPENAI_CUSTOM_HEADERS"].splitlines()
    assert "1" == given["X"]


def test_an_environment_that_names_a_rollout_itself_stays(emitted: Spans) -> None:
    """What the program sets for its child counts; outside any rollout or span nothing is added."""
    own = {"PATH": os.environ["PATH"], "SPANMILL_ROLLOUT_ID": "mine"}
    with rollout("r"):
        assert "mine" == child_environment(env=own)["SPANMILL_ROLLOUT_ID"]
        assert "TRACEPARENT" not in child_environment(env=own)
    contexts.install()
    assert {"SPANMILL_ROLLOUT_ID", "TRACEPARENT"}.isdisjoint(child_environment())


def test_a_child_that_emits_belongs_to_its_parents_rollout(emitted: Spans, grpc_sink: Any) -> None:
    """A Python child with the same API joins the rollout: its reward is the parent's, and it announces nothing."""
    program = "import spanmill\nwith spanmill.rollout() as r:\n    r.reward(0.5)\n"
    env = {**os.environ, "OTEL_EXPORTER_OTLP_ENDPOINT": grpc_sink.endpoint}
    with rollout("r"):
        subprocess.run([sys.executable, "-c", program], env=env, check=True)
    reward(0)  # outside: another trace
    assert [("rollout", "r", None), ("spanmill.reward", "r", 0.5)] == sorted(
        (s["name"], s["attributes"][ROLLOUT], s["attributes"].get("spanmill.reward.value")) for s in grpc_sink.spans()
    )
