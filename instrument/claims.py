"""Which tasks were begun and which are done: in memory, and with `--resume FILE` in a file that outlives a kill.

The file is JSON lines: the run, then a line for each attempt that was begun and one for each that ended. A run that is
started again with the file keeps its rollout ids, leaves alone what is done, and makes the next attempt at all else.
"""

import fcntl
import json
import os
from collections import defaultdict
from collections.abc import Generator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import IO, Any, cast

from spanmill.errors import InputError


class Claims:
    """What became of the rollouts of one run."""

    def __init__(self, run: str, file: IO[str] | None = None) -> None:
        self.run = run
        self._file = file
        self._claimed_at: dict[str, list[str]] = defaultdict(list)
        self._done: set[str] = set()

    def is_done(self, rollout_id: str) -> bool:
        """Whether nothing is left to do for a rollout."""
        return rollout_id in self._done

    def claim(self, rollout_id: str) -> tuple[str, ...]:
        """Begin the next attempt at a rollout: the times, ISO 8601, of all so far, this one's last."""
        self._claimed_at[rollout_id].append(_now())
        times = tuple(self._claimed_at[rollout_id])
        self._write({"rollout_id": rollout_id, "attempt": len(times) - 1, "claimed_at": times[-1]})
        return times

    def end(self, rollout_id: str, *, status: str, exit_code: int, timed_out: bool, done: bool) -> None:
        """The newest attempt at a rollout has ended; `done` if it is not worth another."""
        if done:
            self._done.add(rollout_id)
        attempt = len(self._claimed_at[rollout_id]) - 1
        told = {"status": status, "exit_code": exit_code, "timed_out": timed_out, "done": done, "ended_at": _now()}
        self._write({"rollout_id": rollout_id, "attempt": attempt, **told})

    def take(self, line: dict[str, Any]) -> None:
        """Take up what a line of the file says. Raises KeyError if it says something else."""
        if "claimed_at" in line:
            self._claimed_at[line["rollout_id"]].append(line["claimed_at"])
        elif line["done"]:
            self._done.add(line["rollout_id"])

    def _write(self, line: dict[str, Any]) -> None:
        if self._file is not None:
            self._file.write(json.dumps(line) + "\n")
            self._file.flush()


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")


@contextmanager
def opened(path: str | None, run: str, *, is_given: bool) -> Generator[Claims]:
    """The claims of a run, those in the file at `path` included; `run` is its id if the file names none.

    Raises InputError for a file that another process uses, that is none of these, or that is another run's if the id
    `is_given`.
    """
    if path is None:
        yield Claims(run)
        return
    with open(path, "a+", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise InputError(f"{path}: another spanmill run uses it") from None
        yield _read(path, file, run, is_given=is_given)


def _read(path: str, file: IO[str], run: str, *, is_given: bool) -> Claims:
    file.seek(0)
    lines = file.readlines()
    if lines and not lines[-1].endswith("\n"):  # cut by a kill while it was written
        file.truncate(sum(len(line.encode()) for line in lines[:-1]))
        lines.pop()
    file.seek(0, os.SEEK_END)
    claims = Claims(run, file)
    if not lines:
        file.write(json.dumps({"run": run}) + "\n")
        file.flush()
        return claims
    for number, line in enumerate(lines, 1):
        try:
            found = cast("dict[str, Any]", json.loads(line))
            if number == 1:
                claims.run = found["run"]
            else:
                claims.take(found)
        except (ValueError, KeyError, TypeError):
            raise InputError(f"{path}:{number}: expected a line that spanmill run wrote, found {line!r:.60}") from None
    if is_given and claims.run != run:
        raise InputError(f"{path}: it is of the run {claims.run!r}, not of {run!r}")
    return claims
