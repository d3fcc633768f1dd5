"""`/metrics`: what Prometheus reads."""

from collections.abc import Callable, Iterator
from typing import Final

from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from spanmill.collector.ingest import REFUSALS, Ingest
from spanmill.collector.watch import Watch

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
_BUCKETS: Final = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)
_TABLES: Final = ("rollouts", "triplets", "episodes", "quarantine")


class Metrics:
    """The figures of one service."""

    def __init__(self, ingest: Ingest, watch: Watch, forwarded: Callable[[], dict[str, int]]) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_Figures(ingest, watch, forwarded))
        fsync = Histogram(
            "spanmill_journal_fsync_seconds",
            "How long the disk took to sync a group of requests.",
            buckets=_BUCKETS,
            registry=self._registry,
        )
        ingest.journal.on_sync = fsync.observe
        self.route: Final = Route("/metrics", self._answer, methods=["GET"])

    def _answer(self, request: Request) -> Response:
        return Response(generate_latest(self._registry), media_type=CONTENT_TYPE)


class _Figures(Collector):
    def __init__(self, ingest: Ingest, watch: Watch, forwarded: Callable[[], dict[str, int]]) -> None:
        self._ingest = ingest
        self._watch = watch
        self._forwarded = forwarded

    def collect(self) -> Iterator[Metric]:
        """Every figure, as it stands."""
        counts, state = self._ingest.counts(), self._watch.state
        refused = {name: counts.get(name, 0) for name in REFUSALS}
        accepted = counts.get("requests", 0)
        yield _counter("requests_received", "Requests that came.", accepted + sum(refused.values()))
        yield _counter("requests_accepted", "Requests that were acknowledged, and so are on disk.", accepted)
        yield _labelled("requests_rejected", "Requests that were not acknowledged.", "reason", refused)
        yield _counter("accepted_bytes", "Bytes of acknowledged requests, decompressed.", self._ingest.accepted_bytes)
        for name, meaning in (
            ("spans", "Spans that were acknowledged."),
            ("log_records", "Log records that were acknowledged."),
            ("rewards", "Rewards that were acknowledged."),
            ("rejected_spans", "Spans without valid ids: in the journal, and then in quarantine."),
            ("ignored_metrics", "Requests with metrics, which are answered and dropped."),
        ):
            yield _counter(name, meaning, counts.get(name, 0))
        yield _gauge("inflight_bytes", "Bytes received and not yet on disk.", self._ingest.inflight)
        yield _gauge("refusing", "1 while all requests are refused, until there is room again.", self._ingest.refusing)
        yield _gauge("ready", "1 while requests are taken and the indexer runs.", not self._unready())
        yield _gauge("journal_bytes", "Size of the journal.", state.journal_bytes)
        yield _gauge("journal_segments", "Files of the journal.", state.segments)
        yield _gauge("journal_lag_bytes", "Bytes in the journal that are not indexed yet.", state.lag_bytes)
        yield _gauge("disk_free_bytes", "What the fuller disk of journal and dataset has left.", state.free_bytes)
        yield _gauge("open_components", "Groups of traces with rollouts not written yet.", state.open_components)
        tallies = state.tallies or {}
        rows = {table: tallies.get(f"rows:{table}", 0) for table in _TABLES}
        yield _labelled("rows_written", "Rows written, revisions included, since the index was made.", "table", rows)
        prefix = "quarantined:"
        quarantined = {key.removeprefix(prefix): value for key, value in tallies.items() if key.startswith(prefix)}
        yield _labelled("quarantined", "Rows of quarantine, since the index was made.", "reason", quarantined)
        yield _labelled("forward_requests", "Requests passed on, by what became of them.", "result", self._forwarded())

    def _unready(self) -> str | None:
        return self._ingest.refusing or self._ingest.unready


def _counter(name: str, meaning: str, value: float) -> Metric:
    return CounterMetricFamily(f"spanmill_{name}", meaning, value=value)


def _gauge(name: str, meaning: str, value: object) -> Metric:
    number = value if isinstance(value, int) else int(value is not None)
    return GaugeMetricFamily(f"spanmill_{name}", meaning, value=number)


def _labelled(name: str, meaning: str, label: str, values: dict[str, int]) -> Metric:
    family = CounterMetricFamily(f"spanmill_{name}", meaning, labels=[label])
    for key in sorted(values):
        family.add_metric([key], values[key])
    return family
