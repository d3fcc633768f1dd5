import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from spanmill.adapters.forest import Divergence, Node, Prefixes, link, same_model


def node(prompt: list[int], response: list[int], model: str | None = "m", agent: object = None) -> Node:
    """A call by its token ids."""
    return Node(np.array(prompt, np.int32), np.array(response, np.int32), model, agent)


def whole(n: Node) -> list[int]:
    """Prompt and response."""
    return [*n.prompt.tolist(), *n.response.tolist()]


# Few token values and lengths, so that prefixes happen often.
TOKENS = st.lists(st.integers(0, 1), max_size=5)
NODES = st.lists(
    st.builds(node, TOKENS, st.lists(st.integers(0, 1), max_size=2), st.sampled_from(["m", "n", None])), max_size=9
)


def extends(child: Node, parent: Node) -> bool:
    """The definition itself, pair by pair."""
    tokens = whole(parent)
    return bool(parent.response.size) and child.prompt.tolist()[: len(tokens)] == tokens


def common(a: list[int], b: list[int]) -> int:
    """Length of the common prefix."""
    n = 0
    while n < min(len(a), len(b)) and a[n] == b[n]:
        n += 1
    return n


def test_the_example_of_the_design() -> None:
    """A2 extends A1, A3 does not since the 5 was cut, and the sub-agent has its own chain."""
    nodes = [
        node([1, 2, 3], [4, 5]),
        node([1, 2, 3, 4, 5, 6], [7]),
        node([1, 2, 3, 4, 6], [5]),
        node([9, 9], [8]),
        node([9, 9, 8, 7], [6]),
    ]
    assert [None, 0, None, None, 3] == [x.parent for x in link(nodes)]


@given(NODES)
def test_the_parent_is_the_longest_call_of_its_model_and_then_the_earliest(nodes: list[Node]) -> None:
    """Hashing finds the parent that comparing every pair finds."""
    for i, links in enumerate(link(nodes)):
        fitting = [k for k, n in enumerate(nodes) if extends(nodes[i], n) and same_model(n.model, nodes[i].model)]
        best = min(fitting, key=lambda k: (-len(whole(nodes[k])), k), default=None)
        assert best == links.parent


@given(NODES)
def test_every_extended_call_comes_before_directly_or_through_another(nodes: list[Node]) -> None:
    """`before` leaves out only what comes before through its other members."""
    links = link(nodes)

    def reach(i: int) -> set[int]:
        found: set[int] = set()
        stack = list(links[i].before)
        while stack:
            k = stack.pop()
            if k not in found:
                found.add(k)
                stack += links[k].before
        return found

    for i in range(len(nodes)):
        assert {k for k, n in enumerate(nodes) if extends(nodes[i], n)} == reach(i)


def test_among_equals_the_parent_is_under_the_same_agent() -> None:
    """Two samples with equal tokens under two agents: each agent's next call extends its own."""
    nodes = [node([1], [2], agent="a"), node([1], [2], agent="b"), node([1, 2, 3], [4], agent="b")]
    assert 1 == link(nodes)[2].parent


@given(NODES, TOKENS)
def test_the_longest_common_prefix_is_found_without_comparing_every_call(nodes: list[Node], prompt: list[int]) -> None:
    """`Prefixes` gives calls that share the longest prefix of all, though it keeps the ends of chains alone."""
    prefixes = Prefixes()
    order = sorted(range(len(nodes)), key=lambda i: len(whole(nodes[i])))  # a parent is added before its child
    links = link(nodes)
    added = [i for i in order if nodes[i].response.size]
    for i in added:
        prefixes.add(i, nodes[i], links[i].parent)
    shared = {i: common(prompt, whole(nodes[i])) for i in added if same_model(nodes[i].model, "m")}
    best = max(shared.values(), default=0)
    found = prefixes.longest(np.array(prompt, np.int32), "m")
    assert {(shared[d.node], d.at) for d in found} == ({(best, best)} if best else set())


def test_of_calls_that_share_equally_much_the_one_extended_first_is_named() -> None:
    """In the design's example A3 could have extended A1, and A2 that extends it: A1 is named."""
    nodes = [node([1, 2, 3], [4, 5]), node([1, 2, 3, 4, 5, 6], [7])]
    prefixes = Prefixes()
    prefixes.add(0, nodes[0], None)
    prefixes.add(1, nodes[1], 0)
    assert [Divergence(0, 4), Divergence(1, 4)] == prefixes.longest(np.array([1, 2, 3, 4, 6], np.int32), "m")
