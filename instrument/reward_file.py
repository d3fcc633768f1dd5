"""The file in which a command under `spanmill run --reward-file` leaves its rewards, whatever its language.

    0.5                                              the reward of the rollout
    {"value": 0.5}                                   the same
    {"value": 0.2, "name": "format"}                 a metric
    {"value": 1, "call_id": "chatcmpl-8f1"}          the reward of one call

One of these on each line; empty lines count for nothing.
"""

import json
import os
from typing import Any, Final, NamedTuple, cast

from spanmill.errors import InputError

REWARD_FILE: Final = "SPANMILL_REWARD_FILE"
"""Tells the command where to write."""

_FIELDS: Final = {"value", "name", "call_id"}


class FileReward(NamedTuple):
    """A reward that a command wrote."""

    value: float
    name: str | None
    call_id: str | None


def state_of(path: str) -> tuple[int, int] | None:
    """(time of the last change in ns, size) of a file, to tell whether it is written to; None if there is none."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size


def read(path: str) -> list[FileReward]:
    """The rewards in a file, the rollout's own under the name `final`. Raises InputError if it has another form."""
    try:
        with open(path, encoding="utf-8") as file:
            lines = file.read().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: the rewards cannot be read: {error}") from error
    return [_reward(line, f"{path}:{number}") for number, line in enumerate(lines, 1) if line.strip()]


def _reward(line: str, where: str) -> FileReward:
    try:
        found: Any = json.loads(line)
    except ValueError:
        found = None
    fields = cast("dict[str, Any]", found) if isinstance(found, dict) else {"value": found}
    value, name, call_id = (fields.get(field) for field in ("value", "name", "call_id"))
    if not isinstance(value, (int, float)) or not fields.keys() <= _FIELDS:
        raise InputError(f'{where}: expected a number, or {{"value": …, "name": …, "call_id": …}}, found {line!r}')
    name = "final" if name is None and call_id is None else name
    return FileReward(float(value), None if name is None else str(name), None if call_id is None else str(call_id))
