"""The OpenAI and Anthropic clients, as they stand, made to ask for token ids: every call becomes a span of ours.

Both are made of one base client. Its `request` is wrapped to add what is missing, its `_process_response` to read the
answer off the wire, before anything is parsed: so an answer that does not parse keeps its ids, and the program gets
what it would have got. openai 1.x to 3.x, anthropic; sync, async, streamed, raw and parsed.
"""

from collections.abc import Awaitable, Callable, Mapping
from contextvars import ContextVar
from copy import copy
from types import ModuleType
from typing import Any, Final, cast
from urllib.parse import urlsplit

from wrapt import register_post_import_hook, wrap_function_wrapper

from spanmill.instrument import carriers, hosts, identity, litellm_transport, provider
from spanmill.instrument.asking import REFUSED, Object, route_of
from spanmill.instrument.exchange import Exchange
from spanmill.instrument.reports import guarded
from spanmill.instrument.responses import is_open, read_along

MODULES: Final = ("openai._base_client", "anthropic._base_client")
NAMING: Final = ("x-spanmill-rollout-id", "baggage", "authorization")
"""Headers that may name a rollout."""

SKIPPED: Final = "x-spanmill-skip"
"""Header of a request that is not to be recorded, if it is "1"."""

_current: ContextVar["Exchange | None"] = ContextVar("spanmill-exchange", default=None)
_patched: set[str] = set()


def install() -> None:
    """Patch the client libraries, now or when they are imported. Any number of times."""
    for name in MODULES:
        if name not in _patched:
            _patched.add(name)
            register_post_import_hook(_patch, name)
    litellm_transport.install()


def _patch(module: ModuleType) -> None:
    with guarded(f"patching {module.__name__}"):
        for kind, request in (("SyncAPIClient", _request), ("AsyncAPIClient", _request_async)):
            wrap_function_wrapper(module, f"{kind}.request", request)
            wrap_function_wrapper(module, f"{kind}._process_response", _process_response)


# ------------------------------------------------------------------ the request


class _Request:
    """The arguments of the client's `request`, with those to call it with in their place."""

    def __init__(self, client: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self._args = args
        self._kwargs = dict(kwargs)
        self.options: Any = kwargs["options"] if "options" in kwargs else args[1]
        self.url = str(client.base_url)
        said = self.options.headers
        self._headers: dict[str, Any] = dict(cast("Mapping[str, Any]", said)) if isinstance(said, Mapping) else {}
        self._client = client

    def open(self) -> Exchange | None:
        """The exchange that this request begins; None if it does not generate or is not to be recorded."""
        options = self.options
        route = route_of(str(options.url).partition("?")[0])
        body = cast("Object", options.json_data)
        if route is None or not isinstance(options.json_data, Mapping) or self._headers.get(SKIPPED) == "1":
            return None
        named = self._named()
        around = None if named is None else identity.to_baggage(named, provider.ambient())
        return Exchange(route, {**body, **(options.extra_json or {})}, around=around)

    def _named(self) -> identity.Identity | None:
        """Whose the client itself says it is, by URL, key or headers: that counts before where the code runs.

        Not so the rollout of the process, which `spanmill run` puts into the headers of every client.
        """
        said: dict[str, Any] = {**getattr(self._client, "_custom_headers", {}), **self._headers}
        headers = {name.lower(): value for name, value in said.items() if isinstance(value, str)}
        key = getattr(self._client, "api_key", None)
        if isinstance(key, str):
            headers.setdefault("x-api-key", key)
        _, prefix, rest = urlsplit(self.url).path.partition("/rollout/")
        if not prefix and not str(key).startswith(carriers.KEY) and headers.keys().isdisjoint(NAMING):
            return None
        from spanmill.instrument.vllm.requests import read_path, read_request

        found = read_request("", headers, read_path((prefix + rest).encode())[0]).identity
        process = identity.from_environment()
        if found is None or process is None:
            return found
        return None if found.rollout_id == process.rollout_id else found

    def with_ids(self, exchange: Exchange) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments that ask for more: a copy, so that the program's own options stay as they are."""
        exchange.ask(hosts.host(self.url).refused)
        options = copy(self.options)
        names = {name.lower() for name in self._headers}
        ours = {name: value for name, value in exchange.headers().items() if name not in names}
        options.headers = {**ours, **self._headers}
        if exchange.added:
            options.extra_json = {**(options.extra_json or {}), **exchange.added}
        if "options" in self._kwargs:
            return self._args, {**self._kwargs, "options": options}
        return (self._args[0], options, *self._args[2:]), self._kwargs

    def is_refused(self, exchange: Exchange, error: BaseException) -> bool:
        """Whether the server refuses what was added, which it will not be asked for again."""
        if not exchange.added or getattr(error, "status_code", None) not in REFUSED:
            return False
        return exchange.refuse(f"{error} {getattr(error, 'body', '')}", hosts.host(self.url).refused)

    def again(self, exchange: Exchange) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments after a refusal: as the program gave them, or with what the server takes instead."""
        return self.with_ids(exchange) if exchange.added else (self._args, self._kwargs)


def _open(client: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[_Request, Exchange] | None:
    with guarded("request"):
        request = _Request(client, args, kwargs)
        if (exchange := request.open()) is not None:
            return request, exchange
    return None


def _request(wrapped: Callable[..., Any], client: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    opened = _open(client, args, kwargs)
    if opened is None:
        return wrapped(*args, **kwargs)
    request, exchange = opened
    asking = None
    with guarded("request"):
        gives_ids = hosts.decided(request.url)
        if hosts.probe(request.url) if gives_ids is None else gives_ids:
            asking = request.with_ids(exchange)
    token = _current.set(exchange)
    try:
        if asking is None:
            result = wrapped(*args, **kwargs)
        else:
            try:
                result = wrapped(*asking[0], **asking[1])
            except Exception as error:
                if not request.is_refused(exchange, error):
                    raise
                args, kwargs = request.again(exchange)
                result = wrapped(*args, **kwargs)
    except BaseException as error:
        exchange.end(error)
        raise
    finally:
        _current.reset(token)
    if not is_open(exchange):
        exchange.end()
    return result


async def _request_async(
    wrapped: Callable[..., Awaitable[Any]], client: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    opened = _open(client, args, kwargs)
    if opened is None:
        return await wrapped(*args, **kwargs)
    request, exchange = opened
    token = _current.set(exchange)
    try:
        asking = None
        gives_ids = hosts.decided(request.url)
        if gives_ids is None:
            from anyio import to_thread  # the client's own way to wait, whatever event loop it runs in

            gives_ids = await to_thread.run_sync(hosts.probe, request.url)
        if gives_ids:
            with guarded("request"):
                asking = request.with_ids(exchange)
        if asking is None:
            result = await wrapped(*args, **kwargs)
        else:
            try:
                result = await wrapped(*asking[0], **asking[1])
            except Exception as error:
                if not request.is_refused(exchange, error):
                    raise
                args, kwargs = request.again(exchange)
                result = await wrapped(*args, **kwargs)
    except BaseException as error:
        exchange.end(error)
        raise
    finally:
        _current.reset(token)
    if not is_open(exchange):
        exchange.end()
    return result


# ------------------------------------------------------------------ the answer


def _process_response(wrapped: Callable[..., Any], _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Before the client parses the answer: record it, and put in its place what was asked for."""
    exchange, response = _current.get(), kwargs.get("response")
    if exchange is not None and response is not None:
        with guarded("answer"):
            read_along(response, exchange)
    return wrapped(*args, **kwargs)
