"""A model server that gives the answers which a real vLLM once gave, to whoever comes with the same conversation.

It speaks as much of OpenAI's API as the demo's agent does. As vLLM does, it tells token ids and log probabilities only
to a request that asks for them (`return_token_ids`, `logprobs`). A conversation that was not recorded is an error.
"""

import json
import threading
from collections.abc import Generator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

ANSWERS = Path(__file__).with_name("answers.jsonl")
PATH = "/v1/chat/completions"


def load(path: Path = ANSWERS) -> dict[str, Any]:
    """The recorded answers by their conversations."""
    lines = map(json.loads, path.read_text().splitlines())
    return {conversation(line): line["answer"] for line in lines}


def conversation(request: dict[str, Any]) -> str:
    """What an answer is found by: messages and tools, to the letter."""
    return json.dumps([request.get("messages"), request.get("tools")], sort_keys=True)


def reply(answers: dict[str, Any], path: str, body: bytes) -> tuple[int, dict[str, Any]]:
    """(HTTP status, JSON) for a request."""
    if path != PATH:
        return 404, error(f"POST {path}: only {PATH} is here")
    request = json.loads(body)
    if request.get("stream") or request.get("n", 1) != 1:
        return 400, error("only whole answers of one choice were recorded")
    found = answers.get(conversation(request))
    if found is None:
        return 404, error("this conversation was not recorded")
    answer = json.loads(json.dumps(found))
    if not request.get("return_token_ids"):
        answer["prompt_token_ids"] = answer["choices"][0]["token_ids"] = None
    if not request.get("logprobs"):
        answer["choices"][0]["logprobs"] = None
    return 200, answer


def error(message: str) -> dict[str, Any]:
    """An error as OpenAI's clients read it."""
    return {"error": {"message": message, "type": "invalid_request_error"}}


@contextmanager
def running(port: int = 0) -> Generator[str]:
    """The server, in a thread; gives its base URL."""
    answers = load()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            status, found = reply(answers, self.path, self.rfile.read(int(self.headers["Content-Length"])))
            body = json.dumps(found).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            """The demo's output is for people."""

    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1"
    finally:
        server.shutdown()
        server.server_close()
