import gzip
import os
import zlib

import pytest
import zstandard

from spanmill.collector.compression import grpc_encoding, inflate
from spanmill.errors import DecodeError

PACKED = {"gzip": gzip.compress, "x-gzip": gzip.compress, "deflate": zlib.compress, "zstd": zstandard.compress}
BODIES = [b"", b"span" * 10, bytes(5 << 20), os.urandom(700_000)]


@pytest.mark.parametrize("encoding", PACKED)
@pytest.mark.parametrize("body", BODIES, ids=len)
def test_every_encoding_gives_the_body_back(encoding: str, body: bytes) -> None:
    """Whatever its size, and however well it was compressed."""
    assert b"".join(inflate(encoding, PACKED[encoding](body))) == body


@pytest.mark.parametrize("encoding", ["gzip", "zstd"])
def test_several_streams_in_a_row_are_one(encoding: str) -> None:
    """Members of gzip and zstd frames may be joined, as senders that compress in pieces do."""
    pack = PACKED[encoding]
    assert b"".join(inflate(encoding, pack(b"one") + pack(b"two" * 500_000))) == b"one" + b"two" * 500_000


@pytest.mark.parametrize("encoding", PACKED)
def test_a_stream_that_was_cut_is_an_error(encoding: str) -> None:
    """However little is missing: half a request is never taken for a whole one."""
    packed = PACKED[encoding](b"span" * 1000)
    for cut in (0, 1, len(packed) // 2, len(packed) - 1):
        with pytest.raises(DecodeError, match="cut short"):
            list(inflate(encoding, packed[:cut]))


@pytest.mark.parametrize("encoding", PACKED)
def test_what_is_no_such_stream_is_an_error(encoding: str) -> None:
    """The error names the encoding."""
    with pytest.raises(DecodeError, match=f"not what Content-Encoding {encoding} says"):
        list(inflate(encoding, b"no such stream"))


@pytest.mark.parametrize(("encoding", "most"), [("gzip", 1 << 20), ("deflate", 1 << 20), ("zstd", 32 << 20)])
def test_a_bomb_comes_in_pieces(encoding: str, most: int) -> None:
    """256 MiB of zeros in a small body are decompressed no further than the caller goes."""
    bomb = PACKED[encoding](bytes(256 << 20))
    chunks = inflate(encoding, bomb)
    sizes = [len(next(chunks)) for _ in range(5)]
    assert max(sizes) <= most
    assert sum(sizes) < 256 << 20


def test_a_grpc_message_shows_its_compression() -> None:
    """Neither compression begins as an OTLP request can."""
    assert [grpc_encoding(body) for body in (gzip.compress(b""), zlib.compress(b""), b"\x0a\x00", b"", b"\x78")] == [
        "gzip",
        "deflate",
        None,
        None,
        None,
    ]
