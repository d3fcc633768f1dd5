"""How a Python under `spanmill run` starts: by OpenTelemetry's mechanism where there is one, else by ours alone."""

import logging
from functools import wraps
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Final

from spanmill.instrument import zero_code
from spanmill.instrument.reports import guarded

AUTO: Final = "opentelemetry.instrumentation.auto_instrumentation"
LOADER: Final = f"{AUTO}._load"


def begin() -> None:
    """Start recording this process, with every other instrumentor that is installed for it."""
    zero_code.start()
    with guarded("auto-instrumentation"):
        if find_spec("opentelemetry.instrumentation") is None:
            return
        logger = logging.getLogger(LOADER)
        logger.addFilter(_is_news)
        try:
            _initialize()
        finally:
            logger.removeFilter(_is_news)
        _yield_to_the_program()


def _initialize() -> None:
    module: Any = import_module(AUTO)
    if hasattr(module, "initialize"):
        module.initialize()
    else:
        import_module(f"{AUTO}.sitecustomize")  # of older versions: importing it does it


def _yield_to_the_program() -> None:
    """Let a program that instruments itself have it as it says: its spans go to its own provider, as they did before.

    OpenTelemetry would ignore its call, since the instrumentor is at work already.
    """
    base: Any = import_module("opentelemetry.instrumentation.instrumentor").BaseInstrumentor
    instrument = base.instrument

    @wraps(instrument)
    def anew(self: Any, **wanted: Any) -> Any:
        if self.is_instrumented_by_opentelemetry:
            if not wanted:
                return None  # nothing that it does not do already
            self.uninstrument()
        return instrument(self, **wanted)

    base.instrument = anew


def _is_news(record: logging.LogRecord) -> bool:
    """Not that other configurators are installed and stay unused, which is as it should be."""
    return not str(record.msg).startswith("Configuration of %s not loaded")
