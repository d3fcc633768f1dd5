"""What model servers of tests have in common: how they answer, and that they run."""

import json
import threading
import time
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Speaking(BaseHTTPRequestHandler):
    """Answers in JSON, or as a stream of events."""

    protocol_version = "HTTP/1.1"

    def send_json(self, status: int, body: Any) -> None:
        """A whole answer."""
        content = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def send_events(self, events: Iterable[Any], delay_s: float = 0.0) -> None:
        """A streamed answer, with a pause before each event but the first."""
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream; charset=utf-8")
        self.send_header("Connection", "close")
        self.end_headers()
        self.close_connection = True
        for number, event in enumerate(events):
            if number:
                time.sleep(delay_s)
            self.wfile.write(b"data: " + json.dumps(event).encode() + b"\n\n")
        self.wfile.write(b"data: [DONE]\n\n")

    def log_message(self, format: str, *args: Any) -> None:
        """Keep the test's output clean."""


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128  # many clients may come at once

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that goes away is what some tests are about."""


@contextmanager
def serving(handler: type[Speaking]) -> Generator[str]:
    """The URL of a server that runs."""
    server = _Server(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
