"""`spanmill run --tasks`: many rollouts on this machine, some at once, each a process of the same command.

A rollout is `<run>/<task>/<k>` of the group `<run>/<task>`. Each attempt has a session of its own, so that it can be
stopped with all that it started; its input on stdin, unless the command's words ask for it; its output shown in one
piece when it ends; and a file for rewards. What is stopped gets `GRACE_S` to end by itself.
"""

import asyncio
import errno
import os
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import IO, Any, Final, NamedTuple, TextIO, cast

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from spanmill.errors import ConfigError
from spanmill.instrument import claims, provider
from spanmill.instrument.carriers import check_url
from spanmill.instrument.claims import Claims
from spanmill.instrument.identity import Identity
from spanmill.instrument.reward_file import REWARD_FILE
from spanmill.instrument.rollouts import Rollout, Work
from spanmill.instrument.run import (
    KILLED,
    NOT_EXECUTABLE,
    NOT_FOUND,
    child_environment,
    give_rewards,
    named,
    say_what_is_lost,
    send_to,
)
from spanmill.instrument.tasks import OURS, Task, as_text, check_command, fill, names_in, read_tasks
from spanmill.semconv import STATUSES

GRACE_S: Final = 10.0
"""How long what is told to end may take; a Python child sends its spans meanwhile."""

SAY_EVERY_S: Final = 10.0
"""How often the count is said where there is no terminal."""

STOPPING: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


class Options(NamedTuple):
    """How the rollouts of a run are run."""

    repeat: int = 1
    parallel: int = os.cpu_count() or 1
    retries: int = 0
    timeout_s: float | None = None
    endpoint: str | None = None
    base_url: str | None = None
    reward_from_exit: bool = False


class Ended(NamedTuple):
    """How an attempt ended."""

    code: int
    timed_out: bool = False
    why: str | None = None
    """Why it never began."""

    @property
    def well(self) -> bool:
        """Whether it succeeded; what was told to end has not, however politely it did."""
        return self.code == 0 and not self.timed_out

    @property
    def is_verdict(self) -> bool:
        """Whether the command itself said so, by an exit code of its own."""
        return self.why is None and not self.timed_out and self.code <= KILLED

    def words(self) -> str:
        """For a person."""
        if self.why is not None:
            return self.why
        if self.timed_out:
            return "timed out"
        return f"signal {self.code - KILLED}" if self.code > KILLED else f"exit code {self.code}"


def run_tasks(
    command: Sequence[str],
    file: str,
    options: Options,
    *,
    run_id: str | None = None,
    mode: str | None = None,
    resume: str | None = None,
) -> int:
    """Run `command` for every task in `file`, `repeat` times each, and return 0 if all came to succeed, else 1.

    An attempt that fails, crashes or takes longer than `timeout_s` is followed by the next, `retries` times at most.
    With `reward_from_exit` an exit code is a verdict and is not repeated; only what a signal or the timeout ended is.
    `run_id` and `mode`, which tasks may overrule, are read from the environment if they are not given, as for one
    rollout; `resume` is a file of `claims`. Raises ConfigError for options that cannot be, InputError for tasks that
    cannot be run: nothing was started then.
    """
    _check(options)
    tasks = read_tasks(file)
    check_command(command, tasks, file)
    if not names_in(command[:1]) and shutil.which(command[0]) is None:
        print(f"spanmill run: {command[0]}: there is no such command", file=sys.stderr)
        return NOT_FOUND
    own = named({"rollout_id": run_id, "mode": mode}, os.environ)
    is_given = run_id is not None or own.rollout_id == os.environ.get("SPANMILL_ROLLOUT_ID")
    options = options._replace(endpoint=send_to(options.endpoint))
    with claims.opened(resume, own.rollout_id, is_given=is_given) as claimed, _Screen() as screen:
        runner = _Runner(command, tasks, options, own.mode, claimed, screen)
        asyncio.run(runner.run())
    say_what_is_lost(f"run {claimed.run}: starts or ends of rollouts", delivered=provider.close())
    return 0 if runner.has_succeeded() else 1


def _check(options: Options) -> None:
    for name, value, least in (("repeat", options.repeat, 1), ("parallel", options.parallel, 1)):
        if value < least:
            raise ConfigError(f"--{name}: expected a number from {least}, found {value}")
    if options.retries < 0:
        raise ConfigError(f"--retries: expected a number from 0, found {options.retries}")
    if options.timeout_s is not None and not 0 < options.timeout_s < float("inf"):
        raise ConfigError(f"--timeout: expected seconds, more than 0, found {options.timeout_s:g}")
    if options.base_url is not None:
        check_url(options.base_url)


class _Runner:
    """The rollouts of one run on their way."""

    def __init__(
        self,
        command: Sequence[str],
        tasks: Sequence[Task],
        options: Options,
        mode: str | None,
        claimed: Claims,
        screen: "_Screen",
    ) -> None:
        self._command = command
        self._mode = mode
        self._options = options
        self._claims = claimed
        self._screen = screen
        self._reads_stdin = "input" not in names_in(command)
        every = [(task, self._identity(task, k)) for task in tasks for k in range(options.repeat)]
        self._waiting = iter([(task, own) for task, own in every if not claimed.is_done(own.rollout_id)])
        self._all = len(every)
        self._before = sum(claimed.is_done(own.rollout_id) for _, own in every)
        self._running: set[int] = set()
        """Processes, each the first of its session."""
        self._signals = 0
        self.counts: Counter[str] = Counter()
        """Rollouts by how they came out, and `attempts`, `timed out`."""

    def _identity(self, task: Task, k: int) -> Identity:
        group = f"{self._claims.run}/{task.id}"
        labels: dict[str, Any] = {"mode": self._mode, **task.labels}
        return Identity(f"{group}/{k}", group_id=group, task_id=task.id, group_size=self._options.repeat, **labels)

    def has_succeeded(self) -> bool:
        """Whether every rollout did."""
        return self.counts["succeeded"] + self._before == self._all

    async def run(self) -> None:
        """All of them, so many at once."""
        started = time.monotonic()
        said = f"{self._all} rollouts, {self._options.parallel} at once, of the run {self._claims.run}"
        self._screen.say(said + (f"; {self._before} are done already" if self._before else ""))
        self._screen.start(self._all, self._before)
        with self._listening():
            workers = min(self._options.parallel, self._all)
            await asyncio.gather(*(self._work() for _ in range(workers)))
        self._screen.stop()
        left = self._all - self._before - sum(self.counts[status] for status in STATUSES)
        parts = [f"{self.counts['succeeded']} succeeded", f"{self.counts['failed']} failed"]
        others = {status: self.counts[status] for status in STATUSES[2:]} | {"not started": left}
        parts += [f"{n} {what}" for what, n in others.items() if n]
        timed_out = f" ({self.counts['timed out']} timed out)" if self.counts["timed out"] else ""
        total = f"{self.counts['attempts']} attempts{timed_out} in {time.monotonic() - started:.1f} s"
        self._screen.say(f"{', '.join(parts)}; {total}")

    async def _work(self) -> None:
        for task, own in self._waiting:
            if self._signals:
                return
            status = await self._rollout(task, own)
            self.counts[status] += 1
            self._screen.count(self.counts)

    async def _rollout(self, task: Task, own: Identity) -> str:
        """The status of the last attempt at it."""
        left = self._options.retries
        while True:
            status, done = await self._attempt(task, own, is_last=not left)
            if done or self._signals or not left:
                return status
            left -= 1

    async def _attempt(self, task: Task, own: Identity, *, is_last: bool) -> tuple[str, bool]:
        """(status, whether it needs no other attempt)."""
        times = self._claims.claim(own.rollout_id)
        own = replace(own, attempt=len(times) - 1)
        self.counts["attempts"] += 1
        with ExitStack() as stack:
            out, err, stdin = (stack.enter_context(tempfile.TemporaryFile()) for _ in range(3))
            rewards = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="spanmill-")), "rewards")
            if self._reads_stdin and task.input is not None:
                stdin.write(as_text(task.input).encode())
                stdin.seek(0)
            async with Rollout(own, {}, Work(task.input, times)) as rollout:
                env = child_environment(
                    own, os.environ, rollout.context, endpoint=self._options.endpoint, base_url=self._options.base_url
                )
                words = fill(self._command, {**task.fields, **dict(zip(OURS, _ours(own), strict=True))})
                ended = await self._process(words, {**env, REWARD_FILE: str(rewards)}, stdin, out, err)
                done = ended.well or (self._options.reward_from_exit and ended.is_verdict)
                rollout.status = "succeeded" if ended.well else "cancelled" if self._signals else "failed"
                if self._options.reward_from_exit and not self._signals and (done or is_last):
                    rollout.reward(ended.well, name="final")
                if rewards.exists():
                    give_rewards(rollout, str(rewards))
            status = str(rollout.status)
            self._claims.end(own.rollout_id, status=status, exit_code=ended.code, timed_out=ended.timed_out, done=done)
            self.counts["timed out"] += ended.timed_out
            self._screen.show(out, err)
            if not ended.well:
                self._screen.say(f"{own.rollout_id} attempt {own.attempt}: {status}, {ended.words()}")
        return status, done

    async def _process(
        self, words: Sequence[str], env: Mapping[str, str], stdin: IO[bytes], out: IO[bytes], err: IO[bytes]
    ) -> Ended:
        try:
            process = await asyncio.create_subprocess_exec(
                *words, env=env, stdin=stdin, stdout=out, stderr=err, start_new_session=True
            )
        except OSError as error:
            return Ended(NOT_FOUND if error.errno == errno.ENOENT else NOT_EXECUTABLE, why=str(error.strerror))
        self._running.add(process.pid)
        if self._signals:  # it came while the process was started
            _send(process.pid, signal.SIGTERM)
        timed_out = False
        try:
            await asyncio.wait_for(process.wait(), self._options.timeout_s)
        except TimeoutError:
            timed_out = True
            await _end(process)
        finally:
            self._running.discard(process.pid)
        if timed_out or self._signals:
            _send(process.pid, signal.SIGKILL)  # what it left behind
        code = cast("int", process.returncode)
        return Ended(KILLED - code if code < 0 else code, timed_out)

    @contextmanager
    def _listening(self) -> Generator[None]:
        """While signals that would end this process stop its children first; what is ignored here stays ignored."""
        loop = asyncio.get_running_loop()
        provider.tracer()  # has a handler for SIGTERM, which is to come before ours
        heard = [number for number in STOPPING if signal.getsignal(number) is not signal.SIG_IGN]
        for number in heard:
            loop.add_signal_handler(number, self._stop, number)
        try:
            yield
        finally:
            self._kill()
            for number in heard:
                loop.remove_signal_handler(number)

    def _stop(self, number: int) -> None:
        """Begin nothing more, tell all to end, and the second time kill them."""
        self._signals += 1
        if self._signals > 1:
            self._kill()
            return
        self._screen.say(f"{signal.Signals(number).name}: {len(self._running)} are told to end; once more kills them")
        for pid in self._running:
            _send(pid, number)
        asyncio.get_running_loop().call_later(GRACE_S, self._kill)

    def _kill(self) -> None:
        for pid in self._running:
            _send(pid, signal.SIGKILL)


def _ours(own: Identity) -> tuple[object, ...]:
    """The values of `OURS`."""
    return own.task_id, own.rollout_id, own.attempt


def _send(pid: int, number: int) -> None:
    """A signal to a process and all that it started in its session."""
    with suppress(ProcessLookupError):  # they ended before
        os.killpg(pid, number)


async def _end(process: asyncio.subprocess.Process) -> None:
    _send(process.pid, signal.SIGTERM)
    try:
        await asyncio.wait_for(process.wait(), GRACE_S)
    except TimeoutError:
        _send(process.pid, signal.SIGKILL)
        await process.wait()


@contextmanager
def _perhaps_unread(target: TextIO) -> Generator[None]:
    """While something is written: if nobody reads it any more (`| head`), it goes nowhere, and the rollouts go on."""
    try:
        yield
    except BrokenPipeError:
        with open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), target.fileno())


class _Screen:
    """What a person sees: on stderr a bar on a terminal and plain lines elsewhere, and what the commands wrote."""

    def __init__(self) -> None:
        self._bar: Progress | None = None
        self._task = TaskID(0)
        self._all = self._before = 0
        self._said = time.monotonic()

    def __enter__(self) -> "_Screen":
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """No more bar."""
        bar, self._bar = self._bar, None
        if bar is not None:
            bar.stop()

    def start(self, total: int, before: int) -> None:
        """`total` rollouts, of which `before` were done before."""
        self._all, self._before = total, before
        if sys.stderr.isatty():
            columns = (
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[failed]} failed"),
                TimeElapsedColumn(),
            )
            self._bar = Progress(*columns, console=Console(stderr=True), transient=True)
            self._task = self._bar.add_task("", total=total, completed=before, failed=0)
            self._bar.start()

    def count(self, counts: Mapping[str, int]) -> None:
        """So many have ended."""
        ended = self._before + sum(counts.get(status, 0) for status in STATUSES)
        if self._bar is not None:
            self._bar.update(self._task, completed=ended, failed=counts.get("failed", 0))
        elif time.monotonic() - self._said >= SAY_EVERY_S and ended < self._all:
            self._said = time.monotonic()
            self.say(f"{ended} of {self._all}, {counts.get('failed', 0)} failed")

    def say(self, text: str) -> None:
        """A line of ours."""
        with self._paused(), _perhaps_unread(sys.stderr):
            print(f"spanmill run: {text}", file=sys.stderr, flush=True)

    def show(self, out: IO[bytes], err: IO[bytes]) -> None:
        """What a command wrote, in one piece."""
        with self._paused():
            for source, target in ((out, sys.stdout), (err, sys.stderr)):
                source.seek(0)
                with _perhaps_unread(target):
                    shutil.copyfileobj(source, target.buffer)
                    target.flush()

    @contextmanager
    def _paused(self) -> Generator[None]:
        if self._bar is None:
            yield
            return
        self._bar.stop()
        yield
        self._bar.start()
