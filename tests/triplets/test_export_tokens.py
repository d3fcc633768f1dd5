"""Every export has the same tokens at the same places with the same logprobs."""

import tempfile
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from exported_rollouts import call, rollout, rollouts, write
from exported_tokens import BY_CALL, BY_ROW, KEEPS_MISSING_LOGPROBS, WITHOUT_LOGPROBS, Sampled, Sequence, of_episode
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from spanmill.errors import ExportError
from spanmill.triplets.exports import TARGETS, Fill, export
from spanmill.triplets.records import Episode, Rollout
from spanmill.triplets.select import Selection

EXACT = [*BY_ROW, *BY_CALL]
MIXED = Selection(logprobs="any")


def exported(dataset: Path, name: str, selection: Selection = MIXED) -> list[Sequence]:
    """What the files of an export say; nothing if there is nothing to export."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out"
        try:
            export(dataset, name, out, selection)
        except ExportError as error:
            if "nothing was written" not in str(error):
                raise
            return []
        return list((BY_ROW | BY_CALL)[name](out))


def expected(made: Iterable[Rollout], name: str) -> list[Sequence]:
    """What they must say: the Episodes, without those that the format cannot have."""
    episodes = [episode for one in made for episode in one.episodes]
    kept = [e for e in episodes if e.logprobs is not None or name in KEEPS_MISSING_LOGPROBS]
    return [of_episode(episode, name not in WITHOUT_LOGPROBS) for episode in kept]


def trained(sequences: Iterable[Sequence]) -> Counter[tuple[tuple[int, ...], Sampled]]:
    """Each trained token with all that the model read before it, and how often it stands there."""
    return Counter((one.ids[: token.position], token) for one in sequences for token in one.sampled)


def as_calls(made: Iterable[Rollout], name: str) -> Counter[tuple[tuple[int, ...], Sampled]]:
    """As `trained`, of formats that have calls: one keeps its logprobs if another of its Episode has none."""
    if name != "atif":
        return trained(expected(made, name))
    found = list[Sequence]()
    for one in made:
        known = {call.call_id: call for call in one.triplets}
        found += [_with_own_logprobs(episode, known) for episode in one.episodes]
    return trained(found)


def _with_own_logprobs(episode: Episode, known: dict[str, Any]) -> Sequence:
    sampled = list[Sampled]()
    for turn in episode.turns:
        own = known[turn.call_id].response_logprobs
        for at in range(turn.prompt_end, turn.response_end) if turn.trained else ():
            logprob = None if own is None else float(own[at - turn.prompt_end])
            sampled.append(Sampled(at, int(episode.input_ids[at]), logprob))
    return Sequence(tuple(map(int, episode.input_ids)), tuple(sampled))


@pytest.mark.slow
@settings(max_examples=10, suppress_health_check=[HealthCheck.too_slow])
@given(st.tuples(*(rollouts(f"rollout-{number}") for number in range(3))))
def test_every_export_trains_the_same_tokens(made: tuple[Rollout, ...]) -> None:
    """Rows and calls of every format, decoded, are the Episodes: tokens, positions, logprobs and what is trained."""
    with tempfile.TemporaryDirectory() as folder:
        dataset = write(Path(folder) / "data", made)
        for name in BY_ROW:
            assert (name, expected(made, name)) == (name, exported(dataset, name))
        for name in BY_CALL:
            assert (name, as_calls(made, name)) == (name, trained(exported(dataset, name)))


def tree() -> list[Rollout]:
    """Two turns, a fork of the first, a sub-agent, a second choice, an untrained inner call and three versions."""
    calls = [
        call(0, [1, 2, 3], [4, 5]),
        call(1, [1, 2, 3, 4, 5, 6], [7], trainable=False),
        call(2, [1, 2, 3, 4, 5, 6, 7, 8], [9, 1]),
        call(3, [1, 2, 3, 4, 5, 2], [3, 3, 3]),
        call(4, [8, 8], [6], agent="helper"),
        call(5, [8, 8], [7], agent="helper", choice=1),
    ]
    return [rollout("tree", calls)]


@pytest.mark.parametrize("name", EXACT)
def test_a_tree_is_exported_call_by_call_once(tmp_path: Path, name: str) -> None:
    """A call that stands in two Episodes is trained in one of them, and context in the other, in every format."""
    made = tree()
    found = trained(exported(write(tmp_path / "data", made), name))
    assert (1, 9) == (max(found.values()), sum(found.values()))
    assert as_calls(made, name) == found


IDS, LOGPROBS = ("input_ids", "response_token_ids"), ("logprobs", "response_logprobs")
"""Columns of rows of episodes, and of calls."""


@pytest.mark.parametrize(
    ("name", "columns"),
    [(name, IDS) for name in EXACT] + [(name, LOGPROBS) for name in EXACT if name not in WITHOUT_LOGPROBS],
)
@pytest.mark.parametrize("by", [-1, 1])
def test_a_shift_by_one_would_be_seen(
    tmp_path: Path, name: str, by: int, columns: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the tokens, or their logprobs, moved by one place an export is not what it was: the test above can fail."""
    target = next(target for target in TARGETS if target.name == name)
    dataset = write(tmp_path / "data", tree())
    true = trained(exported(dataset, name))

    def shifted(rows: Any, fill: Fill) -> Any:
        """What the target makes of lists that are rotated by one place."""
        at = rows.schema.get_field_index(columns[target.reads == "calls"])
        field = rows.schema.field(at)
        rolled = [np.roll(values, by).tolist() for values in rows.column(at).to_pylist()]
        return target.convert(rows.set_column(at, field, pa.array(rolled, field.type)), fill)

    monkeypatch.setattr("spanmill.triplets.exports.exporting.TARGETS", (target._replace(convert=shifted),))
    assert true != trained(exported(dataset, name))
