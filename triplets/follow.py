"""Following a dataset while it is written: each rollout's newest rows once, from wherever the reader was before."""

import asyncio
import re
import threading
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final, Self

import polars as pl
import pyarrow.parquet as pq

from spanmill.errors import DatasetError
from spanmill.storage import Location, Where, locate
from spanmill.triplets.parts import (
    KEY,
    active_parts,
    is_dataset,
    open_parquet,
    origins_of,
    part_numbers,
    part_path,
    read_footers,
    scan,
)
from spanmill.triplets.schema import EPISODES, ROLLOUTS, TRIPLETS, TableSpec, polars_schema

POLL_S: Final = 0.2
"""How often the folder is listed while nothing is new."""
_CURSOR: Final = re.compile(r"(\d+(-\d+)?(,\d+(-\d+)?)*)?", re.ASCII)


@dataclass(frozen=True)
class News:
    """Whole rollouts that a follower had not been given, in the order in which they stand in one part.

    Their tables are read when they are first asked for, from files that are open: a rewriting changes nothing in a
    folder. In an object store it takes them away, so read them at once there.
    """

    cursor: str
    """Store it once the rows are used: `follow(path, cursor)` goes on behind them."""
    keys: pl.DataFrame
    """rollout_id and attempt of the rollouts."""
    _files: Mapping[str, pq.ParquetFile]

    @cached_property
    def rollouts(self) -> pl.DataFrame:
        """Columns as in `schema.ROLLOUTS`.

        With `revision` > 0 a row replaces what was given of its (rollout_id, attempt) before; with the flag `moved` it
        takes that back: the calls stand under another rollout now.
        """
        return self._rows(ROLLOUTS)

    @cached_property
    def triplets(self) -> pl.DataFrame:
        """Columns as in `schema.TRIPLETS`."""
        return self._rows(TRIPLETS)

    @cached_property
    def episodes(self) -> pl.DataFrame:
        """Columns as in `schema.EPISODES`."""
        return self._rows(EPISODES)

    def _rows(self, table: TableSpec) -> pl.DataFrame:
        rows = pl.DataFrame(self._files[table.name].read().replace_schema_metadata(), schema=polars_schema(table))
        return rows.join(self.keys, on=KEY, how="semi", maintain_order="left")


def follow(path: Where, cursor: str = "", *, timeout: float | None = None, poll: float = POLL_S) -> "Follower":
    """The rows of the dataset at `path` that were not given before `cursor`, and then new ones as they are committed.

        for news in spanmill.follow("data", cursor):
            train(news.episodes)
            save(news.cursor)

    Each (rollout_id, attempt, revision) comes once, whatever is rewritten meanwhile and however often the follower is
    started anew from the last cursor. A revision that a newer one replaced before the follower came is left out.
    `cursor` is "" for the start, or that of the last news whose rows were used: rows given since then come again.
    `timeout` is how many seconds without news end the iteration: None waits for ever, 0 takes what is there and ends.
    The folder is listed every `poll` seconds.

    Raises DatasetError if there is no dataset, or the cursor is none of it, SchemaVersionError if a newer spanmill
    wrote it.
    """
    return Follower(path, cursor, timeout=timeout, poll=poll)


class Follower:
    """Iterates over news, with `for` or `async for`; made by `follow`. One thread at a time, but for `stop`."""

    def __init__(self, path: Where, cursor: str, *, timeout: float | None, poll: float) -> None:
        if timeout is not None and timeout < 0:
            raise ValueError(f"timeout: expected seconds from 0, or None, found {timeout}")
        self._root = locate(path)
        self._given = _parse(cursor)
        self._timeout = timeout
        self._poll = poll
        self._stopped = threading.Event()
        self._waiting: Iterator[News] | None = None
        """The news of one look at the folder that were not given out yet."""
        if not is_dataset(self._root):
            raise DatasetError(
                f"{self._root} is no dataset; `spanmill serve --out {self._root}` makes one as it starts"
            )
        read_footers(self._root, self._floor)  # says at once what cannot be read
        highest = max(part_numbers(self._root, ROLLOUTS), default=0)
        if self._given and self._given[-1][1] > highest:
            raise DatasetError(f"the cursor {cursor} is of another dataset: {self._root} has parts up to {highest}")

    @property
    def cursor(self) -> str:
        """That of the news given last."""
        return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in self._given)

    def stop(self) -> None:
        """End the iteration, also from another thread; a wait ends at once."""
        self._stopped.set()

    def take(self) -> News | None:
        """News if there are any by now, else None."""
        while not self._stopped.is_set():
            fresh = self._waiting is None
            self._waiting = self._waiting or self._look()
            try:
                if (news := next(self._waiting, None)) is not None:
                    return news
            except FileNotFoundError:
                # A part was replaced since it was listed: its rows stand in a later one.
                fresh = False
            self._waiting = None
            if fresh:
                return None
        return None

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> News:
        """The next news; waits for them."""
        deadline = None if self._timeout is None else time.monotonic() + self._timeout
        while (news := self.take()) is None:
            if self._over(deadline) or self._stopped.wait(self._poll):
                raise StopIteration
        return news

    def __aiter__(self) -> AsyncIterator[News]:
        return self

    async def __anext__(self) -> News:
        """As `__next__`; files are read in a thread."""
        deadline = None if self._timeout is None else time.monotonic() + self._timeout
        while (news := await asyncio.to_thread(self.take)) is None:
            if self._over(deadline) or self._stopped.is_set():
                raise StopAsyncIteration
            await asyncio.sleep(self._poll)
        return news

    def _over(self, deadline: float | None) -> bool:
        return deadline is not None and time.monotonic() >= deadline

    @property
    def _floor(self) -> int:
        """All rows that were first committed in a part up to this one have been given."""
        return self._given[0][1] if self._given and self._given[0][0] <= 1 else 0

    def _look(self) -> Iterator[News]:
        """What is new in the parts that there are now. Raises FileNotFoundError if one is replaced meanwhile."""
        footers = read_footers(self._root, self._floor)
        if not footers:
            return
        index = _index(self._root, active_parts(footers))
        index = index.filter(~pl.col("origin").is_in([n for low, high in self._given for n in range(low, high + 1)]))
        found = index.filter("newest").partition_by("part", maintain_order=True)
        for number, rows in enumerate(found):
            part: int = rows["part"][0]
            files = {
                table.name: open_parquet(part_path(self._root, table, part)) for table in (ROLLOUTS, TRIPLETS, EPISODES)
            }
            if number + 1 < len(found):
                origins = index.filter(pl.col("part") == part)["origin"].unique().to_list()
                self._given = _joined([*self._given, *((origin, origin) for origin in origins)])
            else:
                self._given = [(1, footers[-1].number)]
            yield News(self.cursor, rows.select(KEY), files)
        self._given = [(1, footers[-1].number)]


def _index(root: Location, parts: Sequence[int]) -> pl.DataFrame:
    """Of every row of `rollouts` in the parts: its key, part and origin, and whether it is the newest of its key."""
    frames = [
        scan([part_path(root, ROLLOUTS, part)])
        .select(*KEY, "revision", pl.lit(part).alias("part"))
        .collect()
        .with_columns(pl.Series("origin", origins_of(root, part), pl.Int64))
        for part in parts
    ]
    version = pl.struct("revision", "origin")
    return pl.concat(frames).with_columns(newest=version == version.sort().last().over(KEY))


def _parse(cursor: str) -> list[tuple[int, int]]:
    if not _CURSOR.fullmatch(cursor):
        raise DatasetError(f"{cursor!r} is no cursor: expected that of news, or the empty text for the start")
    ranges = [text.partition("-") for text in cursor.split(",")] if cursor else []
    return _joined((int(low), int(high or low)) for low, _, high in ranges)


def _joined(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Ranges of whole numbers, both ends included, ascending and with gaps between them."""
    found: list[tuple[int, int]] = []
    for low, high in sorted(ranges):
        if found and low <= found[-1][1] + 1:
            found[-1] = found[-1][0], max(high, found[-1][1])
        else:
            found.append((low, high))
    return found
