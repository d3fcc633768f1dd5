import asyncio
import threading
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import polars as pl
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from spanmill.errors import DatasetError
from spanmill.triplets import parts
from spanmill.triplets.follow import Follower, News, follow
from spanmill.triplets.reader import read_episodes, read_rollouts, read_triplets
from spanmill.triplets.records import Rollout
from spanmill.triplets.schema import TableSpec
from spanmill.triplets.writer import DatasetWriter

MakeRollout = Callable[..., Rollout]
Version = tuple[str, int, int]
VERSION = ("rollout_id", "attempt", "revision")


def _versions(news: News) -> list[Version]:
    return news.rollouts.select(VERSION).rows()


def _all(follower: Follower) -> list[Version]:
    return [version for news in follower for version in _versions(news)]


def test_what_is_committed_comes_once_and_whole(tmp_path: Path, make_rollout: MakeRollout):
    """News hold the rows of all three tables as readers see them, and nothing comes a second time."""
    with DatasetWriter(tmp_path) as writer:
        writer.write([make_rollout("a"), make_rollout("b")])
        follower = follow(tmp_path, timeout=0)
        (news,) = list(follower)
        assert news.rollouts.equals(read_rollouts(tmp_path).collect())
        assert news.triplets.equals(read_triplets(tmp_path).collect())
        assert news.episodes.equals(read_episodes(tmp_path).collect())
        writer.write([make_rollout("c")])
        assert [("c", 0, 0)] == _all(follower)
        assert ["1", "1-2"] == [news.cursor, follower.cursor]


def test_a_newer_revision_comes_as_such(tmp_path: Path, make_rollout: MakeRollout):
    """A revision comes after the one it replaces; who was away gets the newest only."""
    with DatasetWriter(tmp_path) as writer:
        writer.write([make_rollout("a"), make_rollout("b")])
        follower = follow(tmp_path, timeout=0)
        before = _all(follower)
        writer.write([make_rollout("a", revision=1)])
        assert ([("a", 0, 0), ("b", 0, 0)], [("a", 0, 1)]) == (before, _all(follower))
        assert [("b", 0, 0), ("a", 0, 1)] == _all(follow(tmp_path, timeout=0))


def test_a_rewriting_brings_nothing_again(tmp_path: Path, make_rollout: MakeRollout):
    """A part that replaces others holds news only of those that had not been given."""
    with DatasetWriter(tmp_path) as writer:
        for name in "abc":
            writer.write([make_rollout(name)])
        follower = follow(tmp_path, timeout=0)
        _all(follower)
        for name in "defgh":
            writer.write([make_rollout(name)])
        assert 9 == writer.rewrite()
        writer.purge_old(0, time.time() + 1)
        assert [(name, 0, 0) for name in "defgh"] == _all(follower)
        assert [(name, 0, 0) for name in "abcdefgh"] == _all(follow(tmp_path, timeout=0))
        assert [] == _all(follow(tmp_path, follower.cursor, timeout=0))


def test_a_move_takes_back_what_was_given(tmp_path: Path, make_rollout: MakeRollout):
    """Rows that stand under another rollout now come as a revision without rows, flagged `moved`."""
    with DatasetWriter(tmp_path) as writer:
        writer.write([make_rollout("a")])
        follower = follow(tmp_path, timeout=0)
        _all(follower)
        writer.write([make_rollout("a", revision=1, moved=True)])
        (news,) = list(follower)
        assert ([("a", 0, 1)], [["moved"]], 0) == (
            _versions(news),
            news.rollouts["flags"].to_list(),
            news.episodes.height,
        )


def test_news_outlive_their_files(tmp_path: Path, make_rollout: MakeRollout):
    """Rows are those of the moment at which news were given, though their files were rewritten and removed since."""
    with DatasetWriter(tmp_path) as writer:
        writer.write([make_rollout("a"), make_rollout("b")])
        (news,) = list(follow(tmp_path, timeout=0))
        writer.write([make_rollout("a", revision=1)])
        while writer.rewrite() is not None:
            pass
        writer.purge_old(0, time.time() + 1)
        assert {("a", 0), ("b", 0)} == set(news.episodes.select("rollout_id", "revision").rows())


OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("write"), st.lists(st.sampled_from("abcdefgh"), min_size=1, max_size=3, unique=True)),
        st.tuples(st.just("move"), st.sampled_from("abcdefgh")),
        st.tuples(st.just("rewrite"), st.none()),
        st.tuples(st.just("take"), st.integers(1, 3)),
        st.tuples(st.just("restart"), st.none()),
    ),
    min_size=5,
    max_size=20,
)


@pytest.mark.slow
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(OPERATIONS)
def test_any_interleaving_gives_each_revision_once(
    make_rollout: MakeRollout, operations: list[tuple[str, list[str] | str | int | None]]
):
    """Whatever commits, rewritings, removals and restarts come between, none comes twice and each newest one comes."""
    revisions: dict[str, int] = {}
    given_out: list[Version] = []
    with TemporaryDirectory() as folder, DatasetWriter(folder) as writer:
        follower = follow(folder, timeout=0)

        def take(most: int) -> None:
            for _ in range(most):
                news = follower.take()
                if news is not None:
                    given_out.extend(_versions(news))

        for what, which in operations:
            if what == "write" and isinstance(which, list):
                for name in which:
                    revisions[name] = revisions.get(name, -1) + 1
                writer.write([make_rollout(name, revision=revisions[name]) for name in which])
            elif what == "move" and which in revisions:
                revisions[which] += 1
                writer.write([make_rollout(which, revision=revisions[which], moved=True)])
            elif what == "rewrite":
                writer.rewrite()
                writer.purge_old(0, time.time() + 1)
            elif what == "take" and isinstance(which, int):
                take(which)
            elif what == "restart":
                follower = follow(folder, follower.cursor, timeout=0)
        given_out += _all(follower)
        newest = set(read_rollouts(folder).select(VERSION).collect().rows())
        assert given_out == list(dict.fromkeys(given_out))
        assert set() == newest - set(given_out)
        assert [] == _all(follow(folder, follower.cursor, timeout=0))
    for name in revisions:
        own = [revision for rollout_id, _, revision in given_out if rollout_id == name]
        assert sorted(own) == own


def test_each_comes_once_beside_a_writer(tmp_path: Path, make_rollout: MakeRollout):
    """A follower that runs while parts are committed, rewritten and removed is given every rollout once."""
    writer = DatasetWriter(tmp_path)
    names = [f"r{number}" for number in range(60)]

    def write() -> None:
        for name in names:
            writer.write([make_rollout(name)])
            writer.rewrite()
            writer.purge_old(0, time.time() + 1)

    follower = follow(tmp_path, poll=0.001, timeout=20)
    thread = threading.Thread(target=write)
    thread.start()
    found: list[Version] = []
    for news in follower:
        found += _versions(news)
        if len(found) >= len(names):
            follower.stop()
    thread.join()
    writer.close()
    assert sorted((name, 0, 0) for name in names) == sorted(found)


def test_a_wait_ends_by_timeout_and_by_stop(tmp_path: Path, make_rollout: MakeRollout):
    """Without news the iteration ends after `timeout` seconds, or as soon as another thread stops it."""
    DatasetWriter(tmp_path).close()
    assert [] == list(follow(tmp_path, timeout=0.01))
    endless = follow(tmp_path)
    threading.Timer(0.05, endless.stop).start()
    assert [] == list(endless)
    with DatasetWriter(tmp_path) as writer:
        writer.write([make_rollout("a")])
    assert None is endless.take()


def test_async_news_leave_the_loop_free(tmp_path: Path, make_rollout: MakeRollout):
    """`async for` gives the same news, and other tasks run while it waits."""

    async def run() -> list[Version]:
        found: list[Version] = []
        follower = follow(tmp_path, poll=0.01, timeout=20)

        async def write() -> None:
            with DatasetWriter(tmp_path) as writer:
                for name in "ab":
                    await asyncio.sleep(0.03)
                    writer.write([make_rollout(name)])

        task = asyncio.create_task(write())
        async for news in follower:
            found += _versions(news)
            if len(found) == 2:
                follower.stop()
        await task
        return found

    DatasetWriter(tmp_path).close()
    assert [("a", 0, 0), ("b", 0, 0)] == asyncio.run(run())


@pytest.mark.parametrize("cursor", ["x", "1-", "-1", "1,,2", "1;2", "٣"])
def test_what_is_no_cursor_is_said(tmp_path: Path, cursor: str):
    """A text that no news had is refused at once."""
    DatasetWriter(tmp_path).close()
    with pytest.raises(DatasetError, match="is no cursor"):
        follow(tmp_path, cursor)


def test_a_cursor_of_another_dataset_is_said(tmp_path: Path, make_rollout: MakeRollout):
    """A cursor beyond the newest part would pass over what is to come: it is refused."""
    with DatasetWriter(tmp_path) as writer:
        writer.write([make_rollout("a")])
    with pytest.raises(DatasetError, match=r"of another dataset: .* has parts up to 1"):
        follow(tmp_path, "1-7")


def test_a_folder_without_a_dataset_is_said(tmp_path: Path):
    """Following a folder that holds none would wait for ever: it is refused."""
    with pytest.raises(DatasetError, match="is no dataset; `spanmill serve --out"):
        follow(tmp_path / "typo")


def test_the_highest_listing_decides(tmp_path: Path, make_rollout: MakeRollout, monkeypatch: pytest.MonkeyPatch):
    """A listing that missed a part in motion is made again, so its rows are never passed over."""
    with DatasetWriter(tmp_path) as writer:
        for name in "abcdefgh":
            writer.write([make_rollout(name)])
        writer.rewrite()
    real = parts.part_numbers
    torn = iter([[7, 8]])

    def listed(root: Path, table: TableSpec) -> list[int]:
        return next(torn, None) or real(root, table)

    monkeypatch.setattr(parts, "part_numbers", listed)
    assert [9] == [footer.number for footer in parts.read_footers(tmp_path)]


def test_origins_survive_rewriting_after_rewriting(tmp_path: Path, make_rollout: MakeRollout):
    """Each row of a part that replaced others knows in which part it came, through two rewritings."""
    with DatasetWriter(tmp_path) as writer:
        for name in "hgfedcba":
            writer.write([make_rollout(name)])
        writer.rewrite()
        writer.write([make_rollout("d", revision=1)])
        writer.rewrite()
        part = writer.newest([("a", 0)])["a", 0][1]
    rows = pl.read_parquet(tmp_path / "rollouts" / f"part-{part:08d}.parquet")
    origins = dict(zip(rows["rollout_id"], parts.origins_of(tmp_path, part), strict=True))
    assert (11, {"a": 8, "b": 7, "c": 6, "e": 4, "f": 3, "g": 2, "h": 1}) == (part, origins)
