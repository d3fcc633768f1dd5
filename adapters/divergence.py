"""Where a prompt stopped following an earlier call, and drifts that `realign` accepts (design section 7)."""

from typing import NamedTuple

import numpy as np

from spanmill.adapters.forest import Divergence, Prefixes
from spanmill.adapters.joined import Joined
from spanmill.adapters.options import Options
from spanmill.triplets.records import Json, TokenIds


class Drift(NamedTuple):
    """A parent that a prompt extends but for the end of its answer."""

    parent: Joined
    at: int
    """First differing position; what the parent sampled from here on is gone."""


def find_drifts(ordered: list[Joined], options: Options) -> dict[int, Drift]:
    """Note on each new root what it could have extended; under `realign`, accept short drifts."""
    drifts: dict[int, Drift] = {}
    earlier = Prefixes()
    numbers: dict[int, int] = {}
    for number, call in enumerate(ordered):
        if not call.has_ids:
            continue
        if call.parent is None:
            near = earlier.longest(call.prompt, call.merged.model)
            if options.merge == "realign":
                within = [d for d in near if _accepts(ordered[d.node], d.at, call.prompt, options.realign_tokens)]
                if within:
                    drifts[id(call)] = Drift(ordered[within[0].node], within[0].at)
            if near:
                call.divergence = _divergence(call, ordered[near[0].node], near[0])
        if call.tokens:
            numbers[id(call)] = number
            earlier.add(number, call.node, numbers.get(id(call.parent)))
    return drifts


def _accepts(parent: Joined, index: int, prompt: TokenIds, limit: int) -> bool:
    """Whether a drift starts inside the parent's answer and reaches no further than the limit to the answer's end."""
    start = parent.prompt.size
    return start <= index < prompt.size and 0 < start + parent.tokens - index <= limit


def _divergence(call: Joined, parent: Joined, near: Divergence) -> dict[str, Json] | None:
    """Where and why a prompt stopped following an earlier call; None if the two have too little in common to say."""
    start = parent.prompt.size
    compacted = call.merged.metadata.get("compacted") is True
    if near.at >= call.prompt.size or (near.at < start and not compacted and 2 * near.at < start):
        return None
    if near.at < start:
        kind = "compacted" if compacted or call.prompt.size < start + parent.tokens else "edited"
    else:
        gone = parent.response[near.at - start :]
        kind = _drift_kind(gone, call.prompt[near.at :])
    return {"parent_call_id": parent.call_id, "index": near.at, "kind": kind}


def _drift_kind(gone: TokenIds, comes: TokenIds) -> str:
    """How a prompt left an answer.

    `template`: it goes on with a later part of the answer, so tokens were dropped; `retokenized`: the answer's end
    comes after other tokens; `edited`: neither.
    """
    tail = gone[-min(gone.size, 8) :]
    if any(
        np.array_equal(gone[skip:], comes[: gone.size - skip]) for skip in np.flatnonzero(gone == comes[:1]).tolist()
    ):
        return "template"
    places = np.flatnonzero(comes[: 2 * gone.size + 16] == tail[-1:]) if tail.size else np.zeros(0, np.int64)
    return "retokenized" if places.size and gone.size > 1 else "edited"
