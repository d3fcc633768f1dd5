"""Messages for people and for log collectors: one line each on stderr, without a span's content or a secret."""

import json
import logging
import sys
from collections.abc import Generator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Final

from spanmill.collector.config import LogFormat

_LOGGERS: Final = ("spanmill", "uvicorn.error", "grpc")


class _Text(logging.Formatter):
    def __init__(self, process: str | None) -> None:
        super().__init__()
        self._prefix = f"spanmill: {process}: " if process else "spanmill: "

    def format(self, record: logging.LogRecord) -> str:
        return self._prefix + _one_line(record.getMessage())


class _Json(logging.Formatter):
    def __init__(self, process: str | None) -> None:
        super().__init__()
        self._more = {"process": process} if process else {}

    def format(self, record: logging.LogRecord) -> str:
        at = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        found = {"time": at, "level": record.levelname.lower(), "logger": record.name}
        return json.dumps(found | self._more | {"message": _one_line(record.getMessage())})


def _one_line(text: str) -> str:
    return " | ".join(line.strip() for line in text.splitlines() if line.strip())


@contextmanager
def logging_to_stderr(form: LogFormat, process: str | None = None) -> Generator[None]:
    """Messages of ours, and warnings of the servers, go to stderr in one form; `process` is the one that says it."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Json(process) if form == "json" else _Text(process))
    loggers = [logging.getLogger(name) for name in _LOGGERS]
    before = [logger.propagate for logger in loggers]
    for logger in loggers:
        logger.addHandler(handler)
        logger.propagate = False
    try:
        yield
    finally:
        for logger, propagated in zip(loggers, before, strict=True):
            logger.removeHandler(handler)
            logger.propagate = propagated
