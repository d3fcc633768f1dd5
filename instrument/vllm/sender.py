"""From the event loop to a thread of ours: a bounded queue of generations that have ended, and what becomes of them.

The event loop only appends. The thread makes the spans and gives them to the outbox that all emitters share.
"""

import threading
import time
from collections import deque
from typing import Final

from spanmill.instrument import provider
from spanmill.instrument.provider import Counters
from spanmill.instrument.reports import guarded, report
from spanmill.instrument.vllm.generation import Generation
from spanmill.instrument.vllm.spans import emit

MAX_BYTES: Final = 64 * 2**20
"""What may wait for the thread: far more than ever does, unless the machine stands still."""


class _Queue:
    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.waiting: deque[tuple[Generation, int]] = deque()
        self.bytes = 0
        self.busy = False
        self.dropped = 0
        self.thread: threading.Thread | None = None

    def put(self, generation: Generation) -> None:
        size = generation.size()
        with self.changed:
            if self.bytes + size > MAX_BYTES:
                self.dropped += 1
                report("vllm queue", "spans cannot be made as fast as vLLM answers: some are dropped", counted=False)
                return
            self.waiting.append((generation, size))
            self.bytes += size
            if self.thread is None or not self.thread.is_alive():
                self.thread = threading.Thread(target=self._work, name="spanmill-vllm", daemon=True)
                self.thread.start()
                if drain not in provider.on_process_end:
                    provider.on_process_end.append(drain)
            self.changed.notify_all()

    def _work(self) -> None:
        while True:
            with self.changed:
                self.busy = False
                self.changed.notify_all()
                self.changed.wait_for(lambda: self.waiting)
                generation, size = self.waiting.popleft()
                self.busy = True
            with guarded("making a span"):
                emit(generation)
            with self.changed:
                self.bytes -= size

    def drain(self, timeout_s: float) -> bool:
        with self.changed:
            return self.changed.wait_for(lambda: not self.waiting and not self.busy, timeout_s)


_queue = _Queue()


def send(generation: Generation) -> None:
    """Queue a generation that has ended, or drop and count it. Never blocks."""
    _queue.put(generation)


def drain() -> None:
    """Make spans of everything queued, for as long as the end of the process may take."""
    _queue.drain(provider.exit_timeout_s())


def flush(timeout_s: float = 30.0) -> bool:
    """Send every generation that has ended now and wait for the collector; True if it took them all."""
    until = time.monotonic() + timeout_s
    return _queue.drain(timeout_s) and provider.flush(max(0.0, until - time.monotonic()))


def counters() -> Counters:
    """What became of this process's spans so far, generations that did not even become one included."""
    made = provider.counters()
    return made._replace(dropped=made.dropped + _queue.dropped)
