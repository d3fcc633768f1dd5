"""Whose rollout a request is, read off every carrier by a real vLLM, which notices nothing."""

from typing import Any

import pytest
from running_vllm import MESSAGES, MODEL, VllmServer, new_rollout

from spanmill import semconv as sc
from spanmill.triplets.records import Span

pytestmark = pytest.mark.vllm

CHAT = "/v1/chat/completions"
BODY = {"model": MODEL, "messages": MESSAGES, "max_tokens": 4}
TRACE = "0af7651916cd43dd8448eb211c80319c"


def _ask(vllm: VllmServer, path: str = CHAT, body: Any = BODY, **headers: str) -> str:
    answer = vllm.post(path, body, **headers)
    assert answer.status_code == 200, answer.text
    return answer.json()["id"]


def _span(vllm: VllmServer, rollout_id: str) -> Span:
    """The span of the only call of a rollout."""
    vllm.rollout(rollout_id, 1)
    (found,) = [s for s in vllm.spans() if s.attributes.get(sc.ROLLOUT_ID) == rollout_id]
    return found


def _said(span: Span, *names: str) -> list[object]:
    return [span.attributes.get(name) for name in names]


def test_headers(vllm: VllmServer) -> None:
    """Every header lands in the column that it names."""
    rollout_id = new_rollout()
    headers = {
        "x_spanmill_attempt": "2",
        "x_spanmill_group_id": "g",
        "x_spanmill_task_id": "t",
        "x_spanmill_mode": "val",
    }
    _ask(vllm, x_spanmill_rollout_id=rollout_id, **headers)
    rollout = vllm.rollout(rollout_id, 1)
    said = (rollout.attempt, rollout.group_id, rollout.task_id, rollout.mode, rollout.identity_source)
    assert said == (2, "g", "t", "val", "carrier")


def test_stronger_carriers_win(vllm: VllmServer) -> None:
    """Header before baggage before path before API key, and the span says which it was."""
    ids = [new_rollout() for _ in sc.CARRIERS]
    everything = {
        "x_spanmill_rollout_id": ids[0],
        "baggage": f"{sc.ROLLOUT_ID}={ids[1]},{sc.ROLLOUT_ATTEMPT}=1",
        "authorization": f"Bearer sk-rollout-{ids[3]}.3",
    }
    _ask(vllm, f"/rollout/{ids[2]}/attempt/2{CHAT}", **everything)
    del everything["x_spanmill_rollout_id"]
    _ask(vllm, f"/rollout/{ids[2]}/attempt/2{CHAT}", **everything)
    del everything["baggage"]
    _ask(vllm, f"/rollout/{ids[2]}/attempt/2{CHAT}", **everything)
    _ask(vllm, CHAT, **everything)
    spans = [_span(vllm, rollout_id) for rollout_id in ids]
    assert list(sc.CARRIERS) == [s.attributes[sc.ROLLOUT_CARRIER] for s in spans]
    assert [0, 1, 2, 3] == [s.attributes[sc.ROLLOUT_ATTEMPT] for s in spans]


def test_percent_encoded_ids(vllm: VllmServer) -> None:
    """An id with slashes, dots and other scripts comes whole out of path and key."""
    rollout_id = f"batch 7/täsk.1/{new_rollout()}"
    encoded = rollout_id.replace(" ", "%20").replace("/", "%2F").replace("ä", "%C3%A4").replace(".", "%2E")
    _ask(vllm, f"/rollout/{encoded}{CHAT}")
    _ask(vllm, x_api_key=f"sk-rollout-{encoded}")
    assert vllm.rollout(rollout_id, 2).num_calls == 2


def test_path_prefix_serves_every_route(vllm: VllmServer) -> None:
    """Under a rollout's prefix vLLM answers as it does without, also where nothing is recorded."""
    prefix = f"/rollout/{new_rollout()}"
    plain = vllm.client.get("/v1/models").json()
    assert plain["data"][0]["id"] == vllm.client.get(f"{prefix}/v1/models").json()["data"][0]["id"]
    assert vllm.client.get(f"{prefix}/health").status_code == 200
    assert vllm.client.get("/rollout//v1/models").status_code == 404


def test_trace_session_and_retry(vllm: VllmServer) -> None:
    """The client's span is the parent; vLLM's session id is the conversation; the client's retry count is kept."""
    rollout_id = new_rollout()
    _ask(
        vllm,
        x_spanmill_rollout_id=rollout_id,
        traceparent=f"00-{TRACE}-b7ad6b7169203331-00",
        x_session_id="session-1",
        x_stainless_retry_count="1",
    )
    span = _span(vllm, rollout_id)
    assert (TRACE, "b7ad6b7169203331", 2) == (span.trace_id, span.parent_id, span.kind)
    assert ["session-1", 1] == _said(span, sc.GEN_AI_CONVERSATION_ID, sc.REQUEST_RETRY)


def test_choices_share_a_trace(vllm: VllmServer) -> None:
    """With no client's span, the choices of a request stand in one trace: without a rollout id they are one rollout."""
    response_id = _ask(vllm, body={**BODY, "n": 3})
    several = _ask(vllm, "/v1/completions", {"model": MODEL, "prompt": ["a", "b"], "n": 2, "max_tokens": 3})
    vllm.rollout(_ask_last(vllm), 1)
    for found, count in ((response_id, 3), (several, 4)):
        spans = [s for s in vllm.spans() if s.attributes.get(sc.GEN_AI_RESPONSE_ID) == found]
        assert (count, 1) == (len(spans), len({s.trace_id for s in spans}))


def _ask_last(vllm: VllmServer) -> str:
    """A rollout whose span comes after all that were made before."""
    rollout_id = new_rollout()
    _ask(vllm, x_spanmill_rollout_id=rollout_id)
    return rollout_id


def test_what_is_not_recorded(vllm: VllmServer) -> None:
    """No span for a request that says so, for tokenising, for health, for a beam search."""
    rollout_id = new_rollout()
    mine = {"x_spanmill_rollout_id": rollout_id}
    _ask(vllm, x_spanmill_skip="1", **mine)
    assert vllm.post("/tokenize", {"model": MODEL, "prompt": "hello"}, **mine).status_code == 200
    beams = {**BODY, "use_beam_search": True, "n": 2, "max_tokens": 3, "temperature": 0}
    assert vllm.post(CHAT, beams, **mine).status_code == 200
    vllm.rollout(_ask_last(vllm), 1)
    assert [] == [s.name for s in vllm.spans() if s.attributes.get(sc.ROLLOUT_ID) == rollout_id]


def test_malformed_carriers(vllm: VllmServer) -> None:
    """What is malformed is ignored and counted; the request is served."""
    before = vllm.client.get("/spanmill/status").json()["counters"]["ignored"]
    response_id = _ask(vllm, f"/rollout/%FF{CHAT}", authorization="Bearer sk-rollout-a.b", traceparent="00-zz")
    vllm.rollout(_ask_last(vllm), 1)
    (span,) = [s for s in vllm.spans() if s.attributes.get(sc.GEN_AI_RESPONSE_ID) == response_id]
    assert [None, None] == _said(span, sc.ROLLOUT_ID, sc.ROLLOUT_CARRIER)
    assert before + 2 == vllm.client.get("/spanmill/status").json()["counters"]["ignored"]


def test_vllms_own_api_key(vllm_with_key: VllmServer) -> None:
    """VLLM checks its key as ever: no carrier gets past it, and `sk-rollout-<id>:<key>` carries both."""
    rollout_id = new_rollout()
    refused = [
        vllm_with_key.post(CHAT, BODY),
        vllm_with_key.post(f"/rollout/{rollout_id}{CHAT}", BODY),
        vllm_with_key.post(CHAT, BODY, authorization=f"Bearer sk-rollout-{rollout_id}"),
        vllm_with_key.post(CHAT, BODY, authorization=f"Bearer sk-rollout-{rollout_id}:wrong"),
        vllm_with_key.post(CHAT, BODY, authorization=f"Bearer sk-rollout-{rollout_id}:", x_api_key="secret"),
    ]
    assert [401] * 5 == [answer.status_code for answer in refused]
    _ask(vllm_with_key, authorization=f"Bearer sk-rollout-{rollout_id}.4:secret")
    _ask(vllm_with_key, f"/rollout/{rollout_id}/attempt/4{CHAT}", authorization="Bearer secret")
    assert (4, 2) == ((found := vllm_with_key.rollout(rollout_id, 2)).attempt, found.num_calls)


def test_messages_and_tools(vllm: VllmServer) -> None:
    """Messages and tools of each API stand in the rows in OpenAI chat shape."""
    rollout_id = new_rollout()
    parameters = {"type": "object", "properties": {"item": {"type": "string"}}}
    function = {"name": "lookup", "description": "A price.", "parameters": parameters}
    tool = {"type": "function", "function": function}
    system, user = {"role": "system", "content": "be brief"}, {"role": "user", "content": "the fox"}
    mine = {"x_spanmill_rollout_id": rollout_id}
    first = _ask(vllm, body={**BODY, "messages": [system, user], "tools": [tool], "tool_choice": "none"}, **mine)
    asked = {"model": MODEL, "instructions": "be brief", "input": "the fox", "max_output_tokens": 4}
    second = _ask(
        vllm, "/v1/responses", {**asked, "tools": [{"type": "function", **function}], "tool_choice": "none"}, **mine
    )
    schema = {"name": "lookup", "description": "A price.", "input_schema": parameters}
    asked = {"model": MODEL, "system": "be brief", "messages": [user], "max_tokens": 4}
    third = _ask(vllm, "/v1/messages", {**asked, "tools": [schema], "tool_choice": {"type": "none"}}, **mine)
    rows = {row.call_id: row for row in vllm.rollout(rollout_id, 3).triplets}
    parsed = {k: (json_or_none(row.messages), json_or_none(row.tools)) for k, row in rows.items()}
    assert dict.fromkeys([first, second, third], ([system, user], [tool])) == parsed


def json_or_none(text: str | None) -> Any:
    """A JSON column."""
    import json

    return None if text is None else json.loads(text)
