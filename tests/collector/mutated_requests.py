"""Requests that nobody would send, and what must hold for each: for the test, and for bench/fuzz_requests.py."""

import gzip
import random
import zlib
from collections import Counter
from collections.abc import Callable, Sequence

import zstandard
from google.protobuf.json_format import MessageToJson
from google.protobuf.message import DecodeError as ProtobufError
from google.rpc.code_pb2 import INVALID_ARGUMENT, OK, RESOURCE_EXHAUSTED
from made_spans import make_call, make_request, make_rollout
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from spanmill.collector.decode import decode
from spanmill.collector.ingest import Answer, Ingest
from spanmill.collector.journal import Kind
from spanmill.errors import DecodeError

PACKERS: dict[str | None, Callable[[bytes], bytes]] = {
    None: bytes,
    "gzip": lambda body: gzip.compress(body, 1),
    "deflate": lambda body: zlib.compress(body, 1),
    "zstd": lambda body: zstandard.compress(body, 1),
}
EXTREMES = (b"\x00", b"\xff", b"\x80" * 10, b"\xff" * 9 + b"\x7f", b"\x0a", b"{", b"[" * 2000, b'"', b"\x1f\x8b")


def seeds() -> list[tuple[Kind, bytes]]:
    """Whole requests that the others are made of."""
    arrays = make_call("a", "array", attributes={"spanmill.response.token_ids": [1, 2, 3], "x": [1.5, "s", True]})
    bodies = [make_request(*make_rollout("r")), make_request(arrays), b""]
    found = [(Kind.TRACES_PROTO, body) for body in bodies] + [(Kind.LOGS_PROTO, body) for body in bodies]
    for body in bodies:
        text = MessageToJson(ExportTraceServiceRequest.FromString(body), indent=None).encode()
        found += [(Kind.TRACES_JSON, text), (Kind.LOGS_JSON, text)]
    return found


def mutated(body: bytes, rng: random.Random) -> bytes:
    """The body with one to four pieces flipped, cut, repeated, put in or taken from elsewhere in it."""
    data = bytearray(body)
    for _ in range(rng.randint(1, 4)):
        at = rng.randint(0, len(data))
        match rng.randrange(6):
            case 0 if at < len(data):
                data[at] ^= 1 << rng.randrange(8)
            case 1:
                del data[at:]
            case 2:
                del data[at : at + rng.randint(1, 16)]
            case 3:
                data[at:at] = rng.choice(EXTREMES)
            case 4:
                start = rng.randint(0, len(data))
                data[at:at] = data[start : start + rng.randint(1, 200)]
            case _:
                data[at : at + 4] = rng.randbytes(4)
    return bytes(data)


def run(ingest: Ingest, seed: int, count: int) -> Counter[int]:
    """How often each code was answered to `count` mutated requests. ValueError with the request if one is wrong."""
    rng = random.Random(seed)
    known = seeds()
    codes = Counter[int]()
    for number in range(count):
        kind, body = rng.choice(known)
        encoding = rng.choice(list(PACKERS)) if number % 4 == 0 else None
        # Half of what is compressed is damaged after that.
        early = encoding is None or rng.random() < 0.5
        body = PACKERS[encoding](mutated(body, rng)) if early else mutated(PACKERS[encoding](body), rng)
        answer, unpacked = _answered(ingest, kind, encoding, body)
        codes[answer.code] += 1
        wrong = _wrong(kind, unpacked, answer)
        if wrong:
            raise ValueError(f"request {number} of seed {seed}, {kind.name} {encoding} {body!r}: {wrong}")
    return codes


def _answered(ingest: Ingest, kind: Kind, encoding: str | None, body: bytes) -> tuple[Answer, bytes | None]:
    """As the receivers do it."""
    unpacked: bytes | None = None
    with ingest.lease() as lease:
        try:
            found = ingest.unpacked(encoding, body, lease)
            if isinstance(found, Answer):
                return found, None
            unpacked = found
            checked, _ = ingest.begin(kind, unpacked)
            return ingest.accepted(kind, checked, unpacked), unpacked
        except Exception as error:
            return ingest.failed(error), unpacked


def _wrong(kind: Kind, body: bytes | None, answer: Answer) -> str | None:
    """What is wrong with an answer: it is our failure, or a refusal of what the specification's own parser takes."""
    if answer.code not in (OK, INVALID_ARGUMENT, RESOURCE_EXHAUSTED):
        return answer.message
    if body is None:
        return None
    if answer.code == OK:
        return _undecodable(kind, body)
    return "OTLP's own classes read it" if kind is Kind.TRACES_PROTO and _parses(body) else None


def _undecodable(kind: Kind, body: bytes) -> str | None:
    """Why an acknowledged request cannot be decoded, in whole or span by span; the latter are quarantined."""
    try:
        decode(kind, body)
    except DecodeError as error:
        return f"it was acknowledged, and then: {error}"
    return None


def _parses(body: bytes) -> bool:
    try:
        ExportTraceServiceRequest.FromString(body)
    except ProtobufError:
        return False
    return True


def http_requests(rng: random.Random, count: int) -> Sequence[bytes]:
    """HTTP requests of which head or body are damaged."""
    _, body = seeds()[0]
    head = b"POST /v1/traces HTTP/1.1\r\nHost: x\r\nContent-Type: application/x-protobuf\r\nContent-Length: %d\r\n\r\n"
    whole = head % len(body) + body
    start = len(head) + 40
    return [mutated(whole[:start], rng) + whole[start:] for _ in range(count)]
