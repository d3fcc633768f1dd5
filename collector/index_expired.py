"""What has expired, as the index knows it: traces and rollouts whose spans were removed from the journal."""

import sqlite3
from collections.abc import Iterable

from spanmill.collector.assemble import RolloutKey
from spanmill.collector.expired import Batch
from spanmill.collector.journal import Position
from spanmill.triplets.records import Reward


class ExpiredNames:
    """The tables of names in the index's database; `collector/expired.py` keeps the list that they come from."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db

    @property
    def read(self) -> int:
        """How many bytes of the list have been taken in."""
        row = self._db.execute("SELECT bytes FROM expired_read").fetchone()
        return row[0] if row else 0

    def add(self, batch: Batch) -> None:
        """Take in a batch of the list, within a transaction."""
        self._db.executemany(
            "INSERT OR REPLACE INTO expired_traces VALUES (?, ?, ?)", [(name, *batch.upto) for name in batch.traces]
        )
        self._db.executemany(
            "INSERT OR REPLACE INTO expired_rollouts VALUES (?, ?, ?, ?)",
            [(*key, *batch.upto) for key in batch.rollouts],
        )

    def add_end(self, end: int) -> None:
        """Note up to which byte the list has been taken in, within a transaction."""
        self._db.execute("DELETE FROM expired_read")
        self._db.execute("INSERT INTO expired_read VALUES (?)", (end,))

    def trace(self, name: str) -> Position | None:
        """Up to where the spans of a trace were written before it expired; None if it has not."""
        row = self._db.execute("SELECT segment, offset FROM expired_traces WHERE name = ?", (name,)).fetchone()
        return Position(*row) if row else None

    def rollouts(self, keys: Iterable[RolloutKey]) -> set[RolloutKey]:
        """Those of the rollouts that have expired."""
        select = "SELECT 1 FROM expired_rollouts WHERE rollout_id = ? AND attempt = ?"
        return {key for key in keys if self._db.execute(select, key).fetchone()}

    def attempt(self, reward: Reward) -> int | None:
        """The attempt that a reward is for, if it has expired; where the reward names none, the highest that has."""
        (attempt,) = self._db.execute(
            "SELECT max(attempt) FROM expired_rollouts WHERE rollout_id = ?1 AND attempt = coalesce(?2, attempt)",
            (reward.rollout_id, reward.attempt),
        ).fetchone()
        return attempt

    def written_before(self, trace: str, position: Position) -> bool:
        """Whether what stands there of a trace, met again as the journal is read anew, is in the rows already."""
        upto = self.trace(trace)
        return upto is not None and position < upto

    def rewarded_before(self, reward: Reward, position: Position) -> bool:
        """The same of a reward for a rollout that has expired."""
        row = self._db.execute(
            "SELECT segment, offset FROM expired_rollouts WHERE rollout_id = ?1 AND (attempt = ?2 OR ?2 IS NULL)"
            " ORDER BY attempt DESC",
            (reward.rollout_id, reward.attempt),
        ).fetchone()
        return row is not None and position < Position(*row)
