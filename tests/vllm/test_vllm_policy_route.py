"""`/spanmill/policy_version`, before an app that checks a key as vLLM's does."""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Generator
from typing import Any

import pytest

from spanmill.instrument.vllm import policy
from spanmill.instrument.vllm.middleware import Middleware
from spanmill.instrument.vllm.policy_route import MAX_BODY, POLICY


class Engine:
    """What vLLM 0.32 and newer keep track with."""

    def __init__(self) -> None:
        self.version = "default"

    async def update_weight_version(self, new_version: str) -> None:
        """Name the weights."""
        self.version = new_version

    async def get_weight_version(self) -> str:
        """What they are called."""
        return self.version


async def inner(scope: Any, receive: Any, send: Any) -> None:
    """An app that has no route at all, behind a check of a key that guards /v1."""
    keyed = (b"authorization", b"Bearer secret") in scope["headers"]
    status = 404 if keyed or not scope["path"].startswith("/v1") else 401
    await send({"type": "http.response.start", "status": status, "headers": []})
    await send({"type": "http.response.body", "body": b"said by the app"})


@pytest.fixture(autouse=True)
def shared(monkeypatch: pytest.MonkeyPatch) -> Generator[None]:
    """A file of the test's own, as the plugin makes one."""
    monkeypatch.setenv(policy.FILE, "")
    policy.share()
    yield
    policy.set_policy_version(None)


def ask(
    method: str = "GET", body: bytes = b"", engine: object = None, key: bytes = b"secret", **more: Any
) -> tuple[int, Any]:
    """(status, content) of an answer; a body comes in two messages."""
    scope = {
        "type": "http",
        "method": method,
        "path": POLICY,
        "headers": [(b"authorization", b"Bearer " + key)],
        **more,
    }
    half = len(body) // 2
    coming = iter([(body[:half], True), (body[half:], False)])
    sent: list[Any] = []

    async def receive() -> Any:
        part, more = next(coming)
        return {"type": "http.request", "body": part, "more_body": more}

    async def send(message: Any) -> None:
        sent.append(message)

    found = engine or object()
    asyncio.run(Middleware(inner, lambda: found, lambda _: {})(scope, receive, send))
    text = b"".join(message.get("body", b"") for message in sent)
    return sent[0]["status"], json.loads(text) if text.startswith(b"{") else text.decode()


def test_a_version_is_set_and_shown() -> None:
    """Without an engine that keeps track, the processes of the server share what was set."""
    assert (200, {"version": None}) == ask()
    assert (200, {"version": "step-7"}) == ask("POST", b'{"version": "step-7"}')
    assert ((200, {"version": "step-7"}), "step-7") == (ask(), policy.named_version())
    assert (200, {"version": "8"}) == ask("POST", b'{"version": 8}')
    assert (200, {"version": None}) == ask("POST", b'{"version": null}')
    assert ((200, {"version": None}), None) == (ask(), policy.named_version())


def test_the_engine_keeps_track_where_it_can() -> None:
    """It is told, and asked; its name for unnamed weights is no version."""
    engine = Engine()
    assert (200, {"version": None}) == ask(engine=engine)
    assert ((200, {"version": "a"}), "a") == (ask("POST", b'{"version": "a"}', engine), engine.version)
    assert (200, {"version": "a"}) == ask(engine=engine)
    assert ((200, {"version": None}), "default") == (ask("POST", b'{"version": null}', engine), engine.version)


def test_the_key_of_the_server() -> None:
    """Who is not let in gets the app's own answer, and sets nothing."""
    assert (401, "said by the app") == ask("POST", b'{"version": "a"}', key=b"wrong")
    assert (401, "said by the app") == ask(key=b"wrong", root_path="")
    assert (200, {"version": None}) == ask()


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"{}",
        b"\xff",
        b'{"version": true}',
        b'{"version": 1.5}',
        b'{"version": ""}',
        b'{"version": []}',
        b'{"version": "default"}',
        b'{"version": "' + b"x" * MAX_BODY + b'"}',
    ],
)
def test_a_body_that_names_no_version(body: bytes) -> None:
    """It is refused with what was expected, and sets nothing."""
    policy.set_policy_version("before")
    status, content = ask("POST", body)
    assert (400, True, "before") == (status, "expected" in content["error"], policy.named_version())


def test_other_methods_and_a_dead_engine() -> None:
    """They are told so."""

    class Dead(Engine):
        async def update_weight_version(self, new_version: str) -> None:
            raise RuntimeError("dead")

    assert 405 == ask("DELETE")[0]
    status, content = ask("POST", b'{"version": "a"}', Dead())
    assert (503, True, None) == (status, "dead" in content["error"], policy.named_version())


PROGRAM = """
import multiprocessing, os, subprocess, sys
from spanmill.instrument.vllm import policy
def child(pipe):
    policy.share()
    pipe.send((os.environ[policy.FILE], policy.named_version()))
    policy.set_policy_version("from the child")
if __name__ == "__main__":
    policy.share()
    policy.set_policy_version("from the parent")
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=child, args=(theirs,))
    process.start()
    shared, seen = ours.recv()
    process.join()
    server = "from spanmill.instrument.vllm import policy; policy.share(); print(policy.named_version())"
    alone = subprocess.run([sys.executable, "-c", server], capture_output=True, text=True, check=True).stdout.strip()
    print(shared == os.environ[policy.FILE], seen, policy.named_version(), alone, shared, sep="|")
"""


def test_what_shares_a_version(tmp_path: Any) -> None:
    """The processes that vLLM starts do, in both directions; a server that is a command of its own does not.

    Nothing is left behind when the first of them ends.
    """
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    environ = {name: value for name, value in os.environ.items() if not name.startswith("SPANMILL_")}
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=True, env=environ)
    *said, path = done.stdout.strip().split("|")
    assert (["True", "from the parent", "from the child", "None"], False) == (said, os.path.exists(path))
