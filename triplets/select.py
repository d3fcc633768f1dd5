"""Which rollouts and Episodes are handed to a trainer: rules as polars expressions, and what each leaves out.

    from spanmill import select

    chosen = select.Selection(mode=("train",), max_policy_age=2, whole_groups=True)
    rows = select.episodes("data", chosen)            # a LazyFrame with the columns of `schema.EPISODES`
    last = spanmill.read_rollouts("data").filter(select.counts())

Every rule has a name, under which the loss report says what it left out. A rollout is kept or left out as a whole but
for `model`, `agent` and `max_tokens` and what a format needs, which choose among its Episodes.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple

import polars as pl

from spanmill.errors import ExportError
from spanmill.storage import Where
from spanmill.triplets.parts import KEY
from spanmill.triplets.reader import read_episodes, read_rollouts

Logprobs = Literal["one", "raw", "processed", "any", "none"]
Overlong = Literal["drop", "truncate"]
Need = Literal["logprobs", "reward", "temperature", "policy_version", "messages"]

LEFT_OUT: Final = "left_out"
"""The column with the name of the rule that left a row out; null on a row that is selected."""
EPISODE: Final = (*KEY, "episode")


@dataclass(frozen=True, kw_only=True)
class Selection:
    """What is wanted. A tuple means one of its members, an empty one anything."""

    model: tuple[str, ...] = ()
    mode: tuple[str, ...] = ()
    status: tuple[str, ...] = ()
    """Else the attempt that counts is chosen by `counts`."""
    task_id: tuple[str, ...] = ()
    rollout_prefix: str | None = None
    agent: str | None = None
    """A regular expression that is found in the agent's name."""
    min_reward: float | None = None
    max_reward: float | None = None
    max_policy_age: int | None = None
    """How many versions the weights may have advanced since they sampled the oldest trained token of a rollout."""
    policy_version: int | None = None
    """The version that ages count from; None is the newest of the dataset."""
    whole_groups: bool = False
    """Only groups with `group_size` rollouts (unknown: as many as the dataset has), all selected, at least two."""
    logprobs: Logprobs = "one"
    """Of one mode, whichever; of this one; of `any`, mixed; or `none`: they are not looked at."""
    mix_models: bool = False
    max_tokens: int | None = None
    """Longest sequence, T."""
    overlong: Overlong = "drop"
    """What becomes of longer ones."""


class Decided(NamedTuple):
    """Every rollout attempt and Episode of a dataset, without its tokens, with the column `left_out`."""

    rollouts: pl.DataFrame
    """Also `num_calls`, `num_triplets` and `tokens_*`, from which the loss report is made."""
    episodes: pl.DataFrame
    """Also `tokens` (T), `trained` tokens and `calls`, and what --max-tokens leaves: `trained_left`, `calls_left`."""


def counts(status: Sequence[str] = ()) -> pl.Expr:
    """Over rollouts: whether this is the attempt that counts.

    That is the last one which did not fail and was not cancelled, else the last one with a reward; with `status`, the
    last one that ended so.
    """
    attempt = pl.col("attempt")
    if status:
        return attempt == _last(pl.col("status").is_in(status))
    usable = _last(~pl.col("status").is_in(["failed", "cancelled"]))
    return (attempt == pl.coalesce(usable, _last(pl.col("reward").is_not_null()))).fill_null(False)


def _last(where: pl.Expr) -> pl.Expr:
    return pl.when(where).then(pl.col("attempt")).max().over("rollout_id")


def modes() -> pl.Expr:
    """Over Episodes: the logprobs modes of their trained turns, each once; null stands for not recorded."""
    turn = pl.element().struct
    trained = pl.col("turns").list.eval(turn.field("logprobs_mode").filter(turn.field("trained")))
    return trained.list.unique(maintain_order=True)


def oldest_version() -> pl.Expr:
    """Over Episodes: the version of the weights that sampled their oldest trained token.

    Null if any trained token's version is not recorded, or is no whole number.
    """
    runs = pl.col("policy_versions").list
    versions = runs.eval(pl.element().struct.field("version").cast(pl.Int64, strict=False)).list
    known = runs.eval(pl.element().struct.field("length").cast(pl.Int64)).list.sum() == _trained()
    return pl.when(known & (versions.eval(pl.element().is_null()).list.any() == False)).then(versions.min())  # noqa: E712


def _trained() -> pl.Expr:
    return pl.col("loss_mask").list.sum().cast(pl.Int64)


def rollouts(path: Where, selection: Selection) -> pl.LazyFrame:
    """The selected rollouts of the dataset, columns as in `schema.ROLLOUTS`; raises as `episodes`."""
    keys = decide(read_rollouts(path), read_episodes(path), selection).rollouts
    chosen = keys.filter(pl.col(LEFT_OUT).is_null()).select(KEY).lazy()
    return read_rollouts(path).join(chosen, on=KEY, how="semi", maintain_order="left")


def episodes(path: Where, selection: Selection) -> pl.LazyFrame:
    """The selected Episodes of the dataset, columns as in `schema.EPISODES`, whole: `overlong` cuts none.

    Raises ExportError if they mix logprobs modes or models that the selection does not allow to mix, or the pattern
    `agent` is none, and what `spanmill.read_episodes` raises.
    """
    keys = decide(read_rollouts(path), read_episodes(path), selection).episodes
    chosen = keys.filter(pl.col(LEFT_OUT).is_null()).select(EPISODE).lazy()
    return read_episodes(path).join(chosen, on=EPISODE, how="semi", maintain_order="left")


def decide(
    rollouts: pl.LazyFrame,
    episodes: pl.LazyFrame,
    selection: Selection,
    needs: Collection[Need] = (),
    *,
    one_model: bool = True,
) -> Decided:
    """What is selected of rollouts and Episodes, and which rule left out what is not.

    `needs` are what a format cannot do without: rows that lack it are left out under the name `no_<need>`. Raises as
    `episodes`.
    """
    found = rollouts.select(_ROLLOUT_COLUMNS).collect(engine="streaming")
    sequences = _facts(episodes, selection, needs).collect(engine="streaming")
    try:
        sequences = sequences.with_columns(_first(_episode_rules(selection, needs)).alias(LEFT_OUT))
    except pl.exceptions.ComputeError as error:
        raise ExportError(f"--agent {selection.agent!r} is no regular expression: {error}") from error
    kept = pl.col(LEFT_OUT).is_null()
    oldest = sequences.group_by(KEY).agg(
        pl.when(kept).then(pl.col("oldest")).min().alias("oldest"),
        (kept & pl.col("oldest").is_null()).any().alias("unknown_version"),
        kept.any().alias("has_rows"),
    )
    found = found.join(oldest, on=KEY, how="left", maintain_order="left")
    newest = selection.policy_version if selection.policy_version is not None else sequences["newest"].max()
    found = found.with_columns(_first(_rollout_rules(selection, needs, newest)).alias(LEFT_OUT))
    if selection.whole_groups:
        found = found.with_columns(pl.coalesce(LEFT_OUT, _first(_group_rules())).alias(LEFT_OUT))
    wider = found.select(*KEY, above=LEFT_OUT)
    sequences = sequences.join(wider, on=KEY, how="left", maintain_order="left")
    sequences = sequences.with_columns(pl.coalesce("above", LEFT_OUT).alias(LEFT_OUT)).drop("above")
    _check_mixtures(sequences.filter(kept), selection, one_model)
    return Decided(found, sequences)


_ROLLOUT_COLUMNS: Final = (
    *KEY,
    "revision",
    "group_id",
    "group_size",
    "task_id",
    "mode",
    "status",
    "reward",
    "num_calls",
    "num_triplets",
    "tokens_captured",
    "tokens_masked",
    "tokens_superseded",
    "tokens_quarantined",
)


def _facts(episodes: pl.LazyFrame, selection: Selection, needs: Collection[Need]) -> pl.LazyFrame:
    """What the rules ask of an Episode, in a few bytes each; only the columns that they ask for are read."""
    turn = pl.element().struct
    limit = selection.max_tokens if selection.max_tokens is not None else (1 << 31) - 1
    trained = pl.col("turns").list.eval(turn.field("trained") & (turn.field("prompt_end") < limit))
    cold = pl.col("turns").list.eval(turn.field("trained") & turn.field("temperature").is_null())
    newest = pl.col("policy_versions").list.eval(pl.element().struct.field("version").cast(pl.Int64, strict=False))
    return episodes.select(
        *EPISODE,
        "agent",
        "model",
        tokens=pl.col("loss_mask").list.len().cast(pl.Int64),
        trained=_trained(),
        trained_left=pl.col("loss_mask").list.head(limit).list.sum().cast(pl.Int64),
        calls=pl.col("turns").list.eval(turn.field("trained")).list.sum().cast(pl.Int64),
        calls_left=trained.list.sum().cast(pl.Int64),
        no_prompt=pl.col("loss_mask").list.first() == 1,
        modes=modes(),
        oldest=oldest_version(),
        newest=newest.list.max(),
        no_temperature=cold.list.any(),
        no_logprobs=pl.col("logprobs").is_null() if "logprobs" in needs else False,
        no_messages=pl.col("messages").is_null() if "messages" in needs else False,
    )


_Rule = tuple[str, pl.Expr]
"""A name, and what must hold of a row that stays; null is not enough."""


def _first(rules: Sequence[_Rule]) -> pl.Expr:
    """The name of the first rule that a row fails, or null."""
    failed = [pl.when(~keep.fill_null(False)).then(pl.lit(name)) for name, keep in rules]
    return pl.coalesce(*failed, pl.lit(None, pl.String))


def _rollout_rules(selection: Selection, needs: Collection[Need], newest: object) -> list[_Rule]:
    reward = pl.col("reward")
    rules: list[_Rule] = []
    if selection.status:
        rules.append(("status", pl.col("status").is_in(selection.status)))
    else:
        usable = ~pl.col("status").is_in(["failed", "cancelled"]) | reward.is_not_null()
        rules.append(("failed_or_cancelled", usable.any().over("rollout_id")))
    rules.append(("other_attempt", counts(selection.status)))
    for name in ("mode", "task_id"):
        if wanted := getattr(selection, name):
            rules.append((name, pl.col(name).is_in(wanted)))
    if selection.rollout_prefix is not None:
        rules.append(("rollout_prefix", pl.col("rollout_id").str.starts_with(selection.rollout_prefix)))
    if "reward" in needs or selection.min_reward is not None or selection.max_reward is not None:
        rules.append(("no_reward", reward.is_not_null()))
    if selection.min_reward is not None:
        rules.append(("min_reward", reward >= selection.min_reward))
    if selection.max_reward is not None:
        rules.append(("max_reward", reward <= selection.max_reward))
    if selection.max_policy_age is not None:
        rules.append(("no_policy_version", ~pl.col("unknown_version").fill_null(False)))
        age = pl.lit(newest, pl.Int64) - pl.col("oldest")
        rules.append(("policy_age", (age <= selection.max_policy_age) | ~pl.col("has_rows").fill_null(False)))
    return rules


def _group_rules() -> list[_Rule]:
    """After the others: `left_out` and `has_rows` say which rollouts are in."""
    inside = pl.col(LEFT_OUT).is_null() & pl.col("has_rows").fill_null(False)
    members = pl.when(inside).then(pl.col("rollout_id")).n_unique() - (~inside).any().cast(pl.Int64)
    size = pl.coalesce(pl.col("group_size").max(), pl.col("rollout_id").n_unique())
    return [
        ("no_group", pl.col("group_id").is_not_null()),
        ("incomplete_group", (members >= size).over("group_id")),
        ("group_of_one", (members > 1).over("group_id")),
    ]


def _episode_rules(selection: Selection, needs: Collection[Need]) -> list[_Rule]:
    # Of a token with nothing before it no trainer has a distribution.
    rules: list[_Rule] = [("no_prompt", ~pl.col("no_prompt"))]
    if selection.model:
        rules.append(("model", pl.col("model").is_in(selection.model)))
    if selection.agent is not None:
        rules.append(("agent", pl.col("agent").str.contains(selection.agent)))
    if selection.logprobs in ("raw", "processed"):
        alone = pl.col("modes").list.eval(pl.element().eq_missing(pl.lit(selection.logprobs))).list.all()
        rules.append(("logprobs_mode", alone))
    rules += [
        (f"no_{need}", ~pl.col(f"no_{need}")) for need in ("logprobs", "temperature", "messages") if need in needs
    ]
    if "policy_version" in needs:
        rules.append(("no_policy_version", pl.col("oldest").is_not_null()))
    if selection.max_tokens is not None:
        fits = pl.col("tokens") <= selection.max_tokens
        rules.append(("overlong", fits if selection.overlong == "drop" else fits | (pl.col("trained_left") > 0)))
    return rules


def _check_mixtures(kept: pl.DataFrame, selection: Selection, one_model: bool) -> None:
    if one_model and not selection.mix_models and not selection.model:
        found = kept.drop_nulls("model").group_by("model").len().sort("model").rows()
        if len(found) > 1:
            raise ExportError(
                f"the selection has Episodes of {len(found)} models, {_listed(found)}: "
                "choose with --model, or allow it with --mix-models"
            )
    if selection.logprobs == "one":
        found = kept.select(mode=pl.col("modes")).explode("mode").group_by("mode").len().sort("mode").rows()
        if len(found) > 1:
            raise ExportError(
                f"the selection mixes logprobs modes, {_listed(found)} Episodes: "
                "choose with --logprobs raw or processed, or allow it with --logprobs any"
            )


def _listed(found: Sequence[tuple[str | None, int]], most: int = 5) -> str:
    shown = [f"{'not recorded' if name is None else name} ({number:,})" for name, number in found[:most]]
    return ", ".join(shown) + (", …" if len(found) > most else "")
