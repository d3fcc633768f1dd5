"""What the figures of a running `spanmill serve` say of loss (`/metrics`)."""

import re
from collections.abc import Iterator, Mapping
from typing import Final

from spanmill.doctor.finding import Finding, ok, warning

_SAMPLE: Final = re.compile(r'^(spanmill_\w+)(?:\{\w+="([^"]*)"\})? ([-+.\dena]+)$', re.MULTILINE)

LOW_BYTES: Final = 2 << 30
"""Free disk: `serve` refuses below --min-free-mib, 512 MiB unless told."""
LAG_BYTES: Final = 1 << 30

Samples = Mapping[tuple[str, str], float]


def examine_metrics(text: str) -> list[Finding]:
    """What the figures mean."""
    samples = {(name, label): float(value) for name, label, value in _SAMPLE.findall(text)}
    return [*_disk(samples), *_requests(samples), *_rows(samples), *_workers(samples)]


def _disk(samples: Samples) -> Iterator[Finding]:
    free = samples.get(("spanmill_disk_free_bytes", ""))
    if free is None:
        return
    shown = f"its disk has {free / 2**30:.1f} GiB left"
    if samples.get(("spanmill_refusing", "")):
        yield warning(f"{shown}, and requests are refused until there is room", "make room, or lower --min-free-mib")
    elif free < LOW_BYTES:
        yield warning(f"{shown}: below --min-free-mib (512) requests are refused", "make room")
    else:
        yield ok(shown)
    lag = samples.get(("spanmill_journal_lag_bytes", ""), 0)
    if lag > LAG_BYTES:
        yield warning(f"{lag / 2**30:.1f} GiB of the journal wait to be indexed: rows come late", "see its messages")


def _requests(samples: Samples) -> Iterator[Finding]:
    refused = {label: n for (name, label), n in samples.items() if name == "spanmill_requests_rejected_total" and n}
    if refused:
        said = ", ".join(f"{n:.0f} {reason}" for reason, n in sorted(refused.items()))
        yield warning(f"since its start it refused requests: {said}", "see in docs/collectors.md what senders then do")
    unsent = {
        label: n
        for (name, label), n in samples.items()
        if name == "spanmill_forward_requests_total" and label.startswith("dropped") and n
    }
    if unsent:
        said = ", ".join(f"{n:.0f} {result}" for result, n in sorted(unsent.items()))
        yield warning(f"--forward did not pass on: {said}", "look at that endpoint; the journal has everything")


def _rows(samples: Samples) -> Iterator[Finding]:
    bad = {label: n for (name, label), n in samples.items() if name == "spanmill_quarantined_total" and n}
    if bad:
        said = ", ".join(f"{n:.0f} {reason}" for reason, n in sorted(bad.items()))
        yield warning(f"in quarantine are {said}", "`spanmill stats DATASET` shows what was set aside, and why")


def _workers(samples: Samples) -> Iterator[Finding]:
    workers = samples.get(("spanmill_workers", ""), 1)
    if workers > 1:
        yield warning(
            f"it has {workers:.0f} workers, and one gRPC connection stays on one of them",
            "spread senders over connections: several collectors or exporters in front, or OTLP over HTTP",
        )
