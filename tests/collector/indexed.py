"""A journal and its indexer without processes, on a clock of their own."""

from dataclasses import replace
from pathlib import Path

from made_spans import Span, make_request

from spanmill.adapters import Options
from spanmill.collector import rewards
from spanmill.collector.assemble import SECOND, Timing
from spanmill.collector.build import build
from spanmill.collector.config import BuildConfig
from spanmill.collector.index_file import INDEX_NAME
from spanmill.collector.indexer import Indexer
from spanmill.collector.journal import SEGMENT_BYTES, JournalWriter, Kind, Position
from spanmill.collector.retention import EVERYTHING, Keep
from spanmill.triplets.records import Reward

DEFAULT = Timing()


class Service:
    """A journal, and an indexer that can be killed and started again, on a clock of their own."""

    def __init__(
        self, folder: Path, timing: Timing = DEFAULT, keep: Keep = EVERYTHING, segment_bytes: int = SEGMENT_BYTES
    ) -> None:
        self.folder = folder
        self.out = folder / "out"
        self.now_ns = 1_000_000 * SECOND
        self.reports: list[str] = []
        self._timing = timing
        self.keep = keep
        self._segment_bytes = segment_bytes
        self._journals = {0: JournalWriter(folder / "journal", segment_bytes=segment_bytes)}
        self.start()

    def start(self) -> None:
        """Start an indexer on what is there."""
        self.indexer = Indexer(
            self.folder / "journal",
            self.out,
            Options(),
            self._timing,
            keep=self.keep,
            clock=lambda: self.now_ns,
            report=self.reports.append,
        )

    def restart(self, *, lose_index: bool = False) -> None:
        """As after a kill, with or without the index."""
        self.indexer.close()
        if lose_index:
            for path in (self.folder / "journal").glob(f"{INDEX_NAME}*"):
                path.unlink()
        self.start()

    def close(self) -> None:
        """Stop."""
        self.indexer.close()
        for journal in self._journals.values():
            journal.close()

    def receive(self, *spans: Span, worker: int = 0) -> Position:
        """Spans in a request of their own, to one of the workers."""
        return self.append(Kind.TRACES_PROTO, make_request(*spans), worker)

    def reward(self, *given: Reward, worker: int = 0) -> None:
        """Rewards, as they are posted now."""
        stamped = [replace(reward, received_ns=self.now_ns) for reward in given]
        self.append(Kind.REWARDS, rewards.encode(stamped), worker)

    def append(self, kind: Kind, body: bytes, worker: int = 0) -> Position:
        """A record in a worker's part of the journal, received now."""
        if worker not in self._journals:
            folder = self.folder / "journal"
            self._journals[worker] = JournalWriter(folder, worker=worker, segment_bytes=self._segment_bytes)
        return self._journals[worker].append(kind, body, self.now_ns)

    def close_part(self, worker: int) -> None:
        """A worker that is no more."""
        self._journals.pop(worker).close()

    def work(self, after_s: float = 0, *, flush: bool = False) -> int:
        """Let time pass, index all there is, look now and after every flush; how many rollouts were written."""
        self.now_ns += int(after_s * SECOND)
        written = 0
        while self.indexer.step() or self.indexer.behind:
            if self.indexer.caught_up:
                written += self.indexer.look()
        return written + self.indexer.look(flush=flush)

    def built(self) -> Path:
        """What `build` makes of the journal."""
        out = self.folder / f"built-{len(list(self.folder.iterdir()))}"
        build([self.folder / "journal"], BuildConfig(out=out))
        return out
