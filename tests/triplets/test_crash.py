"""A crash is an error at the k-th step that changes the folder: nothing after it runs, as nothing would."""

import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from spanmill.errors import DatasetError
from spanmill.triplets.reader import read_episodes, read_quarantine, read_rollouts, read_triplets
from spanmill.triplets.records import Quarantined, Rollout
from spanmill.triplets.schema import TABLES
from spanmill.triplets.writer import DatasetWriter

MakeRollout = Callable[..., Rollout]
MakeQuarantined = Callable[..., Quarantined]
Change = Callable[[DatasetWriter], Any]
STEPS = ("replace", "fsync")


class Crash(OSError):
    """The step that was not taken."""


@pytest.fixture
def crash_at(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Makes the k-th rename or fsync from now on fail, and every later one."""

    def arm(step: int) -> None:
        monkeypatch.undo()
        left = [step]

        def stopping(real: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any, **kwargs: Any) -> Any:
                left[0] -= 1
                if left[0] < 0:
                    raise Crash("crashed here")
                return real(*args, **kwargs)

            return call

        for name in STEPS:
            monkeypatch.setattr(os, name, stopping(getattr(os, name)))

    return arm


def _read(root: Path) -> list[list[dict[str, Any]]]:
    """Every table's newest rows, in an order of their own."""
    frames = (read_rollouts, read_triplets, read_episodes, read_quarantine)
    return [sorted(frame(root).collect().to_dicts(), key=repr) for frame in frames]


def _glob(root: Path) -> list[list[dict[str, Any]]]:
    globs = [sorted((root / table.name).rglob("*.parquet")) for table in TABLES]
    return [sorted(pl.concat(map(pl.read_parquet, paths)).to_dicts(), key=repr) for paths in globs]


def _dataset(root: Path, make_rollout: MakeRollout, make_quarantined: MakeQuarantined) -> None:
    """Superseded rows in two parts, a moved rollout, and strays."""
    with DatasetWriter(root) as writer:
        writer.write([make_rollout("a"), make_rollout("b"), make_rollout("m")], [make_quarantined("stray", "a", 0)])
        writer.write([make_rollout("c"), make_rollout("a", revision=1)])
        writer.write([make_rollout("a", revision=2), make_rollout("m", revision=1, moved=True)])


def _crashes(root: Path, change: Change, crash_at: Callable[[int], None], seen: Callable[[int, Path], None]) -> int:
    """Runs `change` on a copy of the dataset, crashing at every step in turn; how many steps it has."""
    for step in range(1000):
        copy = root.with_name(f"copy-{step}")
        shutil.copytree(root, copy)
        with DatasetWriter(copy) as writer:
            crash_at(step)
            try:
                change(writer)
            except DatasetError:
                crash_at(1000)
            else:
                crash_at(1000)
                return step
        seen(step, copy)
    raise AssertionError("the change never ended")


def test_a_crash_in_a_commit_leaves_all_of_it_or_nothing(
    tmp_path: Path,
    make_rollout: MakeRollout,
    make_quarantined: MakeQuarantined,
    crash_at: Callable[[int], None],
):
    """Wherever a commit stops, readers see the rows before or after it, at once and after the next start."""
    root = tmp_path / "dataset"
    _dataset(root, make_rollout, make_quarantined)
    before = _read(root)
    shutil.copytree(root, tmp_path / "after")

    def change(writer: DatasetWriter) -> None:
        writer.write([make_rollout("d"), make_rollout("b", revision=1)], [make_quarantined("another")])

    with DatasetWriter(tmp_path / "after") as writer:
        change(writer)
    after = _read(tmp_path / "after")
    states: list[bool] = []

    def seen(step: int, copy: Path) -> None:
        at_once = _read(copy)
        assert at_once in (before, after)
        with DatasetWriter(copy) as writer:
            assert _read(copy) == at_once
            assert bool(writer.newest([("d", 0)])) == (at_once == after)
            assert not list(copy.rglob(".part*"))
            if at_once == before:
                change(writer)
            assert _read(copy) == after
        states.append(at_once == after)

    steps = _crashes(root, change, crash_at, seen)
    assert (len(states), sorted(states)) == (steps, states)
    assert {True, False} == set(states)


@pytest.mark.slow
def test_a_crash_in_a_rewriting_loses_and_revives_nothing(
    tmp_path: Path,
    make_rollout: MakeRollout,
    make_quarantined: MakeQuarantined,
    crash_at: Callable[[int], None],
):
    """Wherever a rewriting stops, readers see the same rows, and the next start and rewriting end as it would have."""
    root = tmp_path / "dataset"
    _dataset(root, make_rollout, make_quarantined)
    expected = _read(root)

    def change(writer: DatasetWriter) -> None:
        while writer.rewrite(max_bytes=14000) is not None:
            pass

    def seen(step: int, copy: Path) -> None:
        assert _read(copy) == expected
        with DatasetWriter(copy) as writer:
            assert _read(copy) == expected
            names = [(name, attempt) for name in "abcdm" for attempt in (0, 1)]
            committed = writer.newest(names)
            change(writer)
            assert {key[0] for key in writer.newest(names)} == {"a", "b", "c"}
            assert {key: value[0] for key, value in committed.items() if key[0] != "m"} == {
                key: revision for key, (revision, _) in writer.newest(names).items()
            }
        assert (_read(copy), _glob(copy)) == (expected, expected)

    assert _crashes(root, change, crash_at, seen) > 30


def test_a_writer_goes_on_after_a_failed_commit(
    tmp_path: Path,
    make_rollout: MakeRollout,
    make_quarantined: MakeQuarantined,
    crash_at: Callable[[int], None],
):
    """The same writer, told to write again once the disk works, leaves exactly what one clean commit leaves."""
    root = tmp_path / "dataset"
    _dataset(root, make_rollout, make_quarantined)
    batch = [make_rollout("d"), make_rollout("b", revision=1)]
    shutil.copytree(root, tmp_path / "clean")
    with DatasetWriter(tmp_path / "clean") as writer:
        writer.write(batch)
    expected = _read(tmp_path / "clean")
    for step in range(12):
        copy = tmp_path / f"copy-{step}"
        shutil.copytree(root, copy)
        with DatasetWriter(copy) as writer:
            crash_at(step)
            with pytest.raises(DatasetError, match="cannot write to the dataset"):
                writer.write(batch)
            crash_at(1000)
            writer.write(batch)
            assert _read(copy) == expected
            while writer.rewrite() is not None:
                pass
        assert (_read(copy), _glob(copy)) == (expected, expected)


def test_a_crash_after_an_unclear_commit_mixes_no_rows(
    tmp_path: Path,
    make_rollout: MakeRollout,
    make_quarantined: MakeQuarantined,
    crash_at: Callable[[int], None],
):
    """A part renamed but not known to be durable counts as committed, so the next one never overwrites its files."""
    read: list[Any] = []
    for step in range(13):
        root = tmp_path / f"dataset-{step}"
        _dataset(root, make_rollout, make_quarantined)
        with DatasetWriter(root) as writer:
            crash_at(11)
            with pytest.raises(DatasetError):
                writer.write([make_rollout("d")])
            crash_at(step)
            with suppress(DatasetError):
                writer.write([make_rollout("e")])
            crash_at(1000)
        frames = (read_rollouts, read_triplets)
        read.append(["".join(sorted(set(frame(root).collect()["rollout_id"]))) for frame in frames])
    assert sorted(read) == read
    assert {tuple(row) for row in read} == {("abcd", "abcd"), ("abcde", "abcde")}
