"""The policy version over HTTP, on a real vLLM with one API-server process and with two."""

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from running_vllm import HERE, MESSAGES, MODEL, VllmServer, new_rollout, running_server

from spanmill.instrument.vllm.policy_route import POLICY

pytestmark = pytest.mark.vllm

AT_ONCE = 12
BODY = {"model": MODEL, "messages": MESSAGES, "max_tokens": 4}


def versions_of(server: VllmServer, rollout: str, calls: int) -> set[str | None]:
    """The versions of the rows of a rollout."""
    return {row.policy_version for row in server.rollout(rollout, calls).triplets}


@pytest.mark.slow
def test_two_api_servers(tiny_model: Path) -> None:
    """A version that one process was told holds in the other, for what is shown and for what is recorded."""
    command_line = (str(HERE / "vllm_cli.py"), "serve")
    with (
        running_server(tiny_model, "--api-server-count", "2", launcher=command_line) as server,
        ThreadPoolExecutor(AT_ONCE) as pool,
    ):

        def answered(path: str, wanted: int, timeout_s: float = 60) -> dict[int, object]:
            """By process, what it answers; each connection is a new one, and some process takes it."""
            seen: dict[int, object] = {}
            until = time.monotonic() + timeout_s

            def ask(_: int) -> None:
                with httpx.Client(base_url=server.url) as fresh:  # both requests on one connection: one process
                    pid = fresh.get("/spanmill/status").json()["pid"]
                    seen[pid] = fresh.get(path).json()

            while len(seen) < wanted and time.monotonic() < until:
                list(pool.map(ask, range(AT_ONCE)))  # one at a time, the same idle process would take them all
            return seen

        def chat(rollout: str) -> None:
            headers = {"x-spanmill-rollout-id": rollout}
            httpx.post(f"{server.url}/v1/chat/completions", json=BODY, headers=headers, timeout=60).raise_for_status()

        assert [{"version": None}] * 2 == list(answered(POLICY, 2).values())
        for step in ("step-1", "step-2"):
            assert {"version": step} == httpx.post(server.url + POLICY, json={"version": step}).json()
            assert [{"version": step}] * 2 == list(answered(POLICY, 2).values())
            rollout = new_rollout()
            list(pool.map(chat, [rollout] * 12))
            assert {step} == versions_of(server, rollout, 12)
        httpx.post(server.url + POLICY, json={"version": None}).raise_for_status()
        server.post("/v1/chat/completions", BODY, x_spanmill_rollout_id=(unknown := new_rollout()))
        assert {None} == versions_of(server, unknown, 1)


def test_the_servers_key_is_asked_for(vllm_with_key: VllmServer) -> None:
    """Without vLLM's own key nobody sets or sees a version; with it the rows say it."""
    server = vllm_with_key
    for wrong in ({}, {"authorization": "Bearer wrong"}):
        assert 401 == httpx.post(server.url + POLICY, json={"version": "x"}, headers=wrong).status_code
        assert 401 == httpx.get(server.url + POLICY, headers=wrong).status_code
    key = {"authorization": "Bearer secret"}
    before = httpx.get(server.url + POLICY, headers=key).json()["version"]
    assert {"version": "9"} == httpx.post(server.url + POLICY, json={"version": 9}, headers=key).json()
    rollout = new_rollout()
    server.post("/v1/chat/completions", BODY, x_spanmill_rollout_id=rollout, authorization="Bearer secret")
    assert {"9"} == versions_of(server, rollout, 1)
    httpx.post(server.url + POLICY, json={"version": before}, headers=key).raise_for_status()
