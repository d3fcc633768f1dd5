"""`spanmill.rollout`: everything inside the block belongs to one rollout, whatever instrumentation records it."""

import asyncio
import os
import time
from collections.abc import Callable, Sequence
from contextvars import Token
from dataclasses import dataclass, replace
from functools import wraps
from inspect import iscoroutinefunction
from types import TracebackType
from typing import Any, Final, SupportsFloat, TypeVar, cast
from uuid import uuid4

from opentelemetry import trace
from opentelemetry.context import Context, attach, create_key, detach, get_value, set_value
from opentelemetry.trace import Span, Status, StatusCode
from opentelemetry.util.types import AttributeValue

from spanmill.instrument import carriers, contexts, hooks, identity, provider
from spanmill.instrument.identity import Identity
from spanmill.instrument.reports import guarded, report
from spanmill.instrument.rewards import COUNTED, reward
from spanmill.instrument.texts import json_text
from spanmill.semconv import (
    ERROR_TYPE,
    ROLLOUT_STARTED,
    ROLLOUT_STATUS,
    STATUSES,
    TASK_CLAIMED_AT,
    TASK_CLAIMS,
    TASK_INPUT,
)

F = TypeVar("F", bound=Callable[..., Any])

SPAN_NAME: Final = "rollout"
CANCELLATIONS: Final = (asyncio.CancelledError, KeyboardInterrupt, GeneratorExit)

_CURRENT: Final = create_key("spanmill-rollout")
_open: Final[set["Rollout"]] = set()
"""Rollouts of this process that have announced themselves and not yet ended."""


@dataclass(frozen=True, slots=True)
class Work:
    """What a rollout works on, and by which server, beside its identity. None means not known."""

    input: object = None
    """The task's input, anything that JSON can say."""
    claimed_at: Sequence[str] = ()
    """When each attempt at the task was begun, this one's last: ISO 8601."""
    base_url: str | None = None
    """Of a model server with our plugin, or of a gateway."""
    api_key: str | None = None
    """The server's own."""

    def attributes(self) -> dict[str, AttributeValue]:
        """As attributes of a span."""
        made: dict[str, AttributeValue] = {}
        if (text := json_text(self.input, "task input")) is not None:
            made[TASK_INPUT] = text
        if self.claimed_at:
            made |= {TASK_CLAIMS: len(self.claimed_at), TASK_CLAIMED_AT: list(self.claimed_at)}
        return made


class Rollout:
    """A rollout that is going on: what `with spanmill.rollout(...) as r` gives. Sync and async, and a decorator.

    `r.id`, `r.attempt` and `r.identity` say whose spans these are. `r.status` may be set to succeeded, failed,
    cancelled or unknown; what is set there wins over what the end of the block says. `r.metrics` are numbers by name
    that the end of the block reports. `r.base_url`, `r.api_key` and `r.headers` point a client at the model server so
    that its requests, wherever they are made, are this rollout's.
    """

    def __init__(self, named: Identity | None, others: dict[str, Any], work: Work | None = None) -> None:
        self._named = named
        self._others = others
        self._work = work or Work()
        self.identity: Identity | None = named
        self.metrics: dict[str, SupportsFloat] = {}
        """Reported at the end as rewards of these names, which count for nothing but stand in `rewards`."""
        self._status: str | None = None
        self._outcome: str | None = None
        self._span: Span | None = None
        self._context: Context | None = None
        self._token: Token[Context] | None = None
        self._pid = 0
        self._joined = False

    @property
    def id(self) -> str:
        """The rollout's id; known once the block is entered. Raises RuntimeError before."""
        return self._entered().rollout_id

    @property
    def attempt(self) -> int:
        """The attempt, 0 for the first run. Raises RuntimeError before the block is entered."""
        return self._entered().attempt

    def _entered(self) -> Identity:
        if self.identity is None:
            raise RuntimeError("the rollout has not begun: enter it with `with spanmill.rollout(...) as r`")
        return self.identity

    @property
    def base_url(self) -> str | None:
        """The model server's URL with the rollout in its path; None without `base_url`.

        For servers with our plugin and for gateways: no other understands it.
        """
        return None if self._work.base_url is None else carriers.with_path(self._work.base_url, self._entered())

    @property
    def api_key(self) -> str:
        """An API key that names the rollout, for the same servers; they check the `api_key` that was given."""
        return carriers.api_key(self._entered(), self._work.api_key)

    @property
    def headers(self) -> dict[str, str]:
        """Request headers that name the rollout with its group, task and mode. Any server takes them."""
        return carriers.headers(self._entered())

    @property
    def context(self) -> Context:
        """The context of the rollout's inside, for work done elsewhere. Raises RuntimeError before the start."""
        self._entered()
        return self._context or Context()

    @property
    def status(self) -> str | None:
        """What the rollout will report, as far as it is known: what was set, at the end what the block came to."""
        return self._status or self._outcome

    @status.setter
    def status(self, status: str) -> None:
        if status in STATUSES:
            self._status = status
        else:
            report("status", f"rollout status: expected one of {', '.join(STATUSES)}, found {status!r}; it is ignored")

    def reward(self, value: SupportsFloat, *, name: str | None = None, call_id: str | None = None) -> None:
        """A reward of this rollout, also after its end. See `spanmill.reward`."""
        own = self._entered()
        reward(value, name=name, call_id=call_id, rollout_id=own.rollout_id, attempt=own.attempt, context=self._context)

    def __enter__(self) -> "Rollout":
        self._start()
        try:
            hooks.call("on_rollout_start", self, installed=not self._joined)
        except BaseException as error:  # Ctrl-C: nobody will leave a block that was never entered
            self._finish(error)
            raise
        return self

    def _start(self) -> None:
        if self._context is not None:
            raise RuntimeError("this rollout has begun already: call spanmill.rollout() anew for each one")
        self.identity, self._joined = _resolve(self._named, self._others)
        with guarded("rollout start"):
            self._begin(self.identity)

    def _begin(self, own: Identity) -> None:
        contexts.install()
        tracer = provider.tracer()
        context = identity.to_baggage(own, provider.ambient())
        told = self._work.attributes()
        self._span = tracer.start_span(SPAN_NAME, context, attributes=told if self._joined else None)
        self._context = set_value(_CURRENT, self, trace.set_span_in_context(self._span, context))
        self._pid = os.getpid()
        self._token = attach(self._context)
        if not self._joined:
            _open.add(self)
            now, told = time.time_ns(), {ROLLOUT_STARTED: True, **told}
            tracer.start_span(ROLLOUT_STARTED, self._context, attributes=told, start_time=now).end(now)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if self._ends_here():
                self._outcome = _status_of(error)
                hooks.call("on_rollout_end", self, installed=not self._joined)
        finally:
            self._finish(error)

    def _ends_here(self) -> bool:
        """Not in a forked child, which leaves the block too although the rollout is its parent's, nor a second time."""
        return self._span is not None and os.getpid() == self._pid

    def _finish(self, error: BaseException | None) -> None:
        with guarded("rollout end"):
            if self._ends_here():
                self._report_metrics()
        with guarded("rollout end"):
            if self._token is not None:
                token, self._token = self._token, None
                detach(token)
            self._end(error)

    def _report_metrics(self) -> None:
        for name, value in list(self.metrics.items()):
            if name in COUNTED:
                report(
                    "metric", f"metrics: {name!r} is the name of a reward: give it by rollout.reward; it is left out"
                )
            else:
                self.reward(value, name=name)

    def _end(self, error: BaseException | None) -> None:
        ends, span, self._span = self._ends_here(), self._span, None
        _open.discard(self)
        if span is None or not ends:
            return
        said = self._status
        self._outcome = self._outcome or _status_of(error)
        status = said or self._outcome
        if said or error is not None or not self._joined:
            span.set_attribute(ROLLOUT_STATUS, status)
        if error is not None and status != "succeeded":
            span.set_attribute(ERROR_TYPE, type(error).__qualname__)
            span.set_status(Status(StatusCode.ERROR, str(error)))
            span.record_exception(error)
        span.end()

    def end_with_process(self) -> None:
        """End as cancelled, unless a status was set: the process is about to end."""
        if self._ends_here():
            self._outcome = "cancelled"
            hooks.call("on_rollout_end", self, installed=not self._joined)
            with guarded("rollout end"):
                self._report_metrics()
        with guarded("rollout end"):
            self._end(None)

    async def __aenter__(self) -> "Rollout":
        self._start()
        try:
            await hooks.call_async("on_rollout_start", self, installed=not self._joined)
        except BaseException as error:
            self._finish(error)
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if self._ends_here():
                self._outcome = _status_of(error)
                await hooks.call_async("on_rollout_end", self, installed=not self._joined)
        finally:
            self._finish(error)

    def __call__(self, function: F) -> F:
        """As a decorator, of plain and of `async` functions: every call is a rollout of its own."""
        if iscoroutinefunction(function):

            @wraps(function)
            async def run_async(*args: Any, **kwargs: Any) -> Any:
                async with Rollout(self._named, self._others, self._work):
                    return await function(*args, **kwargs)

            return cast("F", run_async)

        @wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            with Rollout(self._named, self._others, self._work):
                return function(*args, **kwargs)

        return cast("F", run)


def rollout(
    rollout_id: str | int | None = None,
    *,
    attempt: int | None = None,
    group_id: str | int | None = None,
    task_id: str | int | None = None,
    mode: str | None = None,
    group_size: int | None = None,
    resources_id: str | None = None,
    task_input: object = None,
    claimed_at: Sequence[str] = (),
    base_url: str | None = None,
    api_key: str | None = None,
) -> Rollout:
    """A block (`with` or `async with`) or function whose spans make one rollout. Any number may run at once.

    Without an id it is the process's own rollout where the environment names one (`SPANMILL_ROLLOUT_ID`, as
    `spanmill run` sets it, or `spanmill.rollout.id` in `OTEL_RESOURCE_ATTRIBUTES`) and no other rollout is around it;
    else a new one with a random id. Under `spanmill run` the process's own rollout is announced and ended by the
    command, whose exit code has the last word: the block adds a status only if it raises or sets one. A rollout inside
    a rollout is a rollout of its own, and nothing is inherited but its place in the trace.

    `task_input`, anything that JSON can say, and `claimed_at`, the times (ISO 8601) at which each attempt at the task
    was begun, are kept in the rollout's metadata. `base_url`, of a model server with our plugin or of a gateway, and
    `api_key`, its own, make `r.base_url` and `r.api_key`. Raises ConfigError for a `base_url` that is none.

    The status is succeeded, failed if an exception leaves the block, cancelled if that is a cancellation, Ctrl-C or
    the closing of a generator; the exception goes on. Numbers are taken as texts where an id is wanted. What cannot be
    an id or number is reported once and left out; in place of such a rollout id comes a random one.
    """
    given: dict[str, Any] = {
        "attempt": attempt,
        "group_id": group_id,
        "task_id": task_id,
        "mode": mode,
        "group_size": group_size,
        "resources_id": resources_id,
    }
    others: dict[str, Any] = {
        name: fit for name, value in given.items() if (fit := identity.usable(name, value)) is not None
    }
    if base_url is not None:
        carriers.check_url(base_url)
    work = Work(task_input, _texts("claimed_at", claimed_at), base_url, api_key)
    if rollout_id is None:
        return Rollout(None, others, work)
    own = identity.usable("rollout_id", rollout_id) or uuid4().hex
    return Rollout(Identity(str(own), **others), others, work)


def _texts(name: str, values: object) -> tuple[str, ...]:
    said = f"{type(values).__name__} {str(values)[:80]!r}"
    found = cast("Sequence[object]", values) if isinstance(values, (list, tuple)) else [None]
    texts = tuple(value for value in found if isinstance(value, str))
    if len(texts) == len(found):
        return texts
    report(name, f"{name}: expected a list of texts, found {said}; it is left out")
    return ()


def current() -> Rollout | None:
    """The innermost rollout that this code runs in; None outside any."""
    found = get_value(_CURRENT)
    return found if isinstance(found, Rollout) else None


def _resolve(named: Identity | None, others: dict[str, Any]) -> tuple[Identity, bool]:
    """(whose rollout a block is, whether `spanmill run` reports its start and end)."""
    if named is not None:
        return named, False
    process = identity.from_environment()
    if process is None or current() is not None:
        return Identity(uuid4().hex, **others), False
    own = replace(process, **others)
    return own, own.attempt == process.attempt and os.environ.get(identity.RUN) == own.rollout_id


def _end_all() -> None:
    """The process ends around rollouts that are still open: they were cancelled, and say so while they can."""
    for left in list(_open):
        left.end_with_process()


provider.on_process_end.append(_end_all)


def _status_of(error: BaseException | None) -> str:
    if isinstance(error, CANCELLATIONS):
        return "cancelled"
    if isinstance(error, SystemExit):
        return "succeeded" if error.code in (None, 0) else "failed"
    return "succeeded" if error is None else "failed"
