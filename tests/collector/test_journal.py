import errno
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from zlib import crc32

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spanmill.collector.journal import (
    Entry,
    JournalWriter,
    Kind,
    Position,
    read,
    read_at,
    segment_path,
    segments,
)
from spanmill.collector.segment import HEAD_BYTES, HEADER_BYTES
from spanmill.errors import JournalError


def written(directory: Path, bodies: Iterable[bytes], segment_bytes: int = 1 << 20) -> list[Position]:
    """Positions of `bodies`, appended by one writer."""
    with JournalWriter(directory, segment_bytes=segment_bytes) as journal:
        return [journal.append(Kind.TRACES_PROTO, body, number) for number, body in enumerate(bodies)]


def bodies(entries: Iterable[Entry]) -> list[bytes]:
    """What the entries hold."""
    return [entry.body for entry in entries]


def test_what_was_appended_is_read_back_in_order(tmp_path: Path) -> None:
    """Every field of a record comes back, and `end` is where the next one begins."""
    with JournalWriter(tmp_path) as journal:
        first = journal.append(Kind.TRACES_PROTO, b"spans", 5)
        second = journal.append(Kind.FLUSH, b"", 2**63)

    assert list(read(tmp_path)) == [
        Entry(first, Kind.TRACES_PROTO, 5, b"spans", second),
        Entry(second, Kind.FLUSH, 2**63, b"", Position(1, second.offset + HEAD_BYTES)),
    ]
    assert first == Position(1, HEADER_BYTES)


def test_reading_goes_on_where_it_stopped(tmp_path: Path) -> None:
    """A reader that tails gets each record once, also from segments that were begun meanwhile."""
    seen: list[bytes] = []
    after: Position | None = None
    for start in range(3):
        with JournalWriter(tmp_path, segment_bytes=100) as journal:
            for number in range(5):
                journal.append(Kind.LOGS_PROTO, b"%d.%d" % (start, number), 0)
                for entry in read(tmp_path, after):
                    seen.append(entry.body)
                    after = entry.end

    assert seen == [b"%d.%d" % (start, number) for start in range(3) for number in range(5)]
    assert list(read(tmp_path, after)) == []


def test_each_start_begins_a_segment(tmp_path: Path) -> None:
    """Nothing is written behind what a former writer left."""
    assert written(tmp_path, [b"a"]) + written(tmp_path, [b"b"]) == [
        Position(1, HEADER_BYTES),
        Position(2, HEADER_BYTES),
    ]
    assert segments(tmp_path) == [1, 2]


def test_a_segment_keeps_its_size(tmp_path: Path) -> None:
    """A segment is left when the next record does not fit; a record larger than a segment gets one of its own."""
    written(tmp_path, [bytes(40), bytes(40), bytes(40), bytes(500), bytes(40)], segment_bytes=200)

    sizes = [segment_path(tmp_path, number).stat().st_size for number in segments(tmp_path)]
    assert sizes == [HEADER_BYTES + n * HEAD_BYTES + size for n, size in ((2, 80), (1, 40), (1, 500), (1, 40))]


def test_a_record_is_found_by_its_position(tmp_path: Path) -> None:
    """`read_at` gives the same entry as `read`."""
    written(tmp_path, [b"a", b"b" * 1000, b""], segment_bytes=500)

    entries = list(read(tmp_path))
    assert [read_at(tmp_path, entry.position) for entry in entries] == entries


@pytest.mark.parametrize("position", [Position(1, HEADER_BYTES + 1), Position(1, 10_000), Position(7, HEADER_BYTES)])
def test_a_position_without_record_is_an_error(tmp_path: Path, position: Position) -> None:
    """Neither a wrong offset nor a missing segment gives a record."""
    written(tmp_path, [b"a"])

    with pytest.raises(JournalError, match=f"{position.segment:08}.journal"):
        read_at(tmp_path, position)


def test_many_threads_share_a_journal(tmp_path: Path) -> None:
    """Each append gets the position of its own record, whatever was committed with it."""
    sent = [b"%d" % number * (number % 7) for number in range(400)]
    with JournalWriter(tmp_path, segment_bytes=2000) as journal, ThreadPoolExecutor(16) as pool:
        waiting = [pool.submit(journal.append, Kind.TRACES_JSON, body, 1) for body in sent]
        positions = [done.result() for done in waiting]

    assert [read_at(tmp_path, position).body for position in positions] == sent
    assert sorted(positions) == [entry.position for entry in read(tmp_path)]


def test_nothing_is_acknowledged_before_it_is_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An append is done only after the sync that covers its bytes; those that come meanwhile share the next one."""
    gate = threading.Semaphore(0)
    sizes: list[int] = []

    def wait(fd: int) -> None:
        sizes.append(os.fstat(fd).st_size)
        gate.acquire()

    with JournalWriter(tmp_path) as journal:
        monkeypatch.setattr("spanmill.collector.journal._sync", wait)
        first = journal.append_async(Kind.FLUSH, b"", 0)
        while not sizes:
            time.sleep(0.001)
        others = [journal.append_async(Kind.FLUSH, b"", 0) for _ in range(10)]
        assert not first.done()
        gate.release()
        first.result()
        assert not any(other.done() for other in others)
        gate.release()
        last = max(other.result() for other in others)

    assert sizes == [HEADER_BYTES + HEAD_BYTES, last.offset + HEAD_BYTES]


def test_a_sender_that_gives_up_harms_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What nobody waits for any more is written all the same, and those behind it are told of theirs."""
    gate = threading.Event()

    def wait(fd: int) -> None:
        gate.wait()

    with JournalWriter(tmp_path) as journal:
        monkeypatch.setattr("spanmill.collector.journal._sync", wait)
        first = journal.append_async(Kind.FLUSH, b"first", 0)
        second = journal.append_async(Kind.FLUSH, b"second", 0)
        third = journal.append_async(Kind.FLUSH, b"third", 0)
        assert second.cancel()
        gate.set()
        assert third.result() > first.result()

    assert bodies(read(tmp_path)) == [b"first", b"second", b"third"]


def lost(kept: Sequence[bytes], all_bodies: Sequence[bytes]) -> int:
    """How many of `all_bodies` are missing; fails if `kept` is no subsequence of them."""
    rest = iter(all_bodies)
    assert all(body in rest for body in kept), "a body that was never written, or out of order"
    return len(all_bodies) - len(kept)


some_bodies = st.lists(st.binary(max_size=60) | st.just(b"\xd3SR\xf1" * 8), min_size=1, max_size=6)


@settings(max_examples=60)
@given(some_bodies, st.data())
def test_a_flipped_byte_costs_one_record(sent: list[bytes], data: st.DataObject) -> None:
    """Any corrupt byte loses at most the record it hits, never changes a body, and is counted."""
    with TemporaryDirectory() as folder:
        directory = Path(folder)
        written(directory, sent)
        whole = segment_path(directory, 1).read_bytes()
        at = data.draw(st.integers(0, len(whole) - 1))
        flip = data.draw(st.integers(1, 255))
        segment_path(directory, 1).write_bytes(whole[:at] + bytes([whole[at] ^ flip]) + whole[at + 1 :])
        written(directory, [b"later"])

        damage: dict[Position, int] = {}
        kept = bodies(read(directory, damage=damage))
        again = bodies(read(directory, damage=damage))

    assert (lost(kept, [*sent, b"later"]), len(damage)) == ((0, 1) if at < HEADER_BYTES else (1, 1))
    assert again == kept
    assert kept[-1] == b"later"


@settings(max_examples=60)
@given(some_bodies, st.data())
def test_a_cut_tail_costs_what_was_cut(sent: list[bytes], data: st.DataObject) -> None:
    """Any truncation keeps every record that is whole; the torn one counts once the segment has a successor."""
    with TemporaryDirectory() as folder:
        directory = Path(folder)
        written(directory, sent)
        ends = [entry.end.offset for entry in read(directory)]
        cut = data.draw(st.integers(0, ends[-1]))
        os.truncate(segment_path(directory, 1), cut)
        whole = sum(end <= cut for end in ends)
        damage: dict[Position, int] = {}
        assert bodies(read(directory, damage=damage)) == sent[:whole]
        assert damage == {}
        written(directory, [b"later"])

        assert bodies(read(directory, damage=damage)) == [*sent[:whole], b"later"]
        torn = cut - max([0, HEADER_BYTES * (cut >= HEADER_BYTES), *(end for end in ends if end <= cut)])
    assert sum(damage.values()) == torn


def test_every_byte_of_a_journal_may_fail(tmp_path: Path) -> None:
    """Also where a body holds a whole journal of its own: what stands inside a body is never taken for a record."""
    written(tmp_path / "inner", [b"inner"])
    sent = [b"one", segment_path(tmp_path / "inner", 1).read_bytes() * 3, b"three"]
    written(tmp_path / "outer", sent)
    path = segment_path(tmp_path / "outer", 1)
    whole = path.read_bytes()
    spans = [(entry.position.offset, entry.end.offset) for entry in read(tmp_path / "outer")]
    for at in range(len(whole)):
        for flip in (0x01, 0xFF):
            path.write_bytes(whole[:at] + bytes([whole[at] ^ flip]) + whole[at + 1 :])
            expected = [body for body, (start, end) in zip(sent, spans, strict=True) if not start <= at < end]
            assert bodies(read(tmp_path / "outer", complete=True)) == expected


def test_the_end_of_the_newest_segment_is_waited_for(tmp_path: Path) -> None:
    """A half-written record is neither yielded nor damage while it may be on its way; once whole it is read."""
    written(tmp_path, [b"a", b"b" * 100])
    path = segment_path(tmp_path, 1)
    whole = path.read_bytes()
    damage: dict[Position, int] = {}
    second = next(read(tmp_path)).end
    for cut in range(second.offset, len(whole)):
        path.write_bytes(whole[:cut])
        assert list(read(tmp_path, second, damage=damage)) == []
    path.write_bytes(whole)

    assert bodies(read(tmp_path, second, damage=damage)) == [b"b" * 100]
    assert damage == {}


def test_a_finished_journal_counts_its_torn_end(tmp_path: Path) -> None:
    """With no writer at work what is broken at the end of the newest segment is damage."""
    written(tmp_path, [b"a", b"b" * 100])
    second = next(read(tmp_path)).end
    os.truncate(segment_path(tmp_path, 1), second.offset + 50)

    damage: dict[Position, int] = {}
    assert bodies(read(tmp_path, complete=True, damage=damage)) == [b"a"]
    assert damage == {second: 50}


def test_a_newer_journal_is_refused(tmp_path: Path) -> None:
    """A version this spanmill does not know is an error that says so, not damage."""
    written(tmp_path, [b"a"])
    path = segment_path(tmp_path, 1)
    newer = b"SPMLJRNL" + (2).to_bytes(4, "little")
    path.write_bytes(newer + crc32(newer).to_bytes(4, "little") + path.read_bytes()[HEADER_BYTES:])

    with pytest.raises(JournalError, match="has version 2, this spanmill reads up to 1"):
        list(read(tmp_path))


def test_segments_may_be_removed(tmp_path: Path) -> None:
    """A reader whose segment is gone goes on with the next, and a new writer with the next number."""
    written(tmp_path, [b"a"])
    written(tmp_path, [b"b"])
    segment_path(tmp_path, 1).unlink()

    assert bodies(read(tmp_path, Position(1, HEADER_BYTES))) == [b"b"]
    assert written(tmp_path, [b"c"]) == [Position(3, HEADER_BYTES)]


def test_one_writer_at_a_time(tmp_path: Path) -> None:
    """A second writer is refused with the first one's process id; after the first is closed it may write."""
    with JournalWriter(tmp_path), pytest.raises(JournalError, match=rf"another spanmill \(process {os.getpid()}\)"):
        JournalWriter(tmp_path)
    JournalWriter(tmp_path).close()


def test_a_closed_journal_takes_nothing(tmp_path: Path) -> None:
    """An append after close fails, it does not wait for ever."""
    journal = JournalWriter(tmp_path)
    journal.close()

    with pytest.raises(JournalError, match="is closed"):
        journal.append(Kind.FLUSH, b"", 0)


def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    """The start fails, with the folder and the cause."""
    (tmp_path / "file").touch()

    with pytest.raises(JournalError, match="file/journal cannot be written: Not a directory"):
        JournalWriter(tmp_path / "file" / "journal")


class Disk:
    """os.writev of a disk with little room."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, room: int) -> None:
        self.room = room
        self._writev = os.writev
        monkeypatch.setattr(os, "writev", self.writev)

    def writev(self, fd: int, buffers: Iterable[bytes]) -> int:
        """Writes what there is room for, as the system does; ENOSPC when there is none."""
        if self.room == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written = self._writev(fd, [b"".join(buffers)[: self.room]])
        self.room -= written
        return written


def test_a_full_disk_refuses_and_recovers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Appends fail while there is no room, leave nothing torn behind, and succeed again with room."""
    with JournalWriter(tmp_path) as journal:
        first = journal.append(Kind.FLUSH, b"first", 0)
        disk = Disk(monkeypatch, room=HEAD_BYTES + 50)
        for _ in range(3):
            with pytest.raises(JournalError, match="No space left on device"):
                journal.append(Kind.FLUSH, bytes(100), 0)
        disk.room = 10_000
        second = journal.append(Kind.FLUSH, b"second", 0)

    damage: dict[Position, int] = {}
    entries = list(read(tmp_path, complete=True, damage=damage))
    assert [(entry.position, entry.body) for entry in entries] == [(first, b"first"), (second, b"second")]
    assert (damage, segments(tmp_path)) == ({}, [1])


def test_no_room_for_a_new_segment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A segment whose header finds no room leaves no file behind."""
    with JournalWriter(tmp_path, segment_bytes=100) as journal:
        journal.append(Kind.FLUSH, bytes(60), 0)
        disk = Disk(monkeypatch, room=5)
        with pytest.raises(JournalError, match="No space left on device"):
            journal.append(Kind.FLUSH, bytes(60), 0)
        assert segments(tmp_path) == [1]
        disk.room = 10_000
        journal.append(Kind.FLUSH, b"second", 0)

    assert bodies(read(tmp_path)) == [bytes(60), b"second"]


def test_a_failed_sync_leaves_the_segment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a failed sync left on the disk cannot be known: nothing is acknowledged, the next append starts anew."""
    with JournalWriter(tmp_path) as journal:
        with monkeypatch.context() as patch:

            def fail(fd: int) -> None:
                raise OSError(errno.EIO, os.strerror(errno.EIO))

            patch.setattr("spanmill.collector.journal._sync", fail)
            with pytest.raises(JournalError, match="Input/output error"):
                journal.append(Kind.FLUSH, b"first", 0)
        assert journal.append(Kind.FLUSH, b"second", 0) == Position(2, HEADER_BYTES)


def test_an_unforeseen_error_reaches_who_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever goes wrong in the writer's thread, nobody waits for ever."""
    with JournalWriter(tmp_path) as journal:
        with monkeypatch.context() as patch:

            def fail(fd: int, buffers: object) -> int:
                raise MemoryError

            patch.setattr(os, "writev", fail)
            with pytest.raises(JournalError, match="MemoryError"):
                journal.append(Kind.FLUSH, b"first", 0)
        journal.append(Kind.FLUSH, b"second", 0)

    assert bodies(read(tmp_path)) == [b"second"]


APPEND_FOR_EVER = """
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from spanmill.collector.journal import JournalWriter, Kind

journal = JournalWriter(Path(sys.argv[1]), segment_bytes=1 << 16)

def work(worker):
    for number in range(10**9):
        body = b"%d.%d." % (worker, number) * (number % 300)
        position = journal.append(Kind.TRACES_PROTO, body, number)
        sys.stdout.write(f"{position.segment} {position.offset} {worker} {number}\\n")
        sys.stdout.flush()

with ThreadPoolExecutor(4) as pool:
    list(pool.map(work, range(4)))
"""


def test_killed_at_any_moment(tmp_path: Path) -> None:
    """Everything acknowledged before a SIGKILL is read back, and no reader that tails meanwhile saw anything else."""
    seen: dict[Position, bytes] = {}
    acknowledged: list[str] = []
    for delay in (0.05, 0.1, 0.2):
        child = subprocess.Popen(
            [sys.executable, "-c", APPEND_FOR_EVER, str(tmp_path)], stdout=subprocess.PIPE, text=True
        )
        assert child.stdout is not None
        lines = [child.stdout.readline()]
        after = max((Position(position.segment, position.offset) for position in seen), default=None)
        deadline = time.monotonic() + delay
        while time.monotonic() < deadline:
            for entry in read(tmp_path, after):
                seen[entry.position] = entry.body
                after = entry.end
        child.send_signal(signal.SIGKILL)
        lines += child.stdout.readlines()
        child.stdout.close()
        child.wait()
        acknowledged += [line for line in lines if line.endswith("\n")]

    assert len(acknowledged) >= 3
    written(tmp_path, [b"later"])
    kept = {entry.position: entry.body for entry in read(tmp_path)}
    for line in acknowledged:
        segment, offset, worker, number = map(int, line.split())
        assert kept[Position(segment, offset)] == b"%d.%d." % (worker, number) * (number % 300)
    assert {position: kept[position] for position in seen} == seen


def test_a_segment_grows_no_older(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A record that comes 6 hours after a segment was begun begins a new one, so that what is old can be removed."""
    now = [1000.0]
    monkeypatch.setattr("spanmill.collector.journal.time.monotonic", lambda: now[0])
    with JournalWriter(tmp_path) as journal:
        for seconds in (0, 6 * 3600, 1, 6 * 3600):
            now[0] += seconds
            journal.append(Kind.FLUSH, b"", 1)
    assert [1, 1, 2, 2] == [entry.position.segment for entry in read(tmp_path)]
