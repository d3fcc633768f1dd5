"""Episodes as numpy views of Arrow memory: a file that is mapped, or a table that is in memory."""

import os
import shutil
import tempfile
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import polars as pl
import pyarrow as pa

from spanmill.errors import DatasetError
from spanmill.storage import ObjectPath
from spanmill.triplets.reader import read_episodes

SCALARS: Final = (
    "rollout_id",
    "attempt",
    "revision",
    "episode",
    "group_id",
    "reward",
    "advantage",
    "rollout_tokens_trained",
)
"""What is kept of an episode beside its tokens, where nothing else is asked for."""

_OLDEST: Final = pl.CompatLevel.oldest()
"""Strings that pyarrow can take rows of."""
_TOKENS: Final = {"input_ids": pl.List(pl.Int32), "loss_mask": pl.List(pl.Int8), "logprobs": pl.List(pl.Float32)}

Source = str | Path | ObjectPath | pl.LazyFrame | pl.DataFrame | pa.Table


class EpisodeArrays:
    """Rows of `episodes`, by number. Given to another process, a mapped file goes as its name.

    A dataset or a LazyFrame is decoded once, into a temporary file without compression that all processes map: so it
    need not fit into memory. TMPDIR says where. The file is removed with the object that made it.
    """

    def __init__(self, source: Source, columns: Sequence[str] = SCALARS) -> None:
        """Raises DatasetError if there is no dataset, a column is missing or a row's lengths differ."""
        self._columns = list(dict.fromkeys(("prompt_length", *columns)))
        self._file: Path | None = None
        match source:
            case str() | Path() | ObjectPath():
                self._file = _decoded(read_episodes(source), self._columns)
            case pl.LazyFrame():
                self._file = _decoded(source, self._columns)
            case pl.DataFrame():
                self._table = _chosen(source.lazy(), self._columns).collect().to_arrow(compat_level=_OLDEST)
            case _:
                frame = pl.DataFrame(source).lazy()
                self._table = _chosen(frame, self._columns).collect().to_arrow(compat_level=_OLDEST)
        if self._file is not None:
            weakref.finalize(self, _remove, self._file.parent, os.getpid())
            self._table = _mapped(self._file)
        self._view()
        wrong = np.flatnonzero(self.lengths != np.diff(self._bounds["loss_mask"]).ravel())
        if len(wrong):
            row = self._scalars.slice(int(wrong[0]), 1).to_pylist()[0]
            raise DatasetError(f"input_ids and loss_mask of {len(wrong)} episodes differ in length, such as {row}")

    def __len__(self) -> int:
        return len(self.lengths)

    def item(self, row: int) -> dict[str, Any]:
        """`items` of one."""
        return self.items([row])[0]

    def items(self, rows: Sequence[int]) -> list[dict[str, Any]]:
        """For each row its scalars and, as arrays that must not be written to, its tokens.

        `input_ids` (T,) int32, `loss_mask` (T,) bool, `logprobs` (T,) float32 or None where they are not known.
        """
        # Not by polars, whose threads are not there in a forked worker.
        found: list[dict[str, Any]] = self._scalars.take(pa.array(rows, pa.int64())).to_pylist()
        chunks = self._chunk[rows].tolist()
        for name, values in self._values.items():
            for item, chunk, (low, high) in zip(found, chunks, self._bounds[name][rows].tolist(), strict=True):
                item[name] = values[chunk][low:high]
        for item, known in zip(found, self._known[rows].tolist(), strict=True):
            if not known:
                item["logprobs"] = None
        return found

    def __getstate__(self) -> dict[str, Any]:
        return {"columns": self._columns, "file": self._file, "table": None if self._file else self._table}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._columns, self._file = state["columns"], state["file"]
        self._table = state["table"] if self._file is None else _mapped(self._file)
        self._view()

    def _view(self) -> None:
        chunks = {name: [_list(chunk) for chunk in self._table.column(name).chunks] for name in _TOKENS}
        self._values = {
            name: [_numbers(chunk, np.bool_ if name == "loss_mask" else None) for chunk in own]
            for name, own in chunks.items()
        }
        self._bounds = {name: _joined([_bounds(chunk) for chunk in own]) for name, own in chunks.items()}
        sizes = [len(chunk) for chunk in chunks["input_ids"]]
        self._chunk = np.repeat(np.arange(len(sizes)), sizes)
        self._known = np.asarray(self._table.column("logprobs").is_valid())
        self.lengths: npt.NDArray[np.int64] = np.diff(self._bounds["input_ids"]).ravel()
        """(N,) tokens of each row."""
        self._scalars = self._table.select(self._columns)


def _chosen(frame: pl.LazyFrame, columns: Sequence[str]) -> pl.LazyFrame:
    has = frame.collect_schema().names()
    missing = [name for name in (*_TOKENS, *columns) if name not in has]
    if missing:
        raise DatasetError(f"the episodes have no column {', '.join(missing)}; there are {', '.join(has)}")
    return frame.select(*(pl.col(name).cast(kind) for name, kind in _TOKENS.items()), *columns)


def _decoded(frame: pl.LazyFrame, columns: Sequence[str]) -> Path:
    folder = Path(tempfile.mkdtemp(prefix="spanmill-"))
    file = folder / "episodes.arrow"
    try:
        _chosen(frame, columns).sink_ipc(file, compression="uncompressed", maintain_order=True, compat_level=_OLDEST)
    except BaseException:
        shutil.rmtree(folder)
        raise
    return file


def _mapped(file: Path) -> pa.Table:
    return pa.ipc.open_file(pa.memory_map(str(file))).read_all()


def _remove(folder: Path, owner: int) -> None:
    if os.getpid() == owner:  # a forked worker has the object, too
        shutil.rmtree(folder, ignore_errors=True)


def _list(chunk: Any) -> Any:
    """A list array whose offsets are int64, whatever made it."""
    return chunk.cast(pa.large_list(chunk.type.value_type)) if pa.types.is_list(chunk.type) else chunk


def _numbers(chunk: Any, view: Any) -> npt.NDArray[Any]:
    values = chunk.values.to_numpy(zero_copy_only=True)
    return values if view is None else values.view(view)


def _bounds(chunk: Any) -> npt.NDArray[np.int64]:
    """(n, 2): where each row begins and ends in the chunk's values."""
    offsets = chunk.offsets.to_numpy()
    return np.stack([offsets[:-1], offsets[1:]], axis=1)


def _joined(bounds: list[npt.NDArray[np.int64]]) -> npt.NDArray[np.int64]:
    return np.concatenate([np.empty((0, 2), np.int64), *bounds])
