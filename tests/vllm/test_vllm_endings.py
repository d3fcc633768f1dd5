"""Generations that end otherwise than well, and what a client sees of it all."""

import json
import time
from itertools import groupby
from pathlib import Path
from typing import Any, cast

import httpx
import pytest
from running_vllm import MESSAGES, MODEL, VllmServer, new_rollout, running_server

from spanmill import semconv as sc
from spanmill.triplets.records import Triplet

# A server of its own for nearly every test: `make test-vllm` has the time for them.
pytestmark = [pytest.mark.vllm, pytest.mark.slow]

CHAT = "/v1/chat/completions"
LONG = {"model": MODEL, "messages": MESSAGES, "max_tokens": 900, "ignore_eos": True, "return_token_ids": True}


def _only_row(vllm: VllmServer, rollout_id: str) -> Triplet:
    (row,) = vllm.rollout(rollout_id, 1).triplets
    return row


def test_client_leaves_a_stream(vllm: VllmServer) -> None:
    """What was sampled until the client left is recorded, without a finish reason."""
    rollout_id = new_rollout()
    seen: list[int] = []
    headers = {"x-spanmill-rollout-id": rollout_id}
    with vllm.client.stream("POST", CHAT, json={**LONG, "stream": True}, headers=headers) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                for choice in json.loads(line[6:])["choices"]:
                    seen += choice.get("token_ids") or []
            if len(seen) >= 5:
                break
    row = _only_row(vllm, rollout_id)
    assert row.response_token_ids is not None
    assert row.response_logprobs is not None
    assert seen == row.response_token_ids.tolist()[: len(seen)]
    assert row.response_logprobs.size == row.response_token_ids.size < 900
    assert (None, ("aborted",), False) == (row.finish_reason, row.flags, row.trainable)


def test_client_leaves_before_the_answer(vllm: VllmServer) -> None:
    """Of an answer that nobody waited for, the prompt is recorded; its tokens vLLM never handed out."""
    rollout_id = new_rollout()
    with pytest.raises(httpx.ReadTimeout):
        vllm.client.post(CHAT, json=LONG, headers={"x-spanmill-rollout-id": rollout_id}, timeout=0.3)
    row = _only_row(vllm, rollout_id)
    assert row.prompt_token_ids is not None
    assert (None, None, False) == (row.response_token_ids, row.finish_reason, row.trainable)


def test_stop_reason(vllm: VllmServer) -> None:
    """A stop token and a stop string are told as vLLM tells them."""
    found: list[tuple[str | None, str | None]] = []
    for stop in ({"stop_token_ids": list(range(3, 280))}, {"stop": [" "], "include_stop_str_in_output": True}):
        rollout_id = new_rollout()
        answer = vllm.post(CHAT, {**LONG, **stop, "seed": 3}, x_spanmill_rollout_id=rollout_id).json()
        (choice,) = answer["choices"]
        row = _only_row(vllm, rollout_id)
        assert (choice["finish_reason"], str(choice["stop_reason"])) == (row.finish_reason, row.stop_reason)
        found.append((row.finish_reason, row.stop_reason))
    assert ["stop", "stop"] == [reason for reason, _ in found]


def test_refused_requests(vllm: VllmServer) -> None:
    """A request that vLLM refuses makes no row that claims tokens."""
    rollout_id = new_rollout()
    answer = vllm.post(CHAT, {**LONG, "temperature": -1}, x_spanmill_rollout_id=rollout_id)
    assert answer.status_code == 400
    vllm.post(CHAT, {**LONG, "max_tokens": 1}, x_spanmill_rollout_id=rollout_id)
    assert 1 == _only_row(vllm, rollout_id).response_token_ids.size  # pyright: ignore[reportOptionalMemberAccess]


def test_weights_that_change_meanwhile(vllm_with_key: VllmServer) -> None:
    """A response that two versions of the weights sampled has a run for each; before any had a name, none is told."""
    key = {"authorization": "Bearer secret"}
    unnamed, mixed = new_rollout(), new_rollout()
    vllm_with_key.post(CHAT, {**LONG, "max_tokens": 4}, x_spanmill_rollout_id=unnamed, **key)
    row = _only_row(vllm_with_key, unnamed)
    assert (None, ()) == (row.policy_version, row.policy_versions)

    def rename(version: str) -> None:
        renamed = vllm_with_key.post("/update_weight_version", {"new_version": version}, **key)
        assert renamed.status_code == 200, renamed.text

    rename("step-1")
    headers = {"x-spanmill-rollout-id": mixed, **key}
    with vllm_with_key.client.stream("POST", CHAT, json={**LONG, "stream": True}, headers=headers) as answer:
        for i, _ in enumerate(answer.iter_lines()):
            if i == 10:
                rename("step-2")
    row = _only_row(vllm_with_key, mixed)
    runs = row.policy_versions
    assert ["step-1", "step-2"] == [run.version for run in runs]
    assert (0, runs[0].length, 900) == (runs[0].start, runs[1].start, sum(run.length for run in runs))
    assert "step-2" == row.policy_version


def _without_times(answer: httpx.Response) -> Any:
    """An answer as the client sees it, but for the moment at which it was made."""
    names = {k: v for k, v in answer.headers.items() if k not in ("date", "content-length")}
    if "event-stream" not in answer.headers["content-type"]:
        body = answer.json()
        body.pop("created", None)
        return answer.status_code, names, body
    data = [line.removeprefix("data: ") for line in answer.text.splitlines()]
    events = [json.loads(d) for d in data if d.startswith("{")]
    return answer.status_code, names, {d for d in data if not d.startswith("{")}, _said(events)


def _said(events: list[Any]) -> dict[str, Any]:
    """What a stream says at each place of its events. How many tokens go into one is vLLM's, and a matter of time."""
    found: dict[str, list[Any]] = {}

    def walk(value: Any, place: str) -> None:
        if isinstance(value, dict):
            for name, part in cast("dict[str, Any]", value).items():
                walk(part, f"{place}.{name}")
        elif isinstance(value, list):
            for part in cast("list[Any]", value):
                walk(part, f"{place}[]")
        else:
            found.setdefault(place, []).append(value)

    for event in events:
        walk(event, "")
    found.pop(".created", None)
    texts = {place: "".join(v or "" for v in found[place]) for place in found if place.endswith((".text", ".content"))}
    return {place: [value for value, _ in groupby(values)] for place, values in found.items()} | texts


def test_how_a_stream_is_cut_makes_no_difference() -> None:
    """A stream in other pieces says the same; other text, another reason or a field more does not."""

    def piece(text: str, reason: str | None = None, **more: Any) -> Any:
        return {"id": "a", "created": 1, "choices": [{"text": text, "finish_reason": reason}], **more}

    said = _said([piece("a"), piece("b"), piece("c", "stop")])
    assert said == _said([piece("ab"), piece("c", "stop")])
    others = [[piece("ab"), piece("d", "stop")], [piece("ab"), piece("c", "length")], [piece("abc", "stop", usage=1)]]
    assert [True] * 3 == [said != _said(other) for other in others]


def test_client_sees_no_difference(vllm: VllmServer, tiny_model: Path) -> None:
    """With the plugin and without it, answers are the same, whether logprobs were asked for or not."""
    base = {"model": MODEL, "max_tokens": 8, "seed": 11}
    chat = {**base, "messages": MESSAGES}
    requests: list[tuple[str, dict[str, Any]]] = [
        (CHAT, chat),
        (CHAT, {**chat, "n": 2, "logprobs": True, "top_logprobs": 2, "return_token_ids": True}),
        (CHAT, {**chat, "stream": True, "stream_options": {"include_usage": True}}),
        (CHAT, {**chat, "stream": True, "logprobs": True}),
        (CHAT, {**chat, "prompt_logprobs": 1}),
        (CHAT, {**chat, "temperature": -1}),
        ("/v1/completions", {**base, "prompt": ["the", "fox"], "n": 2}),
        ("/v1/completions", {**base, "prompt": "the", "logprobs": 1, "echo": True}),
        ("/v1/completions", {**base, "prompt": "the", "stream": True}),
        ("/v1/messages", {**base, "messages": MESSAGES, "temperature": 0}),
    ]

    def ask(server: VllmServer) -> list[Any]:
        return [_without_times(server.post(p, b, x_request_id=f"same-{i}")) for i, (p, b) in enumerate(requests)]

    with_plugin = ask(vllm)
    with running_server(tiny_model, SPANMILL_VLLM="0") as bare:
        without = ask(bare)
        assert bare.client.get("/spanmill/status").status_code == 404
    assert without == with_plugin


def test_collector_that_is_not_there(tiny_model: Path) -> None:
    """Without a collector vLLM serves on, says so once, counts what is lost and ends in time."""
    gone = "http://127.0.0.1:9"
    with running_server(tiny_model, OTEL_EXPORTER_OTLP_ENDPOINT=gone, SPANMILL_EXIT_TIMEOUT="1") as server:
        body = {"model": MODEL, "messages": MESSAGES, "max_tokens": 2}
        assert [200] * 20 == [server.post(CHAT, body).status_code for _ in range(20)]
        until = time.monotonic() + 60
        while True:
            counters = server.client.get("/spanmill/status").json()["counters"]
            if sum(counters.values()) >= 20 or time.monotonic() > until:
                break
            time.sleep(0.2)
        assert {"emitted": 0, "dropped": 0, "failed": 20, "ignored": 0} == counters
        assert 1 == server.log.read_text().count("spanmill: ")


def test_collector_that_does_not_answer(tiny_model: Path) -> None:
    """Beside a collector that takes requests and never answers, vLLM serves on; what does not fit is counted.

    What waits stays within its bound, and vLLM ends in time.
    """
    with running_server(tiny_model, SPANMILL_QUEUE_MIB="0.05", SPANMILL_EXIT_TIMEOUT="1") as server:
        server.sink.answers.clear()
        body = {"model": MODEL, "messages": MESSAGES, "max_tokens": 200, "ignore_eos": True, "n": 4}
        assert [200] * 12 == [server.post(CHAT, body).status_code for _ in range(12)]
        counters = server.client.get("/spanmill/status").json()["counters"]
        assert (0, 0) == (counters["emitted"], counters["failed"])
        assert 0 < counters["dropped"] < 48
        assert 1 == server.log.read_text().count("spanmill: ")
        begin = time.monotonic()
        server.process.terminate()
        server.process.wait(60)
        assert time.monotonic() - begin < 20


def test_shutdown_flushes(tiny_model: Path) -> None:
    """A vLLM that is told to end delivers what it has sampled."""
    with running_server(tiny_model, OTEL_BSP_SCHEDULE_DELAY="60000") as server:
        rollout_id = new_rollout()
        server.post(CHAT, {**LONG, "max_tokens": 3}, x_spanmill_rollout_id=rollout_id)
        assert [] == server.spans()
        server.process.terminate()
        server.process.wait(60)
        assert [rollout_id] == [s.attributes[sc.ROLLOUT_ID] for s in server.spans()]
