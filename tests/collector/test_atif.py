import json
from pathlib import Path
from typing import Any

import pytest
from exported_rollouts import call, rollout, write

import spanmill
from spanmill import cli
from spanmill.collector import atif
from spanmill.collector.inputs import read_unit, units
from spanmill.collector.journal import Kind
from spanmill.errors import InputError
from spanmill.triplets.exports import export

SAME = {
    "rollouts": ("rollout_id", "attempt", "group_id", "group_size", "task_id", "mode", "status", "reward"),
    "triplets": (
        "rollout_id",
        "attempt",
        "turn",
        "choice",
        "call_id",
        "parent_call_id",
        "agent",
        "model",
        "prompt_token_ids",
        "response_token_ids",
        "response_logprobs",
        "logprobs_mode",
        "policy_versions",
        "temperature",
        "top_p",
        "top_k",
        "max_tokens",
        "finish_reason",
        "stop_reason",
        "reward",
        "messages",
        "response",
        "tools",
        "started_at",
        "ended_at",
        "trainable",
    ),
    "episodes": (
        "rollout_id",
        "attempt",
        "episode",
        "input_ids",
        "loss_mask",
        "logprobs",
        "turns",
        "step_rewards",
        "reward",
        "policy_versions",
    ),
}
"""What an export and a build keep. Other columns say where rows came from: trace and span, dialect, sources."""

FOREIGN: dict[str, Any] = {
    "schema_version": "ATIF-v1.4",
    "session_id": "run 7",
    "agent": {"name": "terminus", "version": "2", "model_name": "m"},
    "steps": [
        {"step_id": 1, "source": "system", "message": "be brief"},
        {"step_id": 2, "source": "user", "message": "list"},
        {
            "step_id": 3,
            "source": "agent",
            "message": "",
            "tool_calls": [{"tool_call_id": "c1", "function_name": "ls", "arguments": {"path": "/"}}],
            "observation": {"results": [{"source_call_id": "c1", "content": "a b"}]},
            "metrics": {
                "prompt_tokens": 2,
                "completion_tokens": 2,
                "prompt_token_ids": [1, 2],
                "completion_token_ids": [3, 4],
                "logprobs": [-0.5, -0.25],
            },
        },
        {"step_id": 4, "source": "agent", "message": "copied", "is_copied_context": True, "metrics": {}},
        {"step_id": 5, "source": "agent", "message": "by rule", "llm_call_count": 0},
        {
            "step_id": 6,
            "source": "agent",
            "message": "a and b",
            "llm_call_count": 2,
            "metrics": {"prompt_token_ids": [9], "completion_token_ids": [9], "completion_tokens": 7},
        },
    ],
}


def built(path: Path, text: str) -> Path:
    """The dataset of a file."""
    path.mkdir()
    (path / "in.json").write_text(text)
    assert 0 == cli.main(["build", str(path / "in.json"), "--out", str(path / "data")])
    return path / "data"


def rows(dataset: Path, table: str) -> list[dict[str, Any]]:
    """The columns that are the same, in an order of content."""
    frame = getattr(spanmill, f"read_{table}")(dataset).select(SAME[table]).collect()
    return sorted(frame.to_dicts(), key=lambda row: json.dumps(row, default=str))


def test_what_export_wrote_comes_back(tmp_path: Path) -> None:
    """Rewards, versions, sampling, forks, sub-agents, choices, attempts, tools and texts are the same rows again."""
    told = ['[{"role":"user","content":"hi"}]']
    asked = '{"id":"c1","type":"function","function":{"name":"f","arguments":"{\\"x\\": 1 }"}}'
    answer = f'{{"role":"assistant","content":null,"tool_calls":[{asked}]}}'
    result = '{"role":"tool","content":"2","tool_call_id":"c1"}'
    told.append(f'[{{"role":"user","content":"hi"}},{answer},{result}]')
    tools = '[{"type":"function","function":{"name":"f","parameters":{}}}]'
    calls = [
        call(0, [1, 2], [3, 4], messages=told[0], response=answer, tools=tools, reward=0.5, top_p=0.5, top_k=3),
        call(1, [1, 2, 3, 4, 5], [6], messages=told[1], tools=tools, stop_reason="<end>", max_tokens=9),
        call(2, [7], [8, 8], agent="helper", messages=None, response=None, response_logprobs=None),
        call(3, [1, 2, 3, 4, 5], [7], messages=told[1], tools=tools),
        call(4, [9], [1], messages='[{"role":"developer","content":"summary so far"}]'),
    ]
    choice = call(
        5, [9], [2], choice=1, call_id="call-4#1", messages='[{"role":"developer","content":"summary so far"}]'
    )
    made = [
        rollout("a", [*calls, choice], group_id="g", task_id="t", mode="train", group_size=2, reward=0.25),
        rollout("a", calls[:1], attempt=1, status="cancelled", reward=None),
        rollout("b/1", calls[:2], status="failed", reward=0.0),
    ]
    for one in made:
        for number, triplet in enumerate(one.triplets):
            triplet.turn = min(number, 4)  # choices of one request are one turn
    first = write(tmp_path / "data", made)
    export(first, "atif", tmp_path / "documents.jsonl")
    again = built(tmp_path / "again", (tmp_path / "documents.jsonl").read_text())
    kept = {("a", 0), ("b/1", 0)}
    for table in SAME:
        expected = [row for row in rows(first, table) if (row["rollout_id"], row["attempt"]) in kept]
        assert (table, expected) == (table, rows(again, table))


def test_documents_of_other_writers(tmp_path: Path) -> None:
    """The session is the rollout, an inference is a call; copies, rules and sums of several give no numbers."""
    dataset = built(tmp_path / "in", json.dumps(FOREIGN, indent=2))
    (found,) = spanmill.read_rollouts(dataset).collect().to_dicts()
    assert ("run 7", "unknown", None, 2) == tuple(
        found[name] for name in ("rollout_id", "status", "reward", "num_calls")
    )
    first, second = spanmill.read_triplets(dataset).collect().to_dicts()
    assert ([1, 2], [3, 4], [-0.5, -0.25], "terminus", "m", "atif") == tuple(
        first[name]
        for name in ("prompt_token_ids", "response_token_ids", "response_logprobs", "agent", "model", "dialect")
    )
    function = {"name": "ls", "arguments": '{"path": "/"}'}
    spoken = [{"id": "c1", "type": "function", "function": function}]
    assert spoken == json.loads(first["response"])["tool_calls"]
    assert (None, False, ["no_token_ids"]) == tuple(second[n] for n in ("response_token_ids", "trainable", "flags"))
    roles = [message["role"] for message in json.loads(second["messages"])]
    assert ["system", "user", "assistant", "tool", "assistant", "assistant"] == roles


def test_times_that_were_not_recorded_keep_the_order_of_steps(tmp_path: Path) -> None:
    """Steps without a time are ordered as they stand; none is given a time of today."""
    steps: list[dict[str, Any]] = [
        {"step_id": n + 1, "source": "agent", "message": str(n), "metrics": {}} for n in range(12)
    ]
    dataset = built(tmp_path / "in", json.dumps({**FOREIGN, "steps": steps}))
    found = spanmill.read_triplets(dataset).collect()
    assert [str(n) for n in range(12)] == [json.loads(text)["content"] for text in found["response"]]
    assert {1970} == {at.year for at in found["started_at"]}


def test_sub_agents_and_siblings_are_of_one_rollout(tmp_path: Path) -> None:
    """Embedded trajectories, and documents of the same session, are put together; each call once."""
    step = {**FOREIGN["steps"][2], "timestamp": "2026-01-01T00:00:00Z"}
    below = {**FOREIGN, "trajectory_id": "sub", "agent": {"name": "sub", "version": "1"}, "steps": [step]}
    sibling = {**FOREIGN, "trajectory_id": "next", "steps": [{**step, "timestamp": "2026-01-01T00:00:01"}]}
    main = {**FOREIGN, "trajectory_id": "main", "steps": [step], "subagent_trajectories": [below]}
    text = "".join(f"{json.dumps(document)}\n" for document in (main, sibling, main))
    dataset = built(tmp_path / "in", text)
    assert ["run 7"] == spanmill.read_rollouts(dataset).collect()["rollout_id"].to_list()
    assert ["sub", "terminus", "terminus"] == sorted(spanmill.read_triplets(dataset).collect()["agent"].to_list())


def test_a_document_without_a_session_is_a_rollout_of_its_own(tmp_path: Path) -> None:
    """Without session and trajectory id two different documents are two rollouts."""
    other = {**FOREIGN, "session_id": None}
    changed = {**other, "agent": {"name": "x", "version": "1"}}
    dataset = built(tmp_path / "in", f"{json.dumps(other)}\n{json.dumps(changed)}\n")
    assert 2 == spanmill.read_rollouts(dataset).collect().height


DAMAGES: list[dict[str, Any]] = [
    {"steps": None},
    {"steps": [None, 3, {"source": "agent"}, {"source": "agent", "metrics": [], "observation": 3}]},
    {"agent": "terminus"},
    {"subagent_trajectories": {"a": 1}},
    {"extra": {"spanmill": {"reward": 10**400, "attempt": "x", "status": 3, "group_size": "many"}}},
    {"steps": [{"source": "agent", "metrics": {"prompt_token_ids": "x", "completion_token_ids": [1.5, None]}}]},
    {"steps": [{"source": "agent", "metrics": {"completion_token_ids": [1], "logprobs": [float("nan")]}}]},
    {"steps": [{"source": "agent", "timestamp": "yesterday", "extra": {"spanmill": {"policy_versions": 3}}}]},
    {"steps": [{"source": "agent", "timestamp": "9999-12-31T23:59:59", "message": "\ud800"}]},
]


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_documents_are_read_as_far_as_they_go(tmp_path: Path, damage: dict[str, Any]) -> None:
    """Whatever stands where the format has something else, `build` ends well; what cannot be used is quarantined."""
    built(tmp_path / "in", json.dumps({**FOREIGN, **damage}))


def test_versions_that_are_not_understood(tmp_path: Path) -> None:
    """A later major version is refused by name; JSON that is neither OTLP nor ATIF is so called."""
    path = tmp_path / "in.json"
    path.write_text(json.dumps({**FOREIGN, "schema_version": "ATIF-v2.0"}))
    with pytest.raises(InputError, match=r"ATIF-v2.0 is not understood; this spanmill reads ATIF-v1"):
        [request for unit in units(path) for request in read_unit(unit)]
    path.write_text('{"schema_version": 1}')
    with pytest.raises(InputError, match=r"neither OTLP .* nor ATIF"):
        [request for unit in units(path) for request in read_unit(unit)]


def test_a_document_is_requests() -> None:
    """Spans come as one OTLP/JSON request, rewards, if there are any, as a record of them."""
    own = {"rollout_id": "r", "reward": 1, "status": "succeeded"}
    kinds = [kind for kind, _ in atif.records({**FOREIGN, "extra": {"spanmill": own}})]
    assert [Kind.TRACES_JSON, Kind.REWARDS] == kinds
    assert [Kind.TRACES_JSON] == [kind for kind, _ in atif.records(FOREIGN)]
