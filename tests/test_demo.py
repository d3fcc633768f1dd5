import json
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

DEMO = Path(__file__).parent.parent / "demo"
SERVER = runpy.run_path(str(DEMO / "replay_server.py"))
LINES: list[dict[str, Any]] = [json.loads(line) for line in (DEMO / "answers.jsonl").read_text().splitlines()]
PATH = "/v1/chat/completions"


def reply(request: dict[str, Any], path: str = PATH) -> tuple[int, dict[str, Any]]:
    """What the demo's model server answers."""
    return SERVER["reply"](SERVER["load"](), path, json.dumps(request).encode())


def test_answers_are_those_of_the_recording() -> None:
    """The committed file is what its script makes of the recording, answer by answer."""
    recorded = list(runpy.run_path(str(DEMO / "record_answers.py"))["answers"]())
    assert (10, recorded) == (len(LINES), LINES)


def test_every_conversation_has_its_answer() -> None:
    """A request that asks for ids and logprobs gets the answer as it was recorded."""
    asked = {"return_token_ids": True, "logprobs": True, "temperature": 1.0}
    got = [reply({"messages": line["messages"], "tools": line["tools"], **asked}) for line in LINES]
    assert [(200, line["answer"]) for line in LINES] == got


def test_ids_are_told_only_to_who_asks() -> None:
    """As vLLM does, the server leaves out ids and logprobs that the request does not ask for."""
    status, answer = reply({"messages": LINES[0]["messages"], "tools": LINES[0]["tools"]})
    choice = answer["choices"][0]
    assert (200, None, None, None) == (status, answer["prompt_token_ids"], choice["token_ids"], choice["logprobs"])
    assert LINES[0]["answer"]["choices"][0]["message"] == choice["message"]


@pytest.mark.parametrize(
    ("changed", "path", "status", "says"),
    [
        ({"messages": []}, PATH, 404, "this conversation was not recorded"),
        ({"tools": None}, PATH, 404, "this conversation was not recorded"),
        ({"stream": True}, PATH, 400, "only whole answers of one choice were recorded"),
        ({"n": 2}, PATH, 400, "only whole answers of one choice were recorded"),
        ({}, "/v1/completions", 404, "POST /v1/completions: only /v1/chat/completions is here"),
    ],
)
def test_what_was_not_recorded_is_an_error(changed: dict[str, Any], path: str, status: int, says: str) -> None:
    """An agent that says anything else than the recorded one did is told so, never given another answer."""
    request = {"messages": LINES[0]["messages"], "tools": LINES[0]["tools"], **changed}
    expected = {"error": {"message": says, "type": "invalid_request_error"}}
    assert (status, expected) == reply(request, path)


@pytest.mark.slow
def test_demo_passes_its_own_check() -> None:
    """`demo/demo.py` runs four agents, shows their rows, and finds them equal to what the engine logged."""
    done = subprocess.run([sys.executable, DEMO / "demo.py"], capture_output=True, text=True, timeout=300)
    last = "Checked: every token id, log probability, mask and reward is what it should be."
    assert (0, last, "") == (done.returncode, done.stdout.splitlines()[-1], done.stderr)
