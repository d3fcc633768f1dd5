"""How a table becomes a durable Parquet file: encodings, page and row group sizes, fsync."""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from spanmill.storage import Location
from spanmill.triplets.parts import VERSION_KEY, open_parquet
from spanmill.triplets.schema import LOGPROBS, SCHEMA_VERSION, TOKEN_IDS

PAGE_LISTS: Final = 64
"""Each prompt of a rollout repeats the one before it; only within one page does zstd see that, so a page holds at least
so many of the longest lists: within these bounds, as large pages cost time."""
MIN_PAGE_BYTES: Final = 1 << 20
MAX_PAGE_BYTES: Final = 32 << 20
ROW_GROUP_BYTES: Final = 256 << 20
"""In memory: what a reader must hold at once."""

_JSON_TEXT = ("messages", "response", "multimodal", "metadata", "span", "detail")
"""Columns whose values hardly ever repeat as a whole: a dictionary would only grow until it is given up."""


def write_file(path: Path, table: pa.Table, metadata: Mapping[bytes, bytes]) -> None:
    """`table` as a Parquet file with `metadata` in its footer, on disk when this returns."""
    schema = table.schema.with_metadata({VERSION_KEY: SCHEMA_VERSION.encode(), **metadata})
    leaves = [leaf for field in schema for leaf in _leaves(field, field.name)]
    numbers = [leaf for field in schema for leaf in _leaves(field, field.name) if field.type in (TOKEN_IDS, LOGPROBS)]
    strings = [name for name, kind in leaves if pa.types.is_string(kind) and name not in _JSON_TEXT]
    with (
        path.open("wb") as file,
        pq.ParquetWriter(
            file,
            schema,
            compression="zstd",
            compression_level=1,
            use_dictionary=strings,
            column_encoding={name: "BYTE_STREAM_SPLIT" for name, _ in numbers},
            write_statistics=[name for name, _ in leaves if "." not in name],
            data_page_size=_page_bytes(table),
        ) as writer,
    ):
        rows = max(1, int(table.num_rows * ROW_GROUP_BYTES / max(1, table.nbytes)))
        writer.write_table(table.replace_schema_metadata(schema.metadata), row_group_size=rows)
        writer.close()
        file.flush()
        os.fsync(file.fileno())


def _page_bytes(table: pa.Table) -> int:
    longest = 0
    for field in table.schema:
        if field.type in (TOKEN_IDS, LOGPROBS) and table.num_rows:
            lengths = pc.max(pc.list_value_length(table.column(field.name))).as_py()
            longest = max(longest, 4 * (lengths or 0))
    return min(max(PAGE_LISTS * longest, MIN_PAGE_BYTES), MAX_PAGE_BYTES)


def _leaves(field: Any, path: str) -> Iterator[tuple[str, Any]]:
    """(Parquet path, type) of every leaf below an Arrow field."""
    if pa.types.is_list(field.type):
        yield from _leaves(field.type.value_field, f"{path}.list.element")
    elif pa.types.is_struct(field.type):
        for child in field.type:
            yield from _leaves(child, f"{path}.{child.name}")
    else:
        yield path, field.type


def read_file(path: Location, columns: list[str] | None = None) -> pa.Table:
    """A whole file, or some of its columns. Footer metadata is left out."""
    return open_parquet(path).read(columns).replace_schema_metadata()
