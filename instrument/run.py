"""`spanmill run -- CMD`: a command, in whatever language, as one rollout.

The child finds its identity in its environment, in every form that some instrumentation or client library reads. The
rollout is announced before it starts and ends with a status that its exit code decides. The command runs the same with
no collector at all.
"""

import errno
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, Final
from uuid import uuid4

from opentelemetry.context import Context

from spanmill.errors import ConfigError, InputError
from spanmill.instrument import carriers, contexts, provider
from spanmill.instrument.exporters import ENDPOINT, PROTOCOL, TRACES_ENDPOINT, TRACES_PATH, protocol_of, with_scheme
from spanmill.instrument.identity import FIELDS, RUN, Identity
from spanmill.instrument.outbox import UNDELIVERED
from spanmill.instrument.reports import keep_quiet
from spanmill.instrument.reward_file import REWARD_FILE, read, state_of
from spanmill.instrument.rollouts import Rollout

SPANMILL_ENDPOINT: Final = "SPANMILL_ENDPOINT"
AUTO: Final = str(Path(__file__).parent / "auto")
"""The folder that makes Python children record themselves, for `PYTHONPATH`."""
FORWARDED: Final = (
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
)
FROM_TERMINAL: Final = (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP)
"""Signals that a terminal sends to all processes in its foreground, the command included."""

NOT_FOUND: Final = 127
NOT_EXECUTABLE: Final = 126
KILLED: Final = 128


def run(
    command: Sequence[str],
    *,
    rollout_id: str | None = None,
    attempt: int | None = None,
    group_id: str | None = None,
    task_id: str | None = None,
    mode: str | None = None,
    endpoint: str | None = None,
    base_url: str | None = None,
    reward_from_exit: bool = False,
    reward_file: str | None = None,
) -> int:
    """Run `command` as one rollout and return its exit code.

    `reward_from_exit` rewards it with 1 for exit code 0 and 0 for any other, unless Ctrl-C ended it. `reward_file` is
    where the command writes its rewards (`reward_file.read`); it finds the path in `SPANMILL_REWARD_FILE`.

    That is 128 + n if signal n ended it, 127 if there is no such command, 126 if it cannot be executed. What is not
    given is read from `SPANMILL_ROLLOUT_ID` and the like, unless an outer `spanmill run` set them; without an id the
    rollout gets a new one. Raises ConfigError for a value that cannot be.
    """
    environ = dict(os.environ)
    given = {"rollout_id": rollout_id, "attempt": attempt, "group_id": group_id, "task_id": task_id, "mode": mode}
    own = named(given, environ)
    if base_url is not None:
        carriers.check_url(base_url)
    endpoint = send_to(endpoint)
    before: tuple[int, int] | None = None
    with Rollout(own, {}) as rollout:
        env = child_environment(own, environ, rollout.context, endpoint=endpoint, base_url=base_url)
        if reward_file is not None:
            env[REWARD_FILE] = os.path.abspath(reward_file)
            before = state_of(reward_file)
        code, interrupted = _run_child(command, env)
        if reward_from_exit and not interrupted:
            rollout.reward(code == 0, name="final")
        if reward_file is not None:
            if state_of(reward_file) == before:
                _say(rollout, f"{reward_file}: the command wrote no reward there")
            else:
                give_rewards(rollout, reward_file)
        rollout.status = "succeeded" if code == 0 else "cancelled" if interrupted else "failed"
    say_what_is_lost(f"rollout {own.rollout_id}: its start or end", delivered=provider.close())
    return code


def send_to(endpoint: str | None) -> str | None:
    """Send our own spans to `endpoint`, or `SPANMILL_ENDPOINT`, or where `OTEL_*` says; the first two are returned."""
    endpoint = endpoint or os.environ.get(SPANMILL_ENDPOINT)
    keep_quiet(UNDELIVERED)
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # stderr is the command's; what is lost is said at the end
    if endpoint:
        provider.configure(endpoint=endpoint)
    return endpoint


def child_environment(
    own: Identity,
    environ: Mapping[str, str],
    context: Context,
    *,
    endpoint: str | None = None,
    base_url: str | None = None,
) -> dict[str, str]:
    """The environment of a child process that is the rollout `own`, from that of its parent.

    `context` is what the child's spans are to stand under; `endpoint` where they go, if not where `environ` says;
    `base_url` that of a model server with our plugin, or of a gateway, which the child's clients are pointed at.
    """
    env = contexts.child_environment(own, environ, context)
    env["OTEL_TRACES_SAMPLER"] = "always_on"
    env["OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT"] = env["OTEL_SPAN_EVENT_COUNT_LIMIT"] = str(provider.ATTRIBUTE_LIMIT)
    cut = ("OTEL_ATTRIBUTE_VALUE_LENGTH_LIMIT", "OTEL_SPAN_ATTRIBUTE_VALUE_LENGTH_LIMIT")  # would cut token arrays
    for name in (*cut, "OTEL_TRACES_SAMPLER_ARG"):
        env.pop(name, None)
    env |= {name: "spanmill" for name in ("OTEL_PYTHON_DISTRO", "OTEL_PYTHON_CONFIGURATOR") if name not in env}
    paths = [path for path in env.get("PYTHONPATH", "").split(os.pathsep) if path and path != AUTO]
    env["PYTHONPATH"] = os.pathsep.join([AUTO, *paths])
    if endpoint:
        env.pop(TRACES_ENDPOINT, None)
        env[ENDPOINT] = with_scheme(endpoint).removesuffix(TRACES_PATH)
        env.setdefault(PROTOCOL, protocol_of(endpoint))
    if base_url:
        server = carriers.with_path(base_url.rstrip("/").removesuffix(carriers.VERSION), own)
        env |= {"OPENAI_BASE_URL": server + carriers.VERSION, "ANTHROPIC_BASE_URL": server}
        for name in ("OPENAI_API_KEY", "ANTHROPIC_API_KEY"):  # without one their clients do not start
            if env.get(name, carriers.KEY).startswith(carriers.KEY):
                env[name] = carriers.api_key(own)
    return env


def named(given: Mapping[str, Any], environ: Mapping[str, str]) -> Identity:
    """What was given, else what the environment says, else a new rollout."""
    ids = {field.env for field in FIELDS}
    inherited = environ.get(RUN) is not None and environ.get(RUN) == environ.get("SPANMILL_ROLLOUT_ID")
    said = {} if inherited else {name: value for name, value in environ.items() if name in ids and value}
    parts: dict[str, Any] = {"rollout_id": uuid4().hex}
    for field in FIELDS:
        value = given.get(field.name)
        if value is None and field.env in said:
            value = said[field.env]
            if field.is_int:
                try:
                    value = int(value)
                except ValueError:
                    raise ConfigError(f"{field.env}: expected a number, found {value!r}") from None
        if value is not None:
            parts[field.name] = value
    try:
        return Identity(**parts)
    except (TypeError, ValueError) as error:
        raise ConfigError(str(error)) from None


def give_rewards(rollout: Rollout, file: str) -> None:
    """Give the rollout the rewards that its command wrote; one line says so if they cannot be read."""
    try:
        for reward in read(file):
            rollout.reward(reward.value, name=reward.name, call_id=reward.call_id)
    except InputError as error:
        _say(rollout, str(error))


def _say(rollout: Rollout, what: str) -> None:
    print(f"spanmill run: rollout {rollout.id}: {what}", file=sys.stderr)


def _run_child(command: Sequence[str], env: Mapping[str, str]) -> tuple[int, bool]:
    """(exit code, whether Ctrl-C came)."""
    relay = _Relay()
    with relay.listening():
        try:
            child = subprocess.Popen(command, env=env)
        except OSError as error:
            print(f"spanmill run: {command[0]}: {error.strerror}", file=sys.stderr)
            return (NOT_FOUND if error.errno == errno.ENOENT else NOT_EXECUTABLE), relay.interrupted
        relay.attach(child)
        code = _wait(child)
    return (KILLED - code if code < 0 else code), relay.interrupted


def _wait(child: "subprocess.Popen[bytes]") -> int:
    """The child's exit code. In short waits, so that a signal that comes just before one is handled all the same."""
    while True:
        try:
            return child.wait(1.0)
        except subprocess.TimeoutExpired:
            continue


class _Relay:
    """Hands the signals that this process gets on to the child, those included that came before it was there."""

    def __init__(self) -> None:
        self.interrupted = False
        self._child: subprocess.Popen[bytes] | None = None
        self._early: list[int] = []

    @contextmanager
    def listening(self) -> Generator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield  # only the main thread may handle signals; whoever calls from another one handles them
            return
        before = {number: signal.getsignal(number) for number in FORWARDED}
        for number, handler in before.items():
            if handler is not signal.SIG_IGN:  # ignored here means ignored in the child: `nohup`, background jobs
                signal.signal(number, self._handle)
        try:
            yield
        finally:
            for number, handler in before.items():
                if handler is not None:
                    signal.signal(number, handler)

    def attach(self, child: "subprocess.Popen[bytes]") -> None:
        self._child = child
        for number in self._early:
            child.send_signal(number)

    def _handle(self, number: int, _: FrameType | None) -> None:
        self.interrupted = self.interrupted or number == signal.SIGINT
        if self._child is None:
            self._early.append(number)
        elif number not in FROM_TERMINAL or not _in_foreground():
            self._child.send_signal(number)


def _in_foreground() -> bool:
    """Whether a terminal sends its signals to this process and the command alike, so that none must be handed on."""
    try:
        terminal = os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY)
    except OSError:
        return False
    try:
        return os.tcgetpgrp(terminal) == os.getpgrp()
    except OSError:
        return False
    finally:
        os.close(terminal)


def say_what_is_lost(what: str, *, delivered: bool) -> None:
    """One line if the collector did not take all that this process had to report."""
    lost = provider.counters()
    if not delivered or lost.failed or lost.dropped:
        print(
            f"spanmill run: {what} could not be reported, no collector answers at {provider.destination()}",
            file=sys.stderr,
        )
