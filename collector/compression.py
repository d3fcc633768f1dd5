"""Decompression that is bounded while it runs: a small body that grows without end costs no more than its limit."""

import zlib
from collections.abc import Iterator
from typing import Final

import zstandard

from spanmill.errors import DecodeError

ENCODINGS: Final = ("gzip", "x-gzip", "deflate", "zstd")
"""Values of Content-Encoding that `inflate` takes."""

_CHUNK: Final = 1 << 20
_PIECE: Final = 1 << 18
_ZSTD_PIECE: Final = 1 << 10
"""zstd's decoder takes no limit, but 4 bytes make at most a block of 128 KiB: so a piece makes at most 32 MiB."""
_GZIP: Final = 31
_ZLIB: Final = 15
"""wbits of the two formats."""


def inflate(encoding: str, body: bytes) -> Iterator[bytes]:
    """What `body` decompresses to, in chunks; the caller stops when it is too much.

    Several gzip members or zstd frames in a row are one. Raises DecodeError if the body is cut short or no such stream.
    """
    try:
        yield from _zstd(body) if encoding == "zstd" else _zlib(body, _ZLIB if encoding == "deflate" else _GZIP)
    except (zlib.error, zstandard.ZstdError) as error:
        raise DecodeError(f"the body is not what Content-Encoding {encoding} says: {error}") from error


def grpc_encoding(body: bytes) -> str | None:
    """How a gRPC message that was not decompressed is compressed, None if it is not.

    No OTLP request begins like gzip (in protobuf 1f is a field of a type that does not exist) or like zlib (78 would be
    field 15).
    """
    if body.startswith(b"\x1f\x8b"):
        return "gzip"
    if body.startswith(b"\x78") and len(body) > 1 and int.from_bytes(body[:2], "big") % 31 == 0:
        return "deflate"
    return None


def _zlib(body: bytes, wbits: int) -> Iterator[bytes]:
    decoder = zlib.decompressobj(wbits)
    for start in range(0, len(body), _PIECE):
        data = body[start : start + _PIECE]
        while data:
            if decoder.eof:
                decoder = zlib.decompressobj(wbits)
            yield decoder.decompress(data, _CHUNK)
            data = decoder.unused_data if decoder.eof else decoder.unconsumed_tail
    while not decoder.eof:
        rest = decoder.decompress(b"", _CHUNK)
        if not rest:
            raise DecodeError("the compressed body is cut short")
        yield rest


def _zstd(body: bytes) -> Iterator[bytes]:
    decompressor = zstandard.ZstdDecompressor()
    decoder = decompressor.decompressobj()
    for start in range(0, len(body), _ZSTD_PIECE):
        data = body[start : start + _ZSTD_PIECE]
        while data:
            if decoder.eof:
                decoder = decompressor.decompressobj()
            yield decoder.decompress(data)
            data = decoder.unused_data if decoder.eof else b""
    if not decoder.eof:
        raise DecodeError("the compressed body is cut short")
