"""How a Python under `spanmill run` starts: by OpenTelemetry's mechanism where there is one, else by ours alone."""

import logging
from importlib.util import find_spec
from typing import Final

from spanmill.instrument import zero_code
from spanmill.instrument.reports import guarded

LOADER: Final = "opentelemetry.instrumentation.auto_instrumentation._load"


def begin() -> None:
    """Start recording this process, with every other instrumentor that is installed for it."""
    zero_code.start()
    with guarded("auto-instrumentation"):
        if find_spec("opentelemetry.instrumentation") is None:
            return
        from opentelemetry.instrumentation.auto_instrumentation import (  # pyright: ignore[reportMissingTypeStubs]
            initialize,
        )

        logger = logging.getLogger(LOADER)
        logger.addFilter(_is_news)
        try:
            initialize()
        finally:
            logger.removeFilter(_is_news)


def _is_news(record: logging.LogRecord) -> bool:
    """Not that other configurators are installed and stay unused, which is as it should be."""
    return not str(record.msg).startswith("Configuration of %s not loaded")
