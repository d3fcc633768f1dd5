"""LiteLLM's own transport, by which `hosted_vllm/` and other providers reach their server without the OpenAI client."""

import json
from collections.abc import Awaitable, Callable
from types import ModuleType
from typing import Any, Final, cast
from urllib.parse import urlsplit

from wrapt import register_post_import_hook, wrap_function_wrapper

from spanmill.instrument import hosts
from spanmill.instrument.asking import REFUSED, Object, route_of
from spanmill.instrument.exchange import Exchange
from spanmill.instrument.reports import guarded
from spanmill.instrument.responses import is_open, read_along

MODULE: Final = "litellm.llms.custom_httpx.http_handler"

_patched: set[str] = set()


def install() -> None:
    """Patch LiteLLM, now or when it is imported. Any number of times."""
    if not _patched:
        _patched.add(MODULE)
        register_post_import_hook(_patch, MODULE)


def _patch(module: ModuleType) -> None:
    with guarded(f"patching {module.__name__}"):
        wrap_function_wrapper(module, "HTTPHandler.post", _post)
        wrap_function_wrapper(module, "AsyncHTTPHandler.post", _post_async)


def _open(args: tuple[Any, ...], kwargs: Object) -> Exchange | None:
    """The exchange that a request begins; None if it generates nothing."""
    with guarded("request"):
        route = route_of(urlsplit(str(kwargs.get("url"))).path)
        body = _body(kwargs)
        if route is not None and body is not None and not args:
            return Exchange(route, body)
    return None


def _body(kwargs: Object) -> Object | None:
    """The body, given as text, bytes or a dict; None if it is no JSON object."""
    given = kwargs.get("json") or kwargs.get("data")
    try:
        found = json.loads(given) if isinstance(given, (str, bytes)) else given
    except ValueError:
        return None
    return cast("Object", found) if isinstance(found, dict) else None


def _asking(kwargs: Object, exchange: Exchange) -> Object:
    """The arguments that ask for more."""
    exchange.ask(hosts.host(kwargs["url"]).refused)
    given = cast("Object", kwargs.get("headers") or {})
    names = {name.lower() for name in given}
    ours = {name: value for name, value in exchange.headers().items() if name not in names}
    changed = {**kwargs, "headers": {**ours, **given}}
    if exchange.added:
        where = "json" if kwargs.get("json") else "data"
        body = {**(_body(kwargs) or {}), **exchange.added}
        changed[where] = body if isinstance(kwargs[where], dict) else json.dumps(body)
    return changed


def _is_refused(kwargs: Object, exchange: Exchange, error: Exception) -> bool:
    """Whether the server refuses what was added, which it will not be asked for again."""
    response = getattr(error, "response", None)
    if not exchange.added or getattr(response, "status_code", None) not in REFUSED:
        return False
    said = " ".join(str(getattr(error, name, "")) for name in ("args", "message", "text"))
    return exchange.refuse(said + str(getattr(response, "_content", b"")), hosts.host(kwargs["url"]).refused)


def _post(wrapped: Callable[..., Any], _: Any, args: tuple[Any, ...], kwargs: Object) -> Any:
    exchange = _open(args, kwargs)
    if exchange is None:
        return wrapped(*args, **kwargs)
    asking = kwargs
    with guarded("request"):
        gives_ids = hosts.decided(kwargs["url"])
        if hosts.probe(kwargs["url"]) if gives_ids is None else gives_ids:
            asking = _asking(kwargs, exchange)
    try:
        try:
            response = wrapped(**asking)
        except Exception as error:
            if not _is_refused(kwargs, exchange, error):
                raise
            response = wrapped(**(_asking(kwargs, exchange) if exchange.added else kwargs))
    except BaseException as error:
        exchange.end(error)
        raise
    return _finish(response, exchange)


async def _post_async(wrapped: Callable[..., Awaitable[Any]], _: Any, args: tuple[Any, ...], kwargs: Object) -> Any:
    exchange = _open(args, kwargs)
    if exchange is None:
        return await wrapped(*args, **kwargs)
    asking = kwargs
    try:
        with guarded("request"):
            gives_ids = hosts.decided(kwargs["url"])
            if gives_ids is None:
                from anyio import to_thread

                gives_ids = await to_thread.run_sync(hosts.probe, kwargs["url"])
            if gives_ids:
                asking = _asking(kwargs, exchange)
        try:
            response = await wrapped(**asking)
        except Exception as error:
            if not _is_refused(kwargs, exchange, error):
                raise
            response = await wrapped(**(_asking(kwargs, exchange) if exchange.added else kwargs))
    except BaseException as error:
        exchange.end(error)
        raise
    return _finish(response, exchange)


def _finish(response: Any, exchange: Exchange) -> Any:
    with guarded("answer"):
        read_along(response, exchange)
    if not is_open(exchange):
        exchange.end()
    return response
