"""Which call extends which: token prefixes, found by hashing, in work linear in tokens (design section 7).

B extends A when A's prompt and response together are a prefix of B's prompt:

    A [1 2 3] -> [4 5]      B [1 2 3 4 5 6] -> [7]      B extends A
"""

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

import numpy as np

from spanmill.triplets.records import TokenIds

MULTIPLIER: Final = 0x9E3779B97F4A7C15
"""Odd, so that no power of it vanishes modulo 2**64."""


class Node(NamedTuple):
    """A call as the forest sees it. Nodes are given earliest first."""

    prompt: TokenIds
    """(P,)"""
    response: TokenIds
    """(R,); a call that sampled nothing is never a parent."""
    model: str | None
    agent: object
    """Equal for calls under one agent span."""


class Links(NamedTuple):
    """What a node extends."""

    parent: int | None
    """The longest call that the prompt extends; among equals the one under the same agent span, then the earliest."""
    before: list[int]
    """Calls that must come earlier, of any model; further ones come before these."""


class Divergence(NamedTuple):
    """The call with the longest common prefix, and the first position in the child's prompt that differs."""

    node: int
    at: int


def same_model(a: str | None, b: str | None) -> bool:
    """A model that was not recorded contradicts nothing."""
    return a is None or b is None or a == b


def link(nodes: Sequence[Node]) -> list[Links]:
    """What each node extends. Each prompt is hashed once and compared with its matches alone."""
    if not nodes:
        return []
    whole = [np.concatenate((n.prompt, n.response)) for n in nodes]
    powers = _powers(max(w.size for w in whole))
    hashes = [np.cumsum((w.astype(np.uint64) + np.uint64(1)) * powers[: w.size]) for w in whole]
    ends: dict[tuple[int, int], list[int]] = defaultdict(list)
    for i, node in enumerate(nodes):
        if node.response.size:
            ends[whole[i].size, int(hashes[i][-1])].append(i)
    lengths = np.unique(np.fromiter((length for length, _ in ends), np.int64, len(ends)))
    return [
        _links(i, nodes, whole, _matches(nodes[i].prompt, hashes[i], lengths, ends, whole)) for i in range(len(nodes))
    ]


def _powers(n: int) -> np.ndarray:
    powers = np.full(n, MULTIPLIER, np.uint64)
    powers[:1] = 1
    return np.cumprod(powers)


def _matches(
    prompt: TokenIds,
    hashes: np.ndarray,
    lengths: np.ndarray,
    ends: dict[tuple[int, int], list[int]],
    whole: list[TokenIds],
) -> Iterator[tuple[int, list[int]]]:
    """(length, calls) of every call whose tokens are a prefix of the prompt, longest first."""
    possible = lengths[: np.searchsorted(lengths, prompt.size, "right")]
    for length, value in zip(possible[::-1].tolist(), hashes[possible - 1][::-1].tolist(), strict=True):
        found = [i for i in ends.get((length, value), ()) if np.array_equal(whole[i], prompt[:length])]
        if found:
            yield length, found


def _links(i: int, nodes: Sequence[Node], whole: list[TokenIds], matches: Iterator[tuple[int, list[int]]]) -> Links:
    parent: int | None = None
    before: list[int] = []
    covered = -1  # calls of up to this many tokens come before one of `before` already
    for length, found in matches:
        if length > covered:
            before += found
            covered = max(covered, *(nodes[f].prompt.size for f in found))
        if parent is None:
            fitting = [f for f in found if same_model(nodes[f].model, nodes[i].model)]
            parent = min(fitting, key=lambda f: (nodes[f].agent != nodes[i].agent, f), default=None)
        if parent is not None and length <= covered:
            break
    return Links(parent, before)


class Prefixes:
    """Earlier calls by their tokens, to find the one that shares the longest prefix with a prompt."""

    def __init__(self) -> None:
        self._sorted: dict[str | None, list[tuple[bytes, int]]] = defaultdict(list)

    def add(self, node: int, tokens: TokenIds, model: str | None) -> None:
        """Add a call's prompt and response, (P + R,)."""
        insort(self._sorted[model], (_big_endian(tokens), node))

    def longest(self, prompt: TokenIds, model: str | None) -> list[Divergence]:
        """All calls that share the longest prefix with the prompt, by their numbers; [] if none shares any."""
        wanted = _big_endian(prompt)
        best = 0
        found: list[int] = []
        for other, entries in self._sorted.items():
            if not same_model(other, model):
                continue
            at = bisect_left(entries, (wanted, -1))
            shared = max((_common(wanted, e[0]) for e in entries[max(0, at - 1) : at + 1]), default=0)
            if shared < best or not shared:
                continue
            if shared > best:
                best, found = shared, []
            prefix = wanted[: 4 * shared]
            start = bisect_left(entries, (prefix, -1))
            for tokens, node in entries[start:]:
                if not tokens.startswith(prefix):
                    break
                found.append(node)
        return [Divergence(n, best) for n in sorted(found)]


def _big_endian(tokens: TokenIds) -> bytes:
    return tokens.astype(">i4").tobytes()


def _common(a: bytes, b: bytes) -> int:
    """Length of the common prefix, in tokens."""
    n = min(len(a), len(b))
    differs = np.frombuffer(a, "u1", n) != np.frombuffer(b, "u1", n)
    at = int(differs.argmax()) if n else 0
    return (at if n and differs[at] else n) // 4
