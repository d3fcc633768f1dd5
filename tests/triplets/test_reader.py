import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow.parquet as pq
import pytest

from spanmill.errors import DatasetError, SchemaVersionError
from spanmill.triplets.parts import REPLACES_KEY, VERSION_KEY
from spanmill.triplets.reader import read_episodes, read_quarantine, read_rollout, read_rollouts, read_triplets
from spanmill.triplets.records import Quarantined, Rollout
from spanmill.triplets.schema import EPISODES, QUARANTINE, ROLLOUTS, TABLES, TRIPLETS, TableSpec, polars_schema
from spanmill.triplets.writer import DatasetWriter

MakeRollout = Callable[..., Rollout]
AsRow = Callable[[Any], dict[str, Any]]
READERS = [
    (read_rollouts, ROLLOUTS),
    (read_triplets, TRIPLETS),
    (read_episodes, EPISODES),
    (read_quarantine, QUARANTINE),
]


def _set_metadata(path: Path, changes: dict[bytes, bytes]) -> None:
    """Writes a file anew with other footer metadata."""
    table = pq.ParquetFile(path).read()
    pq.write_table(table.replace_schema_metadata({**table.schema.metadata, **changes}), path)


@pytest.mark.parametrize(("read", "table"), READERS)
@pytest.mark.parametrize("parts", [0, 1])
def test_an_empty_dataset_has_every_column(
    tmp_path: Path, read: Callable[[Path], pl.LazyFrame], table: TableSpec, parts: int
):
    """Without a part, or with one that has no rows, a frame with the table's schema and no rows is read."""
    with DatasetWriter(tmp_path) as writer:
        for _ in range(parts):
            writer.write([])
    frame = read(tmp_path).collect()
    assert (frame.schema, frame.height) == (polars_schema(table), 0)


@pytest.mark.parametrize(("read", "table"), READERS)
def test_rows_have_the_schema_of_the_spec(
    tmp_path: Path, make_rollout: MakeRollout, read: Callable[[str], pl.LazyFrame], table: TableSpec
):
    """Frames have the columns and types of the column spec, also after a join that removes rows; a str is a path."""
    with DatasetWriter(tmp_path) as writer:
        writer.write([make_rollout("a")])
        writer.write([make_rollout("a", revision=1)])
    assert read(str(tmp_path)).collect_schema() == polars_schema(table)


def test_only_the_newest_revision_is_read(tmp_path: Path, make_rollout: MakeRollout, as_row: AsRow):
    """Rows of older revisions are left out of every table before any rewriting; parts keep their order."""
    newest = [make_rollout("b"), make_rollout("a", attempt=1), make_rollout("a", revision=1)]
    with DatasetWriter(tmp_path) as writer:
        writer.write([make_rollout("a"), *newest[:2]])
        writer.write(newest[2:])
    assert read_rollouts(tmp_path).collect().to_dicts() == [as_row(r) for r in newest]
    assert read_triplets(tmp_path).collect().to_dicts() == [as_row(row) for r in newest for row in r.triplets]
    assert read_episodes(tmp_path).collect().to_dicts() == [as_row(row) for r in newest for row in r.episodes]
    assert read_quarantine(tmp_path).collect().to_dicts() == [as_row(row) for r in newest for row in r.quarantined]


def test_the_later_of_two_equal_revisions_is_read(tmp_path: Path, make_rollout: MakeRollout):
    """A revision that was written twice, after a crash say, is read once."""
    with DatasetWriter(tmp_path) as writer:
        writer.write([make_rollout("a"), make_rollout("b")])
        writer.write([make_rollout("a", calls=3)])
    assert read_triplets(tmp_path).collect()["call_id"].to_list() == ["b-0", "b-1", "a-0", "a-1", "a-2"]


def test_strays_are_read_even_if_they_name_a_superseded_rollout(
    tmp_path: Path, make_rollout: MakeRollout, make_quarantined: Callable[..., Quarantined]
):
    """A stray row belongs to no revision, so none supersedes it."""
    with DatasetWriter(tmp_path) as writer:
        writer.write([make_rollout("a")], [make_quarantined("named", "a", 0), make_quarantined("unnamed")])
        writer.write([make_rollout("a", revision=1)])
    assert read_quarantine(tmp_path).collect()["detail"].to_list() == ["named", "unnamed", "revision 1"]


def test_one_rollout_is_read_as_all_are(
    tmp_path: Path, make_rollout: MakeRollout, make_quarantined: Callable[..., Quarantined]
):
    """The rows of one attempt are those that a filter on every table gives, whatever else its parts hold."""
    with DatasetWriter(tmp_path) as writer:
        writer.write([make_rollout("a"), make_rollout("b"), make_rollout("b", attempt=1)])
        writer.write([make_rollout("c", moved=True), make_rollout("b", revision=1), make_rollout("d")])
        writer.write([], [make_quarantined("late", "b", 0)])
    own = (pl.col("rollout_id") == pl.lit("b")) & (pl.col("attempt") == 0)
    expected = {table.name: read(tmp_path).filter(own).collect().to_dicts() for read, table in READERS}
    assert expected == {name: rows.to_dicts() for name, rows in read_rollout(tmp_path, "b", 0).items()}
    for absent in (("c", 0), ("b", 2), ("x", 0)):
        assert [0] * 4 == [rows.height for rows in read_rollout(tmp_path, *absent).values()]


def test_replaced_parts_are_not_read(tmp_path: Path, make_rollout: MakeRollout):
    """A part that the footer of another names does not count, also while its files still lie there."""
    with DatasetWriter(tmp_path) as writer:
        writer.write([make_rollout("a"), make_rollout("b")])
        writer.write([make_rollout("a")])
    _set_metadata(tmp_path / "rollouts" / "part-00000002.parquet", {REPLACES_KEY: b"[1]"})
    assert read_rollouts(tmp_path).collect()["rollout_id"].to_list() == ["a"]


def test_uncommitted_parts_are_not_read(tmp_path: Path, make_rollout: MakeRollout):
    """A part whose file in `rollouts` is not there yet does not exist."""
    with DatasetWriter(tmp_path) as writer:
        writer.write([make_rollout("a")])
        writer.write([make_rollout("b")])
    (tmp_path / "rollouts" / "part-00000002.parquet").unlink()
    assert read_triplets(tmp_path).collect()["rollout_id"].unique().to_list() == ["a"]


@pytest.mark.parametrize("revised", [False, True])
def test_filters_and_columns_reach_the_files(tmp_path: Path, make_rollout: MakeRollout, revised: bool):
    """A filter and a choice of columns are applied while the files are scanned, also beside superseded rows."""
    with DatasetWriter(tmp_path) as writer:
        writer.write([make_rollout("a"), make_rollout("b")])
        writer.write([make_rollout("c", revision=0), *([make_rollout("a", revision=1)] if revised else [])])
    query = read_triplets(tmp_path).filter(pl.col("turn") == 1).select("call_id")
    plan = query.explain()
    assert ("JOIN" in plan, plan.count("SELECTION"), plan.count("Parquet SCAN")) == (
        (True, 2, 2) if revised else (False, 1, 1)
    )
    assert re.findall(r"PROJECT (\d+)/39 COLUMNS", plan) == (["4", "2"] if revised else ["2"])
    assert query.collect()["call_id"].to_list() == (["b-1", "c-1", "a-1"] if revised else ["a-1", "b-1", "c-1"])


@pytest.mark.parametrize("open_dataset", [read_rollouts, DatasetWriter])
def test_a_newer_schema_is_refused(tmp_path: Path, make_rollout: MakeRollout, open_dataset: Callable[[Path], Any]):
    """Reader and writer stop at a dataset of a later version and say which they understand."""
    with DatasetWriter(tmp_path) as writer:
        writer.write([make_rollout("a")])
    _set_metadata(tmp_path / "rollouts" / "part-00000001.parquet", {VERSION_KEY: b"2"})
    with pytest.raises(
        SchemaVersionError, match="schema version 2, this spanmill understands up to 1; upgrade spanmill"
    ):
        open_dataset(tmp_path)


def test_files_of_another_program_are_refused(tmp_path: Path):
    """A Parquet file without our version is named, not read as if it were ours."""
    DatasetWriter(tmp_path).close()
    pl.DataFrame({"rollout_id": ["a"]}).write_parquet(tmp_path / "rollouts" / "part-00000001.parquet")
    with pytest.raises(DatasetError, match=r"part-00000001\.parquet was not written by spanmill"):
        read_rollouts(tmp_path)


@pytest.mark.parametrize("path", ["", "nothing", "file"])
def test_no_dataset_is_a_clear_error(tmp_path: Path, path: str):
    """A folder without the table folders, no folder at all, and a file are said to be no dataset."""
    (tmp_path / "file").write_text("")
    with pytest.raises(
        DatasetError, match=f"^{tmp_path / path} is no dataset: expected a folder with rollouts, [^\n]*$"
    ):
        read_rollouts(tmp_path / path)


def test_a_missing_file_is_a_clear_error(tmp_path: Path, make_rollout: MakeRollout):
    """A quarantine file that vanished is reported once several looks have not found it."""
    with DatasetWriter(tmp_path) as writer:
        writer.write([make_rollout("a")])
        writer.write([make_rollout("a", revision=1)])
    (tmp_path / "quarantine" / "part-00000001.parquet").unlink()
    with pytest.raises(DatasetError, match="lacks a file, or is rewritten all the time"):
        read_quarantine(tmp_path)


def test_reading_needs_no_lock(tmp_path: Path, make_rollout: MakeRollout):
    """A dataset is read while a writer has it open, and each read sees the parts committed by then."""
    seen: list[list[str]] = []
    with DatasetWriter(tmp_path) as writer:
        for name in "abcdefgh":
            writer.write([make_rollout(name)])
            seen.append(read_rollouts(tmp_path).collect()["rollout_id"].to_list())
        assert writer.rewrite() == 9
        seen.append(read_rollouts(tmp_path).collect()["rollout_id"].to_list())
    assert seen == [list("abcdefgh"[:count]) for count in (*range(1, 9), 8)]
    assert [(tmp_path / table.name).is_dir() for table in TABLES] == [True] * 4
