"""What the pages show, asked of the dataset's files: filters, sorting and paging reach Parquet."""

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import polars as pl

from spanmill.collector.stats import FATES, counted
from spanmill.storage import Location
from spanmill.triplets.parts import part_numbers
from spanmill.triplets.reader import read_episodes, read_quarantine, read_rollout, read_rollouts, read_triplets
from spanmill.triplets.schema import ROLLOUTS

Row = Mapping[str, Any]
_T = TypeVar("_T")

PAGE_ROWS: Final = 50
SORTS: Final = {
    "started": "started_at",
    "rollout": "rollout_id",
    "reward": "reward",
    "calls": "num_calls",
    "tokens": "tokens_captured",
    "trained": "tokens_trained",
}
"""What the table of rollouts may be sorted by: the name in an address, and its column."""
_LISTED: Final = (
    "rollout_id",
    "attempt",
    "group_id",
    "task_id",
    "status",
    "reward",
    "num_calls",
    "num_episodes",
    "tokens_captured",
    "tokens_trained",
    "flags",
    "started_at",
    "ended_at",
)
_KEY: Final = ("rollout_id", "attempt")
TIME_BINS: Final = 40
_HISTOGRAM_BINS: Final = 20


@dataclass(frozen=True)
class Wanted:
    """Which rollouts a page lists, as its address says; None and "" want all."""

    prefix: str = ""
    """Beginning of the rollout id."""
    status: str = ""
    group: str = ""
    task: str = ""
    mode: str = ""
    agent: str = ""
    flag: str = ""
    version: str = ""
    """Policy version of any of its calls."""
    least: float | None = None
    """Smallest final reward."""
    most: float | None = None
    sort: str = "started"
    """A key of SORTS."""
    descending: bool = True
    page: int = 1


@dataclass(frozen=True)
class Listed:
    """A page of rollouts."""

    rows: list[dict[str, Any]]
    total: int
    """Of all pages."""


class Data:
    """A dataset as the pages see it; thread-safe. What was counted is kept until a part comes or goes."""

    def __init__(self, path: Location) -> None:
        self.path = path
        self._lock = threading.Lock()
        self._stamp = ""
        self._kept: dict[str, Any] = {}

    def stamp(self) -> str:
        """Changes whenever rows are committed or rewritten; empty where there is no dataset yet."""
        try:
            numbers = part_numbers(self.path, ROLLOUTS)
        except FileNotFoundError:
            return ""
        return f"{len(numbers)}-{numbers[-1]}" if numbers else "0"

    def _once(self, name: str, make: Callable[[], _T]) -> _T:
        """What `make` returns, made again only if the dataset has changed."""
        stamp = self.stamp()
        with self._lock:
            if stamp != self._stamp:
                self._stamp, self._kept = stamp, {}
            if name in self._kept:
                return self._kept[name]
        made = make()
        with self._lock:
            if stamp == self._stamp:
                self._kept[name] = made
        return made

    def rollouts(self) -> pl.LazyFrame:
        """The newest rows. Raises DatasetError if there is no dataset, SchemaVersionError for a newer one."""
        return self._once("rollouts", lambda: read_rollouts(self.path))

    # Lists

    def listed(self, wanted: Wanted) -> Listed:
        """A page of the rollouts that are wanted."""
        frame = self._filtered(wanted)
        order = SORTS[wanted.sort]
        total = frame.select(pl.len()).collect().item()
        by = [order, *(name for name in _KEY if name != order)]
        descending = [wanted.descending, *(False for _ in by[1:])]
        rows = frame.select(_LISTED).sort(by, descending=descending, nulls_last=True)
        start = (wanted.page - 1) * PAGE_ROWS
        return Listed(rows.slice(start, PAGE_ROWS).collect().to_dicts(), total)

    def _filtered(self, wanted: Wanted) -> pl.LazyFrame:
        frame = self.rollouts()
        if wanted.prefix:
            frame = frame.filter(pl.col("rollout_id").str.starts_with(wanted.prefix))
        equal = {"status": wanted.status, "group_id": wanted.group, "task_id": wanted.task, "mode": wanted.mode}
        for column, value in equal.items():
            if value:
                frame = frame.filter(pl.col(column) == value)
        if wanted.flag:
            frame = frame.filter(pl.col("flags").list.contains(wanted.flag))
        if wanted.least is not None:
            frame = frame.filter(pl.col("reward") >= wanted.least)
        if wanted.most is not None:
            frame = frame.filter(pl.col("reward") <= wanted.most)
        if wanted.agent or wanted.version:
            calls = read_triplets(self.path)
            if wanted.agent:
                calls = calls.filter(pl.col("agent") == wanted.agent)
            if wanted.version:
                calls = calls.filter(pl.col("policy_version") == wanted.version)
            frame = frame.join(calls.select(_KEY).unique(), on=_KEY, how="semi")
        return frame

    def choices(self) -> Mapping[str, list[str]]:
        """The values that a filter may take, the most frequent first, at most 50 of each."""
        return self._once("choices", self._choices)

    def _choices(self) -> dict[str, list[str]]:
        frame = self.rollouts().select("status", "mode", "flags").collect()
        calls = read_triplets(self.path).select("agent", "policy_version").collect()
        columns = {
            "status": frame["status"],
            "mode": frame["mode"],
            "flag": frame["flags"].explode(),
            "agent": calls["agent"],
            "version": calls["policy_version"],
        }
        return {name: [value for value, _ in counted(values)[:50]] for name, values in columns.items()}

    # The whole dataset

    def summary(self) -> Mapping[str, Any]:
        """Counts of everything, from the columns that say them."""
        return self._once("summary", self._summary)

    def _summary(self) -> dict[str, Any]:
        names = ("status", "reward", "num_calls", "num_triplets", "num_episodes", "tokens_captured", "flags")
        frame = self.rollouts().select(*names, "closed_by", *(f"tokens_{fate}" for fate in FATES)).collect()
        calls = read_triplets(self.path).select("trainable", "flags").collect()
        episodes = read_episodes(self.path).select("truncated", "flags").collect()
        captured = int(frame["tokens_captured"].sum())
        fates = {fate: int(frame[f"tokens_{fate}"].sum()) for fate in FATES}
        untrained = calls.filter(~pl.col("trainable"))
        return {
            "rollouts": frame.height,
            "rewarded": frame.height - frame["reward"].null_count(),
            "reward": frame["reward"].mean(),
            "calls": int(frame["num_calls"].sum()),
            "kept": calls.height,
            "trained": int(calls["trainable"].sum()),
            "episodes": episodes.height,
            "truncated": int(episodes["truncated"].sum()),
            "captured": captured,
            "fates": fates,
            "conserved": captured == sum(fates.values()),
            "status": counted(frame["status"]),
            "closed_by": counted(frame["closed_by"]),
            "flags": counted(frame["flags"].explode()),
            "call_flags": counted(calls["flags"].explode()),
            "why_untrained": counted(untrained["flags"].explode()),
            "episode_flags": counted(episodes["flags"].explode()),
            "quarantine": counted(read_quarantine(self.path).select("reason").collect()["reason"]),
        }

    def curves(self) -> Mapping[str, Any]:
        """What is plotted: rewards over time and by policy version, distributions of rewards, lengths and turns."""
        return self._once("curves", self._curves)

    def _curves(self) -> dict[str, Any]:
        rewards = self.rollouts().select(*_KEY, "started_at", "reward").drop_nulls("reward").collect()
        versions = pl.col("policy_versions").list.last().struct.field("version").alias("version")
        length = pl.col("turns").list.last().struct.field("response_end").alias("length")
        columns = (*_KEY, "reward", "num_turns", length, versions)
        episodes = read_episodes(self.path).select(columns).collect()
        by_version = episodes.drop_nulls(["version", "reward"]).unique(_KEY, keep="last", maintain_order=True)
        grouped = by_version.group_by("version").agg(pl.len().alias("rollouts"), pl.col("reward").mean())
        ordered = grouped.sort(pl.col("version").cast(pl.Int64, strict=False), "version", nulls_last=True)
        return {
            "over_time": _over_time(rewards),
            "by_version": ordered.rows(),
            "rewards": histogram(rewards["reward"]),
            "lengths": histogram(episodes["length"]),
            "turns": histogram(episodes["num_turns"]),
        }

    def quarantine(self, reason: str, page: int) -> Listed:
        """A page of what was set aside, for one reason or for any."""
        frame = read_quarantine(self.path)
        if reason:
            frame = frame.filter(pl.col("reason") == reason)
        total = frame.select(pl.len()).collect().item()
        rows = frame.with_row_index("row").slice((page - 1) * PAGE_ROWS, PAGE_ROWS).collect()
        return Listed(rows.to_dicts(), total)

    # One rollout, one group

    def attempts(self, rollout_id: str) -> list[int]:
        """The attempts of a rollout, ascending; none if it is not there."""
        own = self.rollouts().filter(pl.col("rollout_id") == rollout_id).select("attempt")
        return sorted(own.collect()["attempt"].to_list())

    def rollout(self, rollout_id: str, attempt: int) -> dict[str, list[dict[str, Any]]]:
        """The rows of one attempt in every table; no row in `rollouts` if it is not there."""
        return {name: frame.to_dicts() for name, frame in read_rollout(self.path, rollout_id, attempt).items()}

    def group(self, group_id: str) -> list[dict[str, Any]]:
        """The rollouts of a group, by id and attempt, at most 1,000."""
        columns = (*_LISTED, "group_size")
        own = self.rollouts().filter(pl.col("group_id") == group_id).select(columns)
        return own.sort(_KEY).head(1000).collect().to_dicts()


def _over_time(rewards: pl.DataFrame) -> list[tuple[Any, float, int]]:
    """(start of the bin, mean reward, rollouts) over at most TIME_BINS equal spans of time, empty ones left out."""
    if rewards.is_empty():
        return []
    at = pl.col("started_at").dt.epoch("us")
    first, last = rewards.select(at.min().alias("first"), at.max().alias("last")).row(0)
    width = max(1, (last - first) // TIME_BINS + 1)
    binned = rewards.group_by(((at - first) // width).alias("bin"))
    means = binned.agg(pl.col("reward").mean(), pl.len().alias("rollouts")).sort("bin")
    return [(first + number * width, reward, count) for number, reward, count in means.rows()]


def histogram(values: pl.Series) -> list[tuple[float, float, int]]:
    """(from, to, how many) of bins of equal width; nulls and values that are no finite number are left out."""
    kept = values.drop_nulls().cast(pl.Float64)
    kept = kept.filter(kept.is_finite())
    if kept.is_empty():
        return []
    low, high = float(kept.min() or 0.0), float(kept.max() or 0.0)  # pyright: ignore[reportArgumentType]  of floats it is one
    if low == high:
        return [(low, high, kept.len())]
    whole = values.dtype.is_integer()
    width = max(1.0, -(-(high - low + 1) // _HISTOGRAM_BINS)) if whole else (high - low) / _HISTOGRAM_BINS
    number = ((kept - low) / width).floor().clip(0, _HISTOGRAM_BINS - 1).cast(pl.Int32).alias("bin")
    counts = dict(number.value_counts().rows())
    bins = range(int((high - low) // width) + 1 if whole else _HISTOGRAM_BINS)
    return [(low + n * width, low + (n + 1) * width, counts.get(n, 0)) for n in bins]


def spread(rewards: Sequence[float | None]) -> dict[str, float] | None:
    """Mean, standard deviation, smallest and largest of the rewards that there are; None without any."""
    known = pl.Series([reward for reward in rewards if reward is not None], dtype=pl.Float64)
    if known.is_empty():
        return None
    stats = {"mean": known.mean(), "std": known.std(ddof=0), "min": known.min(), "max": known.max()}
    return {name: float(value) for name, value in stats.items()}  # pyright: ignore[reportArgumentType]  numbers all
