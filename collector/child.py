"""A process of `spanmill serve` that is started again when it dies, and ends by itself when the service is gone.

It is told what to do, and learns that the service is gone, over a pipe to its stdin: first the length of a pickle and
the pickle, then commands. It answers on stdout with `ready` and an end of line once all is open, or with why it cannot.
"""

import logging
import os
import pickle
import select
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import IO, Any

_log = logging.getLogger(__name__)

RESTART_S = (0.5, 30.0)
"""The first and the longest wait before a dead process is started again; it doubles after each that lived shorter."""


class Child:
    """The process `python -m module`, which is given `setup`; people know it as `name`."""

    def __init__(self, name: str, module: str, setup: Any, comfort: str, files: Sequence[int] = ()) -> None:
        """`comfort` says what goes on without it; it inherits `files`."""
        self.name = name
        self._module = module
        self._setup = setup
        self._comfort = comfort
        self._files = files
        self._wait_s = RESTART_S[0]
        self._start_at: float | None = None
        self.start()

    def start(self) -> None:
        """Start it."""
        command = [sys.executable, "-m", self._module]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=tuple(self._files)
        )
        self._started = time.monotonic()
        self._start_at = None
        setup = pickle.dumps(self._setup)
        self.send(len(setup).to_bytes(4) + setup)

    def keep_up(self) -> bool:
        """Whether it runs. One that has died is started again, in a while."""
        if self._process.poll() is None:
            return True
        now = time.monotonic()
        if self._start_at is None:
            short = now - self._started < self._wait_s
            self._wait_s = min(2 * self._wait_s, RESTART_S[1]) if short else RESTART_S[0]
            self._start_at = now + self._wait_s
            _log.warning(
                "%s has died%s; it starts again in %g s; %s", self.name, self._last_words, self._wait_s, self._comfort
            )
        elif now >= self._start_at:
            self._close_pipes()
            self.start()
        return False

    def await_ready(self, seconds: float) -> str | None:
        """None as soon as it has opened everything; why not, if it ends before, or takes longer than `seconds`."""
        readable, _, _ = select.select([self._output], [], [], seconds)
        if not readable:
            return f"{self.name} is not ready after {seconds:g} s"
        line = self._output.readline().decode().strip()
        if line == "ready":
            return None
        return line or f"{self.name} ended with exit code {self._process.wait()} before it was ready"

    def send(self, command: bytes) -> None:
        """Tell it something. Nothing happens if it has died, which is seen where its end is waited for."""
        with suppress(BrokenPipeError):
            if self._process.stdin is not None:
                self._process.stdin.write(command)
                self._process.stdin.flush()

    def end(self, deadline: float) -> str | None:
        """None if it ends as it should until `deadline`, of the monotonic clock; else what is wrong."""
        try:
            code = self._process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            return "the time to drain is over"
        return f"{self.name} has died{self._last_words}" if code else None

    def kill(self) -> None:
        """End it at once; nothing that was acknowledged is lost by that."""
        self._process.kill()
        self._process.wait()
        self._close_pipes()

    @property
    def _last_words(self) -> str:
        """Why it ended, if it said so."""
        said = self._output.read().decode(errors="replace").removeprefix("ready\n").strip()
        return f": {said}" if said else f" (exit code {self._process.returncode})"

    def _close_pipes(self) -> None:
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with suppress(BrokenPipeError):
                    pipe.close()

    @property
    def _output(self) -> IO[bytes]:
        if self._process.stdout is None:
            raise ValueError(f"{self.name} was started without a pipe for its output")
        return self._process.stdout


def read_setup(control: int) -> Any:
    """In the child: what it was given. BrokenPipeError if the service is gone already."""
    return pickle.loads(_exactly(control, int.from_bytes(_exactly(control, 4))))


def _exactly(control: int, size: int) -> bytes:
    """Not by a buffered reader, which would swallow the commands that follow."""
    data = b""
    while len(data) < size:
        more = os.read(control, size - len(data))
        if not more:
            raise BrokenPipeError("the service has gone")
        data += more
    return data
