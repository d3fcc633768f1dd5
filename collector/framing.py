"""Files of protobuf requests: how the requests are set apart in them, and whether they hold traces or logs.

Three framings are told apart by content: 4 bytes of big-endian length (the Go collector's file exporter), a varint
length (protobuf's own), and one bare request. The file exporter may compress each request, then also JSON ones.
"""

import json
import re
from collections.abc import Callable, Iterator
from io import BufferedReader
from itertools import chain
from typing import Final, cast

from google.protobuf.message import DecodeError as ProtobufError
from google.protobuf.unknown_fields import UnknownFieldSet

from spanmill.collector.compression import inflate
from spanmill.collector.decoded import SPAN_ID_BYTES, TRACE_ID_BYTES
from spanmill.collector.input_files import compression, warn_once
from spanmill.collector.journal import Kind
from spanmill.collector.otlp_proto import LogRecord, Outline, Span
from spanmill.errors import DecodeError, InputError
from spanmill.storage import Location
from spanmill.triplets.records import Json

MAX_REQUEST_BYTES: Final = (1 << 31) - 1
"""Protobuf's own limit."""

_LARGE: Final = 1 << 24
_STARTS: Final = (b"\x0a", b"{", b"\x1f", b"\x28")
"""How a request may begin: protobuf's only field, JSON, gzip, zstd. It is looked at before a large one is read."""
_JSON_START: Final = re.compile(rb'(?:\xef\xbb\xbf)?\s*\{\s*(?:"|\}|$)')
_JSON_HEAD: Final = re.compile(rb'(?:\xef\xbb\xbf)?\s*\{\s*"(resource_?(?:[sS]pans|[lL]ogs))"')
_JSON_KINDS: Final = {
    b"resourceSpans": Kind.TRACES_JSON,
    b"resource_spans": Kind.TRACES_JSON,
    b"resourceLogs": Kind.LOGS_JSON,
    b"resource_logs": Kind.LOGS_JSON,
}


class UnknownFormatError(InputError):
    """A file that is not what any reader here takes."""


def starts_json(head: bytes) -> bool:
    """Whether a file that begins so holds JSON objects."""
    return _JSON_START.match(head) is not None


def json_kind(line: bytes) -> Kind | None:
    """The kind of a JSON request; None if it is none of traces or logs."""
    head = _JSON_HEAD.match(line)
    if head:
        return _JSON_KINDS.get(head[1])
    try:
        request: Json = json.loads(line.decode("utf-8-sig", "replace"))
    except (ValueError, RecursionError):
        return None
    names = cast("dict[str, Json]", request) if isinstance(request, dict) else {}
    return next((kind for name, kind in _JSON_KINDS.items() if name.decode() in names), None)


def protobuf_requests(path: Location, reopen: Callable[[], BufferedReader]) -> Iterator[tuple[Kind, bytes]]:
    """The requests of a file; `reopen` gives its content from the start, not compressed.

    A last request that is cut is left out with a warning: its writer was killed. Raises UnknownFormatError if the
    file does not begin with a request of traces or logs, InputError if the framing is lost on the way.
    """
    for framing in (_big_endian, _whole, _varint):
        with reopen() as stream:
            records = framing(stream)
            try:
                first = next(filter(None, records), b"")
            except _CutError:
                continue
            if first and _is_request(first):
                yield from _with_kinds(path, chain([first], records))
                return
    raise UnknownFormatError(f"{path} holds no OTLP requests of traces or logs that can be recognised")


class _CutError(Exception):
    """The file ends within a request."""


def _big_endian(stream: BufferedReader) -> Iterator[bytes]:
    while header := stream.read(4):
        length = int.from_bytes(header, "big")
        if len(header) < 4:
            raise _CutError
        yield _body(stream, length)


def _varint(stream: BufferedReader) -> Iterator[bytes]:
    while byte := stream.read(1):
        length, shift = byte[0] & 0x7F, 7
        while byte and byte[0] > 0x7F and shift < 35:
            byte = stream.read(1)
            length |= (byte[0] & 0x7F) << shift if byte else 0
            shift += 7
        if not byte:
            raise _CutError
        yield _body(stream, length)


def _whole(stream: BufferedReader) -> Iterator[bytes]:
    body = stream.read(MAX_REQUEST_BYTES + 1)
    if len(body) > MAX_REQUEST_BYTES:
        raise _CutError
    yield body


def _body(stream: BufferedReader, length: int) -> bytes:
    if length > MAX_REQUEST_BYTES or (length > _LARGE and stream.peek(1)[:1] not in _STARTS):
        raise _CutError
    body = stream.read(length)
    if len(body) < length:
        raise _CutError
    return body


def _with_kinds(path: Location, records: Iterator[bytes]) -> Iterator[tuple[Kind, bytes]]:
    """The records with their kinds; one that shows none has that of the file so far, else what the name suggests."""
    usual = Kind.TRACES_PROTO if re.search("trace|span", path.name, re.IGNORECASE) else Kind.LOGS_PROTO
    offset = sound = 0
    try:
        for number, record in enumerate(filter(None, records), 1):
            try:
                body = _unpacked(record)
                usual = request_kind(body) or usual
                sound = number
            except DecodeError:
                body = record
            offset = number
            yield usual, body
    except _CutError as error:
        if sound < offset:
            raise InputError(
                f"{path} is damaged: request {offset} does not parse, and no length stands behind it"
            ) from error
        warn_once(f"{path} ends within a request, which is left out; the {offset} before it are whole")


def _is_request(record: bytes) -> bool:
    try:
        request_kind(_unpacked(record))
    except DecodeError:
        return False
    return True


def _unpacked(record: bytes) -> bytes:
    """The request, decompressed if it was compressed by itself. Raises DecodeError."""
    encoding = compression(record)
    if encoding is None:
        return record
    body = bytearray()
    for chunk in inflate(encoding, record):
        body += chunk
        if len(body) > MAX_REQUEST_BYTES:
            raise DecodeError(f"a request is larger than {MAX_REQUEST_BYTES} bytes")
    return bytes(body)


def request_kind(body: bytes) -> Kind | None:
    """What a request holds; None if that does not show. Raises DecodeError if it is no request of traces or logs.

    Requests of traces and of logs have one outline. A span and a log record use the same field numbers with other wire
    types, so read as the other one most of their fields are unknown.
    """
    if starts_json(body):
        kind = json_kind(body)
        if kind is None:
            raise DecodeError("a JSON object without spans or log records")
        return kind
    try:
        outline = Outline.FromString(body)
        if len(UnknownFieldSet(outline)):
            raise DecodeError("a message with fields that no request has")
        items = (item for group in outline.groups for scope in group.scopes for item in scope.items)
        return next(filter(None, map(_item_kind, items)), None)
    except ProtobufError as error:
        raise DecodeError(f"no protobuf request: {error}") from error


def _item_kind(item: bytes) -> Kind | None:
    span = Span.FromString(item)
    strange = len(UnknownFieldSet(span)) - len(UnknownFieldSet(LogRecord.FromString(item)))
    if strange > 0:
        return Kind.LOGS_PROTO
    if strange == 0:
        return None
    if len(span.trace_id) == TRACE_ID_BYTES or len(span.span_id) == SPAN_ID_BYTES or span.start_time_unix_nano:
        return Kind.TRACES_PROTO
    raise DecodeError("neither a span nor a log record; metrics and profiles are not read")
