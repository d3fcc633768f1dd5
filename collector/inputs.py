"""What `spanmill build` reads: files and folders of recorded OTLP requests, and tables of rewards. Read lazily."""

import csv
import json
import re
import zlib
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager
from decimal import Decimal
from io import BufferedReader, TextIOWrapper
from itertools import count, starmap
from pathlib import Path
from shutil import copyfileobj
from tempfile import TemporaryDirectory
from typing import Final, NamedTuple, cast

import pyarrow as pa
import zstandard

from spanmill.collector import atif, journal
from spanmill.collector.framing import (
    UnknownFormatError,
    json_kind,
    protobuf_requests,
    starts_json,
)
from spanmill.collector.input_files import open_unpacked, warn_once
from spanmill.collector.journal import Kind
from spanmill.errors import InputError
from spanmill.storage import Location, ObjectPath
from spanmill.triplets.parts import open_parquet
from spanmill.triplets.records import Json, Reward

_LINES: Final = (".jsonl", ".ndjson")
_PROTOBUF: Final = (".binpb", ".pb", ".otlp")
"""A file of a folder that is called so has to be readable, others are passed over if they are not OTLP."""
_ARRAY: Final = re.compile(rb"\s*\[\s*[{\]]")
_PACKED: Final = (".gz", ".zst", ".zstd")


class Request(NamedTuple):
    """A request as it was recorded."""

    kind: Kind
    body: bytes
    received_ns: int = 0
    """Nanoseconds since 1970; 0 if that was not recorded."""


class Unit(NamedTuple):
    """A part of an input that can be read by itself: a file, or a segment of a journal."""

    path: Location
    """The file, or the journal's folder."""
    segment: int | None = None
    is_meant: bool = True
    """Whether it has to be readable: not so a file of a folder, which may hold others too."""

    @property
    def file(self) -> Location:
        """The file, or the segment's."""
        return self.path if self.segment is None else _segment_path(self.path, self.segment)

    def stamp(self) -> tuple[str, int, int | str]:
        """Changes when what it holds does. Raises InputError if it is not there."""
        path = self.file
        try:
            if isinstance(path, ObjectPath):
                return str(path), *path.stamp()
            stat = path.stat()
        except OSError as error:
            raise InputError(f"{path} cannot be read: {error.strerror or error}") from error
        return str(path.absolute()), stat.st_size, stat.st_mtime_ns


def units(path: Location) -> list[Unit]:
    """The units of an input, in their order: a file, or the files and journals of a folder and of those in it, sorted
    by name. Raises InputError if there is nothing to read, or what can be read only once.
    """
    if not path.is_dir():
        if isinstance(path, Path) and path.exists() and not path.is_file():
            raise InputError(f"{path} can be read only once; --engine local takes such an input, others want files")
        return [Unit(path)]
    made = list[Unit]()
    for entry, is_journal in _entries(path):
        segments = _segments(entry) if is_journal else []
        made += [Unit(entry, segment) for segment in segments] or [Unit(entry, is_meant=_suffix(entry) in _PROTOBUF)]
    if not made:
        raise nothing_in(path)
    return made


def nothing_in(folder: Location) -> InputError:
    """The error for a folder that has nothing to read."""
    return InputError(f"{folder} holds no journal and no file of OTLP requests")


def read_unit(unit: Unit) -> Iterator[Request]:
    """The requests of a unit, in their order; of a journal also records of other kinds.

    A file holds OTLP/JSON lines, ATIF documents (one, or one a line), or protobuf requests with a length before each (4
    bytes big-endian, or a varint) or one alone; it may be compressed by gzip or zstd. Content decides, not the name.
    All may be in an object store.

    What is passed over is logged: a last request that was cut, and what is damaged in a journal. A request that does
    not parse is handed on, for its reader to count. Raises InputError if the file is damaged so that what follows
    cannot be found, UnknownFormatError, which is one, if it is not OTLP.
    """
    if unit.segment is not None:
        yield from _segment_requests(unit.path, unit.segment)
    else:
        yield from _file_requests(unit.path)


def _segment_requests(folder: Location, segment: int) -> Iterator[Request]:
    before = journal.Position(segment, 0)
    damage = dict[journal.Position, int]()
    with _on_disk(folder, segment) as here:
        # Nobody appends to an object of a store.
        complete = here is not folder or not journal.is_written(here, journal.worker_of(segment))
        for entry in journal.read(here, before, worker=journal.worker_of(segment), complete=complete, damage=damage):
            if entry.position.segment != segment:
                break
            yield Request(entry.kind, entry.body, entry.received_ns)
    if damage:
        path = _segment_path(folder, segment)
        warn_once(f"{path}: {sum(damage.values())} bytes in {len(damage)} places are damaged and left out")


@contextmanager
def _on_disk(folder: Location, segment: int) -> Generator[Path]:
    """A folder with a segment that can be read by `journal`: from a store it is fetched, for as long as it is read."""
    if isinstance(folder, Path):
        yield folder
        return
    with TemporaryDirectory(prefix="spanmill-") as temporary:
        path = journal.segment_path(Path(temporary), segment)
        with _segment_path(folder, segment).open("rb") as stored, path.open("wb") as file:
            copyfileobj(stored, file)
        yield path.parent


def _segments(folder: Location) -> list[int]:
    if isinstance(folder, Path):
        return journal.segments(folder)
    return sorted(int(entry.name.partition(".")[0]) for entry in folder.iterdir() if entry.suffix == ".journal")


def _segment_path(folder: Location, segment: int) -> Location:
    return folder / journal.segment_path(Path(), segment).name


def _entries(folder: Location) -> Iterator[tuple[Location, bool]]:
    """The journals and files of a folder and of those in it, and whether they are journals."""
    try:
        folders, files = _listed(folder)
    except OSError as error:
        raise InputError(f"{folder} cannot be read: {error.strerror or error}") from error
    if any(file.suffix == ".journal" for file in files):
        yield folder, True
        return
    for name, entry in sorted((entry.name, entry) for entry in (*folders, *files)):
        if name.startswith("."):
            continue
        if entry in folders:
            yield from _entries(entry)
        else:
            yield entry, False


def _listed(folder: Location) -> tuple[set[Location], set[Location]]:
    """The folders and files in a folder."""
    if isinstance(folder, ObjectPath):
        folders, files = folder.listed()
        return set(folders), set(files)
    entries = set[Location](folder.iterdir())
    inside = {entry for entry in entries if entry.is_dir()}
    return inside, entries - inside


def _suffix(path: Location) -> str:
    """The suffix of what a file holds, whether it is compressed or not."""
    return next((suffix for suffix in reversed(path.suffixes) if suffix not in _PACKED), "")


def _file_requests(path: Location) -> Iterator[Request]:
    try:
        with open_unpacked(path) as stream:
            head = stream.peek(64)[:64]
            if starts_json(head):
                yield from _json_requests(path, stream)
                return
            if _ARRAY.match(head):
                raise UnknownFormatError(f"{path} holds a JSON array; expected one request a line, without brackets")
        if head:
            yield from starmap(Request, protobuf_requests(path, lambda: open_unpacked(path)))
    except InputError:
        raise
    except (OSError, zlib.error, zstandard.ZstdError) as error:
        raise InputError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from error


def _json_requests(path: Location, stream: BufferedReader) -> Iterator[Request]:
    usual: Kind | None = None
    for line in stream:
        if line.isspace():
            continue
        if usual is None and line.strip() == b"{":  # one request, written over many lines
            line += stream.read()
        kind = json_kind(line)
        document = _json(line) if kind is None else None
        if atif.is_atif(document):
            usual = Kind.TRACES_JSON
            yield from starmap(Request, atif.records(cast("dict[str, Json]", document)))
            continue
        kind = kind or usual
        if kind is None:
            if _suffix(path) in _LINES and document is None:
                raise InputError(f"{path} is damaged: its first line is no whole JSON object")
            raise UnknownFormatError(
                f"{path} holds JSON, but neither OTLP (no resourceSpans or resourceLogs at its start) nor ATIF"
            )
        if usual is not None and not line.endswith(b"\n") and _json(line) is None:
            warn_once(f"{path} ends within a line, which is left out")
            return
        usual = kind
        yield Request(kind, line)


def _json(line: bytes) -> Json:
    """The value of a JSON text; None if it is none."""
    try:
        return json.loads(line.decode("utf-8-sig", "replace"))
    except (ValueError, RecursionError):
        return None


def read_rewards(path: Location) -> Iterator[Reward]:
    """The rewards of a Parquet, CSV or JSONL table, row by row; `source` is "table".

    Columns are rollout_id, value and, if they are there, attempt, call_id and name; others are not read. A value is a
    number or boolean, in text also NaN, Infinity, true and false. Raises InputError that names the row.
    """
    try:
        with path.open("rb") as file:
            head = file.read(4096)
        if head.startswith(b"PAR1"):
            rows = _parquet_rows(path)
        elif path.suffix in _LINES or starts_json(head):
            rows = _jsonl_rows(path)
        else:
            rows = _csv_rows(path)
        for where, row in rows:
            try:
                yield _reward(row)
            except (ValueError, OverflowError) as error:
                raise InputError(f"{path}, {where}: {error}") from error
    except InputError:
        raise
    except (OSError, pa.ArrowException, csv.Error, UnicodeDecodeError) as error:
        raise InputError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from error


_REWARD_COLUMNS: Final = ("rollout_id", "value", "attempt", "call_id", "name")
_Row = tuple[str, dict[str, Json]]
"""Where the row stands, and its cells."""


def _parquet_rows(path: Location) -> Iterator[_Row]:
    with open_parquet(path) as file:
        names = file.schema_arrow.names
        _check_columns(path, names)
        numbers = count(1)
        for batch in file.iter_batches(columns=[name for name in _REWARD_COLUMNS if name in names]):
            for row in batch.to_pylist():
                yield f"row {next(numbers)}", row


def _csv_rows(path: Location) -> Iterator[_Row]:
    with TextIOWrapper(path.open("rb"), "utf-8-sig", newline="") as file:
        reader = csv.DictReader(file)
        _check_columns(path, reader.fieldnames or ())
        for row in reader:
            where = f"line {reader.line_num}"
            if None in row:
                raise InputError(f"{path}, {where}: more cells than the header has; a comma in a cell needs quotes")
            yield where, row


def _jsonl_rows(path: Location) -> Iterator[_Row]:
    with TextIOWrapper(path.open("rb"), "utf-8-sig") as file:
        for number, line in enumerate(file, 1):
            if line.isspace():
                continue
            try:
                row: Json = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise InputError(f"{path}, line {number}: no JSON: {error}") from error
            if not isinstance(row, dict):
                raise InputError(f"{path}, line {number}: {line.strip():.80} is no JSON object")
            yield f"line {number}", cast("dict[str, Json]", row)


def _check_columns(path: Location, names: Iterable[str]) -> None:
    found = list(names)
    for name in ("rollout_id", "value"):
        if name not in found:
            raise InputError(f"{path} has no column {name}; its columns are {', '.join(found) or 'none'}")


def _reward(row: dict[str, Json]) -> Reward:
    """The reward of a row. Raises ValueError, or OverflowError for an integer that is no double."""
    rollout_id = _text(row, "rollout_id")
    if not rollout_id:
        raise ValueError("rollout_id is empty")
    return Reward(
        rollout_id=rollout_id,
        value=_number(row.get("value")),
        attempt=_attempt(row.get("attempt")),
        call_id=_text(row, "call_id") or None,
        name=_text(row, "name"),
        source="table",
    )


def _text(row: dict[str, Json], name: str) -> str:
    value = row.get(name)
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    raise ValueError(f"{name} is {value!r:.80}, not text")


def _number(value: Json) -> float:
    if isinstance(value, bool | int | float | Decimal):
        return float(value)
    if isinstance(value, str) and value.lower() in ("true", "false"):
        return float(value.lower() == "true")
    if isinstance(value, str) and value and "_" not in value:
        return float(value)
    raise ValueError(f"value is {'missing' if value in (None, '') else format(repr(value), '.80')}; expected a number")


def _attempt(value: Json) -> int | None:
    """None if it is absent, as which tables of other tools write an empty text or NaN."""
    if value is None or value == "" or value != value:
        return None
    if isinstance(value, str) and re.fullmatch("[0-9]+", value):
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int | float) or value < 0 or value != int(value):
        raise ValueError(f"attempt is {value!r:.80}; expected a whole number from 0")
    return int(value)
