"""What stands in for a TracerProvider while the program has set none: its tracers send to spanmill.

The program may still set its own: as far as OpenTelemetry knows, none is set. From then on all tracers, also those that
were made before, are tracers of the program's provider, which gets our processor (`provider.join`).
"""

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from opentelemetry import trace
from opentelemetry.context import Context
from wrapt import wrap_function_wrapper

from spanmill.instrument import provider
from spanmill.instrument.reports import guarded


class _Tracer(trace.Tracer):
    """A tracer of whatever provider is the program's when a span starts."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._args = args
        self._kwargs = kwargs
        self._of: object = None
        self._real: trace.Tracer = trace.NoOpTracer()

    def _tracer(self) -> tuple[trace.Tracer, bool]:
        """(the tracer, whether it is ours)."""
        program = trace._TRACER_PROVIDER  # pyright: ignore[reportPrivateUsage]  what a proxy looks at
        of = provider.tracer_provider() if program is None else program
        if self._of is not of:
            self._of, self._real = of, of.get_tracer(*self._args, **self._kwargs)
        if program is None:
            provider.tracer()  # as every span of ours does: SIGTERM is taken care of
        return self._real, program is None

    def start_span(self, name: str, context: Context | None = None, *args: Any, **kwargs: Any) -> trace.Span:
        """A span of the program's provider, else of ours, under what the parent process handed down."""
        tracer, is_ours = self._tracer()
        return tracer.start_span(name, provider.ambient() if is_ours and context is None else context, *args, **kwargs)

    @contextmanager
    def start_as_current_span(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, name: str, context: Context | None = None, *args: Any, **kwargs: Any
    ) -> Generator[trace.Span]:
        """The same, as the current span."""
        tracer, is_ours = self._tracer()
        around = provider.ambient() if is_ours and context is None else context
        with tracer.start_as_current_span(name, around, *args, **kwargs) as span:
            yield span


class Standin(trace.ProxyTracerProvider):
    """The provider that OpenTelemetry gives out while none is set."""

    def get_tracer(self, *args: Any, **kwargs: Any) -> trace.Tracer:
        """A tracer of the provider that will be there when it is used."""
        return _Tracer(args, kwargs)


def install() -> None:
    """Stand in, and join whatever provider the program has or sets. Any number of times."""
    if isinstance(trace._PROXY_TRACER_PROVIDER, Standin):  # pyright: ignore[reportPrivateUsage]
        return
    trace._PROXY_TRACER_PROVIDER = Standin()  # pyright: ignore[reportPrivateUsage]
    wrap_function_wrapper(trace, "set_tracer_provider", _set_tracer_provider)
    provider.join(trace.get_tracer_provider())


def _set_tracer_provider(wrapped: Any, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    wrapped(*args, **kwargs)
    with guarded("joining the program's provider"):
        provider.join(trace.get_tracer_provider())
