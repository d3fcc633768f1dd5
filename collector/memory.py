"""glibc's allocator, told to give large requests back to the system."""

import ctypes
from typing import Final

_M_MMAP_THRESHOLD: Final = -3
_M_ARENA_MAX: Final = -8
_LARGE_BYTES: Final = 1 << 20
_ARENAS: Final = 2


def give_back_memory() -> None:
    """Let this process keep no more than it uses, for as long as it runs; nothing happens where there is no glibc.

    By itself glibc keeps freed requests of some MiB for later, in an arena for each thread, and a receiver comes to
    hold several times what it may have in flight.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _LARGE_BYTES)
        mallopt(_M_ARENA_MAX, _ARENAS)
