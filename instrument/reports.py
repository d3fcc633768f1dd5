"""What went wrong while emitting: one warning for each kind of trouble, and a count of all.

Emitting must never raise into the program that it observes, so every fault inside it ends here.
"""

import logging
from collections.abc import Generator
from contextlib import contextmanager
from itertools import count
from typing import Final

LOGGER: Final = logging.getLogger("spanmill")

_seen: set[str] = set()
_counter = count()
_ignored = 0


def report(kind: str, message: str, *, counted: bool = True) -> None:
    """Warn of this kind of trouble if it is the first of its kind in the process; count it as ignored input."""
    global _ignored
    if counted:
        _ignored = next(_counter) + 1
    if kind not in _seen:
        _seen.add(kind)
        LOGGER.warning("spanmill: %s (said once)", message)


def keep_quiet(kind: str) -> None:
    """Never warn of this kind of trouble: the caller will say it in its own words."""
    _seen.add(kind)


def ignored() -> int:
    """How many values and steps could not be recorded in this process."""
    return _ignored


def forget_reports() -> None:
    """Start anew in a forked child: nothing said, nothing counted."""
    global _counter, _ignored
    _seen.clear()
    _counter = count()
    _ignored = 0


@contextmanager
def guarded(what: str) -> Generator[None]:
    """Run a step of the emitter: an exception inside is reported and goes no further."""
    try:
        yield
    except Exception as error:
        report(
            f"{what}: {type(error).__name__}", f"{what} failed: {error!r}; the program goes on, this is not recorded"
        )
