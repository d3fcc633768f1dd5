import math
from collections.abc import Iterable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spanmill.collector.assemble import SECOND, Component
from spanmill.collector.index import MOST_SHARED, Found, Index, Key, Seen
from spanmill.collector.journal import Kind, Position
from spanmill.triplets.records import Reward

NOW = 1000 * SECOND


@pytest.fixture
def index(tmp_path: Path) -> Iterable[Index]:
    """A new index in which everything open is due at once."""
    index = Index(tmp_path / "index.sqlite", lambda component: None if component.opened_ns is None else 0)
    yield index
    index.close()


def found(trace: str, *keys: Key, ends: bool = False, size: int = 100) -> Found:
    """What a request holds of a trace."""
    return Found(trace, size, frozenset(keys), ends)


def request(number: int, *held: Found, received_ns: int = NOW) -> Seen:
    """The request at offset `number`."""
    return Seen(Position(1, number), Position(1, number + 1), Kind.TRACES_PROTO, received_ns, held)


def rewarded(number: int, *rewards: Reward) -> Seen:
    """A journal entry of rewards."""
    return Seen(Position(1, number), Position(1, number + 1), Kind.REWARDS, NOW, rewards=rewards)


def groups(index: Index) -> list[list[str]]:
    """The traces of every component, in order."""
    return sorted(sorted(index.traces(component)) for component, _ in index.components())


def joined(edges: Iterable[tuple[str, Key]]) -> list[list[str]]:
    """What the components of these (trace, key) must be, by brute force."""
    traces = {trace: {trace} for trace, _ in edges}
    for key in {key for _, key in edges}:
        sharing = sorted({trace for trace, other in edges if other == key})
        if key[0] == "response" and len(sharing) > MOST_SHARED:
            continue
        union = set[str]().union(*(traces[trace] for trace in sharing))
        for trace in union:
            traces[trace] = union
    return sorted(sorted(group) for group in {frozenset(group) for group in traces.values()})


def test_traces_that_share_a_key_are_one_component(index: Index) -> None:
    """Equal keys join traces, over several steps and whatever order they come in; other traces stay apart."""
    index.add([request(0, found("a", ("rollout", "r")), found("b", ("response", "x")), found("z"))], NOW)
    index.add([request(1, found("c", ("rollout", "r"), ("response", "x")))], NOW)
    assert [["a", "b", "c"], ["z"]] == groups(index)


EDGES = st.lists(
    st.tuples(
        st.integers(0, 25).map(lambda n: f"t{n:02}"),
        st.tuples(st.sampled_from(("rollout", "conversation", "response")), st.sampled_from("xyz")),
    ),
    max_size=120,
)


@settings(max_examples=25)
@given(EDGES, st.integers(1, 10))
def test_components_are_those_of_the_set_of_edges(
    tmp_path_factory: pytest.TempPathFactory, edges: list[tuple[str, Key]], size: int
) -> None:
    """In any order and any cutting into requests; a loose key of more than 16 traces joins nothing."""
    index = Index(tmp_path_factory.mktemp("index") / "index.sqlite", lambda component: 0)
    entries = [request(number, found(trace, key)) for number, (trace, key) in enumerate(edges)]
    for start in range(0, len(entries), size):
        index.add(entries[start : start + size], NOW)
    assert joined(edges) == groups(index)
    sizes = {trace: 100 * sum(trace == other for other, _ in edges) for trace, _ in edges}
    expected = {min(group): sum(sizes[trace] for trace in group) for group in joined(edges)}
    due = {component.id: component.bytes for component in index.due(NOW, 100)}
    assert expected == {first: due[component] for component, first in index.components()}
    index.close()


@pytest.mark.parametrize("kind", ["rollout", "conversation"])
def test_a_rollout_may_have_any_number_of_traces(index: Index, kind: str) -> None:
    """Only ids of responses and tool calls are taken for constants."""
    index.add([request(n, found(f"t{n:02}", (kind, "r"))) for n in range(40)], NOW)
    assert [[f"t{n:02}" for n in range(40)]] == groups(index)


def test_requests_are_found_by_component(index: Index) -> None:
    """The requests of a component come in journal order, each once, with those of its traces that it holds."""
    index.add([request(0, found("a"), found("z")), request(1, found("b", ("rollout", "r")))], NOW)
    index.add([request(2, found("a", ("rollout", "r")), found("b"))], NOW)
    component = index.component_of("a")
    assert component is not None
    expected = [
        (Position(1, 0), {"a": component}),
        (Position(1, 1), {"b": component}),
        (Position(1, 2), {"a": component, "b": component}),
    ]
    assert expected == list(index.requests([component]))


def test_the_place_and_the_rows_are_one_transaction(tmp_path: Path) -> None:
    """What fails leaves nothing; what did not is there after a new start, with the place that it reached."""
    with closing(Index(tmp_path / "index.sqlite")) as index:
        assert {} == index.places
        index.add([request(0, found("a"))], NOW)
    with closing(Index(tmp_path / "index.sqlite", lambda component: 1 // (component.bytes - 200))) as index:
        with pytest.raises(ZeroDivisionError):
            index.add([request(1, found("b")), request(2, found("c", size=200))], NOW)
        assert ({0: Position(1, 1)}, [["a"]]) == (index.places, groups(index))
    with closing(Index(tmp_path / "index.sqlite")) as index:
        assert ({0: Position(1, 1)}, [["a"]]) == (index.places, groups(index))


@pytest.mark.parametrize("damage", [b"", b"no database at all" * 100])
def test_a_damaged_index_is_made_anew(tmp_path: Path, damage: bytes) -> None:
    """A file that is no index is replaced by an empty one: the journal has everything."""
    path = tmp_path / "index.sqlite"
    path.write_bytes(damage)
    index = Index(path)
    assert ({}, []) == (index.places, groups(index))
    index.close()


def test_a_reward_waits_for_its_rollout(index: Index) -> None:
    """A reward that comes before its rollout's spans is there when they come; the newest of equal writes counts."""
    first, other, second = Reward("r", 1.0), Reward("r", 2.0, name="x"), Reward("r", math.inf)
    index.add([rewarded(0, first, other), rewarded(1, second)], NOW)
    index.add([request(2, found("a", ("rollout", "r")))], NOW)
    component = index.component_of("a")
    assert component is not None
    assert [other, second] == index.rewards(component)


@pytest.mark.parametrize("key", [("rollout", "r"), ("conversation", "r"), None])
def test_a_reward_finds_its_component(index: Index, key: Key | None) -> None:
    """A rollout is named by its id, by its conversation or by its trace: its written component is due again."""
    index.add([request(0, found("a" if key else "r", *([key] if key else [])), found("z"))], NOW)
    index.looked([(component, None) for component, _ in index.components()], (), NOW)
    index.add([rewarded(1, Reward("r", float("nan")))], NOW)
    component = index.component_of("a" if key else "r")
    assert component is not None
    assert [component] == [one.id for one in index.due(NOW, 10)]
    assert ["nan"] == [str(reward.value) for reward in index.rewards(component)]


def test_what_changed_is_due(index: Index) -> None:
    """New spans, a flush and a new start make a component due; being looked at takes it off the list."""
    index.add([request(0, found("a", ends=True)), request(1, found("b"))], NOW)
    a, b = index.component_of("a"), index.component_of("b")
    assert a and b
    opened = Component(b, bytes=100, newest_ns=NOW, opened_ns=NOW)
    assert [replace(opened, id=a, signal_ns=NOW, ended=True), opened] == index.due(NOW, 10)
    index.looked([(a, None), (b, NOW + 5)], (), NOW)
    looked = replace(opened, looked_ns=NOW, until_ns=NOW + 5)
    assert [looked] == index.due(NOW, 10)
    index.add([Seen(Position(1, 2), Position(1, 3), Kind.FLUSH, NOW)], NOW)
    assert [replace(looked, flushed=True)] == index.due(NOW, 10)
    index.add([request(3, found("b"))], NOW)
    assert [False] == [one.flushed for one in index.due(NOW, 10)]


def test_a_clock_that_is_put_back_delays_nothing(index: Index) -> None:
    """Receive times in the future count as now, when they are indexed and at every start."""
    index.add([request(0, found("a", ends=True), received_ns=NOW + 50)], NOW)
    assert [(NOW, NOW, NOW)] == [(one.newest_ns, one.opened_ns, one.signal_ns) for one in index.due(NOW, 10)]
    index.start(NOW - 10)
    assert [(NOW - 10,) * 3] == [(one.newest_ns, one.opened_ns, one.signal_ns) for one in index.due(NOW, 10)]


def test_written_rollouts_follow_their_trace(index: Index) -> None:
    """A rollout that was written is found from the component its trace belongs to by now, until it is gone."""
    index.add([request(0, found("a"), found("b"))], NOW)
    index.intend([(("a", 0), "a"), (("b", 0), "b"), (("c", 0), "never indexed")])
    index.add([request(1, found("a", ("rollout", "r")), found("b", ("rollout", "r")))], NOW)
    component = index.component_of("a")
    assert component is not None
    assert {("a", 0), ("b", 0)} == index.written(component)
    index.looked([(component, None)], [("a", 0)], NOW)
    assert {("b", 0)} == index.written(component)
