import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest
from dataset_rows import rollouts
from served import wait_for

PAGE = Path(__file__).parent.parent / "docs" / "quickstart.md"
PRINTS = "It prints"
SAVED = re.compile(r"Save this as `([\w.]+)`:$")


class Block(NamedTuple):
    """A code block of the page, and the last line of text before it."""

    language: str
    code: str
    before: str


def blocks() -> Iterator[Block]:
    """The code blocks of the page, in order."""
    before, language, code = "", None, list[str]()
    for line in PAGE.read_text().splitlines():
        if line.startswith("```") and language is None:
            language = line[3:]
        elif line == "```" and language is not None:
            yield Block(language, "\n".join(code) + "\n", before)
            before, language, code = "", None, []
        elif language is not None:
            code.append(line)
        elif line:
            before = line


def environment() -> dict[str, str]:
    """What a reader's shell has, but for the ports: free ones in place of 4317 and 4318."""
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as other:
        grpc, http = (f"127.0.0.1:{s.getsockname()[1]}" for s in (one, other))
    ours = ("SPANMILL_", "OTEL_", "TRACEPARENT", "TRACESTATE", "BAGGAGE")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    return kept | {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "SPANMILL_GRPC": grpc,
        "SPANMILL_HTTP": http,
        "SPANMILL_ENDPOINT": f"http://{http}",
        "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf",
    }


@contextmanager
def in_a_terminal_of_its_own(command: str, folder: Path, env: dict[str, str]) -> Generator[None]:
    """The service, from when it is ready to Ctrl-C."""
    process = subprocess.Popen(command.split(), cwd=folder, env=env, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        assert "spanmill ready" in process.stdout.readline()
        yield
        process.send_signal(signal.SIGINT)
        assert 0 == process.wait(60)
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def run(arguments: list[str], folder: Path, env: dict[str, str]) -> str:
    """What a program prints; it must succeed and have nothing to complain of."""
    done = subprocess.run(arguments, cwd=folder, env=env, capture_output=True, text=True, timeout=120)
    assert (0, "") == (done.returncode, done.stderr)
    return done.stdout


@pytest.mark.slow
def test_quick_start_runs_as_written(tmp_path: Path) -> None:
    """Every command and program of the page works, in its order, and prints what the page says."""
    env = environment()
    service, *steps = [block for block in blocks() if not block.code.startswith("pip install")]
    assert ("sh", True) == (service.language, service.code.startswith("spanmill serve "))
    printed, told = "", list[str]()
    with in_a_terminal_of_its_own(service.code, tmp_path, env):
        for block in steps:
            saved = SAVED.search(block.before)
            if saved:
                (tmp_path / saved[1]).write_text(block.code)
            elif block.language == "text":
                assert (PRINTS, block.code) == (block.before, printed)
                told.append(block.code)
            elif block.language == "python":
                printed = run([sys.executable, "-c", block.code], tmp_path, env)
            else:
                if "spanmill show" in block.code:
                    rewarded = wait_for(lambda: [r for r in rows(tmp_path) if r[1] is not None][1:], 60)
                    assert [("sums/2", 0.5)] == rewarded
                printed = run(["bash", "-e", "-c", block.code], tmp_path, env)
                told.append(printed)
    agents, rewards, shown = (told[n] for n in range(3))
    assert ("ten\nten\n", 2) == (agents, rewards.count("1 reward stored"))
    assert ["sums/1", "rollout sums/1", "conserved"] == [
        w for w in ("sums/1", "rollout sums/1", "conserved") if w in shown
    ]
    assert 5 == len(told)


def rows(folder: Path) -> list[tuple[str, float | None]]:
    """(rollout, final reward) so far."""
    data = folder / "data"
    found = rollouts(data, "rollout_id", "reward") if any((data / "rollouts").glob("*.parquet")) else []
    return [(row[0], row[1]) for row in found]
