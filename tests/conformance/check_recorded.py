#!/usr/bin/env python3
"""Holds a dataset that was built from a real recording to what the engine really did.

    check_recorded.py RECORDING DATASET

A recording is a folder with `traces.binpb`, the requests as they came (each a 4-byte big-endian length and an
ExportTraceServiceRequest), maybe `logs.binpb`, and `truth.json`, the engine's own log of every generation.
What must hold:

1. Every generation that a client received stands there once per choice; one whose answer was lost never; nothing else.
2. Where spans carry ids (`spans_carry` in the truth): equal prompt and response ids, equal logprobs if carried, else
   null; trainable. Of a stream that was closed early: a prefix of the truth, not trainable or flagged aborted. Where a
   span has the prompt twice over (`prompt_twice`, a streamed n = 2): the right ids, or kept out of training.
3. Where they carry none: null ids, not trainable, flag no_token_ids.
4. Rows of one rollout share one (rollout_id, attempt), rows of two never do; the id is the expected one where the truth
   names it. Where each call stands alone in its trace (carrier `none`) only the second half is demanded.
5. Turns follow the order in which the rollout's generations started.
6. In Episodes each turn's slice equals the truth, the mask is 1 on trained turns and nowhere else, and every trainable
   generation is trained once.
"""

import json
import math
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import polars as pl

import spanmill

Json = dict[str, Any]
Key = tuple[str, int]
"""(response id, choice)"""


class Sample(NamedTuple):
    """One choice of one generation, as the engine logged it."""

    generation: Json
    choice: Json

    @property
    def carried(self) -> set[str]:
        """What the spans carry of it: prompt, prompt_twice, response, logprobs."""
        return set(self.generation["spans_carry"])

    @property
    def partial(self) -> bool:
        """The client closed the stream before its end."""
        return self.generation["delivered"] == "partial"


class Placed(NamedTuple):
    """A triplet and the rollout of the truth that it belongs to; `sample` is None if the row has no response id."""

    rollout: str | None
    row: Json
    sample: Sample | None


def check(recording: Path, dataset: Path) -> list[str]:
    """Every way in which the dataset differs from the recording's truth; empty if it holds."""
    truth = json.loads((recording / "truth.json").read_text())
    triplets = spanmill.read_triplets(dataset).collect().to_dicts()
    episodes = spanmill.read_episodes(dataset).collect().to_dicts()
    quarantined = _quarantined_spans(dataset)
    samples = {
        (generation["response_id"], choice["index"]): Sample(generation, choice)
        for generation in truth["generations"]
        if generation["delivered"] != "no"
        for choice in generation["choices"]
    }
    placed = [_place(row, samples, truth) for row in triplets]
    problems = [
        *_presence(truth, samples, placed, quarantined),
        *(problem for one in placed for problem in _contents(one)),
        *_identity(truth, placed),
        *_turn_order(truth, placed),
        *_episodes(episodes, samples, placed),
    ]
    return list(dict.fromkeys(problems))


def _quarantined_spans(dataset: Path) -> set[str]:
    parts = sorted((dataset / "quarantine").glob("*.parquet"))
    return {span_id for part in parts for span_id in pl.read_parquet(part, columns=["span_id"])["span_id"]}


def _key(call_id: str) -> Key:
    response_id, _, choice = call_id.partition("#")
    return response_id, int(choice or 0)


def _place(row: Json, samples: dict[Key, Sample], truth: Json) -> Placed:
    """By response id; else by the rollout's name in the row's text, else by a trace that one rollout alone has."""
    sample = samples.get(_key(row["call_id"]))
    if sample:
        return Placed(sample.generation["rollout"], row, sample)
    text = (row["messages"] or "") + row["metadata"]
    named = [rollout["rollout"] for rollout in truth["rollouts"] if rollout["rollout"] in text]
    owners = [rollout["rollout"] for rollout in truth["rollouts"] if row["trace_id"] in rollout["trace_ids"]]
    return Placed(named[0] if named else owners[0] if len(owners) == 1 else None, row, None)


# Rule 1


def _presence(
    truth: Json, samples: dict[Key, Sample], placed: Sequence[Placed], quarantined: set[str]
) -> Iterator[str]:
    lost = {generation["response_id"] for generation in truth["generations"] if generation["delivered"] == "no"}
    yield from (f"row for the lost generation {key}" for one in placed if (key := _key(one.row["call_id"]))[0] in lost)
    seen = Counter(_key(one.row["call_id"]) for one in placed if one.sample)
    yield from (f"{key} stands there {count} times" for key, count in seen.items() if count > 1)

    missing: defaultdict[str, list[Sample]] = defaultdict(list)
    for key, sample in samples.items():
        set_aside = any(span["span_id"] in quarantined for span in sample.generation["mentioned_by"])
        if key not in seen and not ("prompt_twice" in sample.carried and set_aside):
            missing[sample.generation["rollout"]].append(sample)
    loose = Counter(one.rollout for one in placed if not one.sample)
    for rollout in {*missing, *loose}:
        unseen = missing.get(rollout or "", [])
        if len(unseen) != loose[rollout]:
            yield f"{rollout}: {len(unseen)} generations without a row, {loose[rollout]} rows without a known id"
        for sample in unseen:
            if sample.carried & {"prompt", "prompt_twice", "response"}:
                yield f"{sample.generation['response_id']} is missing although its ids are in the spans"


# Rules 2 and 3


def _contents(one: Placed) -> Iterator[str]:
    row, sample = one.row, one.sample
    if sample is None or (not sample.partial and "response" not in sample.carried):
        yield from _without_ids(row)
    elif sample.partial:
        yield from _cut_short(row, sample)
    else:
        yield from _with_ids(row, sample)


def _without_ids(row: Json) -> Iterator[str]:
    if row["prompt_token_ids"] is not None or row["response_token_ids"] is not None:
        yield f"{row['call_id']}: token ids invented"
    if row["trainable"]:
        yield f"{row['call_id']}: trainable without ids"
    if "no_token_ids" not in row["flags"]:
        yield f"{row['call_id']}: flag no_token_ids is missing from {row['flags']}"


def _cut_short(row: Json, sample: Sample) -> Iterator[str]:
    ids, logprobs = row["response_token_ids"], row["response_logprobs"]
    if ids is not None and ids != sample.choice["token_ids"][: len(ids)]:
        yield f"{row['call_id']}: the ids of a stream closed early are no prefix of the truth"
    if logprobs is not None and not _close(logprobs, sample.choice["logprobs"][: len(logprobs)]):
        yield f"{row['call_id']}: the logprobs of a stream closed early differ"
    if row["trainable"] and "aborted" not in row["flags"]:
        yield f"{row['call_id']}: a stream closed early is trainable and not flagged aborted"


def _with_ids(row: Json, sample: Sample) -> Iterator[str]:
    right_prompt = row["prompt_token_ids"] == sample.generation["prompt_token_ids"]
    logprobs = row["response_logprobs"]
    if row["response_token_ids"] != sample.choice["token_ids"]:
        yield f"{row['call_id']}: response ids differ"
    if "prompt" in sample.carried and not right_prompt:
        yield f"{row['call_id']}: prompt ids differ"
    if "prompt_twice" in sample.carried and not right_prompt and (row["trainable"] or row["prompt_token_ids"]):
        yield f"{row['call_id']}: prompt ids differ (the span has them twice)"
    if "logprobs" in sample.carried and (logprobs is None or not _close(logprobs, sample.choice["logprobs"])):
        yield f"{row['call_id']}: logprobs differ"
    if "logprobs" not in sample.carried and logprobs is not None:
        yield f"{row['call_id']}: logprobs invented"
    if "prompt" in sample.carried and not row["trainable"] and not sample.generation["aborted"]:
        yield f"{row['call_id']}: not trainable, flags {row['flags']}"


def _close(got: list[float], want: list[float]) -> bool:
    """A recording may hold the text of a float32: equal to 1e-4."""
    return len(got) == len(want) and all(
        math.isclose(a, b, rel_tol=1e-4, abs_tol=1e-4) for a, b in zip(got, want, strict=True)
    )


# Rules 4 and 5


def _identity(truth: Json, placed: Sequence[Placed]) -> Iterator[str]:
    owners: defaultdict[tuple[str, int], set[str | None]] = defaultdict(set)
    for one in placed:
        owners[one.row["rollout_id"], one.row["attempt"]].add(one.rollout)
    yield from (f"{key} holds rows of {len(names)} rollouts" for key, names in owners.items() if len(names) > 1)
    for rollout in truth["rollouts"]:
        keys = {key for key, names in owners.items() if rollout["rollout"] in names}
        if rollout["carrier"] != "none" and len(keys) > 1:
            yield f"rollout {rollout['rollout']} is split over {sorted(keys)}"
        for key in keys:
            expected = rollout.get("expected_rollout_id") or key[0]  # null where the truth does not name it
            if expected != key[0]:
                yield f"rollout {rollout['rollout']} has the id {key[0]} instead of {expected}"
            if rollout.get("expected_attempt", key[1]) != key[1]:
                yield f"rollout {rollout['rollout']} has the attempt {key[1]} instead of {rollout['expected_attempt']}"


def _turn_order(truth: Json, placed: Sequence[Placed]) -> Iterator[str]:
    for rollout in truth["rollouts"]:
        started = sorted(
            (one.sample.generation["seq"], one.sample.choice["index"], one.row["turn"])
            for one in placed
            if one.sample and one.rollout == rollout["rollout"]
        )
        turns = [turn for _, _, turn in started]
        if rollout["carrier"] != "none" and turns != sorted(turns):
            yield f"rollout {rollout['rollout']}: turns out of order: {turns}"


# Rule 6


def _episodes(episodes: Sequence[Json], samples: dict[Key, Sample], placed: Sequence[Placed]) -> Iterator[str]:
    trained: Counter[str] = Counter()
    for episode in episodes:
        outside = list(episode["loss_mask"])
        for turn in episode["turns"]:
            yield from _turn(episode, turn, samples.get(_key(turn["call_id"])))
            start, end = turn["prompt_end"], turn["response_end"]
            outside[start:end] = [0] * (end - start)
            trained[turn["call_id"]] += turn["trained"]
        if any(outside):
            yield f"episode {episode['rollout_id']}/{episode['episode']}: the mask is 1 outside of the turns"
    for one in placed:
        call_id = one.row["call_id"]
        if one.sample and one.row["trainable"] and trained[call_id] != 1:
            yield f"{call_id} is trained {trained[call_id]} times"


def _turn(episode: Json, turn: Json, sample: Sample | None) -> Iterator[str]:
    """One turn of an Episode; a stream closed early has no truth to compare its whole slice with."""
    where = f"episode {episode['rollout_id']}/{episode['episode']}, {turn['call_id']}"
    start, end = turn["prompt_end"], turn["response_end"]
    if sample is None:
        yield f"{where}: no such generation"
        return
    if sample.partial:
        return
    prompt, response = episode["input_ids"][:start], episode["input_ids"][start:end]
    if prompt != sample.generation["prompt_token_ids"] or response != sample.choice["token_ids"]:
        yield f"{where}: the slice differs"
    if set(episode["loss_mask"][start:end]) - {int(turn["trained"])}:
        yield f"{where}: the mask differs"
    logprobs = episode["logprobs"]
    if turn["trained"] and logprobs is not None and not _close(logprobs[start:end], sample.choice["logprobs"]):
        yield f"{where}: logprobs differ"


if __name__ == "__main__":
    found = check(Path(sys.argv[1]), Path(sys.argv[2]))
    print("\n".join(found) or "every row equals what the engine did")
    sys.exit(bool(found))
