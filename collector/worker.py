"""A worker of `spanmill serve --workers N`: a receiver with a part of the journal of its own, in a process of its own.

It may be killed at any moment: what it has acknowledged is on disk.
"""

import os
import signal
import sys
from collections.abc import Iterator
from typing import NamedTuple

from spanmill.collector.child import read_setup
from spanmill.collector.config import ServeConfig
from spanmill.collector.figures import Figures
from spanmill.collector.journal import LOCK_S, JournalWriter
from spanmill.collector.logs import logging_to_stderr
from spanmill.collector.memory import give_back_memory
from spanmill.collector.receive import start_receiver
from spanmill.errors import SpanmillError


class Setup(NamedTuple):
    """What a worker is given."""

    config: ServeConfig
    """With the ports that all workers share."""
    number: int
    figures: int
    """A file descriptor."""


def run(setup: Setup, control: int) -> None:
    """Receive until `control`, a pipe's file descriptor, says "drain"; end at once if it closes: the service is gone.

    Prints "ready" once journal and addresses are open. Raises SpanmillError if they cannot be.
    """
    config, number, figures = setup
    give_back_memory()
    with (
        logging_to_stderr(config.log_format, f"worker {number}"),
        JournalWriter(config.journal_folder, worker=number, wait_s=LOCK_S) as journal,
    ):
        receiver = start_receiver(config, journal, figures=Figures(figures, config.workers, number))
        print("ready", flush=True)
        for command in _commands(control):
            if command == "drain":
                receiver.stop(config.drain_timeout)
                return
            receiver.unready(command.removeprefix("unready").strip() or None)
    os._exit(1)


def unready(reason: str | None) -> bytes:
    """The command that tells a worker why nothing becomes of what it receives; None: all is well."""
    return f"unready {reason or ''}\n".encode()


DRAIN = b"drain\n"
"""The command to take no further request and to end."""


def _commands(control: int) -> Iterator[str]:
    """The lines that come down the pipe, until it closes."""
    rest = b""
    while data := os.read(control, 4096):
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            yield line.decode()


def main() -> int:
    """The child process: its setup and commands on stdin, "ready" or an error on stdout."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # the service decides, over the pipe
    control = sys.stdin.fileno()
    try:
        run(read_setup(control), control)
    except BrokenPipeError:
        return 1  # the service was killed while this process came up
    except SpanmillError as error:
        print(error, flush=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
