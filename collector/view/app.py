"""Who may see the pages, and how they are served. Read-only.

Every value of a span is hostile text: the templates escape it, and the headers let no script of another run.
"""

import ipaddress
import logging
import signal
import threading
from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path
from types import FrameType
from typing import Any, Final, cast
from urllib.parse import urlencode

import polars as pl
import uvicorn
from jinja2 import Environment, PackageLoader, StrictUndefined
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Receive, Scope, Send

from spanmill.collector.access import Tokens
from spanmill.collector.view import pages
from spanmill.collector.view.data import Data
from spanmill.collector.view.strips import TextOf, load_tokenizer
from spanmill.collector.view.text import visible
from spanmill.errors import DatasetError, ListenError
from spanmill.storage import Location
from spanmill.triplets.json_rows import json_text

_log = logging.getLogger(__name__)

_HEADERS: Final = {
    "Content-Security-Policy": "default-src 'none'; style-src 'self'; script-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}
_AT_ONCE: Final = 2
"""Pages that are made at the same time: the receiver in the same process has the other cores."""


def view_app(dataset: Location, text_of: TextOf | None = None, open_to_pages: bool = False) -> ASGIApp:
    """The pages, at PATHS, of a dataset, which may not exist yet.

    Unless `open_to_pages`, they answer only to who addresses this machine by a number or as localhost: a web page whose
    name an attacker points at 127.0.0.1 gets nothing.
    """
    site = _Site(dataset, text_of)
    shown = {
        "/": ("dataset.html", pages.dataset),
        "/rollouts": ("rollouts.html", pages.rollouts),
        "/rollout": ("rollout.html", site.with_tokens(pages.rollout)),
        "/episode": ("episode.html", site.with_tokens(pages.episode)),
        "/call": ("call.html", site.with_tokens(pages.call)),
        "/group": ("group.html", pages.group),
        "/quarantine": ("quarantine.html", pages.quarantine),
    }
    routes: list[BaseRoute] = [
        Route(path, site.page(template, make), methods=["GET"]) for path, (template, make) in shown.items()
    ]
    routes += [
        Route("/row.json", site.row, methods=["GET"]),
        Route("/stamp", site.stamp, methods=["GET"]),
        Mount("/static", StaticFiles(packages=[("spanmill.collector.view", "static")])),
    ]
    return Starlette(routes=routes, middleware=[] if open_to_pages else [Middleware(_LocalNames)])


def view(dataset: Location, host: str, port: int, tokenizer: Path | None, token_file: Path | None) -> int:
    """Serve the pages until SIGTERM or SIGINT; returns 0. Prints one line with the address once they can be opened.

    Raises DatasetError if there is no dataset, ConfigError if an option cannot work, ListenError for a busy port.
    """
    text_of = load_tokenizer(tokenizer) if tokenizer else None
    tokens = Tokens(token_file) if token_file else None
    Data(dataset).rollouts()
    local = _is_local(host)
    if not (local or tokens):
        _log.warning("anybody who reaches %s:%d can read the dataset: set --token-file", host, port)
    app = view_app(dataset, text_of, open_to_pages=not local or tokens is not None)
    app = _Guard(app, tokens) if tokens else app
    config = uvicorn.Config(app, host, port, log_level="warning", server_header=False, ws="none", lifespan="off")
    try:
        listener = config.bind_socket()
    except SystemExit as error:  # uvicorn has logged why
        raise ListenError(f"{host}:{port} cannot be listened on") from error
    server = uvicorn.Server(config)

    def stop(_: int, __: FrameType | None) -> None:
        server.should_exit = True

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)  # until uvicorn has handlers of its own; it hands on what those were told
    with listener:
        listener.listen(config.backlog)  # whoever reads the line may connect at once
        shown = f"[{host}]" if ":" in host else host
        print(f"spanmill view of {dataset} at http://{shown}:{listener.getsockname()[1]}/", flush=True)
        server.run([listener])
    return 0


def _is_local(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class _LocalNames:
    """Turns away requests that name this machine as only the outside would."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        host = Headers(scope=scope).get("host", "") if scope["type"] == "http" else "localhost"
        name = host.rpartition(":")[0] if host.rpartition(":")[2].isdecimal() else host
        if name == "localhost" or _is_number(name.strip("[]")):
            await self._app(scope, receive, send)
        else:
            answer = PlainTextResponse("Open this page by its address, 127.0.0.1, or as localhost.\n", 421)
            await answer(scope, receive, send)


def _is_number(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


class _Guard:
    """Asks the browser for a token."""

    def __init__(self, app: ASGIApp, tokens: Tokens) -> None:
        self._app = app
        self._tokens = tokens

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._tokens.allow(Headers(scope=scope).get("authorization")):
            await self._app(scope, receive, send)
            return
        headers = {"WWW-Authenticate": 'Basic realm="spanmill: the token is the password", charset="UTF-8"'}
        await PlainTextResponse("A token is needed.\n", 401, headers)(scope, receive, send)


class _Site:
    """The pages of one dataset."""

    def __init__(self, dataset: Location, text_of: TextOf | None) -> None:
        self._data = Data(dataset)
        self._text_of = text_of
        self._room = threading.BoundedSemaphore(_AT_ONCE)
        self._templates = _templates(dataset, text_of is not None)

    def with_tokens(
        self, make: Callable[[Data, pages.Query, TextOf | None], Any]
    ) -> Callable[[Data, pages.Query], Any]:
        """A page that shows tokens, with the tokenizer that there is."""
        return lambda data, query: make(data, query, self._text_of)

    def page(self, template: str, make: Callable[[Data, pages.Query], pages.Page]) -> Callable[[Request], Response]:
        """The endpoint of a page; starlette runs it in a thread."""

        def endpoint(request: Request) -> Response:
            status, values = self._made(make, request)
            shown = template if status == 200 else "error.html"
            text = self._templates.get_template(shown).render(
                **values, path=request.url.path, query=dict(request.query_params), stamp=self._data.stamp()
            )
            return HTMLResponse(text.encode(errors="replace"), status, _HEADERS)

        return endpoint

    def row(self, request: Request) -> Response:
        """A stored row as JSON."""
        status, row = self._made(pages.row_json, request)
        return Response(json_text(row), status, _HEADERS, "application/json")

    def stamp(self, request: Request) -> Response:
        """Changes when there is something new to see."""
        return PlainTextResponse(self._data.stamp(), headers=_HEADERS)

    def _made(self, make: Callable[[Data, pages.Query], Any], request: Request) -> tuple[int, Any]:
        """(HTTP status, what is shown); what cannot be shown is said in a sentence."""
        try:
            with self._room:
                return 200, make(self._data, request.query_params)
        except pages.NotThere as error:
            return 404, {"said": str(error)}
        except pages.BadAddress as error:
            return 400, {"said": str(error)}
        except (DatasetError, pl.exceptions.PolarsError) as error:
            return 503, {"said": f"The dataset cannot be read: {error}"}


def _templates(dataset: Location, has_text: bool) -> Environment:
    templates = Environment(
        loader=PackageLoader("spanmill.collector.view"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_shown,
    )
    shared: dict[str, Any] = {"dataset_path": str(dataset), "has_text": has_text, "address": _address}
    cast("dict[str, Any]", templates.globals).update(shared)
    templates.filters.update(number=_number, count=_count, seconds=_seconds, at=_at)
    return templates


def _shown(value: Any) -> Any:
    """Any value as the page has it: nothing for None, and no character that changes the order of others."""
    if value is None:
        return ""
    return visible(value) if isinstance(value, str) and not hasattr(value, "__html__") else value


def _address(path: str, query: Mapping[str, Any] | None = None, **changes: Any) -> str:
    """A path with its query, changed; what is None or "" is left out."""
    values = {**(query or {}), **changes}
    told = urlencode({name: value for name, value in values.items() if value not in (None, "")}, errors="replace")
    return f"{path}?{told}" if told else path


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def _count(value: int) -> str:
    return f"{value:,}"


def _seconds(value: float | None) -> str:
    if value is None:
        return "not ended"
    return f"{value:.3g} s" if value >= 1 else f"{value * 1000:.3g} ms"


def _at(value: datetime) -> str:
    return f"{value:%Y-%m-%d %H:%M:%S}"
