# pyright: basic, reportMissingImports=false
"""Episodes as torch tensors: a dataset for DataLoader, and functions that make one batch of several episodes.

    from torch.utils.data import DataLoader
    from spanmill.torch import EpisodeDataset, TokenBatches, pad

    dataset = EpisodeDataset("data")
    batches = TokenBatches(dataset.lengths, max_tokens=32768, shuffle=True)
    for batch in DataLoader(dataset, batch_sampler=batches, collate_fn=pad, num_workers=2):
        ...

Letters: B episodes of a batch, T tokens of an episode, L the longest T, P the longest prompt, R the longest rest, N the
sum of all T. A logprob that is not known is NaN, never 0; 0 stands where nothing was trained.
"""

from collections.abc import Iterator, Sequence
from typing import Any, Literal

import numpy as np
import torch
from torch.utils.data import Dataset, Sampler

from spanmill.triplets.episode_arrays import SCALARS, EpisodeArrays, Source

__all__ = ["EpisodeDataset", "TokenBatches", "pack", "pad"]

IGNORED = -100
"""The label of a token that is not trained: what torch's cross entropy leaves out."""

Item = dict[str, Any]
"""An episode: its scalar columns, and `input_ids`, `loss_mask` and `logprobs` as numpy arrays (T,) that must not be
written to; `logprobs` is None where they are not known."""


class EpisodeDataset(Dataset[Item]):
    """The episodes of a dataset folder, of a LazyFrame such as `read_episodes(path).filter(...)`, or of a table.

    `collate_fn` of the DataLoader makes batches of its items: `pad`, `pack`, or a function of your own that takes a
    list of them. `columns` says which scalar columns an item has beside `prompt_length`. A folder or LazyFrame is
    decoded once, into a temporary file that all workers map (see `EpisodeArrays`), as it is at that moment.

    Raises DatasetError if there is no dataset or a column is missing.
    """

    def __init__(self, source: Source, columns: Sequence[str] = SCALARS) -> None:
        self._arrays = EpisodeArrays(source, columns)

    @property
    def lengths(self) -> np.ndarray:
        """(episodes,) tokens of each."""
        return self._arrays.lengths

    def __len__(self) -> int:
        return len(self._arrays)

    def __getitem__(self, row: int) -> Item:
        if not -len(self) <= row < len(self):
            raise IndexError(f"row {row} of {len(self)} episodes")
        return self._arrays.item(row % len(self))

    def __getitems__(self, rows: Sequence[int]) -> list[Item]:
        """Several at once, which DataLoader asks for."""
        return self._arrays.items(rows)


class TokenBatches(Sampler[list[int]]):
    """A batch sampler: rows whose batch has at most `max_tokens` tokens, those of about equal length together.

    `packed` says that a batch is to be packed, and has the sum of the lengths; else it is padded to the longest. With
    `shuffle` every pass has another order, the same for the same `seed`; otherwise rows go in their own order.

    Raises ValueError if an episode alone has more than `max_tokens`.
    """

    def __init__(
        self, lengths: np.ndarray, max_tokens: int, *, packed: bool = False, shuffle: bool = False, seed: int = 0
    ) -> None:
        self._lengths = np.asarray(lengths)
        longer = int((self._lengths > max_tokens).sum())
        if longer:
            longest = int(self._lengths.max())
            raise ValueError(f"{longer} episodes have more than max_tokens={max_tokens} tokens, the longest {longest}")
        self._max_tokens = max_tokens
        self._packed = packed
        self._random = np.random.default_rng(seed) if shuffle else None
        self._next = self._batches()

    def __len__(self) -> int:
        return len(self._next)

    def __iter__(self) -> Iterator[list[int]]:
        batches, self._next = self._next, self._batches()
        return iter(batches)

    def _batches(self) -> list[list[int]]:
        if self._random is None:
            order = np.arange(len(self._lengths))
        elif self._packed:
            order = self._random.permutation(len(self._lengths))
        else:  # rows of equal length in any order
            order = np.lexsort([self._random.random(len(self._lengths)), self._lengths])
        found: list[list[int]] = [[]]
        longest = total = 0
        for row, length in zip(order.tolist(), self._lengths[order].tolist(), strict=True):
            longest, total = max(longest, length), total + length
            if (total if self._packed else longest * (len(found[-1]) + 1)) > self._max_tokens:
                found.append([])
                longest = total = length
            found[-1].append(row)
        if self._random is not None:
            self._random.shuffle(found)
        return [batch for batch in found if batch]


def pad(
    items: Sequence[Item],
    *,
    align: Literal["sequence", "response", "shifted"] = "sequence",
    pad_id: int = 0,
    multiple_of: int = 1,
) -> dict[str, Any]:
    """One row per episode, filled up to the longest (and to a multiple of `multiple_of`) with `pad_id`.

    Always `input_ids` (B, L) int64, `attention_mask` (B, L) bool, `position_ids` (B, L) int64, and, aligned as asked,
    `loss_mask` bool, `labels` int64 (-100 where not trained) and `logprobs` float32:

        sequence    (B, L): one element per token, at its place; the episode stands at the left
        response    (B, R): one per token behind the first prompt; prompts end, responses begin in one column, and
                    `prompts` (B, P) and `responses` (B, R) are the two halves of `input_ids`
        shifted     (B, L-1), and so are the other three: element t is about token t + 1, which position t predicts

    Scalar columns come along: numbers as (B,) tensors (float32 with NaN for null, int64), others as lists. Use
    `functools.partial` to give options to a DataLoader.
    """
    lengths = [len(item["input_ids"]) for item in items]
    prompts = [item["prompt_length"] for item in items]
    if align == "response":
        before = _up(max(prompts, default=0), multiple_of)
        starts = [before - prompt for prompt in prompts]
        width = before + _up(max((n - p for n, p in zip(lengths, prompts, strict=True)), default=0), multiple_of)
    else:
        before = 0
        starts = [0] * len(items)
        width = _up(max(lengths, default=0), multiple_of)
    shape = len(items), width
    ids = np.full(shape, pad_id, np.int64)
    attended, trained, logprobs = np.zeros(shape, np.bool_), np.zeros(shape, np.bool_), np.zeros(shape, np.float32)
    for row, (item, start, length) in enumerate(zip(items, starts, lengths, strict=True)):
        at = slice(start, start + length)
        ids[row, at] = item["input_ids"]
        attended[row, at] = True
        trained[row, at] = item["loss_mask"]
        logprobs[row, at] = _logprobs(item)
    ids, attended, trained, logprobs = map(torch.from_numpy, (ids, attended, trained, logprobs))
    positions = torch.arange(width).expand(shape)
    if align == "response":
        positions = positions.sub(torch.tensor(starts, dtype=torch.int64)[:, None]).clamp_(min=0)
    about = {"loss_mask": trained, "labels": torch.where(trained, ids, IGNORED), "logprobs": logprobs}
    tokens = {"input_ids": ids, "attention_mask": attended, "position_ids": positions}
    if align == "response":
        about = {name: tensor[:, before:] for name, tensor in about.items()}
        about |= {"prompts": ids[:, :before], "responses": ids[:, before:]}
    elif align == "shifted":
        about = {name: tensor[:, 1:] for name, tensor in about.items()}
        tokens = {name: tensor[:, :-1] for name, tensor in tokens.items()}
    elif align != "sequence":
        raise ValueError(f"align: expected sequence, response or shifted, found {align!r}")
    return tokens | about | _scalars(items)


def pack(items: Sequence[Item], *, align: Literal["sequence", "shifted"] = "sequence") -> dict[str, Any]:
    """All episodes one behind the other in a single row, for attention that is told where each begins.

    `input_ids`, `position_ids` (from 0 in each episode), `sequence_ids` (number of the episode), `loss_mask`, `labels`
    and `logprobs`, all (1, N) with dtypes as `pad` has them; `cu_seqlens` (B + 1,) int32 and `max_seqlen`. `align` is
    that of `pad`; shifted, each episode is one element shorter. Scalar columns come as with `pad`.
    """
    if align not in ("sequence", "shifted"):
        raise ValueError(f"align: expected sequence or shifted, found {align!r}")
    cut = int(align == "shifted")
    ends, begins = slice(None, -1 if cut else None), slice(cut, None)
    lengths = np.array([max(len(item["input_ids"]) - cut, 0) for item in items], np.int64)
    bounds = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
    trained = _chained([item["loss_mask"][begins] for item in items], np.bool_)
    targets = _chained([item["input_ids"][begins] for item in items], np.int64)
    found = {
        "input_ids": _chained([item["input_ids"][ends] for item in items], np.int64) if cut else targets,
        "position_ids": torch.from_numpy(np.arange(bounds[-1]) - np.repeat(bounds[:-1], lengths)),
        "sequence_ids": torch.from_numpy(np.repeat(np.arange(len(items)), lengths)),
        "loss_mask": trained,
        "labels": torch.where(trained, targets, IGNORED),
        "logprobs": _chained([_logprobs(item)[begins] for item in items], np.float32),
    }
    return {
        **{name: tensor[None] for name, tensor in found.items()},
        "cu_seqlens": torch.from_numpy(bounds.astype(np.int32)),
        "max_seqlen": int(lengths.max(initial=0)),
        **_scalars(items),
    }


def _logprobs(item: Item) -> np.ndarray:
    """(T,) float32: NaN on trained tokens where they are not known."""
    if item["logprobs"] is not None:
        return item["logprobs"]
    return np.where(item["loss_mask"], np.float32(np.nan), np.float32(0))


def _chained(arrays: Sequence[np.ndarray], dtype: Any) -> torch.Tensor:
    return torch.from_numpy(np.concatenate([np.empty(0, dtype), *arrays], dtype=dtype))


def _scalars(items: Sequence[Item]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in items[0] if items else ():
        values = [item[name] for item in items]
        kinds = {type(value) for value in values}
        if name in ("input_ids", "loss_mask", "logprobs"):
            continue
        if kinds <= {int}:
            found[name] = torch.tensor(values, dtype=torch.int64)
        elif kinds <= {float, type(None)} and (float in kinds or name in ("reward", "advantage")):
            found[name] = torch.tensor([float("nan") if value is None else value for value in values])
        else:
            found[name] = values
    return found


def _up(number: int, multiple_of: int) -> int:
    return -(-number // multiple_of) * multiple_of
