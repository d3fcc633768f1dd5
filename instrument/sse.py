"""Server-sent events on their way through: each may be changed or left out, the rest passes byte for byte."""

import re
from collections.abc import Callable
from typing import Final

END: Final = re.compile(rb"\r?\n\r?\n|\r\r")
DATA: Final = re.compile(rb"^data:[ ]?(.*)$", re.MULTILINE)


class Events:
    """A stream of events. `edit` gets the data of each: what it gives back takes its place, None drops the event.

    An event whose data `edit` gives back as it is, and one with several data lines or none, passes as it came.
    """

    def __init__(self, edit: Callable[[bytes], bytes | None]) -> None:
        self._edit = edit
        self._rest = bytearray()

    def feed(self, data: bytes) -> bytes:
        """The next bytes in, the events that they complete out."""
        searched = max(0, len(self._rest) - 3)  # an end may lie across the border
        self._rest += data
        passed: list[bytes] = []
        done = 0
        for end in END.finditer(self._rest, searched):
            passed.append(self._event(bytes(self._rest[done : end.start()]), end[0]))
            done = end.end()
        del self._rest[:done]
        return b"".join(passed)

    def close(self) -> bytes:
        """What is left when the stream ends: an event that its sender did not finish."""
        rest = bytes(self._rest)
        self._rest.clear()
        return self._event(rest, b"") if rest else b""

    def _event(self, lines: bytes, end: bytes) -> bytes:
        data = DATA.findall(lines)
        if len(data) != 1:
            return lines + end
        old = data[0].rstrip(b"\r")
        new = self._edit(old)
        if new is None:
            return b""
        return lines + end if new is old else lines.replace(old, new, 1) + end
