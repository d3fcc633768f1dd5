"""How rows lie on disk. Each sink writes as rows come; `safe_output` lets nobody see a half-written file or folder."""

import json
import os
import tempfile
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import polars as pl
import pyarrow.parquet as pq

from spanmill.errors import ExportError
from spanmill.storage import sync
from spanmill.triplets.exports.target import Fill, Write

SHARD_CELLS: Final = 4 << 20
"""Most padded positions in a file of tensors; each takes some 40 bytes."""
SHARD_ROWS: Final = 4096


@contextmanager
def safe_output(path: Path) -> Generator[Path]:
    """A path beside `path` to write to; what is there at the end is moved to `path`, after an error it is removed.

    Raises ExportError if `path` exists or its folder does not.
    """
    if path.exists() or path.is_symlink():
        raise ExportError(f"{path} exists already; choose another path, or remove it")
    if not path.parent.is_dir():
        raise ExportError(f"{path.parent} is no folder; make it first")
    with tempfile.TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent) as folder:
        inside = Path(folder) / path.name
        yield inside
        for found in [inside, *inside.rglob("*")] if inside.is_dir() else [inside]:
            _sync(found)
        if path.exists():
            raise ExportError(f"{path} has appeared meanwhile; nothing was written to it")
        inside.rename(path)
        sync(path.parent)


def _sync(path: Path) -> None:
    if path.is_dir():
        sync(path)
        return
    with path.open("rb") as file:
        os.fsync(file.fileno())


@contextmanager
def parquet(path: Path, fill: Fill) -> Generator[Write]:
    """One Parquet file, a row group for each batch."""
    writer: Any = None

    def write(rows: Any) -> None:
        nonlocal writer
        if writer is None:
            writer = pq.ParquetWriter(path, rows.schema, compression="zstd", compression_level=1)
        writer.write_table(rows)

    try:
        yield write
    finally:
        if writer is not None:
            writer.close()


@contextmanager
def json_lines(path: Path, fill: Fill) -> Generator[Write]:
    """One file, a JSON object for each row with its columns as keys."""
    with path.open("wb") as file:
        yield lambda rows: pl.DataFrame(rows).write_ndjson(file)


@contextmanager
def json_texts(path: Path, fill: Fill) -> Generator[Write]:
    """One file, a line for each row: the JSON text in its only column."""
    with path.open("w", encoding="utf-8") as file:
        yield lambda rows: file.writelines(f"{text}\n" for text in rows.column(0).to_pylist())


@contextmanager
def msgpack(path: Path, fill: Fill) -> Generator[Write]:
    """A folder of files, each one msgpack array of rows, which are arrays of their columns' values."""
    from msgspec.msgpack import Encoder

    path.mkdir()
    files = _numbered(path, "msgpack")

    def write(rows: Any) -> None:
        columns = [column.to_pylist() for column in rows.columns]
        next(files).write_bytes(Encoder().encode(list(zip(*columns, strict=True))))

    yield write


Arrays = dict[str, np.ndarray[Any, Any]]


def tensors(
    ids: tuple[str, ...] = (),
    left: tuple[str, ...] = (),
    texts: tuple[str, ...] = (),
    finish: Callable[[Arrays], Arrays] | None = None,
) -> Callable[[Path, Fill], AbstractContextManager[Write]]:
    """A sink of safetensors files in a folder: list columns as [B, longest] arrays, numbers as [B].

    Lists are padded with 0, those named in `ids` with the pad token; at the end, those named in `left` at the start.
    `finish` makes the arrays of a file from these. Columns named in `texts` stand as JSON lists in each file's
    metadata, under their names.
    """
    return partial(_tensors, ids=ids, left=left, texts=texts, finish=finish)


@contextmanager
def _tensors(
    path: Path,
    fill: Fill,
    ids: tuple[str, ...],
    left: tuple[str, ...],
    texts: tuple[str, ...],
    finish: Callable[[Arrays], Arrays] | None,
) -> Generator[Write]:
    from safetensors.numpy import save

    path.mkdir()
    files = _numbered(path, "safetensors")

    def write(rows: Any) -> None:
        for shard in shards(rows):
            arrays = {
                name: pad(shard.column(name), name in left, fill.pad_token_id if name in ids else 0)
                for name in shard.column_names
                if name not in texts
            }
            said = {name: json.dumps(shard.column(name).to_pylist()) for name in texts}
            next(files).write_bytes(save(finish(arrays) if finish else arrays, said))

    yield write


def _numbered(folder: Path, suffix: str) -> Iterator[Path]:
    number = 0
    while True:
        yield folder / f"part-{number:05d}.{suffix}"
        number += 1


def shards(rows: Any) -> Iterator[Any]:
    """The rows in slices whose padded arrays are of bounded size; a row alone may be larger."""
    lists = [column for column in rows.columns if str(column.type).startswith("list")]
    longest = (
        np.max([[len(one) for one in column] for column in lists], axis=0) if lists else np.zeros(rows.num_rows, int)
    )
    first, width = 0, 0
    for row, length in enumerate(longest.tolist()):
        width = max(width, length)
        if row > first and (width * (row - first + 1) > SHARD_CELLS or row - first >= SHARD_ROWS):
            yield rows.slice(first, row - first)
            first, width = row, length
    yield rows.slice(first)


def pad(column: Any, at_start: bool, value: float) -> np.ndarray[Any, Any]:
    """A list column as a matrix as wide as its longest list, or a column of numbers as it is."""
    array = column.combine_chunks()
    if not str(array.type).startswith("list"):
        return array.to_numpy(zero_copy_only=False)
    lengths = np.diff(array.offsets.to_numpy())
    out = np.full((len(lengths), int(lengths.max(initial=0))), value, array.values.type.to_pandas_dtype())
    place = np.arange(out.shape[1])
    first = out.shape[1] - lengths if at_start else np.zeros_like(lengths)
    out[(place >= first[:, None]) & (place < (first + lengths)[:, None])] = array.flatten().to_numpy(
        zero_copy_only=False
    )
    return out
