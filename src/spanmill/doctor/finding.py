"""What `spanmill doctor` finds, one thing at a time."""

from typing import Literal, NamedTuple

Level = Literal["ok", "warning", "error"]


class Finding(NamedTuple):
    """Something that the doctor found."""

    level: Level
    """An error loses data as things are; a warning loses some under a condition that the text names."""
    text: str
    """What is so, and what it means."""
    do: str = ""
    """What to do about it; empty where nothing needs doing."""

    def __str__(self) -> str:
        return f"{self.text}; {self.do}" if self.do else self.text


def ok(text: str) -> Finding:
    """Nothing is lost by it."""
    return Finding("ok", text)


def warning(text: str, do: str) -> Finding:
    """Something may be lost by it."""
    return Finding("warning", text, do)


def error(text: str, do: str) -> Finding:
    """Something is lost by it."""
    return Finding("error", text, do)
