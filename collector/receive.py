"""Receiving: OTLP over gRPC and HTTP into the journal. What was acknowledged is on disk."""

import ipaddress
import os
import socket
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from spanmill.collector import receive_grpc
from spanmill.collector.access import access_of
from spanmill.collector.config import ServeConfig
from spanmill.collector.config_values import Address
from spanmill.collector.figures import Figures
from spanmill.collector.forward import Forwarder
from spanmill.collector.index_file import INDEX_NAME, unknown_rollouts
from spanmill.collector.ingest import Ingest
from spanmill.collector.journal import JournalWriter
from spanmill.collector.metrics import metrics_route
from spanmill.collector.receive_http import HttpServer, build_app
from spanmill.collector.records import Records
from spanmill.collector.records_http import RecordRoutes
from spanmill.collector.view import PATHS
from spanmill.collector.watch import Watch
from spanmill.errors import ListenError
from spanmill.storage import Location


class Receiver:
    """Both servers, running."""

    def __init__(
        self, ingest: Ingest, watch: Watch, grpc: Any, grpc_address: Address, http: HttpServer, http_address: Address
    ) -> None:
        self.grpc_address = grpc_address
        """With the port that was bound."""
        self.http_address = http_address
        self._ingest = ingest
        self.watch = watch
        """On disk and indexer."""
        self._grpc = grpc
        self._http = http

    def counts(self) -> dict[str, int]:
        """As `Ingest.counts`."""
        return self._ingest.counts()

    def unready(self, reason: str | None) -> None:
        """Tell those who ask why nothing becomes of what is received at the moment; None: all is well."""
        self._ingest.unready = reason

    def stop(self, timeout: float) -> None:
        """Takes no further request, and waits up to `timeout` seconds for those in flight.

        The rest are cancelled, which their senders take as a failure to be repeated. Close the journal after it.
        """
        deadline = time.monotonic() + timeout
        stopped = self._grpc.stop(timeout)
        self._http.begin_stop(timeout)
        stopped.wait(timeout)
        self._http.join(max(0.0, deadline - time.monotonic()) + 1)
        if self._ingest.forwarder is not None:
            self._ingest.forwarder.stop(max(0.0, deadline - time.monotonic()))
        self.watch.stop()


def start_receiver(
    config: ServeConfig, journal: JournalWriter, routes: Sequence[BaseRoute] = (), figures: Figures | None = None
) -> Receiver:
    """Serves OTLP on `config.grpc` and `config.http`, the latter with `routes` beside its own.

    One of several workers shares both with the others, has its part of every limit, and `figures` in common with them.
    Raises ListenError if an address cannot be had, ConfigError if files of TLS or tokens cannot be used.
    """
    access = access_of(config)
    ingest = _ingest(config, journal, figures or Figures())
    watch = Watch(ingest, config)
    shared = config.workers > 1
    listener = _listen("--http", config.http, shared=shared)
    try:
        # grpc says that an address cannot be had, but not why.
        with _listen("--grpc", config.grpc, shared=shared) as probe:
            grpc_host: str = probe.getsockname()[0]
        grpc, port = receive_grpc.start(ingest, config.grpc, access, shared=shared)
    except ListenError:
        listener.close()
        raise
    http_host, http_port = listener.getsockname()[:2]
    if not shared:
        access.warn_if_open([(grpc_host, config.grpc), (http_host, config.http)])
    watch.start()
    if ingest.forwarder is not None:
        ingest.forwarder.start()
    unknown = partial(unknown_rollouts, config.journal_folder / INDEX_NAME)
    local = ipaddress.ip_address(http_host).is_loopback
    records = RecordRoutes(ingest, Records(config.out, config.journal_folder / INDEX_NAME), unknown)
    pages = _Pages(config.out, open_to_pages=access.tokens is not None or not local)
    app = build_app(
        ingest, unknown, [metrics_route(ingest, watch), *records.routes(), *routes, *pages.routes()], access.tokens
    )
    http = HttpServer(app, listener, access.tls)
    return Receiver(ingest, watch, grpc, config.grpc._replace(port=port), http, config.http._replace(port=http_port))


def reserve(flag: str, address: Address) -> socket.socket:
    """A socket that keeps a port, or a free one for port 0, for workers that listen on it together.

    ListenError if the address cannot be had, or if somebody listens there.
    """
    with _listen(flag, address) as probe:
        family, name = probe.family, probe.getsockname()
    try:
        kept = socket.socket(family)
        kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        kept.bind(name)
    except OSError as error:
        raise ListenError(f"{flag} {address} cannot be listened on: {error.strerror}") from error
    return kept


def check_access(config: ServeConfig, grpc_host: str, http_host: str) -> None:
    """What workers have done for them once: ConfigError if files of TLS or tokens cannot be used, and the warning."""
    access_of(config).warn_if_open([(grpc_host, config.grpc), (http_host, config.http)])


class _Pages:
    """The viewer, which is loaded when somebody first looks."""

    def __init__(self, out: Location, *, open_to_pages: bool) -> None:
        self._out = out
        self._open_to_pages = open_to_pages
        self._app: ASGIApp | None = None

    def routes(self) -> list[BaseRoute]:
        """One per path, so that the codes of all other addresses stay what they are."""
        return [Route(path, self, methods=["GET"]) for path in PATHS]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._app is None:
            from spanmill.collector.view.app import view_app

            self._app = view_app(self._out, open_to_pages=self._open_to_pages)
        await self._app(scope, receive, send)


def _ingest(config: ServeConfig, journal: JournalWriter, figures: Figures) -> Ingest:
    headers = [(name.strip(), value) for name, _, value in (header.partition("=") for header in config.forward_headers)]
    queue = (config.forward_queue_mib << 20) // config.workers
    forwarder = Forwarder(config.forward, queue, headers, figures) if config.forward else None
    message = config.max_message_mib << 20
    return Ingest(journal, message, max(message, (config.max_inflight_mib << 20) // config.workers), forwarder, figures)


def _listen(flag: str, address: Address, *, shared: bool = False) -> socket.socket:
    """A listening socket, alone on its port unless that is `shared`."""
    try:
        found = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, _, _, _, name = min(found, key=lambda info: info[0] != socket.AF_INET)
        return socket.create_server(name, family=family, backlog=1024, reuse_port=shared)
    except OSError as error:
        # socket adds the address to the system's words.
        cause = error.strerror if isinstance(error, socket.gaierror) else os.strerror(error.errno or 0)
        raise ListenError(f"{flag} {address} cannot be listened on: {cause}") from error
