"""`spanmill run --tasks` with real commands."""

import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from otlp_sink import Sink

from spanmill import adapt
from spanmill.cli import main

RunMany = Callable[..., subprocess.Popen[str]]
ENDED = re.compile(r"spanmill run: (.*) in \d+\.\d s\n$")
CLI = "import sys; from spanmill.instrument import runner; {patch}; from spanmill.cli import main; sys.exit(main())"


@pytest.fixture
def run_many(grpc_sink: Sink, tmp_path: Path) -> RunMany:
    """Starts `spanmill run --tasks` for these tasks with these options and words, in a process of its own."""

    def launch(
        tasks: list[Any], *words: str, patch: str = "", endpoint: str = "", stderr: int = subprocess.PIPE
    ) -> subprocess.Popen[str]:
        file = tmp_path / "tasks.jsonl"
        file.write_text("".join(json.dumps(task) + "\n" for task in tasks))
        options = ["--tasks", str(file), "--endpoint", endpoint or grpc_sink.endpoint, "--rollout-id", "R"]
        program = CLI.format(patch=patch or "pass")
        return subprocess.Popen(
            [sys.executable, "-c", program, "run", *options, *words],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            start_new_session=True,
        )

    return launch


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    """(exit code, stdout, the last line of stderr without its time)."""
    out, err = process.communicate(timeout=60)
    ended = ENDED.search(err)
    assert ended is not None, err
    return process.returncode, out, ended[1].rpartition("\n")[2].removeprefix("spanmill run: ")


def ends(sink: Sink) -> list[tuple[Any, ...]]:
    """(rollout id, attempt, status) of all that ended, sorted."""
    names = ("spanmill.rollout.id", "spanmill.rollout.attempt", "spanmill.rollout.status")
    return sorted(tuple(span["attributes"][name] for name in names) for span in sink.named("rollout"))


def gone(pid: int) -> bool:
    """Whether a process is no more, soon."""
    until = time.monotonic() + 10
    while time.monotonic() < until:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except OSError:
            return True
        time.sleep(0.02)
    return False


def test_every_task_is_a_group_of_rollouts(run_many: RunMany, grpc_sink: Sink) -> None:
    """Ids, group and its size, task, mode, resources, input, claims and times are in the rows."""
    tasks = [{"id": "a", "input": "hi", "mode": "val", "resources_id": "w2"}, {"id": "b/c", "input": [1]}]
    process = run_many(tasks, "--repeat", "2", "--mode", "train", "--", "echo", "{task_id}", "{input}", "{attempt}")
    code, out, said = finish(process)
    assert (0, "4 succeeded, 0 failed; 4 attempts") == (code, said)
    assert ["a hi 0"] * 2 + ["b/c [1] 0"] * 2 == sorted(out.splitlines())
    rows = [
        (r.rollout_id, r.attempt, r.group_id, r.group_size, r.task_id, r.mode, r.status)
        for r in adapt(grpc_sink.bodies)
    ]
    assert [
        ("R/a/0", 0, "R/a", 2, "a", "val", "succeeded"),
        ("R/a/1", 0, "R/a", 2, "a", "val", "succeeded"),
        ("R/b/c/0", 0, "R/b/c", 2, "b/c", "train", "succeeded"),
        ("R/b/c/1", 0, "R/b/c", 2, "b/c", "train", "succeeded"),
    ] == rows
    metadata = json.loads(adapt(grpc_sink.bodies)[0].metadata)
    times = metadata["task"].pop("claimed_at")
    assert ({"input": "hi", "claims": 1}, "w2", 1) == (metadata["task"], metadata["resources_id"], len(times))
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}\+00:00", times[0])


def test_each_run_is_new(tmp_path: Path, grpc_sink: Sink) -> None:
    """Without an id no two runs have a rollout in common."""
    file = tmp_path / "tasks.jsonl"
    file.write_text("{}\n")
    words = [
        "run",
        "--tasks",
        str(file),
        "--endpoint",
        grpc_sink.endpoint,
        "--",
        "sh",
        "-c",
        "echo $SPANMILL_ROLLOUT_ID",
    ]
    told = [
        subprocess.check_output([sys.executable, "-c", CLI.format(patch="pass"), *words], text=True) for _ in range(2)
    ]
    assert [True, True] == [re.fullmatch("[0-9a-f]{32}/1/0\n", each) is not None for each in told]
    assert told[0] != told[1]


@pytest.mark.parametrize(
    ("task", "word", "expected"),
    [
        ({"input": "two\nlines"}, "{task_id}", "two\nlines"),
        ({"input": {"q": "é"}}, "{task_id}", '{"q":"é"}'),
        ({"input": "x" * 1_000_000}, "{task_id}", "x" * 1_000_000),
        ({}, "{task_id}", ""),
        ({"input": "asked for"}, "{input}", ""),
    ],
    ids=["text", "json", "long", "none", "as a word"],
)
def test_the_input_is_on_stdin(task: Any, word: str, expected: str, run_many: RunMany) -> None:
    """As text or JSON of any length, unless a word of the command asks for it; then there is nothing on stdin."""
    assert (0, expected) == finish(run_many([task], "--", "sh", "-c", "cat", word))[:2]


def test_what_fails_is_tried_again(run_many: RunMany, grpc_sink: Sink, tmp_path: Path) -> None:
    """As the next attempt of the same rollout, with a claim more, until it succeeds or the retries are used up."""
    script = f"echo out; [ -e {tmp_path}/$0 ] || {{ touch {tmp_path}/$0; kill -KILL $$; }}; exit $1"
    process = run_many(
        [{"id": "a", "n": 0}, {"id": "b", "n": 3}], "--retries", "2", "--", "sh", "-c", script, "{task_id}", "{n}"
    )
    assert (1, "out\n" * 5, "1 succeeded, 1 failed; 5 attempts") == finish(process)
    failed = [("R/b/0", attempt, "failed") for attempt in range(3)]
    assert [("R/a/0", 0, "failed"), ("R/a/0", 1, "succeeded"), *failed] == ends(grpc_sink)
    claims = {(r.rollout_id, r.attempt): json.loads(r.metadata)["task"]["claims"] for r in adapt(grpc_sink.bodies)}
    assert {("R/a/0", 0): 1, ("R/a/0", 1): 2, ("R/b/0", 0): 1, ("R/b/0", 1): 2, ("R/b/0", 2): 3} == claims


def test_an_exit_code_that_is_a_verdict_is_not_tried_again(run_many: RunMany, grpc_sink: Sink, tmp_path: Path) -> None:
    """With --reward-from-exit: else the reward would be the best of several; a crash is no verdict and has none."""
    script = f'[ "$0" = 0 ] || exit 1; [ -e {tmp_path}/x ] || {{ touch {tmp_path}/x; kill -KILL $$; }}'
    process = run_many(
        [{"id": "a", "n": 0}, {"id": "b", "n": 1}],
        *("--retries", "2", "--reward-from-exit", "--", "sh", "-c", script, "{n}"),
    )
    assert (1, "", "1 succeeded, 1 failed; 3 attempts") == finish(process)
    rewarded = [(r.rollout_id, r.attempt, r.reward) for r in adapt(grpc_sink.bodies)]
    assert [("R/a/0", 0, None), ("R/a/0", 1, 1.0), ("R/b/0", 0, 0.0)] == rewarded


def test_each_has_a_file_for_rewards(run_many: RunMany, grpc_sink: Sink) -> None:
    """What a command writes there is its rollout's; nothing written is no reward."""
    tasks = [{"id": "a", "r": "0.25"}, {"id": "b", "r": "0.75"}, {"id": "c", "r": ""}]
    script = '[ -z "$0" ] || echo "$0" > $SPANMILL_REWARD_FILE'
    assert 0 == finish(run_many(tasks, "--parallel", "3", "--", "sh", "-c", script, "{r}"))[0]
    assert [0.25, 0.75, None] == [r.reward for r in adapt(grpc_sink.bodies)]


def test_so_many_run_at_once(run_many: RunMany, tmp_path: Path) -> None:
    """Never more, and the next as soon as one has ended."""
    script = f"ls {tmp_path} | grep -c ^run-; touch {tmp_path}/run-$$; sleep 0.2; rm {tmp_path}/run-$$"
    process = run_many([{}], "--repeat", "7", "--parallel", "3", "--", "sh", "-c", f"exec 2>/dev/null; {script}")
    code, out, _ = finish(process)
    assert (0, True) == (code, max(map(int, out.split())) <= 2)
    assert 7 == len(out.split())


@pytest.mark.parametrize("trap", ["", "trap '' TERM;", "trap 'exit 0' TERM;"], ids=["dies", "ignores", "obeys"])
def test_what_takes_too_long_is_ended(trap: str, run_many: RunMany, grpc_sink: Sink) -> None:
    """With all that it started; killed if it does not end when it is told to; failed also if it ends well then."""
    script = f"{trap} sleep 60 & echo $!; {trap} sleep 60; {trap} sleep 60"
    process = run_many([{}], "--timeout", "0.5", "--", "sh", "-c", script, patch="runner.GRACE_S = 0.5")
    code, out, said = finish(process)
    assert (1, "0 succeeded, 1 failed; 1 attempts (1 timed out)") == (code, said)
    assert gone(int(out))
    assert [("R/1/0", 0, "failed")] == ends(grpc_sink)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_stops_them_all(number: signal.Signals, run_many: RunMany, grpc_sink: Sink, tmp_path: Path) -> None:
    """Each gets it, ends in its own way and is cancelled, what it started is gone; nothing else begins."""
    child = f"""
import os, signal, subprocess, sys, time
signal.signal({int(number)}, lambda *_: (print("bye"), sys.exit(int(sys.argv[1]))))
print(subprocess.Popen(["sleep", "60"], stdout=subprocess.DEVNULL).pid, flush=True)
open({str(tmp_path)!r} + "/ready-" + sys.argv[1], "w")
while True:
    time.sleep(0.05)  # a signal just before one long sleep would lie until it ends
"""
    tasks = [{"n": 0}, {"n": 5}, {"n": 6}]
    process = run_many(tasks, "--parallel", "2", "--retries", "3", "--", sys.executable, "-c", child, "{n}")
    until = time.monotonic() + 30
    while time.monotonic() < until and len(list(tmp_path.glob("ready-*"))) < 2:
        time.sleep(0.02)
    process.send_signal(number)
    code, out, said = finish(process)
    assert (1, "1 succeeded, 0 failed, 1 cancelled, 1 not started; 2 attempts") == (code, said)
    assert [("R/1/0", 0, "succeeded"), ("R/2/0", 0, "cancelled")] == ends(grpc_sink)
    assert 2 == out.count("bye")
    assert all(gone(int(line)) for line in out.split() if line != "bye")


def test_a_second_signal_kills(run_many: RunMany, grpc_sink: Sink, tmp_path: Path) -> None:
    """Also what does not listen to the first."""
    script = f"trap '' INT; touch {tmp_path}/ready; while true; do sleep 0.1; done"
    process = run_many([{}], "--", "sh", "-c", script)
    until = time.monotonic() + 30
    while time.monotonic() < until and not (tmp_path / "ready").exists():
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    time.sleep(0.3)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    assert (1, "", "0 succeeded, 0 failed, 1 cancelled; 1 attempts") == finish(process)


def test_a_run_that_was_killed_goes_on(run_many: RunMany, grpc_sink: Sink, tmp_path: Path) -> None:
    """What was done stays done, all else is attempted anew under a number of its own."""
    script = f"echo $0; [ $0 != b ] || [ -e {tmp_path}/again ] || {{ touch {tmp_path}/ready; sleep 60; }}"
    words = ("--parallel", "1", "--resume", str(tmp_path / "claims"), "--", "sh", "-c", script, "{task_id}")
    tasks = [{"id": "a"}, {"id": "b"}, {"id": "c"}]
    process = run_many(tasks, *words)
    until = time.monotonic() + 30
    while time.monotonic() < until and not (tmp_path / "ready").exists():
        time.sleep(0.02)
    process.kill()
    process.communicate()
    (tmp_path / "again").touch()
    assert (0, "b\nc\n", "2 succeeded, 0 failed; 2 attempts") == finish(run_many(tasks, *words))
    assert [("R/b/0", 1, "succeeded"), ("R/c/0", 0, "succeeded")] == [
        end for end in ends(grpc_sink) if end[0] != "R/a/0"
    ]
    assert (0, "", "0 succeeded, 0 failed; 0 attempts") == finish(run_many(tasks, *words))


def test_output_comes_in_one_piece(run_many: RunMany) -> None:
    """What several write at the same time is never mixed."""
    script = "for i in 1 2 3 4 5; do echo $0; echo $0 >&2; sleep 0.05; done"
    process = run_many([{"id": str(n)} for n in range(3)], "--parallel", "3", "--", "sh", "-c", script, "{task_id}")
    out, err = process.communicate(timeout=60)
    own = [line for line in err.splitlines() if not line.startswith("spanmill run: ")]
    for lines in (out.splitlines(), own):
        pieces = [lines[at : at + 5] for at in range(0, 15, 5)]
        assert [["0"] * 5, ["1"] * 5, ["2"] * 5] == sorted(pieces)


def test_clients_are_pointed_at_a_server(run_many: RunMany) -> None:
    """The rollout, percent-encoded, in the URL and the key of OpenAI and Anthropic clients; a key that is set stays."""
    names = ("OPENAI_BASE_URL", "ANTHROPIC_BASE_URL", "OPENAI_API_KEY", "ANTHROPIC_API_KEY")
    script = "; ".join(f"echo ${name}" for name in names)
    process = run_many(
        [{"id": "a/b"}], "--base-url", "http://host:1/v1", "--", "env", "ANTHROPIC_API_KEY=own", "sh", "-c", script
    )
    url, key = "http://host:1/rollout/R%2Fa%2Fb%2F0", "sk-rollout-R%2Fa%2Fb%2F0"
    assert [f"{url}/v1", url, key, "own"] == finish(process)[1].split()


def test_without_a_reader_the_rollouts_go_on(run_many: RunMany, grpc_sink: Sink) -> None:
    """`| head` ends the output, not the run."""
    process = run_many([{}], "--repeat", "3", "--parallel", "1", "--", "sh", "-c", "seq 100000")
    assert process.stdout is not None
    process.stdout.close()
    process.stdout = None
    _, err = process.communicate(timeout=60)
    assert (0, "3 succeeded, 0 failed; 3 attempts") == (process.returncode, ENDED.findall(err)[0].rpartition(": ")[2])
    assert 3 == len(ends(grpc_sink))


def test_without_any_reader_the_rollouts_go_on(run_many: RunMany, grpc_sink: Sink) -> None:
    """Not even for what is said on stderr."""
    ours, theirs = os.pipe()
    os.close(ours)
    process = run_many([{}], "--repeat", "3", "--", "sh", "-c", "seq 100000 >&2", stderr=theirs)
    os.close(theirs)
    process.communicate(timeout=60)
    assert (0, 3) == (process.returncode, len(ends(grpc_sink)))


def test_a_bar_on_a_terminal(run_many: RunMany) -> None:
    """It counts what has ended, and is gone at the end."""
    ours, theirs = pty.openpty()
    process = run_many([{}], "--repeat", "3", "--", "sh", "-c", "sleep 0.2", stderr=theirs)
    os.close(theirs)
    seen = b""
    while True:
        try:
            seen += os.read(ours, 65536)
        except OSError:  # the other end is closed
            break
    os.close(ours)
    process.communicate(timeout=60)
    assert (0, True) == (process.returncode, b"/3" in seen)
    assert seen.decode().rstrip().splitlines()[-1].endswith(" s")


def test_without_a_collector_they_run_the_same(run_many: RunMany) -> None:
    """One line at the end says what is lost."""
    process = run_many(
        [{}],
        "--",
        "echo",
        "out",
        endpoint="127.0.0.1:1",
        patch="import os; os.environ['SPANMILL_EXIT_TIMEOUT'] = '0.5'",
    )
    out, err = process.communicate(timeout=60)
    lost = "spanmill run: run R: starts or ends of rollouts could not be reported, no collector answers at 127.0.0.1:1"
    assert (0, "out\n", lost) == (process.returncode, out, err.splitlines()[-1])


@pytest.mark.parametrize(
    ("options", "code", "said"),
    [
        (["--repeat", "0"], 2, "--repeat: expected a number from 1, found 0"),
        (["--parallel", "0"], 2, "--parallel: expected a number from 1, found 0"),
        (["--retries", "-1"], 2, "--retries: expected a number from 0, found -1"),
        (["--timeout", "nan"], 2, "--timeout: expected seconds, more than 0, found nan"),
        (["--timeout", "-1"], 2, "--timeout: expected seconds, more than 0, found -1"),
        (["--base-url", "host:80"], 2, "base_url: expected a URL such as http://127.0.0.1:8000/v1, found 'host:80'"),
        (["--attempt", "1"], 2, "--attempt is of one rollout, not of --tasks, which have their own"),
        (["--group-id", "g"], 2, "--group-id is of one rollout, not of --tasks, which have their own"),
        (["--resume", "/dev/null/x"], 1, "Not a directory"),
    ],
)
def test_options_that_cannot_be(
    options: list[str], code: int, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line, and nothing is started."""
    file = tmp_path / "tasks.jsonl"
    file.write_text("{}\n")
    assert code == main(["run", "--tasks", str(file), *options, "--", "touch", str(tmp_path / "touched")])
    assert (True, False) == (said in capsys.readouterr().err, (tmp_path / "touched").exists())


@pytest.mark.parametrize("option", ["repeat", "parallel", "retries", "timeout", "resume"])
def test_options_of_many_need_tasks(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    """They would have no effect."""
    assert 2 == main(["run", f"--{option}", "1", "--", "true"])
    assert f"spanmill: --{option} needs --tasks FILE\n" == capsys.readouterr().err


def test_a_command_that_is_not_there(run_many: RunMany, grpc_sink: Sink) -> None:
    """127 and one line before anything starts; one that a task names fails for itself alone."""
    process = run_many([{}], "--", "no-such-command")
    assert (127, "spanmill run: no-such-command: there is no such command\n") == (
        process.wait(60),
        process.communicate()[1],
    )
    assert [] == grpc_sink.spans()
    code, _, said = finish(run_many([{"c": "true"}, {"c": "no-such-command"}], "--", "{c}"))
    assert (1, "1 succeeded, 1 failed; 2 attempts") == (code, said)


def test_many_short_ones(run_many: RunMany, grpc_sink: Sink) -> None:
    """Two hundred rollouts, each with one start and one end."""
    code, _, said = finish(run_many([{} for _ in range(50)], "--repeat", "4", "--parallel", "16", "--", "true"))
    assert (0, "200 succeeded, 0 failed; 200 attempts") == (code, said)
    told = Counter(span["attributes"]["spanmill.rollout.id"] for span in grpc_sink.spans())
    assert {f"R/{task}/{k}": 2 for task in range(1, 51) for k in range(4)} == told
