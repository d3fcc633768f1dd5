import os
import re
import signal
import socket
from pathlib import Path

import httpx
import pytest
from dataset_rows import newest_rows, rollouts
from made_spans import make_call, make_request, make_rollout
from served import QUICK, Served, alive, wait_for

from spanmill.collector.build import build
from spanmill.collector.config import BuildConfig, ServeConfig
from spanmill.collector.config_values import Address
from spanmill.collector.service import serve
from spanmill.errors import DatasetError, JournalError, ListenError
from spanmill.triplets.writer import DatasetWriter

FREE = Address("127.0.0.1", 0)
HOST = r"127\.0\.0\.1:\d+"


def written(out: Path) -> list[str]:
    """The rollouts that are in the dataset."""
    return [name for (name,) in rollouts(out, "rollout_id")]


def test_it_says_when_it_is_ready_and_drains(tmp_path: Path) -> None:
    """One line with the addresses; on SIGTERM it writes what was received, all of it if so asked, and exits 0."""
    out = tmp_path / "out"
    with Served(out, "--flush-on-exit") as service:
        assert re.fullmatch(rf"spanmill ready grpc={HOST} http={HOST} out={out}\n", service.ready)
        service.send(make_request(*make_rollout("r"), make_call("t", "open")))
        assert 0 == service.stop()
        assert service.process.stdout
        assert "" == service.process.stdout.read()
    assert ["end", "flush"] == sorted(closed_by for (closed_by,) in rollouts(out, "closed_by"))
    assert "" == service.errors.read_text()
    build([out / ".journal"], BuildConfig(out=tmp_path / "built"))
    assert newest_rows(tmp_path / "built") == newest_rows(out)


def test_what_is_open_stays_open_over_a_restart(tmp_path: Path) -> None:
    """Without --flush-on-exit a rollout that has not ended is not written; the next start goes on with it."""
    out = tmp_path / "out"
    spans = make_rollout("r")
    with Served(out, *QUICK) as service:
        service.send(make_request(*spans[:-1]))
        assert 0 == service.stop()
    assert [] == written(out)
    with Served(out, *QUICK) as service:
        service.send(make_request(spans[-1]))
        assert ["r"] == wait_for(lambda: written(out))
        assert 0 == service.stop()
    assert [(0, 2)] == rollouts(out, "revision", "num_calls")


@pytest.mark.slow
def test_the_journal_is_kept_within_its_limit(tmp_path: Path) -> None:
    """What is written goes while the service runs; its rows stay, and a reward still finds them."""
    out = tmp_path / "out"
    first = out / ".journal" / "00000001.journal"
    with Served(out, *QUICK) as service:
        service.send(make_request(*make_rollout("a")))
        assert ["a"] == wait_for(lambda: written(out))
        assert 0 == service.stop()
    with Served(out, *QUICK, "--journal-max-gib", "0.0000013") as service:
        service.send(make_request(*make_rollout("b")))
        wait_for(lambda: not first.exists())
        reward = {"rollout_id": "a", "value": 0.5}
        answer = httpx.post(f"http://{service.http_address}/v1/rewards", json=reward).json()
        assert {"accepted": 1, "waiting": []} == answer
        wait_for(lambda: [("a", 0.5), ("b", None)] == rollouts(out, "rollout_id", "reward"))
        assert 0 == service.stop()
    assert "" == service.errors.read_text()


def test_a_dead_indexer_is_started_again(tmp_path: Path) -> None:
    """The service goes on receiving when its indexer dies, says so in one line, and the rows come all the same."""
    out = tmp_path / "out"
    with Served(out, *QUICK) as service:
        os.kill(service.indexer(), signal.SIGKILL)
        service.send(make_request(*make_rollout("r")))
        assert ["r"] == wait_for(lambda: written(out))
        assert 0 == service.stop()
    said = service.errors.read_text()
    assert "spanmill: the indexer has died (exit code -9); it starts again in 0.5 s; the journal goes on\n" == said


def test_an_indexer_goes_when_its_service_is_gone(tmp_path: Path) -> None:
    """After kill -9 of the service the indexer ends by itself, and a new service can start at once."""
    out = tmp_path / "out"
    with Served(out, *QUICK) as service:
        service.send(make_request(*make_rollout("r")))
        indexer = service.indexer()
        service.kill()
    with Served(out, *QUICK) as service:
        assert not alive(indexer)
        assert ["r"] == wait_for(lambda: written(out))
        assert 0 == service.stop()


def test_signals_to_the_whole_group_are_no_crash(tmp_path: Path) -> None:
    """Ctrl-C reaches the indexer too: it leaves the draining to the service."""
    out = tmp_path / "out"
    with Served(out, "--flush-on-exit") as service:
        service.send(make_request(make_call("t", "open")))
        for process in (service.indexer(), service.process.pid):
            os.kill(process, signal.SIGINT)
        assert 0 == service.process.wait(60)
    assert 1 == len(written(out))
    assert "" == service.errors.read_text()


def config(out: Path, journal: Path | None = None, http: Address = FREE) -> ServeConfig:
    """A service on free ports."""
    return ServeConfig(out=out, journal=journal, grpc=FREE, http=http)


def test_a_journal_has_one_service(tmp_path: Path) -> None:
    """A second service on a journal does not start, and says which process writes it."""
    with Served(tmp_path / "out") as service, pytest.raises(JournalError) as caught:
        serve(config(tmp_path / "out"))
    expected = f"journal {tmp_path}/out/.journal is written by another spanmill (process {service.process.pid})"
    assert expected == str(caught.value)


def test_a_dataset_has_one_service(tmp_path: Path) -> None:
    """A second service on a dataset, with a journal of its own, does not start."""
    with DatasetWriter(tmp_path / "out"), pytest.raises(DatasetError, match=r"another spanmill is writing to .*/out"):
        serve(config(tmp_path / "out", journal=tmp_path / "journal"))


def test_a_folder_that_is_none_is_named(tmp_path: Path) -> None:
    """A file in the place of journal or dataset stops the start."""
    (tmp_path / "file").write_text("")
    with pytest.raises(JournalError, match=r"journal .*/file/\.journal cannot be written"):
        serve(config(tmp_path / "file"))
    with pytest.raises(DatasetError, match=r"cannot make the dataset .*/file"):
        serve(config(tmp_path / "file", journal=tmp_path / "journal"))


def test_a_taken_port_is_named(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """An address that another process listens on stops the start, and no indexer stays behind."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = Address("127.0.0.1", taken.getsockname()[1])
        with pytest.raises(ListenError, match=rf"^--http {address} cannot be listened on: "):
            serve(config(tmp_path / "out", http=address))
    DatasetWriter(tmp_path / "out").close()
    assert ("", "") == capfd.readouterr()
