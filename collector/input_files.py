"""Files as inputs: opened and decompressed by their content; what is passed over in them is said once."""

import gzip
import io
import logging
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import Any, Final

import zstandard

from spanmill.storage import Location

_CHUNK: Final = 1 << 20
_ZSTD_PIECE: Final = 1 << 12
"""4 bytes of zstd make at most 128 KiB, so a piece makes at most 128 MiB."""
_MAGIC: Final = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd"}

_log = logging.getLogger(__name__)


_said = set[str]()
_listeners = list[list[str]]()


def warn_once(message: str) -> None:
    """Log what was passed over; `build` reads inputs twice, and once is enough to say it."""
    if _listeners:
        _listeners[-1].append(message)
    elif message not in _said:
        _said.add(message)
        _log.warning("%s", message)


@contextmanager
def listening() -> Generator[list[str]]:
    """What would be logged meanwhile, in a list instead: for a process whose log nobody reads."""
    heard = list[str]()
    _listeners.append(heard)
    try:
        yield heard
    finally:
        _listeners.pop()


def keep_quiet() -> None:
    """Log nothing in this process."""
    _log.disabled = True


def compression(head: bytes) -> str | None:
    """How the bytes that begin so are compressed: gzip, zstd or None."""
    return next((name for magic, name in _MAGIC.items() if head.startswith(magic)), None)


def open_unpacked(path: Location) -> io.BufferedReader:
    """The content of a file, decompressed while it is read if it is gzip or zstd.

    A file that ends within its compressed data is read as far as it goes, and that is logged. Reading raises OSError,
    zlib.error or ZstdError if the data is broken.
    """
    file = path.open("rb")
    match compression(file.peek(4)):
        case "gzip":
            return io.BufferedReader(_Chunks(file, _gunzip(file)), _CHUNK)
        case "zstd":
            return io.BufferedReader(_Chunks(file, _unzstd(file)), _CHUNK)
        case _:
            return file


def _gunzip(file: io.BufferedReader) -> Iterator[bytes]:
    reader = gzip.GzipFile(fileobj=file)
    try:
        while chunk := reader.read1(_CHUNK):
            yield chunk
    except EOFError:
        _warn_cut(file)


def _unzstd(file: io.BufferedReader) -> Iterator[bytes]:
    decoder = zstandard.ZstdDecompressor().decompressobj()
    while piece := file.read(_ZSTD_PIECE):
        while piece:
            if decoder.eof:
                decoder = zstandard.ZstdDecompressor().decompressobj()
            yield decoder.decompress(piece)
            piece = decoder.unused_data
    if not decoder.eof:
        _warn_cut(file)


def _warn_cut(file: io.BufferedReader) -> None:
    warn_once(f"{file.name} ends within its compressed data; what stands before that is read")


class _Chunks(io.RawIOBase):
    """What is decompressed from a file, as a file that closes the other one."""

    def __init__(self, file: io.BufferedReader, chunks: Iterator[bytes]) -> None:
        self._file = file
        self._chunks = filter(None, chunks)
        self._rest = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._rest or memoryview(next(self._chunks, b""))
        size = min(len(data), len(buffer))
        buffer[:size] = data[:size]
        self._rest = data[size:]
        return size

    def close(self) -> None:
        self._file.close()
        super().close()
