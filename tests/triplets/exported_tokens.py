"""The way back: from the files of each format to the tokens that are trained, by nothing that the exports use."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np
import pyarrow.parquet as pq
from safetensors.numpy import load

from spanmill.triplets.records import Episode


class Sampled(NamedTuple):
    """A trained token: how many tokens stand before it, which it is, and its logprob, None where there is none."""

    position: int
    token: int
    logprob: float | None


class Sequence(NamedTuple):
    """A row: all its tokens, and those that are trained."""

    ids: tuple[int, ...]
    sampled: tuple[Sampled, ...]


def of_episode(episode: Episode, logprobs: bool = True) -> Sequence:
    """What a format must say of an Episode."""
    values = episode.logprobs if logprobs else None
    return Sequence(
        tuple(map(int, episode.input_ids)),
        tuple(
            Sampled(at, int(episode.input_ids[at]), None if values is None else float(values[at]))
            for at in range(len(episode.input_ids))
            if episode.loss_mask[at]
        ),
    )


def _aligned(ids: Any, mask: Any, logprobs: Any = None, before: int = 0) -> tuple[Sampled, ...]:
    """Of tokens that `before` others precede."""
    return tuple(
        Sampled(before + at, int(token), None if logprobs is None else float(logprobs[at]))
        for at, token in enumerate(ids)
        if mask[at]
    )


def _parquet(path: Path) -> list[dict[str, Any]]:
    return pq.ParquetFile(path).read().to_pylist()


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def _responses(prompt: Any, response: Any, mask: Any, logprobs: Any) -> Sequence:
    assert len(response) == len(mask) == len(logprobs)
    return Sequence((*prompt, *response), _aligned(response, mask, logprobs, len(prompt)))


def _verl(path: Path) -> Iterator[Sequence]:
    for file in sorted(path.iterdir()):
        found = load(file.read_bytes())
        width = found["prompts"].shape[1]
        assert (found["input_ids"][:, :width] == found["prompts"]).all()
        assert (found["input_ids"][:, width:] == found["responses"]).all()
        for row, attention in enumerate(found["attention_mask"] == 1):
            trained = np.flatnonzero(found["response_mask"][row])
            sampled = [
                Sampled(
                    int(found["position_ids"][row, width + at]),
                    int(found["responses"][row, at]),
                    float(found["rollout_log_probs"][row, at]),
                )
                for at in trained
            ]
            assert attention[width + trained].all()
            yield Sequence(tuple(found["input_ids"][row][attention].tolist()), tuple(sampled))


def _areal(path: Path) -> Iterator[Sequence]:
    for file in sorted(path.iterdir()):
        found = load(file.read_bytes())
        for row, attention in enumerate(found["attention_mask"]):
            ids = found["input_ids"][row][attention]
            mask = found["loss_mask"][row][attention]
            assert ((found["versions"][row][attention] != -1) == (mask == 1)).all()
            yield Sequence(tuple(ids.tolist()), _aligned(ids, mask, found["logprobs"][row][attention]))


def _prime_rl(path: Path) -> Iterator[Sequence]:
    for file in sorted(path.iterdir()):
        for ids, mask, logprobs, temperatures, *_ in msgspec.msgpack.decode(file.read_bytes()):
            assert len(ids) == len(mask) == len(logprobs) == len(temperatures)
            yield Sequence(tuple(ids), _aligned(ids, mask, logprobs))


def _slime(path: Path) -> Iterator[Sequence]:
    for row in _lines(path):
        start = len(row["tokens"]) - row["response_length"]
        yield _responses(row["tokens"][:start], row["tokens"][start:], row["loss_mask"], row["rollout_log_probs"])


def _tinker(path: Path) -> Iterator[Sequence]:
    for row in _parquet(path):
        read, targets = row["model_input"], row["target_tokens"]
        assert read[1:] == targets[:-1]
        assert len(read) == len(targets) == len(row["mask"]) == len(row["logprobs"])
        yield Sequence((*read, targets[-1]), _aligned(targets, row["mask"], row["logprobs"], 1))


def _nemo_rl(path: Path) -> Iterator[Sequence]:
    for row in _parquet(path):
        ids: list[int] = []
        sampled: list[Sampled] = []
        for message in row["message_log"]:
            tokens = message["token_ids"]
            if message["role"] == "assistant":
                sampled += _aligned(tokens, [1] * len(tokens), message["generation_logprobs"], len(ids))
            ids += tokens
        assert row["length"] == len(ids)
        yield Sequence(tuple(ids), tuple(sampled))


def _nemo_gym(path: Path) -> Iterator[Sequence]:
    for row in _lines(path):
        tokens, logprobs = row["generation_token_ids"], row["generation_log_probs"]
        yield _responses(row["prompt_token_ids"], tokens, [1] * len(tokens), logprobs)


def _atif(path: Path) -> Iterator[Sequence]:
    for document in _lines(path):
        for trajectory in (document, *document.get("subagent_trajectories", ())):
            for step in trajectory["steps"]:
                own = step.get("extra", {}).get("spanmill", {})
                if step["source"] == "agent" and own.get("trained"):
                    metrics, size = step["metrics"], own["trained_tokens"]
                    logprobs = metrics.get("logprobs", [None] * size)
                    ids, prompt = metrics["completion_token_ids"], metrics["prompt_token_ids"]
                    found = (Sampled(len(prompt) + at, ids[at], logprobs[at]) for at in range(size))
                    yield Sequence((*prompt, *ids[:size]), tuple(found))


def _rows(*names: str) -> Callable[[Path], Iterator[Sequence]]:
    """A format of Parquet rows, sequence aligned if it has two or three columns of tokens, else response aligned."""

    def read(path: Path) -> Iterator[Sequence]:
        for row in _parquet(path):
            columns = [row[name] for name in names]
            if len(names) == 4:
                yield _responses(*columns)
            else:
                assert len({len(column) for column in columns}) == 1
                yield Sequence(tuple(columns[0]), _aligned(*columns))

    return read


def _agent_loop(path: Path) -> Iterator[Sequence]:
    for row in _lines(path):
        yield _responses(row["prompt_ids"], row["response_ids"], row["response_mask"], row["response_logprobs"])


BY_ROW: Final[dict[str, Callable[[Path], Iterator[Sequence]]]] = {
    "verl": _verl,
    "verl-rollouts": _agent_loop,
    "trl-sft": _rows("input_ids", "assistant_masks"),
    "trl-grpo": _rows("prompt_ids", "completion_ids", "env_mask", "logprobs"),
    "trl-async": _rows("input_ids", "completion_mask", "old_log_probs"),
    "skyrl": _rows("prompt_token_ids", "response_ids", "loss_masks", "rollout_logprobs"),
    "skyrl-sft": _rows("input_ids", "loss_mask"),
    "prime-rl": _prime_rl,
    "areal": _areal,
    "slime": _slime,
    "tinker": _tinker,
    "nemo-rl": _nemo_rl,
}
"""Formats with a row for each Episode."""

BY_CALL: Final[dict[str, Callable[[Path], Iterator[Sequence]]]] = {"nemo-gym": _nemo_gym, "atif": _atif}
"""Formats with a record for each call."""

WITHOUT_LOGPROBS: Final = ("trl-sft", "skyrl-sft")
KEEPS_MISSING_LOGPROBS: Final = (*WITHOUT_LOGPROBS, "atif")
"""Formats that take Episodes whose logprobs were not recorded, too."""
