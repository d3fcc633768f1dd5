from collections.abc import Iterator
from pathlib import Path

import pytest
from served import FREE

from spanmill.collector.config import ServeConfig
from spanmill.collector.journal import JournalWriter
from spanmill.collector.receive import Receiver, start_receiver


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[JournalWriter]:
    """An open journal in the folder `journal`."""
    with JournalWriter(tmp_path / "journal") as journal:
        yield journal


@pytest.fixture
def receiver(tmp_path: Path, journal: JournalWriter) -> Iterator[Receiver]:
    """A receiver with the default limits."""
    receiver = start_receiver(ServeConfig(out=tmp_path, grpc=FREE, http=FREE), journal)
    yield receiver
    receiver.stop(5)


@pytest.fixture
def small_receiver(tmp_path: Path, journal: JournalWriter) -> Iterator[Receiver]:
    """A receiver that takes 1 MiB a request, and 1 MiB at a time."""
    config = ServeConfig(out=tmp_path, grpc=FREE, http=FREE, max_message_mib=1, max_inflight_mib=1)
    receiver = start_receiver(config, journal)
    yield receiver
    receiver.stop(5)
