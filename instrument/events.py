"""GenAI events: log records in which some instrumentors put what a call said, instead of on its span.

OpenTelemetry drops them while the program has set no LoggerProvider. Until it does, one of ours stands in, as ours
does for spans (`standin`); if it does, its records go where it says, and to the collector as a copy. Nothing but GenAI
events and our own are taken. Nothing is loaded before the first of them.
"""

from copy import copy
from functools import cache
from types import ModuleType
from typing import Any, Final

from wrapt import register_post_import_hook, wrap_function_wrapper

from spanmill.instrument import identity, provider
from spanmill.instrument.reports import guarded
from spanmill.semconv import ROLLOUT_ID

API: Final = "opentelemetry._logs._internal"
TAKEN: Final = ("gen_ai.", "spanmill.")
"""How the names of events begin that go to the collector."""

NAME: Final = "event.name"
"""Where older instrumentors put the name."""

_served: list[object] = []


def install() -> None:
    """Stand in as soon as logs are used. Any number of times."""
    if not _served:
        _served.append(None)
        register_post_import_hook(_stand_in, API)


def _stand_in(api: ModuleType) -> None:
    with guarded("standing in for a LoggerProvider"):
        proxy: type[Any] = api.ProxyLogger
        nothing: type[Any] = api.NoOpLogger

        def real(self: Any) -> Any:
            found = original.__get__(self)
            if isinstance(found, nothing) and (own := _own()) is not None:
                return own.get_logger(self._name, self._version, self._schema_url, self._attributes)
            return found

        original: Any = vars(proxy)["_logger"]
        proxy._logger = property(real)
        wrap_function_wrapper(api, "set_logger_provider", _set_logger_provider)
        _join(getattr(api, "_LOGGER_PROVIDER", None))


@cache
def _own() -> Any:
    """Our provider; None where the SDK is too old for it."""
    from opentelemetry.sdk._logs import LoggerProvider

    if (processor := _processor()) is None:
        return None
    made = LoggerProvider(resource=provider.tracer_provider().resource, shutdown_on_exit=False)
    made.add_log_record_processor(processor)
    return made


@cache
def _processor() -> Any:
    from opentelemetry.sdk import _logs

    if not hasattr(_logs, "ReadableLogRecord"):
        return None

    class Processor(_logs.LogRecordProcessor):
        """Queues copies of the events that are taken."""

        def on_emit(self, log_record: Any) -> None:
            with guarded("event"):
                _take(log_record)

        def shutdown(self) -> None:
            pass

        def force_flush(self, timeout_millis: int = 30_000) -> bool:
            return provider.flush(timeout_millis / 1000)

    return Processor()


def _take(emitted: Any) -> None:
    """Queue a copy that says whose it is."""
    from opentelemetry.sdk._logs import ReadableLogRecord

    record = emitted.log_record
    attributes: dict[str, Any] = dict(record.attributes or {})
    if not str(record.event_name or attributes.get(NAME) or "").startswith(TAKEN):
        return
    own = identity.from_baggage(record.context)
    if own is None and ROLLOUT_ID not in emitted.resource.attributes:
        own = identity.from_environment()
    copied = copy(record)
    if not emitted.dropped_attributes:  # else it stays as it is, since it counts them
        copied.attributes = {**(identity.attributes(own) if own is not None else {}), **attributes}
    provider.put_log(ReadableLogRecord(copied, emitted.resource, emitted.instrumentation_scope))


def _set_logger_provider(wrapped: Any, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    wrapped(*args, **kwargs)
    from opentelemetry._logs import get_logger_provider

    _join(get_logger_provider())


def _join(program: Any) -> None:
    """Give a provider of the program our processor, once; one that takes none is left alone."""
    add = getattr(program, "add_log_record_processor", None)
    if add is None or any(program is known for known in _served):
        return
    _served.append(program)
    with guarded("joining the program's LoggerProvider"):
        if (processor := _processor()) is not None:
            add(processor)
