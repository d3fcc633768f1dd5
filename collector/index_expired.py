"""What has expired, as the index knows it: traces and rollouts whose spans were removed from the journal."""

import sqlite3
from collections.abc import Iterable

from spanmill.collector.assemble import RolloutKey
from spanmill.collector.expired import Batch
from spanmill.collector.journal import Position, worker_of
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
        (number,) = self._db.execute("SELECT coalesce(max(batch), 0) + 1 FROM expired_batches").fetchone()
        self._db.executemany(
            "INSERT INTO expired_batches VALUES (?, ?, ?, ?)",
            [(number, worker_of(place.segment), *place) for place in batch.upto],
        )
        self._db.executemany(
            "INSERT OR REPLACE INTO expired_traces VALUES (?, ?)", [(name, number) for name in batch.traces]
        )
        self._db.executemany(
            "INSERT OR REPLACE INTO expired_rollouts VALUES (?, ?, ?)", [(*key, number) for key in batch.rollouts]
        )

    def add_end(self, end: int) -> None:
        """Note up to which byte the list has been taken in, within a transaction."""
        self._db.execute("DELETE FROM expired_read")
        self._db.execute("INSERT INTO expired_read VALUES (?)", (end,))

    def trace(self, name: str) -> bool:
        """Whether a trace has expired."""
        return self._db.execute("SELECT 1 FROM expired_traces WHERE name = ?", (name,)).fetchone() is not None

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
        row = self._db.execute("SELECT batch FROM expired_traces WHERE name = ?", (trace,)).fetchone()
        return row is not None and self._is_before(position, row[0])

    def rewarded_before(self, reward: Reward, position: Position) -> bool:
        """The same of a reward for a rollout that has expired."""
        row = self._db.execute(
            "SELECT batch FROM expired_rollouts WHERE rollout_id = ?1 AND (attempt = ?2 OR ?2 IS NULL)"
            " ORDER BY attempt DESC",
            (reward.rollout_id, reward.attempt),
        ).fetchone()
        return row is not None and self._is_before(position, row[0])

    def _is_before(self, position: Position, batch: int) -> bool:
        """Whether a place had been read when a batch expired."""
        found = self._db.execute(
            "SELECT segment, offset FROM expired_batches WHERE batch = ? AND worker = ?",
            (batch, worker_of(position.segment)),
        ).fetchone()
        return found is not None and position < Position(*found)
