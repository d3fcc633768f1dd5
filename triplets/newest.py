"""Which rows of each rollout are the newest, in less than half of the memory that a dict takes.

A service holds this for all rollouts that it ever wrote. They are known by digests of 128 bits: that two of 10^9 have
the same one has a chance below 10^-20.
"""

from collections.abc import Collection, Iterable
from hashlib import blake2b
from typing import Final

import numpy as np

from spanmill.triplets.rewrite import Key

_FEW: Final = 1 << 16


class Newest:
    """(rollout_id, attempt) -> (revision, part), of parts from 1 on.

    What changed lately is in a dict, the rest in columns in the order of the digests, into which the dict goes when it
    has grown to an eighth of them.
    """

    def __init__(self) -> None:
        self._lately: dict[bytes, tuple[int, int]] = {}
        """Part 0 stands for what has been removed."""
        self._digests = np.empty((2, 0), np.uint64)
        self._rows = np.empty((2, 0), np.uint32)

    def of(self, keys: Collection[Key]) -> dict[Key, tuple[int, int]]:
        """The revision and part of the newest rows of each of these rollouts that has any."""
        digests = [_digest(key) for key in keys]
        words = np.frombuffer(b"".join(digests), np.uint64).reshape(-1, 2)
        places = np.searchsorted(self._digests[0], words[:, 0]).tolist()
        found = dict[Key, tuple[int, int]]()
        for key, digest, word, place in zip(keys, digests, words, places, strict=True):
            revision, part = self._lately.get(digest) or self._at(place, *word)
            if part:
                found[key] = (revision, part)
        return found

    def _at(self, place: int, first: np.uint64, second: np.uint64) -> tuple[int, int]:
        """The row of a digest, which stands at `place` or, where another has the same first word, behind it."""
        while place < self._rows.shape[1] and self._digests[0, place] == first:
            if self._digests[1, place] == second:
                return int(self._rows[0, place]), int(self._rows[1, place])
            place += 1
        return 0, 0

    def update(self, rows: Iterable[tuple[Key, tuple[int, int]]]) -> None:
        """Take up the revision and part of these rollouts."""
        for key, row in rows:
            self._lately[_digest(key)] = row
            if len(self._lately) > max(_FEW, len(self._rows[0]) // 8):
                self._settle()

    def remove(self, keys: Iterable[Key]) -> None:
        """Forget these rollouts."""
        self.update((key, (0, 0)) for key in keys)

    def _settle(self) -> None:
        digests = np.frombuffer(b"".join(self._lately), np.uint64).reshape(-1, 2).T
        rows = np.array(list(self._lately.values()), np.uint32).T
        digests, rows = np.hstack([self._digests, digests]), np.hstack([self._rows, rows])
        order = np.lexsort(digests[::-1])  # of equal ones the last is the one of lately
        digests, rows = digests[:, order], rows[:, order]
        last = np.append((digests[:, 1:] != digests[:, :-1]).any(axis=0), True)
        kept = last & (rows[1] > 0)
        self._digests, self._rows = digests[:, kept], rows[:, kept]
        self._lately.clear()


def _digest(key: Key) -> bytes:
    rollout_id, attempt = key
    return blake2b(f"{attempt} {rollout_id}".encode("utf-8", "surrogatepass"), digest_size=16).digest()
