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
    def format(self, record: logging.LogRecord) -> str:
        return f"spanmill: {_one_line(record.getMessage())}"


class _Json(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        at = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        found = {"time": at, "level": record.levelname.lower(), "logger": record.name}
        return json.dumps(found | {"message": _one_line(record.getMessage())})


def _one_line(text: str) -> str:
    return " | ".join(line.strip() for line in text.splitlines() if line.strip())


@contextmanager
def logging_to_stderr(form: LogFormat) -> Generator[None]:
    """Messages of ours, and warnings of the servers, go to stderr in one form."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Json() if form == "json" else _Text())
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
