import os
from collections.abc import Callable
from pathlib import Path

import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spanmill.triplets.reader import read_quarantine, read_rollouts, read_triplets
from spanmill.triplets.records import Quarantined, Rollout
from spanmill.triplets.rewrite import FAN, Part, choose_parts
from spanmill.triplets.schema import TABLES
from spanmill.triplets.writer import DatasetWriter

MakeRollout = Callable[..., Rollout]
MakeQuarantined = Callable[..., Quarantined]
MIB = 1 << 20


def _glob(root: Path, table: str) -> pl.DataFrame:
    """What a trainer's plain glob sees."""
    return pl.concat([pl.read_parquet(path) for path in sorted((root / table).rglob("*.parquet"))])


def _rewrite_all(writer: DatasetWriter) -> int:
    count = 0
    while writer.rewrite() is not None:
        count += 1
    return count


def test_superseded_rows_are_gone_from_a_plain_glob(tmp_path: Path, make_rollout: MakeRollout):
    """After a rewriting every table holds rows of the newest revisions only."""
    with DatasetWriter(tmp_path) as writer:
        writer.write([make_rollout("a"), make_rollout("b")])
        writer.write([make_rollout("a", revision=1)])
        _rewrite_all(writer)
    seen = [
        sorted(_glob(tmp_path, name).select("rollout_id", "revision").unique().rows())
        for name in ("rollouts", "triplets", "episodes")
    ]
    assert seen == [[("a", 1), ("b", 0)]] * 3
    assert sorted(_glob(tmp_path, "quarantine")["detail"]) == ["revision 0", "revision 1"]


def test_rewriting_ends(tmp_path: Path, make_rollout: MakeRollout):
    """Once only newest rows are left there is nothing more to rewrite."""
    with DatasetWriter(tmp_path) as writer:
        writer.write([make_rollout("a")])
        writer.write([make_rollout("a", revision=1)])
        assert (_rewrite_all(writer), _rewrite_all(writer)) == (1, 0)


def test_small_parts_become_one_in_rollout_order(tmp_path: Path, make_rollout: MakeRollout):
    """Eight small parts are joined, rows by (rollout_id, attempt) and within them as they were."""
    with DatasetWriter(tmp_path) as writer:
        for name in "hgfedcba":
            writer.write([make_rollout(name, attempt=1), make_rollout(name)])
        assert writer.rewrite() == 9
        expected = {(name, attempt): (0, 9) for name in "abcdefgh" for attempt in (0, 1)}
        assert writer.newest([*expected, ("i", 0)]) == expected
    expected = [(name, attempt, turn) for name in "abcdefgh" for attempt in (0, 1) for turn in (0, 1)]
    assert _glob(tmp_path, "triplets").select("rollout_id", "attempt", "turn").rows() == expected


def test_a_rewriting_changes_no_row(tmp_path: Path, make_rollout: MakeRollout):
    """The rows that stay are equal in every column before and after."""
    with DatasetWriter(tmp_path) as writer:
        for name in "abcdefgh":
            writer.write([make_rollout(name)])
        before = [_glob(tmp_path, table.name).to_dicts() for table in TABLES]
        _rewrite_all(writer)
    assert [_glob(tmp_path, table.name).to_dicts() for table in TABLES] == before


def test_moved_rollouts_disappear(tmp_path: Path, make_rollout: MakeRollout):
    """The last row of a rollout that moved away goes, and so do its older rows, which must not come to life again."""
    with DatasetWriter(tmp_path) as writer:
        writer.write([make_rollout("a"), make_rollout("b")])
        writer.write([make_rollout("a", revision=1, moved=True)])
        assert read_rollouts(tmp_path).collect()["rollout_id"].to_list() == ["b"]
        _rewrite_all(writer)
        assert writer.newest([("a", 0), ("b", 0)]) == {("b", 0): (0, 3)}
    assert [sorted(set(_glob(tmp_path, table.name)["rollout_id"])) for table in TABLES] == [["b"]] * 4


def test_a_moved_row_outlives_the_rows_it_hides(tmp_path: Path, make_rollout: MakeRollout):
    """As long as older rows of a moved rollout lie in a part that is not rewritten, its last row stays as well."""
    with DatasetWriter(tmp_path) as writer:
        writer.write([make_rollout("a")])
        writer.write([make_rollout("x"), make_rollout("a", revision=1, moved=True)])
        writer.write([make_rollout("x", revision=1)])
        seen = [read_triplets(tmp_path).collect()["rollout_id"].unique().to_list()]
        while writer.rewrite(max_bytes=1) is not None:
            seen.append(read_triplets(tmp_path).collect()["rollout_id"].unique().to_list())
    assert seen == [["x"]] * len(seen)
    assert len(seen) == 3


def test_strays_survive_any_rewriting(tmp_path: Path, make_rollout: MakeRollout, make_quarantined: MakeQuarantined):
    """A stray row that names a rollout stays, although it lies in one part with superseded rows of that rollout."""
    with DatasetWriter(tmp_path) as writer:
        writer.write([make_rollout("a"), make_rollout("b")])
        writer.write([make_rollout("b", revision=1), make_rollout("c")], [make_quarantined("stray", "a", 0)])
        writer.write([make_rollout("c", revision=1)])
        assert writer.rewrite() == 4
        writer.write([make_rollout("a", revision=1)])
        read = sorted(read_quarantine(tmp_path).collect()["detail"])
        _rewrite_all(writer)
    assert read == sorted(_glob(tmp_path, "quarantine")["detail"]) == [*["revision 1"] * 3, "stray"]


def test_replaced_files_wait_and_are_removed_when_old(tmp_path: Path, make_rollout: MakeRollout):
    """Replaced files lie in `.old`, where no glob below a table sees them, until they are as old as asked."""
    with DatasetWriter(tmp_path) as writer:
        writer.write([make_rollout("a")])
        writer.write([make_rollout("a", revision=1)])
        writer.rewrite()
        seen = [path.name for table in TABLES for path in sorted((tmp_path / table.name).rglob("*.parquet"))]
        old = list((tmp_path / ".old").rglob("*.parquet"))
        for path in old:
            os.utime(path, (1000, 1000))
        removed = [writer.purge_old(60, 1059), writer.purge_old(60, 1060), writer.purge_old(60, 1060)]
    assert (seen, len(old), removed) == (["part-00000002.parquet", "part-00000003.parquet"] * 4, 4, [0, 4, 0])


def test_dirty_parts_go_first_and_the_oldest_of_them_before():
    """Parts with rows that are to go are chosen in order, as many as fit, and at least one."""
    parts = [Part(1, 10, False), Part(2, 60, True), Part(3, 30, True), Part(4, 30, True)]
    assert [choose_parts(parts, size) for size in (120, 100, 50)] == [[2, 3, 4], [2, 3], [2]]


@pytest.mark.parametrize(("count", "chosen"), [(FAN - 1, 0), (FAN, FAN)])
def test_small_parts_wait_for_enough_of_their_size(count: int, chosen: int):
    """Parts of one size are joined once there are eight; a large one beside them stays out of it."""
    parts = [Part(number, MIB, False) for number in range(count)] + [Part(99, 200 * MIB, False)]
    assert len(choose_parts(parts, 256 * MIB)) == chosen


@given(st.lists(st.integers(1, 40 * MIB), max_size=200))
def test_joining_is_bounded(sizes: list[int]):
    """Joining ends, makes no part too large, leaves few parts, and rewrites each byte only a few times."""
    limit = 256 * MIB
    parts = {number: size for number, size in enumerate(sizes)}
    moved = 0
    while chosen := choose_parts([Part(number, size, False) for number, size in parts.items()], limit):
        size = sum(parts.pop(number) for number in chosen)
        assert size <= limit
        parts[len(sizes) + moved] = size
        moved += len(chosen)
    assert moved <= 2 * len(sizes) + 16
    assert len(parts) <= 6 * FAN + sum(sizes) // (limit // 4)
