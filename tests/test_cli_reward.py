import socket
import subprocess
import sys
import threading
from collections.abc import Generator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from dataset_rows import rollouts
from served import QUICK, SPANMILL, Served, wait_for

from spanmill.cli import main
from spanmill.instrument import posted
from spanmill.triplets.reader import read_quarantine


@pytest.fixture(autouse=True)
def no_endpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing from the environment of whoever runs the tests."""
    monkeypatch.delenv("SPANMILL_ENDPOINT", raising=False)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The dataset of the service; every test has rollouts of its own in it."""
    return tmp_path_factory.mktemp("reward") / "data"


@pytest.fixture(scope="module")
def served(dataset: Path) -> Generator[Served]:
    """A running service."""
    with Served(dataset, *QUICK) as service:
        yield service


def http_address(served: Served) -> str:
    """Where the service takes HTTP."""
    return served.ready.partition("http=")[2].split()[0]


def run_rollout(served: Served, rollout_id: str, attempt: int = 0) -> None:
    """A rollout that does nothing, by the command line."""
    options = ["--rollout-id", rollout_id, "--attempt", str(attempt), "--endpoint", served.address]
    subprocess.run([SPANMILL, "run", *options, "--", "true"], check=True)


def reward_until(address: str, said: str, *arguments: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Post the same reward again until the collector says this of it."""

    def post() -> bool:
        assert 0 == main(["reward", *arguments, "--endpoint", address])
        return said == capsys.readouterr().out

    wait_for(post)


def wait_for_row(dataset: Path, rollout_id: str, rewards: int = 0) -> Any:
    """(attempt, final reward, every reward) of a rollout, as soon as it is there with so many rewards."""

    def row() -> Any:
        if not any((dataset / "rollouts").glob("*.parquet")):
            return None
        found = rollouts(dataset, "rollout_id", "attempt", "reward", "rewards")
        own = [(*rest, [tuple(r.values()) for r in given]) for name, *rest, given in found if name == rollout_id]
        return next((one for one in own if len(one[-1]) >= rewards), None)

    return wait_for(row)


def test_a_reward_reaches_the_rollout(served: Served, dataset: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What is posted for a rollout that is there is stored, negative or not, and stands in its row."""
    run_rollout(served, "job/a")
    reward_until(http_address(served), "1 reward stored\n", "job/a", "-0.5", capsys=capsys)
    assert 0 == main(["reward", "job/a", "3", "--name", "speed", "--endpoint", f"http://{http_address(served)}/"])
    expected = (0, -0.5, [("", -0.5, None, "cli"), ("speed", 3.0, None, "cli")])
    assert expected == wait_for_row(dataset, "job/a", 2)


def test_a_reward_for_a_rollout_that_is_not_there_waits(
    served: Served, dataset: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is stored, the sender is told that it waits, and once the rollout comes it has the reward."""
    assert 0 == main(["reward", "job/b", "true", "--attempt", "2", "--endpoint", http_address(served)])
    expected = "1 reward stored; it waits for rollout job/b, which the collector has not seen yet\n"
    assert expected == capsys.readouterr().out
    run_rollout(served, "job/b", 2)
    assert (2, 1.0, [("", 1.0, None, "cli")]) == wait_for_row(dataset, "job/b")


@pytest.mark.parametrize("form", ["csv", "jsonl", "parquet"])
def test_a_table_of_rewards_is_posted(
    form: str, served: Served, dataset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Tables are those of `build --rewards`; what is no number is said, and kept in quarantine once it can be."""
    a, b = f"{form}/a", f"{form}/b"
    frame = pl.DataFrame({"rollout_id": [a, b, a], "value": [1.0, float("nan"), 0.5], "name": ["", None, "x"]})
    table = tmp_path / f"rewards.{form}"
    if form == "csv":
        frame.write_csv(table)
    elif form == "jsonl":
        table.write_text(f'{{"rollout_id": "{b}", "value": NaN}}\n' + frame[::2].write_ndjson())
    else:
        frame.write_parquet(table)
    assert 0 == main(["reward", "--from", str(table), "--endpoint", http_address(served)])
    said = capsys.readouterr()
    odd = "spanmill: 1 of the values is NaN or infinite and counts nowhere: quarantined as nonfinite_reward\n"
    names = f"{b}, {a}" if form == "jsonl" else f"{a}, {b}"
    waiting = f"3 rewards stored; those for {names} wait: the collector has not seen such rollouts yet\n"
    assert (odd, waiting) == (said.err, said.out)
    run_rollout(served, a)
    run_rollout(served, b)
    assert (0, 1.0, [("", 1.0, None, "cli"), ("x", 0.5, None, "cli")]) == wait_for_row(dataset, a)
    assert (0, None, []) == wait_for_row(dataset, b)
    assert ["nonfinite_reward"] == wait_for(lambda: reasons(dataset, b))


def reasons(dataset: Path, rollout_id: str) -> list[str]:
    """Why something of a rollout is in quarantine."""
    rows = read_quarantine(dataset).filter(pl.col("rollout_id") == rollout_id).select("reason").collect()
    return rows["reason"].to_list()


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["a", "nan"], 2, "VALUE is nan: a reward is a finite number; nothing was sent"),
        (["a", "-inf"], 2, "VALUE is -inf: a reward is a finite number; nothing was sent"),
        (["a", "good"], 2, "VALUE is 'good': expected a number, or true or false"),
        (["a"], 2, "ROLLOUT and VALUE are missing, or --from FILE in their place"),
        ([], 2, "ROLLOUT and VALUE are missing, or --from FILE in their place"),
        (["a", "1", "--from", "t.csv"], 2, "--from FILE has all that is to be said of its rewards"),
        (["--from", "none.csv"], 1, "none.csv cannot be read: No such file or directory"),
    ],
)
def test_wrong_usage_is_named(
    arguments: list[str],
    code: int,
    says: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One line says what was wrong, before anything is sent."""
    monkeypatch.chdir(tmp_path)
    assert code == main(["reward", *arguments, "--endpoint", "127.0.0.1:1"])
    out, err = capsys.readouterr()
    assert ("", 1, f"spanmill: {says}") == (out, err.count("\n"), err[: len(says) + 10])


def test_a_misspelt_option_is_no_value(capsys: pytest.CaptureFixture[str]) -> None:
    """Negative numbers are values, unknown options are not."""
    assert 2 == main(["reward", "a", "1", "--nmae", "x"])
    assert "--nmae" in capsys.readouterr().err


def test_no_collector_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    """Where nobody listens the command ends with 1 and says where it looked."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    assert 1 == main(["reward", "a", "1", "--endpoint", f"127.0.0.1:{port}"])
    expected = f"spanmill: no collector answers at http://127.0.0.1:{port}/v1/rewards: Connection refused\n"
    assert ("", expected) == capsys.readouterr()


def test_a_collector_that_does_not_answer(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """One that takes the request and hangs costs a bounded wait."""
    monkeypatch.setattr(posted, "TIMEOUT_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        assert 1 == main(["reward", "a", "1", "--endpoint", f"127.0.0.1:{port}"])
    expected = f"spanmill: the collector at http://127.0.0.1:{port}/v1/rewards does not answer within 0.2 s\n"
    assert ("", expected) == capsys.readouterr()


@contextmanager
def answering(status: int, body: bytes) -> Generator[str]:
    """A server that answers every request so; its address."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            """Keep the test's output clean."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    yield f"127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.mark.parametrize(
    ("status", "body", "says"),
    [
        (503, b'{"code": 14, "message": "the disk is full"}', "refuses the rewards: 503 the disk is full"),
        (404, b"nothing here", "refuses the rewards: 404 Not Found"),
        (200, b"<html>", "is no HTTP address of a collector"),
        (200, b"[]", "is no HTTP address of a collector"),
    ],
)
def test_what_a_server_says_is_passed_on(
    status: int, body: bytes, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A refusal has the collector's own words; a server that is no collector is said to be none."""
    with answering(status, body) as address:
        assert 1 == main(["reward", "a", "1", "--endpoint", address])
    out, err = capsys.readouterr()
    assert ("", 1, True) == (out, err.count("\n"), says in err)


def test_grpc_port_is_told_from_http(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    """The collector's other port is no place for rewards, and the message says which is."""
    assert 1 == main(["reward", "a", "1", "--endpoint", served.address])
    assert "is no HTTP address of a collector; `spanmill serve` prints it as http=\n" in capsys.readouterr().err


def test_an_index_that_cannot_be_read_says_nothing_of_waiting() -> None:
    """What the collector does not tell is not made up."""
    with answering(200, b'{"accepted": 1}') as address:
        result = posted.post_rewards([{"rollout_id": "a", "value": 1}], address)
    assert ((1, None), "1 reward stored") == (result, posted.said(result))


def test_many_waiting_rollouts_are_counted() -> None:
    """Of many names the first are said and the rest counted; control characters do not reach the terminal."""
    names = ("a\x1b", *"bcdefg")
    expected = (
        "9 rewards stored; those for 'a\\x1b', b, c, d, e and 2 more wait: the collector has not seen such rollouts yet"
    )
    assert expected == posted.said(posted.Posted(9, names))


def test_base_install_can_post() -> None:
    """Posting one reward needs none of the collector's libraries."""
    missing = "sys.modules.update(dict.fromkeys(('polars', 'pyarrow', 'numpy', 'google', 'grpc'), None))"
    command = "main(['reward', 'a', '1', '--endpoint', '127.0.0.1:1'])"
    program = f"import sys; {missing}; from spanmill.cli import main; sys.exit({command})"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (1, True) == (done.returncode, "no collector answers" in done.stderr)
