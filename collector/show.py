"""A dataset in the terminal: its rollouts, or one of them as calls and as tokens. Told from the dataset alone."""

import json
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any, Final, cast
from unicodedata import category

import polars as pl
from rich.box import SIMPLE_HEAD
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from spanmill.collector.stats import FATES
from spanmill.errors import DatasetError
from spanmill.storage import Where
from spanmill.triplets.flags import in_words
from spanmill.triplets.json_rows import json_text
from spanmill.triplets.reader import read_rollout, read_rollouts
from spanmill.triplets.records import Json
from spanmill.triplets.schema import TABLES

Row = Mapping[str, Any]

PLAIN_WIDTH: Final = 160
"""Columns where stdout is no terminal, which wraps nothing."""
LEAST_WIDTH: Final = 96
"""Columns that the table of rollouts needs."""
ENDS: Final = 3
"""Tokens shown at each end of what the environment put."""
ANSWER: Final = 12
"""Tokens shown at each end of an answer."""
TEXT: Final = 200
"""Characters shown of an answer."""
CONTROL: Final = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})
"""Unicode categories of what a terminal obeys instead of showing it: escapes, newlines, changes of direction."""


def show(
    dataset: Where,
    rollout: str | None = None,
    attempt: int | None = None,
    console: Console | None = None,
    *,
    as_json: bool = False,
) -> None:
    """Print the rollouts of a dataset as a table; with `rollout`, an id or the beginning of one, that one in full.

    An id counts before a beginning; of what several begin with, or of several attempts, the table is printed. Plain
    text where stdout is no terminal. `as_json` prints the rows as they are stored instead: a rollout a line, or of one
    in full an object with a list of rows for each table.

    Raises DatasetError if there is no dataset, or no such rollout in it.
    """
    console = console or _console()
    rows = read_rollouts(dataset).sort("started_at", "rollout_id", "attempt").collect()
    found = _selected(rows, rollout, attempt)
    if rollout is not None and found.height == 1:
        tables = read_rollout(dataset, found["rollout_id"][0], found["attempt"][0])
        rows_of = {name: frame.to_dicts() for name, frame in tables.items()}
        if as_json:
            print(json_text(rows_of))
        else:
            console.print(_rollout(rows_of))
        return
    if found.is_empty() and (rollout is not None or attempt is not None):
        wanted = "no rollout" if rollout is None else f"no rollout {escaped(rollout)!s}"
        more = "" if attempt is None else f" with attempt {attempt}"
        raise DatasetError(f"{dataset} has {wanted}{more}; `spanmill show {dataset}` lists the {rows.height} it has")
    if as_json:
        for row in found.iter_rows(named=True):
            print(json_text(row))
        return
    console.print(_rollouts(found.to_dicts(), console.width))
    if rollout is not None:
        console.print(f"{found.height} match; name one of them, and its --attempt where it has several, to see it.")


def _console() -> Console:
    console = Console(highlight=False, soft_wrap=False)
    return console if sys.stdout.isatty() else Console(highlight=False, width=PLAIN_WIDTH, color_system=None)


def _selected(rows: pl.DataFrame, rollout: str | None, attempt: int | None) -> pl.DataFrame:
    if attempt is not None:
        rows = rows.filter(pl.col("attempt") == attempt)
    if rollout is None:
        return rows
    exact = rows.filter(pl.col("rollout_id") == rollout)
    return exact if exact.height else rows.filter(pl.col("rollout_id").str.starts_with(rollout))


def escaped(text: str | None) -> Text:
    r"""Text from a dataset as a terminal may have it: control characters as `\x1b`; "-" for None."""
    if text is None:
        return Text("-", "dim")
    return Text("".join(c if category(c) not in CONTROL else _escape(c) for c in text))


def _escape(character: str) -> str:
    return character.encode("unicode_escape", "surrogatepass").decode()


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:g}"


# All rollouts


def _rollouts(rows: Sequence[Row], width: int) -> RenderableType:
    """A table; where it would not fit, two lines each."""
    if width < LEAST_WIDTH:
        return Group(*(part for row in rows for part in _in_lines(row)))
    table = Table(box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    table.add_column("rollout", overflow="fold")
    for name in ("attempt", "status", "reward", "calls", "episodes", "trained tokens"):
        table.add_column(name, justify="left" if name == "status" else "right", no_wrap=True)
    table.add_column("flags", overflow="fold")
    for row in rows:
        table.add_row(
            escaped(row["rollout_id"]),
            str(row["attempt"]),
            row["status"],
            _number(row["reward"]),
            str(row["num_calls"]),
            str(row["num_episodes"]),
            f"{row['tokens_trained']} of {row['tokens_captured']}",
            escaped(", ".join(row["flags"])),
        )
    return table


def _in_lines(row: Row) -> tuple[Text, Text]:
    told = f"{row['status']}, reward {_number(row['reward'])}, {row['num_calls']} calls, {row['num_episodes']} episodes"
    tokens = f"{row['tokens_trained']} of {row['tokens_captured']} tokens trained"
    parts = [f"attempt {row['attempt']}", told, tokens, *row["flags"]]
    return _bold(escaped(row["rollout_id"])), Text(f"  {escaped(', '.join(parts))}")


# One rollout


def _rollout(rows: Mapping[str, Sequence[Row]]) -> RenderableType:
    (rollout,), triplets, episodes, aside = (rows[table.name] for table in TABLES)
    parts = [_head(rollout), _rewards(rollout), _calls(triplets), *map(_episode, episodes), _quarantine(aside)]
    flagged = [rollout, *triplets, *episodes]
    flags = sorted({flag for row in flagged for flag in row["flags"]} | {row["reason"] for row in aside})
    return Group(*(part for part in (*parts, _words(flags)) if part is not None))


def _head(rollout: Row) -> RenderableType:
    title = Text.assemble(("rollout ", "dim"), _bold(escaped(rollout["rollout_id"])), f"  attempt {rollout['attempt']}")
    names = ("group_id", "task_id", "mode")
    labels = [f"{name.removesuffix('_id')} {escaped(rollout[name])}" for name in names if rollout[name] is not None]
    captured = rollout["tokens_captured"]
    fates = " + ".join(f"{rollout[f'tokens_{fate}']} {fate}" for fate in FATES)
    lines = [
        f"{rollout['status']}, closed by {rollout['closed_by']}, id from {rollout['identity_source']}, "
        f"revision {rollout['revision']}",
        ", ".join(
            [*labels, f"{_seconds(rollout['started_at'], rollout['ended_at'])} from {rollout['started_at']:%F %T} UTC"]
        ),
        f"{rollout['num_calls']} calls, {rollout['num_triplets']} kept, {rollout['num_episodes']} episodes",
        f"{captured} tokens sampled = {fates}",
    ]
    if rollout["flags"]:
        lines.append(f"flags {', '.join(rollout['flags'])}")
    return Group(title, *(Text(f"  {line}") for line in lines))


def _bold(text: Text) -> Text:
    text.stylize("bold")
    return text


def _seconds(start: datetime, end: datetime) -> str:
    return f"{(end - start).total_seconds():.3g} s"


def _rewards(rollout: Row) -> RenderableType | None:
    final = _section(f"final reward {'none' if rollout['reward'] is None else _number(rollout['reward'])}")
    if not rollout["rewards"]:
        return final
    table = Table("name", "value", "call", "from", box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for one in rollout["rewards"]:
        name = escaped(one["name"]) if one["name"] else Text("-", "dim")
        table.add_row(name, _number(one["value"]), escaped(one["call_id"]), one["source"])
    return Group(final, table)


def _section(title: str) -> Text:
    return Text(f"\n{title}", "bold")


def _calls(triplets: Sequence[Row]) -> RenderableType | None:
    """The calls as the trees that they make: under a call those that extend it, under an agent its own."""
    if not triplets:
        return None
    children: defaultdict[str | None, list[Row]] = defaultdict(list)
    known = {row["call_id"] for row in triplets}
    for row in triplets:
        children[row["parent_call_id"] if row["parent_call_id"] in known else None].append(row)
    turns = {row["call_id"]: row["turn"] for row in triplets}
    whole = Tree(_section("calls"), guide_style="dim")
    agents: dict[str | None, Tree] = {}
    for root in children[None]:
        agent = root["agent"]
        if agent not in agents:
            agents[agent] = whole if agent is None else whole.add(Text.assemble("agent ", _bold(escaped(agent))))
        _grow(agents[agent], root, children, turns)
    return whole


def _grow(tree: Tree, root: Row, children: Mapping[str | None, Sequence[Row]], turns: Mapping[str, int]) -> None:
    """Add a call and what extends it. A single way on stays at its level: a long conversation is no deep tree."""
    waiting = [(tree, root, root["agent"])]
    while waiting:
        place, row, agent = waiting.pop(0)
        node = place.add(_call(row, agent, turns))
        following = children.get(row["call_id"], ())
        waiting[:0] = [(place if len(following) == 1 else node, one, row["agent"]) for one in following]


def _call(row: Row, agent: str | None, turns: Mapping[str, int]) -> RenderableType:
    choice = f".{row['choice']}" if row["choice"] else ""
    parent = turns.get(row["parent_call_id"])
    told = [
        "new context" if parent is None else f"extends turn {parent}",
        f"{_count(row['prompt_token_ids'])} -> {_count(row['response_token_ids'])} tokens",
        row["finish_reason"] or "no finish reason",
        "trained" if row["trainable"] else "not trained",
    ]
    told += [] if row["reward"] is None else [f"reward {_number(row['reward'])}"]
    told += [] if row["agent"] == agent else [f"agent {escaped(row['agent'])}"]
    told += [", ".join(row["flags"])] if row["flags"] else []
    line = Text.assemble(
        (f"turn {row['turn']}{choice}  ", "bold" if row["trainable"] else "dim"),
        escaped(row["call_id"]),
        "  ",
        " · ".join(told),
    )
    said = _answer(row["response"])
    return line if said is None else Group(line, Text(f"  {said}", "italic"))


def _count(ids: Sequence[int] | None) -> str:
    return "?" if ids is None else str(len(ids))


def _answer(response: str | None) -> str | None:
    """The beginning of what the assistant said: its text, and the tools that it called."""
    message: Json = None if response is None else json.loads(response)
    if not isinstance(message, dict):
        return None
    fields = cast("dict[str, Json]", message)
    content: Json = fields.get("content")
    parts = [content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)] if content else []
    for made in cast("list[Json]", fields.get("tool_calls") or []):
        function: Json = made.get("function") or {}
        parts.append(f"{function.get('name')}({function.get('arguments')})")
    said = " ".join(parts)
    return str(escaped(said if len(said) <= TEXT else f"{said[:TEXT]}…"))


# Tokens


def _episode(episode: Row) -> RenderableType:
    size, trained = len(episode["input_ids"]), sum(episode["loss_mask"])
    told = [f"{size} tokens", f"{trained} trained", f"{episode['num_turns']} turns"]
    told += ["truncated"] if episode["truncated"] else []
    told += [f"model {escaped(episode['model'])}"] if episode["model"] else []
    told += [f"agent {escaped(episode['agent'])}"] if episode["agent"] else []
    told += list(episode["flags"])
    table = Table(box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for name in ("position", "token id", "mask", "logprob"):
        table.add_column(name, no_wrap=True)
    table.add_column("turn", overflow="fold")
    for row in _tokens(episode):
        table.add_row(*row)
    return Group(_section(f"episode {episode['episode']}: {', '.join(told)}"), table)


def _tokens(episode: Row) -> Iterator[tuple[str, ...]]:
    position = 0
    for number, turn in enumerate(episode["turns"]):
        start, end = turn["prompt_end"], turn["response_end"]
        yield from _span(episode, range(position, start), ENDS, "context")
        reward = episode["step_rewards"][number]
        what = f"{number} {turn['call_id']}" + ("" if reward is None else f", reward {_number(reward)}")
        yield from _span(episode, range(start, end), ANSWER, str(escaped(what)))
        position = end


def _span(episode: Row, positions: range, ends: int, what: str) -> Iterator[tuple[str, ...]]:
    """A row per token; of more than twice `ends` those in the middle are one row that says how many they are."""
    hidden = positions[ends:-ends]
    for at in positions:
        if at not in hidden:
            logprobs = episode["logprobs"]
            mask = episode["loss_mask"][at]
            logprob = f"{logprobs[at]:.4f}" if mask and logprobs is not None else ""
            yield str(at), str(episode["input_ids"][at]), str(mask), logprob, what if at == positions[0] else ""
        elif at == hidden[0]:
            yield "...", f"{len(hidden)} more", str(episode["loss_mask"][at]), "", ""


# What is aside, and words


def _quarantine(rows: Sequence[Row]) -> RenderableType | None:
    if not rows:
        return None
    lines: list[RenderableType] = [_section(f"quarantined: {len(rows)}")]
    for row in rows:
        place = f"  span {row['span_id']}" if row["span_id"] else ""
        lines.append(Text.assemble("  ", _bold(escaped(row["reason"])), "  ", escaped(row["detail"]), (place, "dim")))
    return Group(*lines)


def _words(flags: Sequence[str]) -> RenderableType | None:
    if not flags:
        return None
    lines = [Text.assemble("  ", _bold(escaped(flag)), f"  {in_words(flag)}") for flag in flags]
    return Group(_section("what the flags mean"), *lines)
