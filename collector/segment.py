"""A segment of the journal: how records stand in a file, and how they are found again.

    header    magic (8 bytes) | version u32 | crc32 of the former u32
    record    mark (4 bytes) | length u32 | kind u8 | received_ns u64 | body's crc32 u32 | crc32 of all that | body

Integers are little-endian, `length` is that of the body. The second checksum begins with the record's offset, so a
record that stands inside another one's body is never taken for one. After damage the next mark with a sound head is
the next record: a flipped byte costs one record, whatever it hit, and a search reads every byte once.
crc32 runs at 2 GB/s or more, above what the disk takes, and needs no dependency.
"""

import os
import struct
import zlib
from collections.abc import Iterator
from enum import IntEnum
from typing import Final, NamedTuple

from spanmill.errors import JournalError

_VERSION: Final = 1
_MAGIC: Final = b"SPMLJRNL"
_HEADER: Final = struct.Struct("<8sII")
_MARK: Final = b"\xd3SR\xf1"
_HEAD: Final = struct.Struct("<4sIBQI")
_SCAN_BYTES: Final = 1 << 20

HEADER_BYTES: Final = _HEADER.size
HEAD_BYTES: Final = _HEAD.size + 4
"""Of a record without its body."""
MAX_BODY_BYTES: Final = (1 << 32) - 1


class Kind(IntEnum):
    """What a record's body is."""

    TRACES_PROTO = 1
    TRACES_JSON = 2
    LOGS_PROTO = 3
    LOGS_JSON = 4
    REWARDS = 5
    """`collector.rewards.encode`."""
    FLUSH = 6
    """Empty: everything that is open is to be closed."""


_KINDS: Final = frozenset(Kind)


class Position(NamedTuple):
    """A place in the journal; positions order as the records do."""

    segment: int
    offset: int
    """In bytes from the start of the segment's file."""


class Entry(NamedTuple):
    """A record."""

    position: Position
    kind: Kind
    received_ns: int
    body: bytes
    end: Position
    """Where reading goes on after it."""


def size_of(fd: int) -> int:
    """In bytes."""
    return os.fstat(fd).st_size


def records(fd: int, position: Position, closed: bool, damage: dict[Position, int]) -> Iterator[Entry]:
    """The records of one segment from `position` on; `closed` says that no more will come."""
    number, offset = position
    if offset < HEADER_BYTES:
        if not closed and size_of(fd) < HEADER_BYTES:
            return
        if not _header_holds(fd):
            damage[Position(number, 0)] = min(size_of(fd), HEADER_BYTES)
        offset = HEADER_BYTES
    while offset < (size := size_of(fd)):
        here = Position(number, offset)
        entry = record_at(fd, here, size)
        if entry is None:
            found = _next_record(fd, here, size)
            if found is None:
                if closed:
                    damage[here] = size - offset
                return
            # One is written after the other, so this one is whole by now, if it was but on its way a moment ago.
            entry = record_at(fd, here, size)
            if entry is None:
                damage[here] = found.position.offset - offset
                entry = found
        yield entry
        offset = entry.end.offset


def _header_holds(fd: int) -> bool:
    found = os.pread(fd, HEADER_BYTES, 0)
    if len(found) < HEADER_BYTES:
        return False
    magic, version, checksum = _HEADER.unpack(found)
    if magic != _MAGIC or zlib.crc32(found[:-4]) != checksum:
        return False
    if version > _VERSION:
        raise JournalError(f"the journal has version {version}, this spanmill reads up to {_VERSION}: update spanmill")
    return True


def record_at(fd: int, position: Position, size: int) -> Entry | None:
    """The record at `position` of a file of `size` bytes, None if no whole and sound one stands there."""
    head = os.pread(fd, HEAD_BYTES, position.offset)
    if len(head) < HEAD_BYTES or _head_sum(position.offset, head[:-4]) != head[-4:]:
        return None
    mark, length, kind, received_ns, body_crc = _HEAD.unpack_from(head)
    start = position.offset + HEAD_BYTES
    if mark != _MARK or kind not in _KINDS or length > size - start:
        return None
    body = _pread(fd, length, start)
    if len(body) < length or zlib.crc32(body) != body_crc:
        return None
    return Entry(position, Kind(kind), received_ns, body, Position(position.segment, start + length))


def _pread(fd: int, length: int, offset: int) -> bytes:
    """Like os.pread, which may return less than asked for (at most 2 GiB) long before the end of the file."""
    body = os.pread(fd, length, offset)
    while len(body) < length and (more := os.pread(fd, length - len(body), offset + len(body))):
        body += more
    return body


def _next_record(fd: int, position: Position, size: int) -> Entry | None:
    """The first sound record behind `position`."""
    offset = position.offset + 1
    while offset < size:
        chunk = os.pread(fd, _SCAN_BYTES, offset)
        at = chunk.find(_MARK)
        while at >= 0:
            entry = record_at(fd, Position(position.segment, offset + at), size)
            if entry is not None:
                return entry
            at = chunk.find(_MARK, at + 1)
        if len(chunk) < _SCAN_BYTES:
            return None
        offset += len(chunk) - len(_MARK) + 1
    return None


def header() -> bytes:
    """What a segment begins with."""
    checked = _HEADER.pack(_MAGIC, _VERSION, 0)[:-4]
    return checked + zlib.crc32(checked).to_bytes(4, "little")


def head(offset: int, kind: Kind, received_ns: int, length: int, body_crc: int) -> bytes:
    """What stands before the body of the record at `offset`."""
    checked = _HEAD.pack(_MARK, length, kind, received_ns, body_crc)
    return checked + _head_sum(offset, checked)


def _head_sum(offset: int, checked: bytes) -> bytes:
    return zlib.crc32(checked, zlib.crc32(offset.to_bytes(8, "little"))).to_bytes(4, "little")
