"""`spanmill export`: what is selected of a dataset, in the form that a trainer reads, and a report of what is not."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import polars as pl
import pyarrow as pa
import pyarrow.compute as pc

from spanmill.errors import DatasetError, ExportError
from spanmill.storage import Location, Where, locate
from spanmill.triplets.exports import (
    areal,
    atif,
    conversations,
    nemo,
    prime_rl,
    skyrl,
    slime,
    tinker,
    trl,
    verl,
)
from spanmill.triplets.exports.report import Report, account
from spanmill.triplets.exports.rows import batches
from spanmill.triplets.exports.sinks import safe_output
from spanmill.triplets.exports.target import Fill, Target
from spanmill.triplets.exports.truncate import truncated
from spanmill.triplets.parts import KEY, active_parts, read_footers, rollout_index
from spanmill.triplets.reader import read_episodes, read_rollouts
from spanmill.triplets.schema import EPISODES, TRIPLETS
from spanmill.triplets.select import EPISODE, LEFT_OUT, Decided, Selection, decide

TARGETS: Final[tuple[Target, ...]] = (
    *verl.TARGETS,
    *trl.TARGETS,
    *skyrl.TARGETS,
    *prime_rl.TARGETS,
    *areal.TARGETS,
    *slime.TARGETS,
    *tinker.TARGETS,
    *nemo.TARGETS,
    *atif.TARGETS,
    *conversations.TARGETS,
)
"""Every format. A new one is a small file and an entry here."""

_DEFAULT_SELECTION: Final = Selection()
_DEFAULT_FILL: Final = Fill()
_TEXTS: Final = frozenset({"messages", "tools", "metadata"})
"""Columns that only targets of messages read."""
_CALL_COLUMNS: Final = tuple(
    column.name
    for column in TRIPLETS.columns
    if column.name not in ("routed_experts", "multimodal", "metadata", "flags")
)


def export(
    dataset: Where,
    to: str,
    out: str | Path,
    selection: Selection = _DEFAULT_SELECTION,
    fill: Fill = _DEFAULT_FILL,
) -> Report:
    """Write what is selected of the dataset to `out` in the format `to`, and return what became of everything in it.

    `out` is a file or folder that does not exist yet; it appears when it is complete. Memory is bounded, whatever the
    size of the dataset, but for the largest rollout (group, for pairs) and some hundred bytes for each Episode.

    Raises ExportError if the format is unknown, `out` exists, the selection is empty or mixes what must not be mixed,
    or the format cannot have what is asked for; DatasetError and SchemaVersionError as `spanmill.read_rollouts`.
    """
    target = find_target(to)
    chosen, needs = _checked(target, selection, fill)
    root = locate(dataset)
    with safe_output(Path(out)) as path:
        decided, wanted = _snapshot(root, target, chosen, needs)
        if wanted.is_empty():
            raise ExportError(f"nothing is selected, so nothing was written:\n{account(decided, 0).text}")
        written, pairs = 0, list[str]()
        with target.sink(path, fill) as write:
            for rows in _rows(root, target, wanted):
                made = target.convert(_prepared(rows, target, chosen, fill), fill)
                if chosen.logprobs == "none" and target.optional_logprobs:
                    made = made.drop_columns([target.optional_logprobs])
                if made.num_rows:
                    write(made)
                    written += made.num_rows
                if target.reads == "groups":
                    pairs += [
                        *made.column("chosen_rollout_id").to_pylist(),
                        *made.column("rejected_rollout_id").to_pylist(),
                    ]
        if target.reads == "groups":
            decided = _unpaired(decided, pairs)
        report = account(decided, written)
        if target.reads == "tasks":
            report = report._replace(calls={}, tokens={})
        if not written:
            raise ExportError(f"what is selected makes no rows of {to}, so nothing was written:\n{report.text}")
    return report


def find_target(name: str) -> Target:
    """The target of that name; raises ExportError that lists them."""
    found = next((target for target in TARGETS if target.name == name), None)
    if found is None:
        raise ExportError(f"--to {name!r} is no format; there are {', '.join(target.name for target in TARGETS)}")
    return found


def _checked(target: Target, selection: Selection, fill: Fill) -> tuple[Selection, frozenset[Any]]:
    """The selection as it applies to the target, and what rows must have. Raises ExportError if they do not fit."""
    cuts = selection.max_tokens is not None and selection.overlong == "truncate"
    if cuts and not target.exact:
        raise ExportError(f"--to {target.name} has whole messages, which cannot be cut: --overlong drop")
    needs = set(target.needs)
    if selection.logprobs == "none":
        if "logprobs" in needs and not target.optional_logprobs:
            raise ExportError(f"--to {target.name} has no place for rows without logprobs")
        needs.discard("logprobs")
    if fill.reward is not None:
        needs.discard("reward")
    if fill.temperature is not None:
        needs.discard("temperature")
    if fill.policy_version is not None:
        needs.discard("policy_version")
    if not target.logprobs and selection.logprobs == "one":
        selection = replace(selection, logprobs="any")
    return selection, frozenset(needs)


def _snapshot(
    root: Location, target: Target, selection: Selection, needs: frozenset[Any], tries: int = 5
) -> tuple[Decided, pl.DataFrame]:
    """What is decided, and where the wanted rows stand; of one state of the dataset, also while it is written."""
    try:
        decided = decide(read_rollouts(root), read_episodes(root), selection, needs, one_model=target.exact)
        index = rollout_index(root, active_parts(read_footers(root)))
        places = index.filter(pl.col("newest") & ~pl.col("moved")).select(*KEY, "revision", "part")
        found = decided.rollouts.join(places, on=(*KEY, "revision"), how="inner", maintain_order="left")
        if found.height == decided.rollouts.height:
            if target.reads == "tasks":
                decided = _one_per_task(decided)
            return decided, _wanted(root, target, decided, found)
        why = "rows were replaced"
    except FileNotFoundError as error:
        why = str(error)
    if tries == 1:
        raise DatasetError(f"{root} is rewritten all the time ({why}); export again")
    return _snapshot(root, target, selection, needs, tries - 1)


def _one_per_task(decided: Decided) -> Decided:
    """The first selected rollout of each task; the others are left out as `same_task`."""
    kept = decided.episodes.filter(pl.col(LEFT_OUT).is_null()).unique(KEY, maintain_order=True)
    about = decided.rollouts.select(*KEY, task=pl.coalesce("task_id", "group_id", "rollout_id"))
    firsts = kept.join(about, on=KEY, how="left", maintain_order="left").unique(
        "task", keep="first", maintain_order=True
    )
    mark = firsts.select(*KEY, first=True)
    missed = pl.when(pl.col("first").is_null()).then(pl.lit("same_task"))

    def marked(rows: pl.DataFrame, inside: pl.DataFrame) -> pl.DataFrame:
        known = inside.select(*KEY, inside=True).unique(KEY)
        joined = rows.join(mark, on=KEY, how="left", maintain_order="left")
        joined = joined.join(known, on=KEY, how="left", maintain_order="left")
        why = pl.coalesce(LEFT_OUT, pl.when(pl.col("inside")).then(missed))
        return joined.with_columns(why.alias(LEFT_OUT)).drop("first", "inside")

    return Decided(marked(decided.rollouts, kept), marked(decided.episodes, kept))


def _unpaired(decided: Decided, rollouts: list[str]) -> Decided:
    """Episodes that are in no pair are left out as `no_pair`."""
    first = pl.col("episode") == pl.col("episode").filter(pl.col(LEFT_OUT).is_null()).min().over(KEY)
    paired = pl.col("rollout_id").is_in(rollouts) & first
    why = pl.coalesce(LEFT_OUT, pl.when(~paired.fill_null(False)).then(pl.lit("no_pair")))
    return decided._replace(episodes=decided.episodes.with_columns(why.alias(LEFT_OUT)))


def _wanted(root: Location, target: Target, decided: Decided, places: pl.DataFrame) -> pl.DataFrame:
    """A row for each selected Episode, or call in it, in the order of the dataset, with what targets get beside it."""
    kept = decided.episodes.filter(pl.col(LEFT_OUT).is_null()).select(EPISODE)
    about = places.select(*KEY, "part", "group_id", "status", "group_size", final_reward="reward")
    rows = kept.join(about, on=KEY, how="inner", maintain_order="left").with_row_index("place")
    rows = rows.with_columns(
        uid=pl.coalesce("group_id", "rollout_id"),
        last_episode=pl.col("episode") == pl.col("episode").max().over(KEY),
        rollout_index=pl.col("place").min().over(KEY),
    )
    rows = rows.with_columns(
        rollout_index=_numbered(pl.col("rollout_index")),
        group_index=_numbered(pl.col("rollout_index").min().over("uid")),
        repetition=_numbered(pl.col("rollout_index")).over("uid"),
    ).drop("place", "group_id")
    match target.reads:
        case "episodes":
            return rows.drop("group_size", "final_reward")
        case "groups":
            return rows.unique(KEY, keep="first", maintain_order=True).drop("group_size", "final_reward")
        case "tasks":
            return _calls_of(root, rows.unique(KEY, keep="first", maintain_order=True)).filter(pl.col("step") == 0)
        case "calls":
            return _calls_of(root, rows)


def _numbered(values: pl.Expr) -> pl.Expr:
    """0 for the smallest value, 1 for the next, and so on."""
    return values.rank("dense").cast(pl.Int64) - 1


def _calls_of(root: Location, rows: pl.DataFrame) -> pl.DataFrame:
    turns = (
        read_episodes(root)
        .select(*EPISODE, pl.col("turns"))
        .join(rows.lazy(), on=EPISODE, how="inner", maintain_order="left")
    )
    turn = pl.col("turns").struct
    calls = turns.with_columns(step=pl.int_ranges(pl.col("turns").list.len())).explode("turns", "step")
    known = read_rollouts(root).select(*KEY, rollout_metadata="metadata")
    calls = calls.with_columns(
        call_id=turn.field("call_id"),
        trained=turn.field("trained"),
        trained_tokens=pl.when(turn.field("trained"))
        .then(turn.field("response_end") - turn.field("prompt_end"))
        .otherwise(0)
        .cast(pl.Int64),
    ).drop("turns")
    return calls.join(known, on=KEY, how="left", maintain_order="left").collect(engine="streaming")


def _rows(root: Location, target: Target, wanted: pl.DataFrame) -> Iterator[Any]:
    if target.reads in ("calls", "tasks"):
        return batches(root, TRIPLETS, wanted, (*KEY, "call_id"), _CALL_COLUMNS)
    skipped = frozenset[str]() if "messages" in target.needs else _TEXTS
    columns = [column.name for column in EPISODES.columns if column.name not in skipped]
    rows = batches(root, EPISODES, wanted, EPISODE, columns)
    return rows if target.reads == "episodes" else _whole_groups(rows, wanted)


def _whole_groups(rows: Iterator[Any], wanted: pl.DataFrame) -> Iterator[Any]:
    """Rows of whole groups; those of a group that is not complete yet wait."""
    missing = dict(wanted.group_by("uid").len().rows())
    waiting: dict[str, list[Any]] = {}
    for batch in rows:
        place: dict[str, list[int]] = {}
        for row, uid in enumerate(batch.column("uid").to_pylist()):
            place.setdefault(uid, []).append(row)
        complete: list[Any] = []
        for uid, found in sorted(place.items(), key=lambda item: item[1][-1]):  # as they become complete
            waiting.setdefault(uid, []).append(batch.take(found))
            missing[uid] -= len(found)
            if not missing[uid]:
                complete += waiting.pop(uid)
        if complete:
            yield pa.concat_tables(complete).combine_chunks()


def _prepared(rows: Any, target: Target, selection: Selection, fill: Fill) -> Any:
    """Episodes as a target gets them: cut and filled as asked for."""
    if target.reads not in ("episodes", "groups"):
        return rows
    if selection.max_tokens is not None and selection.overlong == "truncate":
        rows = truncated(rows, selection.max_tokens)
    if fill.reward is not None:
        at = rows.schema.get_field_index("reward")
        rows = rows.set_column(at, "reward", pc.fill_null(rows.column("reward"), fill.reward))
    if selection.logprobs == "none":
        at = rows.schema.get_field_index("logprobs")
        zeros = rows.column("loss_mask").cast(rows.column("logprobs").type)
        rows = rows.set_column(at, "logprobs", zeros)
    return rows
