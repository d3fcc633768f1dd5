"""Instrumentation of a program that knows nothing of spanmill: what the entry points and `spanmill run` start."""

from spanmill.instrument import contexts, events, injector, standin
from spanmill.instrument.reports import guarded


def start() -> None:
    """Record this process: its LLM calls, its spans if it makes any, and whose they are. Any number of times."""
    for install in (standin.install, events.install, contexts.install, injector.install):
        with guarded("start"):
            install()


class Instrumentor:
    """For `opentelemetry-instrument`: entry points `opentelemetry_instrumentor` and `opentelemetry_configurator`."""

    def instrument(self, **_: object) -> None:
        """Start."""
        start()

    def configure(self, **_: object) -> None:
        """Start, and set no provider: one that is set cannot be the program's own any more."""
        start()
