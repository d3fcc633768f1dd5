"""`/metrics`: what Prometheus reads."""

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Final

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from spanmill.collector.figures import FORWARDED, REFUSALS, SYNC_S, SYNCS
from spanmill.collector.ingest import Ingest
from spanmill.collector.watch import Watch

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
_TABLES: Final = ("rollouts", "triplets", "episodes", "quarantine")


def metrics_route(ingest: Ingest, watch: Watch) -> Route:
    """`/metrics`, with the figures of the whole service."""
    registry = CollectorRegistry()
    registry.register(_Figures(ingest, watch))

    def answer(request: Request) -> Response:
        return Response(generate_latest(registry), media_type=CONTENT_TYPE)

    return Route("/metrics", answer, methods=["GET"])


class _Figures(Collector):
    def __init__(self, ingest: Ingest, watch: Watch) -> None:
        self._ingest = ingest
        self._watch = watch

    def collect(self) -> Iterator[Metric]:
        """Every figure, as it stands."""
        total, state = self._ingest.figures.total, self._watch.state
        refused = {name: total(name) for name in REFUSALS}
        accepted = total("requests")
        yield _counter("requests_received", "Requests that came.", accepted + sum(refused.values()))
        yield _counter("requests_accepted", "Requests that were acknowledged, and so are on disk.", accepted)
        yield _labelled("requests_rejected", "Requests that were not acknowledged.", "reason", refused)
        yield _counter("accepted_bytes", "Bytes of acknowledged requests, decompressed.", total("accepted_bytes"))
        for name, meaning in (
            ("spans", "Spans that were acknowledged."),
            ("log_records", "Log records that were acknowledged."),
            ("rewards", "Rewards that were acknowledged."),
            ("rejected_spans", "Spans without valid ids: in the journal, and then in quarantine."),
            ("ignored_metrics", "Requests with metrics, which are answered and dropped."),
        ):
            yield _counter(name, meaning, total(name))
        yield _gauge("inflight_bytes", "Bytes received and not yet on disk.", total("inflight_bytes"))
        yield _gauge("refusing", "1 while all requests are refused, until there is room again.", self._ingest.refusing)
        yield _gauge("ready", "1 while requests are taken and the indexer runs.", not self._unready())
        yield _gauge("workers", "Processes that receive.", self._ingest.figures.workers)
        yield _syncs([total(name) for name in SYNCS], total("sync_ns"))
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
        forwarded = {name: total(f"forward_{name}") for name in FORWARDED}
        yield _labelled("forward_requests", "Requests passed on, by what became of them.", "result", forwarded)

    def _unready(self) -> str | None:
        return self._ingest.refusing or self._ingest.unready


def _syncs(counts: Sequence[int], nanoseconds: int) -> Metric:
    bounds = [*map(str, SYNC_S), "+Inf"]
    buckets = list(zip(bounds, accumulate(counts), strict=True))
    meaning = "How long the disk took to sync a group of requests."
    return HistogramMetricFamily("spanmill_journal_fsync_seconds", meaning, buckets, nanoseconds / 1e9)


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
