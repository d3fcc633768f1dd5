import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow.parquet as pq
import pytest

from spanmill.errors import DatasetError
from spanmill.triplets.records import Quarantined, Rollout
from spanmill.triplets.schema import TABLES, arrow_schema
from spanmill.triplets.writer import DatasetWriter, stray_key

MakeRollout = Callable[..., Rollout]
NAMES = [table.name for table in TABLES]


def _files(root: Path) -> list[str]:
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file() and path.name != ".lock")


def test_a_part_has_a_file_in_every_table(tmp_path: Path, make_rollout: MakeRollout):
    """Part 1 is one file per table, under the same name, and no temporary file stays."""
    with DatasetWriter(tmp_path) as writer:
        assert writer.write([make_rollout("r")]) == 1
    assert _files(tmp_path) == sorted(f"{name}/part-00000001.parquet" for name in NAMES)


def test_an_empty_part_still_has_a_schema(tmp_path: Path):
    """A part without rows has every table's schema, so that a glob always finds one."""
    with DatasetWriter(tmp_path) as writer:
        writer.write([])
    read = {t.name: pq.read_schema(tmp_path / t.name / "part-00000001.parquet").remove_metadata() for t in TABLES}
    assert read == {table.name: arrow_schema(table) for table in TABLES}


def test_files_read_as_plain_parquet(tmp_path: Path, make_rollout: MakeRollout, as_row: Callable[[Any], Any]):
    """Both polars and pyarrow read the files of a table by a glob, without any knowledge of spanmill."""
    rollouts = [make_rollout(name) for name in "abc"]
    with DatasetWriter(tmp_path) as writer:
        writer.write(rollouts[:2])
        writer.write(rollouts[2:])
    paths = sorted((tmp_path / "rollouts").rglob("*.parquet"))
    expected = [as_row(rollout) for rollout in rollouts]
    assert pl.concat([pl.read_parquet(path) for path in paths]).to_dicts() == expected
    assert pl.read_parquet(tmp_path / "rollouts" / "*.parquet").to_dicts() == expected
    assert pq.read_table(tmp_path / "rollouts")["rollout_id"].to_pylist() == ["a", "b", "c"]


def test_committed_is_kept_current_and_found_again(tmp_path: Path, make_rollout: MakeRollout):
    """The newest revision and its part are known at once, and after a new start."""
    expected = {("a", 0): (1, 2), ("a", 1): (0, 1), ("b", 0): (0, 2)}
    with DatasetWriter(tmp_path) as writer:
        writer.write([make_rollout("a"), make_rollout("a", attempt=1)])
        writer.write([make_rollout("b"), make_rollout("a", revision=1)])
        live = writer.newest([*expected, ("c", 0)])
    with DatasetWriter(tmp_path) as writer:
        assert (live, writer.newest([*expected, ("c", 0)])) == (expected, expected)


def test_committed_rows_are_those_of_the_newest_revision(
    tmp_path: Path, make_rollout: MakeRollout, make_quarantined: Callable[..., Quarantined]
):
    """`read_rows` gives every table's rows of a key, without strays that name it, and nothing for an unknown key."""
    with DatasetWriter(tmp_path) as writer:
        writer.write([make_rollout("a"), make_rollout("b")])
        writer.write([make_rollout("c"), make_rollout("a", revision=1)], [make_quarantined("stray", "a", 0)])
        rows = writer.read_rows([("a", 0), ("b", 0), ("x", 0)])
    counted = {key: [rows[key][table].num_rows for table in NAMES] for key in rows}
    assert counted == {("a", 0): [1, 2, 1, 1], ("b", 0): [1, 2, 1, 1]}
    assert rows["a", 0]["quarantine"]["detail"].to_pylist() == ["revision 1"]


def test_strays_are_known_again(
    tmp_path: Path, make_rollout: MakeRollout, make_quarantined: Callable[..., Quarantined]
):
    """After a restart every stray row is recognised, whether or not it names a rollout, and no other row is."""
    strays = [make_quarantined("one"), make_quarantined("two", "r", 0)]
    with DatasetWriter(tmp_path) as writer:
        writer.write([make_rollout("r")], strays)
        writer.write([make_rollout("s")])
    with DatasetWriter(tmp_path) as writer:
        assert writer.stray_rows() == {stray_key(s.trace_id, s.span_id, s.reason, s.detail, s.span) for s in strays}


def test_an_older_revision_is_refused(tmp_path: Path, make_rollout: MakeRollout):
    """Rows that no reader would ever see are not written; the writer goes on."""
    with DatasetWriter(tmp_path) as writer:
        writer.write([make_rollout("a", revision=2)])
        with pytest.raises(ValueError, match=r"revision 1 of \('a', 0\) is older than the committed 2"):
            writer.write([make_rollout("a", revision=1)])
        assert writer.write([make_rollout("a", revision=3)]) == 2


def test_a_part_holds_one_revision_of_a_rollout(tmp_path: Path, make_rollout: MakeRollout):
    """Two revisions of one attempt in one part are refused: quarantine rows could not be told apart."""
    with DatasetWriter(tmp_path) as writer, pytest.raises(ValueError, match="two revisions"):
        writer.write([make_rollout("a"), make_rollout("a", revision=1)])


def test_a_second_writer_is_turned_away(tmp_path: Path):
    """Only one writer at a time; the next may come when the first has closed."""
    with DatasetWriter(tmp_path), pytest.raises(DatasetError, match="another spanmill is writing to"):
        DatasetWriter(tmp_path)
    DatasetWriter(tmp_path).close()


def test_a_child_that_inherited_the_lock_does_not_keep_it(tmp_path: Path):
    """A closed dataset is free although a copy of the lock's descriptor, as a forked worker has it, is still open."""
    writer = DatasetWriter(tmp_path)
    held = [int(name) for name in os.listdir("/proc/self/fd") if _opens(name, tmp_path / ".lock")]
    inherited = [os.dup(descriptor) for descriptor in held]
    writer.close()
    DatasetWriter(tmp_path).close()
    for descriptor in inherited:
        os.close(descriptor)
    assert len(inherited) == 1


def _opens(descriptor: str, path: Path) -> bool:
    link = Path("/proc/self/fd") / descriptor
    return link.is_symlink() and os.path.realpath(link) == str(path)


@pytest.mark.parametrize("path", ["file", "file/below"])
def test_a_path_that_is_a_file_is_one_clear_error(tmp_path: Path, path: str):
    """A folder that cannot be made is reported with its path, in one line."""
    (tmp_path / "file").write_text("")
    with pytest.raises(DatasetError, match=f"^cannot make the dataset {tmp_path / path}: [^\n]*$"):
        DatasetWriter(tmp_path / path)


def test_a_foreign_file_among_the_rollouts_is_reported(tmp_path: Path):
    """A file that is no Parquet is named, and neither removed nor overlooked."""
    DatasetWriter(tmp_path).close()
    path = tmp_path / "rollouts" / "part-00000001.parquet"
    path.write_text("something else")
    with pytest.raises(DatasetError, match=r"part-00000001\.parquet is no whole Parquet file"):
        DatasetWriter(tmp_path)
    assert path.read_text() == "something else"


def test_paths_are_taken_literally(tmp_path: Path, make_rollout: MakeRollout, as_row: Callable[[Any], Any]):
    """`=`, `*` and `[` in a path are neither hive partitions nor patterns."""
    root = tmp_path / "run=1" / "a*[b]"
    with DatasetWriter(root) as writer:
        writer.write([make_rollout("r")])
        assert writer.read_rows([("r", 0)])["r", 0]["rollouts"].num_columns == len(as_row(make_rollout("r")))
