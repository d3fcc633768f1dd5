"""The gateway as it runs, in a thread of the test's own process."""

import asyncio
import socket
import threading
from collections.abc import Generator
from contextlib import contextmanager

import httpx
import uvicorn

from spanmill.instrument.gateway import configuration


@contextmanager
def serving(upstream: str) -> Generator[httpx.Client]:
    """A client of a gateway before `upstream`."""
    server = uvicorn.Server(configuration(upstream))
    listening = socket.create_server(("127.0.0.1", 0))
    thread = threading.Thread(target=lambda: asyncio.run(server.serve([listening])))
    thread.start()
    with httpx.Client(base_url=f"http://127.0.0.1:{listening.getsockname()[1]}", timeout=20) as client:
        yield client
    server.should_exit = True
    thread.join()
