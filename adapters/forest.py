"""Which call extends which: token prefixes, found by hashing, in work linear in tokens (design section 7).

B extends A when A's prompt and response together are a prefix of B's prompt:

    A [1 2 3] -> [4 5]      B [1 2 3 4 5 6] -> [7]      B extends A
"""

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import pairwise
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
    """A call with the longest common prefix, and the first position in the child's prompt that differs."""

    node: int
    at: int


def same_model(a: str | None, b: str | None) -> bool:
    """A model that was not recorded contradicts nothing."""
    return a is None or b is None or a == b


def link(nodes: Sequence[Node]) -> list[Links]:
    """What each node extends. Each token is hashed once, and each prompt compared with its matches alone."""
    if _is_chain(nodes):
        return [Links(i - 1 if i else None, [i - 1] if i else []) for i in range(len(nodes))]
    sizes = [n.prompt.size + n.response.size for n in nodes]
    lengths = sorted({size for size, n in zip(sizes, nodes, strict=True) if n.response.size})
    stops = np.asarray(lengths, np.int64)
    powers = _powers(max(sizes))
    ends: dict[tuple[int, int], list[int]] = defaultdict(list)
    hashes: list[list[int]] = []
    for i, node in enumerate(nodes):
        at_stops, end = _hash(node, stops, powers)
        hashes.append(at_stops)
        if node.response.size:
            ends[sizes[i], end].append(i)
    return [_links(i, nodes, _matches(nodes, i, lengths, hashes[i], ends)) for i in range(len(nodes))]


def _is_chain(nodes: Sequence[Node]) -> bool:
    """Whether each call extends the one before it, as in most rollouts: comparing them once tells all then."""
    return all(
        a.response.size
        and b.prompt.size >= a.prompt.size + a.response.size
        and same_model(a.model, b.model)
        and _is_prefix(a, b.prompt)
        for a, b in pairwise(nodes)
    )


def _powers(n: int) -> np.ndarray:
    powers = np.full(n, MULTIPLIER, np.uint64)
    powers[:1] = 1
    return np.cumprod(powers)


def _hash(node: Node, stops: np.ndarray, powers: np.ndarray) -> tuple[list[int], int]:
    """(hashes of the prompt's beginnings of the lengths `stops`, as far as it reaches; hash of prompt and response)."""
    p = node.prompt.size
    # uint64 arithmetic wraps around; equal hashes are compared token by token before they count.
    sums = np.cumsum((node.prompt.astype(np.uint64) + np.uint64(1)) * powers[:p])
    own = ((node.response.astype(np.uint64) + np.uint64(1)) * powers[p : p + node.response.size]).sum()
    end = (int(sums[-1]) if p else 0) + int(own)
    return sums[stops[: np.searchsorted(stops, p, "right")] - 1].tolist(), end % 2**64


def _matches(
    nodes: Sequence[Node], i: int, lengths: list[int], hashes: list[int], ends: dict[tuple[int, int], list[int]]
) -> Iterator[tuple[int, list[int]]]:
    """(length, calls) of every call whose tokens are a prefix of the prompt of node `i`, longest first."""
    prompt = nodes[i].prompt
    for k in range(len(hashes) - 1, -1, -1):
        found = [f for f in ends.get((lengths[k], hashes[k]), ()) if _is_prefix(nodes[f], prompt)]
        if found:
            yield lengths[k], found


def _is_prefix(node: Node, prompt: TokenIds) -> bool:
    p, end = node.prompt.size, node.prompt.size + node.response.size
    # As bytes: numpy's comparison makes an array of answers first.
    return (
        end <= prompt.size
        and node.prompt.tobytes() == prompt[:p].tobytes()
        and node.response.tobytes() == prompt[p:end].tobytes()
    )


def _links(i: int, nodes: Sequence[Node], matches: Iterator[tuple[int, list[int]]]) -> Links:
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


class _Entry(NamedTuple):
    node: Node
    parent: int | None


class Prefixes:
    """Earlier calls by their tokens, to find one that shares the longest prefix with a prompt.

    Only the ends of chains are kept in order, by model: what shares a prefix with a call shares it with the call's
    parent as far as the parent reaches. In that order the nearest to a prompt, on either side, share most with it.
    """

    def __init__(self) -> None:
        self._entries: dict[int, _Entry] = {}
        self._sorted: dict[str | None, list[tuple[bytes, int]]] = defaultdict(list)
        self._listed: dict[int, bytes] = {}
        self._new: dict[int, None] = {}

    def add(self, number: int, node: Node, parent: int | None) -> None:
        """Add a call that sampled something; `parent` is the number of the call that it extends, if that was added."""
        self._entries[number] = _Entry(node, parent)
        self._new[number] = None
        if parent is not None and self._entries[parent].node.model == node.model:
            self._new.pop(parent, None)
            tokens = self._listed.pop(parent, None)
            if tokens is not None:
                entries = self._sorted[node.model]
                del entries[bisect_left(entries, (tokens, parent))]

    def longest(self, prompt: TokenIds, model: str | None) -> list[Divergence]:
        """Calls of the model that share the longest prefix with the prompt, by number; [] if none shares any.

        Of many that share equally much, as samples of one prompt do, the nearest in token order and those that they
        extend.
        """
        self._list()
        wanted = _big_endian(prompt)
        best = 0
        found: set[int] = set()
        for other, entries in self._sorted.items():
            if not same_model(other, model):
                continue
            at = bisect_left(entries, (wanted, -1))
            for tokens, end in entries[max(0, at - 1) : at + 1]:
                shared = _common(wanted, tokens)
                for number, reach in self._chain(end, other):
                    common = min(shared, reach)
                    if common < best or not common:
                        break
                    found = found | {number} if common == best else {number}
                    best = common
        return [Divergence(n, best) for n in sorted(found)]

    def _list(self) -> None:
        """Put the calls in order that were added since; most rollouts are one chain and never ask."""
        for number in self._new:
            node = self._entries[number].node
            self._listed[number] = _big_endian(node.prompt) + _big_endian(node.response)
            insort(self._sorted[node.model], (self._listed[number], number))
        self._new.clear()

    def _chain(self, number: int | None, model: str | None) -> Iterator[tuple[int, int]]:
        """(number, tokens) of the call and those of its model that it extends, longest first."""
        while number is not None and self._entries[number].node.model == model:
            node, parent = self._entries[number]
            yield number, node.prompt.size + node.response.size
            number = parent


def _big_endian(tokens: TokenIds) -> bytes:
    return tokens.astype(">i4").tobytes()


def _common(a: bytes, b: bytes) -> int:
    """Length of the common prefix, in tokens."""
    n = min(len(a), len(b))
    differs = np.frombuffer(a, "u1", n) != np.frombuffer(b, "u1", n)
    at = int(differs.argmax()) if n else 0
    return (at if n and differs[at] else n) // 4
