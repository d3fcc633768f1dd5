# pyright: basic, reportMissingImports=false
import gc
import pickle
from functools import partial
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spanmill.errors import DatasetError

torch = pytest.importorskip("torch", reason="needs torch: make test-learn runs these in the environment of vLLM")

from torch.utils.data import DataLoader  # noqa: E402  after the skip

from spanmill.torch import EpisodeDataset, TokenBatches, pack, pad  # noqa: E402

TWO = pl.DataFrame(
    {
        "rollout_id": ["a", "b"],
        "input_ids": [[1, 2, 3, 4], [5, 6]],
        "loss_mask": [[0, 0, 1, 1], [0, 1]],
        "logprobs": [[0.0, 0.0, -0.5, -0.25], [0.0, -1.0]],
        "prompt_length": [2, 1],
        "reward": [1.0, None],
    },
    schema_overrides={
        "input_ids": pl.List(pl.Int32),
        "loss_mask": pl.List(pl.Int8),
        "logprobs": pl.List(pl.Float32),
        "prompt_length": pl.Int32,
    },
)
COLUMNS = ("rollout_id", "reward")


def _plain(batch: dict) -> dict:
    """A batch as lists; NaN, which equals nothing, as a word."""
    shown = {name: value.tolist() if isinstance(value, torch.Tensor) else value for name, value in batch.items()}
    return {
        name: ["nan" if value != value else value for value in row] if name == "reward" else row
        for name, row in shown.items()
    }


def test_sequence_aligned_rows_keep_every_token_at_its_place():
    """`pad` fills up at the right, and masks, labels and logprobs have an element per token."""
    batch = pad(list(EpisodeDataset(TWO, COLUMNS)), pad_id=9)
    assert {
        "input_ids": [[1, 2, 3, 4], [5, 6, 9, 9]],
        "attention_mask": [[True] * 4, [True, True, False, False]],
        "position_ids": [[0, 1, 2, 3]] * 2,
        "loss_mask": [[False, False, True, True], [False, True, False, False]],
        "labels": [[-100, -100, 3, 4], [-100, 6, -100, -100]],
        "logprobs": [[0.0, 0.0, -0.5, -0.25], [0.0, -1.0, 0.0, 0.0]],
        "prompt_length": [2, 1],
        "rollout_id": ["a", "b"],
        "reward": [1.0, "nan"],
    } == _plain(batch)
    assert [torch.int64, torch.bool, torch.float32] == [batch[n].dtype for n in ("input_ids", "loss_mask", "logprobs")]


def test_response_aligned_rows_meet_where_the_prompt_ends():
    """Prompts are filled up at the left, what follows at the right, and masks begin behind the prompt."""
    batch = _plain(pad(list(EpisodeDataset(TWO, COLUMNS)), align="response"))
    assert {
        "input_ids": [[1, 2, 3, 4], [0, 5, 6, 0]],
        "attention_mask": [[True] * 4, [False, True, True, False]],
        "position_ids": [[0, 1, 2, 3], [0, 0, 1, 2]],
        "prompts": [[1, 2], [0, 5]],
        "responses": [[3, 4], [6, 0]],
        "loss_mask": [[True, True], [True, False]],
        "labels": [[3, 4], [6, -100]],
        "logprobs": [[-0.5, -0.25], [-1.0, 0.0]],
    } == {name: batch[name] for name in batch if name not in (*COLUMNS, "prompt_length")}


def test_shifted_rows_stand_where_the_token_is_predicted():
    """Element t of masks, labels and logprobs is about token t + 1."""
    batch = _plain(pad(list(EpisodeDataset(TWO, COLUMNS)), align="shifted"))
    assert ([[1, 2, 3], [5, 6, 0]], [[-100, 3, 4], [6, -100, -100]], [[0.0, -0.5, -0.25], [-1.0, 0.0, 0.0]]) == (
        batch["input_ids"],
        batch["labels"],
        batch["logprobs"],
    )


@pytest.mark.parametrize(
    ("align", "ids", "labels", "bounds"),
    [
        ("sequence", [1, 2, 3, 4, 5, 6], [-100, -100, 3, 4, -100, 6], [0, 4, 6]),
        ("shifted", [1, 2, 3, 5], [-100, 3, 4, 6], [0, 3, 4]),
    ],
)
def test_a_packed_row_says_where_each_episode_begins(align, ids, labels, bounds):
    """Episodes stand one behind the other, positions begin anew, and nothing predicts across a border."""
    batch = _plain(pack(list(EpisodeDataset(TWO, COLUMNS)), align=align))
    sizes = np.diff(bounds)
    assert {
        "input_ids": [ids],
        "labels": [labels],
        "position_ids": [[t for size in sizes for t in range(size)]],
        "sequence_ids": [[n for n, size in enumerate(sizes) for _ in range(size)]],
        "cu_seqlens": bounds,
        "max_seqlen": max(sizes),
    } == {
        name: batch[name]
        for name in ("input_ids", "labels", "position_ids", "sequence_ids", "cu_seqlens", "max_seqlen")
    }


def test_logprobs_that_are_not_known_are_never_zero():
    """Where an episode has none, trained tokens get NaN, which no loss survives unseen."""
    frame = TWO.with_columns(logprobs=pl.lit(None, pl.List(pl.Float32)))
    item = EpisodeDataset(frame, COLUMNS)[0]
    assert None is item["logprobs"]
    logprobs = pad([item])["logprobs"]
    assert ([[False, False, True, True]], 0.0) == (logprobs.isnan().tolist(), logprobs.nan_to_num().sum().item())
    assert pack([item])["logprobs"].isnan().tolist() == [[False, False, True, True]]


EPISODES = st.lists(
    st.lists(
        st.tuples(st.integers(1, 2**31 - 1), st.booleans(), st.floats(-9, -0.5, width=32)), min_size=1, max_size=9
    ).flatmap(lambda tokens: st.tuples(st.just(tokens), st.integers(0, len(tokens)))),
    min_size=1,
    max_size=6,
)


@settings(max_examples=60)
@given(EPISODES)
def test_every_form_holds_the_same_trained_tokens(episodes):
    """Whatever the lengths and alignment, the trained (episode, token, logprob) are those of the rows, in order."""
    # What is trained stands behind the first prompt.
    rows = [[(i, bool(m and t >= p), float(np.float32(lp))) for t, (i, m, lp) in enumerate(ts)] for ts, p in episodes]
    frame = pl.DataFrame(
        {
            "input_ids": [[i for i, _, _ in row] for row in rows],
            "loss_mask": [[int(m) for _, m, _ in row] for row in rows],
            "logprobs": [[lp if m else 0.0 for _, m, lp in row] for row in rows],
            "prompt_length": [p for _, p in episodes],
        }
    )
    items = list(EpisodeDataset(frame, ()))
    expected = [(n, i, lp) for n, row in enumerate(rows) for t, (i, m, lp) in enumerate(row) if m]
    expected_shifted = [(n, i, lp) for n, row in enumerate(rows) for t, (i, m, lp) in enumerate(row) if m and t]

    def trained(batch, rows_of):
        at = batch["loss_mask"].nonzero(as_tuple=True)
        return list(zip(rows_of(at), batch["labels"][at].tolist(), batch["logprobs"][at].tolist(), strict=True))

    def own_row(at):
        return at[0].tolist()

    assert expected == trained(pad(items), own_row)
    assert expected == trained(pad(items, align="response", multiple_of=4), own_row)
    assert expected_shifted == trained(pad(items, align="shifted"), own_row)
    for wanted, batch in ((expected, pack(items)), (expected_shifted, pack(items, align="shifted"))):
        assert wanted == trained(batch, lambda at, batch=batch: batch["sequence_ids"][0][at[1]].tolist())


def _frame(rows: int) -> pl.DataFrame:
    return pl.concat([TWO.with_columns(rollout_id=pl.col("rollout_id") + str(n)) for n in range(rows // 2)])


@pytest.mark.parametrize("workers", ["none", "fork", "spawn"])
def test_worker_processes_give_the_same_batches(tmp_path: Path, workers: str):
    """A mapped file and a hook of one's own work in DataLoader's workers, however these are started."""
    _frame(40).write_parquet(tmp_path / "rows.parquet")
    dataset = EpisodeDataset(pl.scan_parquet(tmp_path / "rows.parquet"), COLUMNS)
    options = {} if workers == "none" else {"num_workers": 2, "multiprocessing_context": workers}
    found = [batch for batch in DataLoader(dataset, batch_size=8, collate_fn=partial(pad, align="response"), **options)]
    assert _frame(40)["rollout_id"].to_list() == [name for batch in found for name in batch["rollout_id"]]
    assert [[3, 4], [6, 0]] * 20 == [row for batch in found for row in batch["responses"].tolist()]
    assert 40 == len(dataset)


def test_the_decoded_file_goes_with_its_dataset(tmp_path: Path):
    """A dataset that is gone leaves no file, a copy in a worker takes none away."""
    _frame(4).write_parquet(tmp_path / "rows.parquet")
    dataset = EpisodeDataset(pl.scan_parquet(tmp_path / "rows.parquet"), COLUMNS)
    copy = pickle.loads(pickle.dumps(dataset))
    file = dataset._arrays._file
    assert file is not None
    before = file.exists()
    expected = [item["rollout_id"] for item in dataset]
    del dataset
    gc.collect()
    assert (True, False, expected) == (before, file.exists(), [item["rollout_id"] for item in copy])


@given(
    st.lists(st.integers(0, 20), min_size=1, max_size=60).map(np.array), st.booleans(), st.booleans(), st.integers(0, 3)
)
def test_batches_keep_to_their_tokens(lengths, packed, shuffle, seed):
    """Every row is in one batch of each pass, no batch has more than it may, and a seed gives the order again."""
    batches = TokenBatches(lengths, 20, packed=packed, shuffle=shuffle, seed=seed)
    again = TokenBatches(lengths, 20, packed=packed, shuffle=shuffle, seed=seed)
    for _ in range(2):
        size = len(batches)
        found = list(batches)
        assert (size, found) == (len(found), list(again))
        assert list(range(len(lengths))) == sorted(row for batch in found for row in batch)
        for batch in found:
            own = lengths[batch]
            assert (own.sum() if packed else own.max() * len(own)) <= 20


def test_an_episode_beyond_the_budget_is_said():
    """An episode that no batch has room for stops the start, with the number that would do."""
    with pytest.raises(ValueError, match="1 episodes have more than max_tokens=4 tokens, the longest 7"):
        TokenBatches(np.array([3, 7]), 4)


def test_rows_are_counted_from_either_end():
    """As in a list: -1 is the last row, and what is beyond raises IndexError."""
    dataset = EpisodeDataset(TWO, COLUMNS)
    assert "b" == dataset[-1]["rollout_id"]
    with pytest.raises(IndexError, match="row 2 of 2 episodes"):
        dataset[2]


@pytest.mark.parametrize(
    ("source", "said"),
    [
        (TWO.drop("reward"), "no column reward; there are rollout_id"),
        (TWO.with_columns(loss_mask=pl.Series([[0, 1], [0, 1]])), "of 1 episodes differ in length"),
        ("nowhere", "is no dataset"),
    ],
)
def test_what_is_no_episode_is_said(source, said):
    """A missing column, lengths that differ and a folder without a dataset are refused with their names."""
    with pytest.raises(DatasetError, match=said):
        EpisodeDataset(source, COLUMNS)


def test_an_empty_dataset_has_empty_batches():
    """No rows are no error."""
    dataset = EpisodeDataset(TWO.clear(), COLUMNS)
    assert (0, (0, 0), (1, 0)) == (len(dataset), pad([])["input_ids"].shape, pack([])["input_ids"].shape)
