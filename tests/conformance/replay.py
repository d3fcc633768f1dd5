#!/usr/bin/env python3
"""Sends a recording over OTLP gRPC as its agent once did, and returns once every request is acknowledged.

replay.py RECORDING HOST:PORT
"""

import struct
import sys
from collections.abc import Iterator
from pathlib import Path

import grpc

SERVICES = {
    "traces.binpb": "/opentelemetry.proto.collector.trace.v1.TraceService/Export",
    "logs.binpb": "/opentelemetry.proto.collector.logs.v1.LogsService/Export",
}


def replay(recording: Path, address: str) -> int:
    """Send all requests of a recording, one after the other, and return how many; RpcError if one is refused."""
    sent = 0
    with grpc.insecure_channel(address) as channel:
        for name, method in SERVICES.items():
            export: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(method)
            for request in read_requests(recording / name):
                export(request, timeout=30, wait_for_ready=True)
                sent += 1
    return sent


def read_requests(path: Path) -> Iterator[bytes]:
    """The recorded requests: each a 4-byte big-endian length and the bytes; none if there is no such file."""
    data = path.read_bytes() if path.exists() else b""
    position = 0
    while position < len(data):
        (length,) = struct.unpack_from(">I", data, position)
        yield data[position + 4 : position + 4 + length]
        position += 4 + length


if __name__ == "__main__":
    print(f"{replay(Path(sys.argv[1]), sys.argv[2])} requests sent and acknowledged")
