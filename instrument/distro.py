"""spanmill as the distribution of `opentelemetry-instrument`: defaults under which no token data is lost."""

import os
from typing import Any, Final

from opentelemetry.instrumentation.distro import BaseDistro

from spanmill.instrument.provider import ATTRIBUTE_LIMIT

DEFAULTS: Final = {
    "OTEL_TRACES_SAMPLER": "always_on",
    "OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT": str(ATTRIBUTE_LIMIT),
    "OTEL_SPAN_EVENT_COUNT_LIMIT": str(ATTRIBUTE_LIMIT),
}
"""For a provider of the program's own; ours has them anyway. What the environment says counts before."""


class Distro(BaseDistro):
    """Entry point `opentelemetry_distro`."""

    def _configure(self, **kwargs: Any) -> None:
        for name, value in DEFAULTS.items():
            os.environ.setdefault(name, value)
