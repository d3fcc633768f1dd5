"""`spanmill serve`: the receiver in this process, the indexer in a second one, which is started again if it dies."""

import logging
import pickle
import resource
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from typing import IO

from spanmill.collector.config import ServeConfig
from spanmill.collector.journal import JournalWriter
from spanmill.collector.logs import logging_to_stderr
from spanmill.collector.receive import Receiver, start_receiver
from spanmill.errors import DatasetError

_log = logging.getLogger(__name__)

_FILES = 65_536
POLL_S = 0.2
RESTART_S = (0.5, 30.0)
"""The first and the longest wait before a dead indexer is started again; it doubles after each that lived shorter."""
START_S = 120.0
"""The longest that opening a dataset may take, with the wait for the indexer of a service that was killed."""


def serve(config: ServeConfig) -> int:
    """Receive, index and write until SIGTERM or SIGINT, then drain; returns 0. Runs in the main thread only.

    Prints one line once everything is open: `spanmill ready grpc=HOST:PORT http=HOST:PORT out=DIR`. Raises ListenError
    if an address cannot be had, JournalError or DatasetError if a folder cannot be written or is another service's.
    """
    stop = threading.Event()
    _allow_files()
    with logging_to_stderr(config.log_format), _stopping(stop), JournalWriter(config.journal_folder) as journal:
        indexer = _Indexer(config)
        try:
            receiver = start_receiver(config, journal)
            receiver.unready("the indexer starts")
            try:
                indexer.await_ready()
                receiver.unready(None)
                print(
                    f"spanmill ready grpc={receiver.grpc_address} http={receiver.http_address} out={config.out}",
                    flush=True,
                )
                _watch(indexer, receiver, stop)
            finally:
                deadline = time.monotonic() + config.drain_timeout
                receiver.stop(config.drain_timeout)
            journal.close()
            indexer.drain(deadline)
        finally:
            indexer.kill()
    return 0


def _watch(indexer: "_Indexer", receiver: Receiver, stop: threading.Event) -> None:
    """Until the service is told to stop, start the indexer again whenever it has died."""
    wait = RESTART_S[0]
    while not stop.wait(POLL_S):
        if not indexer.dead:
            receiver.unready(None)
            continue
        receiver.unready("the indexer has died")
        wait = min(2 * wait, RESTART_S[1]) if indexer.age_s < wait else RESTART_S[0]
        _log.warning("the indexer has died%s; it starts again in %g s; the journal goes on", indexer.last_words, wait)
        if stop.wait(wait):
            return
        indexer.start()


def _allow_files() -> None:
    """As many open files, and so connections, as may be: the usual limit of 1024 is for programs that use select."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _FILES if hard == resource.RLIM_INFINITY else min(hard, _FILES)
    if soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


@contextmanager
def _stopping(stop: threading.Event) -> Generator[None]:
    """Let SIGTERM and SIGINT set `stop`."""
    numbers = (signal.SIGTERM, signal.SIGINT)
    before = [signal.signal(number, lambda number, frame: stop.set()) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


class _Indexer:
    """The second process. When this one is gone, however it went, the pipe to it closes and it ends by itself."""

    def __init__(self, config: ServeConfig) -> None:
        self._config = config
        self.start()

    def start(self) -> None:
        """Start it."""
        command = [sys.executable, "-m", "spanmill.collector.indexer"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._started = time.monotonic()
        config = pickle.dumps(self._config)
        self._send(len(config).to_bytes(4) + config)

    @property
    def dead(self) -> bool:
        """Whether it has ended."""
        return self._process.poll() is not None

    @property
    def age_s(self) -> float:
        """How long ago it was started."""
        return time.monotonic() - self._started

    @property
    def last_words(self) -> str:
        """Why it ended, if it said so."""
        said = self._output.read().decode(errors="replace").removeprefix("ready\n").strip()
        return f": {said}" if said else f" (exit code {self._process.returncode})"

    def await_ready(self) -> None:
        """Return when it has opened everything. DatasetError if it could not."""
        readable, _, _ = select.select([self._output], [], [], START_S)
        if not readable:
            raise DatasetError(f"the dataset {self._config.out} could not be opened within {START_S:g} s")
        line = self._output.readline().decode().strip()
        if line != "ready":
            raise DatasetError(line or f"the indexer ended with exit code {self._process.wait()} before it was ready")

    def drain(self, deadline: float) -> None:
        """Have it write what the journal holds, and end, until `deadline`; the next start writes the rest."""
        self._send(b"drain")
        try:
            code = self._process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            _log.warning("the time to drain is over; the next start writes the rest from the journal")
        else:
            if code:
                _log.warning("the indexer has died%s; the next start writes the rest from the journal", self.last_words)

    def kill(self) -> None:
        """End it at once; nothing is lost by that."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with suppress(BrokenPipeError):
                    pipe.close()

    def _send(self, data: bytes) -> None:
        # A broken pipe says that it has died, which is seen where its end is waited for.
        with suppress(BrokenPipeError):
            if self._process.stdin is not None:
                self._process.stdin.write(data)
                self._process.stdin.flush()

    @property
    def _output(self) -> IO[bytes]:
        if self._process.stdout is None:
            raise ValueError("the indexer was started without a pipe for its output")
        return self._process.stdout
