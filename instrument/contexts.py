"""The current span and rollout go along where Python itself leaves them behind: threads, executors, child processes.

Threads get the context of whoever started them, work in executors that of whoever submitted it. A child process finds
the rollout and the span that started it in its environment; what the program sets there itself stays.
"""

import os
import threading
from collections.abc import Callable, Mapping
from functools import partial
from types import ModuleType
from typing import Any, Final, cast

from opentelemetry import trace
from opentelemetry.context import Context, attach, detach, get_current
from wrapt import register_post_import_hook, wrap_function_wrapper

from spanmill.instrument import identity, provider
from spanmill.instrument.identity import RUN, Identity
from spanmill.instrument.reports import guarded

ENV_POSITION: Final = 10
"""Of `env` among the arguments of `subprocess.Popen`."""

_installed = threading.Event()


def install() -> None:
    """Patch Python: what is imported already now, the rest when it is. Any number of times."""
    if _installed.is_set():
        return
    _installed.set()
    for module, name, wrapper in (
        ("threading", "Thread.start", _start_thread),
        ("concurrent.futures.thread", "ThreadPoolExecutor.submit", _submit),
        ("concurrent.futures.process", "ProcessPoolExecutor.submit", _submit_to_process),
        ("multiprocessing.process", "BaseProcess.start", _start_process),
        ("subprocess", "Popen.__init__", _popen),
    ):
        register_post_import_hook(partial(_patch, name, wrapper), module)


def _patch(name: str, wrapper: Callable[..., Any], module: ModuleType) -> None:
    with guarded(f"patching {name}"):
        wrap_function_wrapper(module, name, wrapper)


def _within(context: Context, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    token = attach(context)
    try:
        return function(*args, **kwargs)
    finally:
        detach(token)


def _within_carried(carrier: dict[str, str], function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    return _within(provider.PROPAGATOR.extract(carrier, Context()), function, *args, **kwargs)


def _carrier() -> dict[str, str]:
    """The current span and baggage as they go over a border; empty if there is neither."""
    carrier: dict[str, str] = {}
    provider.PROPAGATOR.inject(carrier, get_current())
    return carrier


def _start_thread(wrapped: Callable[..., Any], thread: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    context = get_current()
    if context:
        run = thread.run

        def run_within() -> None:
            del thread.run  # else the thread would hold itself
            _within(context, run)

        thread.run = run_within
    return wrapped(*args, **kwargs)


def _submit(wrapped: Callable[..., Any], _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return wrapped(_within, get_current(), *args, **kwargs) if args else wrapped(**kwargs)


def _submit_to_process(wrapped: Callable[..., Any], _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if not args or not (carrier := _carrier()):
        return wrapped(*args, **kwargs)
    return wrapped(_within_carried, carrier, *args, **kwargs)


def _start_process(wrapped: Callable[..., Any], process: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if carrier := _carrier():
        process.run = partial(_within_carried, carrier, process.run)  # goes along when the process is pickled
    return wrapped(*args, **kwargs)


def _popen(wrapped: Callable[..., Any], _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    with guarded("environment of a child"):
        is_placed = len(args) > ENV_POSITION
        given = cast("Mapping[str, str] | None", args[ENV_POSITION] if is_placed else kwargs.get("env"))
        env = _environment(given)
        if env is not None and is_placed:
            args = (*args[:ENV_POSITION], env, *args[ENV_POSITION + 1 :])
        elif env is not None:
            kwargs = {**kwargs, "env": env}
    return wrapped(*args, **kwargs)


def _environment(given: Mapping[str, str] | None) -> dict[str, str] | None:
    """A child's environment with the current rollout and span; None to leave it as it is."""
    context = get_current()
    own = identity.from_baggage(context)
    if own is None and not trace.get_current_span(context).get_span_context().is_valid:
        return None
    inherited: Mapping[str, str] = os.environ
    env = inherited if given is None else given
    if given is not None and any(given.get(name) != inherited.get(name) for name in _OURS if name in given):
        return None  # the program says itself where the child belongs
    return child_environment(own, env, context)


_OURS: Final = ("TRACEPARENT", "BAGGAGE", *(field.env for field in identity.FIELDS))


def child_environment(own: Identity | None, environ: Mapping[str, str], context: Context) -> dict[str, str]:
    """`environ` for a child process under the span of `context` that belongs to the rollout `own`, if to any."""
    env = dict(environ) if own is None else identity.environment(own, environ)
    if own is not None:
        env[RUN] = own.rollout_id
        for name in identity.CUSTOM_HEADERS:
            env[name] = identity.with_headers(env.get(name, ""), own)
    for name in provider.HANDED_DOWN:
        env.pop(name.upper(), None)
    carrier: dict[str, str] = {}
    provider.PROPAGATOR.inject(carrier, context)
    return env | {name.upper(): value for name, value in carrier.items()}
