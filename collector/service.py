"""`spanmill serve`: receivers, and the indexer in a process of its own; whatever dies is started again.

One worker receives in this process. Several are processes of their own, which share the two ports (SO_REUSEPORT) and
each have a part of the journal; this process then only looks after them.
"""

import logging
import os
import resource
import signal
import threading
import time
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Final, Protocol

from spanmill.collector import worker
from spanmill.collector.child import Child
from spanmill.collector.config import ServeConfig
from spanmill.collector.config_values import Address
from spanmill.collector.figures import shared_memory
from spanmill.collector.journal import LOCK_S, JournalWriter, lock, seal
from spanmill.collector.logs import logging_to_stderr
from spanmill.collector.memory import give_back_memory
from spanmill.collector.receive import Receiver, check_access, reserve, start_receiver
from spanmill.errors import DatasetError, JournalError

_log = logging.getLogger(__name__)

_FILES: Final = 65_536
POLL_S: Final = 0.2
START_S: Final = 120.0
"""The longest that opening a dataset may take, with the wait for the indexer of a service that was killed."""
_LOCK_NAME: Final = "service.lock"


def serve(config: ServeConfig) -> int:
    """Receive, index and write until SIGTERM or SIGINT, then drain; returns 0. Runs in the main thread only.

    Prints one line once everything is open: `spanmill ready grpc=HOST:PORT http=HOST:PORT out=DIR`. Raises ListenError
    if an address cannot be had, JournalError or DatasetError if a folder cannot be written or is another service's.
    """
    stop = threading.Event()
    _allow_files()
    give_back_memory()
    with logging_to_stderr(config.log_format), _stopping(stop), _alone(config.journal_folder), ExitStack() as open_now:
        seal(config.journal_folder, config.workers)
        indexer = Child("the indexer", "spanmill.collector.indexer", config, "the journal goes on")
        open_now.callback(indexer.kill)
        receivers = open_now.enter_context(_receivers(config))
        try:
            receivers.unready("the indexer starts")
            receivers.await_ready()
            failure = indexer.await_ready(START_S)
            if failure:
                raise DatasetError(failure)
            receivers.unready(None)
            grpc, http = receivers.addresses
            print(f"spanmill ready grpc={grpc} http={http} out={config.out}", flush=True)
            while not stop.wait(POLL_S):
                receivers.unready(None if indexer.keep_up() else "the indexer has died")
                receivers.keep_up()
        finally:
            deadline = time.monotonic() + config.drain_timeout
            receivers.stop(deadline)
        indexer.send(b"drain")
        failure = indexer.end(deadline)
        if failure:
            _log.warning("%s; the next start writes the rest from the journal", failure)
    return 0


class _Receivers(Protocol):
    """What receives, in this process or in others."""

    addresses: tuple[Address, Address]
    """Of gRPC and HTTP, with the ports that were bound."""

    def await_ready(self) -> None: ...

    def unready(self, reason: str | None) -> None: ...

    def keep_up(self) -> None: ...

    def stop(self, deadline: float) -> None: ...


@contextmanager
def _receivers(config: ServeConfig) -> Generator[_Receivers]:
    if config.workers == 1:
        with JournalWriter(config.journal_folder, wait_s=LOCK_S) as journal:
            yield _Here(start_receiver(config, journal), journal)
        return
    with reserve("--grpc", config.grpc) as grpc, reserve("--http", config.http) as http:
        check_access(config, grpc.getsockname()[0], http.getsockname()[0])
        ports = replace(
            config,
            grpc=config.grpc._replace(port=grpc.getsockname()[1]),
            http=config.http._replace(port=http.getsockname()[1]),
        )
        workers = _Workers(ports)
        try:
            yield workers
        finally:
            workers.kill()


class _Here:
    """The receiver of a service with one worker."""

    def __init__(self, receiver: Receiver, journal: JournalWriter) -> None:
        self._receiver = receiver
        self._journal = journal
        self.addresses = receiver.grpc_address, receiver.http_address

    def await_ready(self) -> None:
        pass

    def unready(self, reason: str | None) -> None:
        self._receiver.unready(reason)

    def keep_up(self) -> None:
        pass

    def stop(self, deadline: float) -> None:
        self._receiver.stop(max(0.0, deadline - time.monotonic()))
        self._journal.close()


class _Workers:
    """The receivers of a service with several."""

    def __init__(self, config: ServeConfig) -> None:
        self.addresses = config.grpc, config.http
        self._said: str | None = None
        self._figures = shared_memory(config.workers)
        self._workers = [
            Child(
                f"worker {number}",
                "spanmill.collector.worker",
                worker.Setup(config, number, self._figures),
                "the others go on",
                [self._figures],
            )
            for number in range(config.workers)
        ]
        self._running = [True] * config.workers
        self._ready = False

    def await_ready(self) -> None:
        for one in self._workers:
            failure = one.await_ready(START_S)
            if failure:
                raise JournalError(failure)
        self._ready = True

    def unready(self, reason: str | None) -> None:
        if reason != self._said:
            self._said = reason
            for one in self._workers:
                one.send(worker.unready(reason))

    def keep_up(self) -> None:
        for number, one in enumerate(self._workers):
            running = one.keep_up()
            if running and not self._running[number]:
                one.send(worker.unready(self._said))
            self._running[number] = running

    def stop(self, deadline: float) -> None:
        for one in self._workers:
            one.send(worker.DRAIN)
        for one in self._workers:
            failure = one.end(deadline + 1)
            if failure and self._ready:
                _log.warning("%s; what it has acknowledged is in the journal", failure)

    def kill(self) -> None:
        for one in self._workers:
            one.kill()
        os.close(self._figures)


@contextmanager
def _alone(folder: Path) -> Generator[None]:
    """Other services keep away from a journal: JournalError if one has it."""
    fd = lock(folder, _LOCK_NAME)
    try:
        yield
    finally:
        os.close(fd)


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
