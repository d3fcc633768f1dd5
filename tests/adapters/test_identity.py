import json

from agent_spans import call, rollout, span

from spanmill.adapters import adapt
from spanmill.triplets.records import Rollout, Span


def attempt_names(rollouts: list[Rollout]) -> list[tuple[int, str | None]]:
    """The number of every attempt, and the name it was numbered for."""
    return [(r.attempt, json.loads(r.metadata).get("attempt_name")) for r in rollouts]


def rows(*spans: Span) -> list[tuple[str, int, str, list[str]]]:
    """(rollout, attempt, source, its calls) of every rollout."""
    return [
        (r.rollout_id, r.attempt, r.identity_source, [t.call_id for t in r.triplets]) for r in adapt(spans).rollouts
    ]


def test_what_a_hook_read_yields_to_the_clients_rollout_in_another_trace() -> None:
    """A stale header on the engine's span makes no rollout of its own when the response id ties it to the client."""
    client = span(
        2, {"gen_ai.operation.name": "chat", "gen_ai.request.model": "m", "gen_ai.response.id": "x"}, parent=1
    )
    stale = {"spanmill.rollout.id": "stale", "spanmill.rollout.carrier": "header"}
    engine = call(3, [1], [2], response_id="x", capture="engine", trace=2, attributes=stale)
    assert [("r", 0, "ancestor", ["x"])] == rows(rollout(1, "r"), client, engine)


def test_of_two_carriers_of_one_call_the_earlier_in_the_list_wins() -> None:
    """A gateway read the path, the engine a header: the header decides, and the path's id makes no row."""
    path = {"spanmill.rollout.id": "by-path", "spanmill.rollout.carrier": "path"}
    header = {"spanmill.rollout.id": "by-header", "spanmill.rollout.carrier": "header"}
    gateway = call(1, [1], [2], response_id="x", capture="gateway", attributes=path)
    engine = call(2, [1], [2], response_id="x", capture="engine", trace=2, attributes=header)
    assert [("by-header", 0, "carrier", ["x"])] == rows(gateway, engine)


def test_equal_response_ids_of_two_rollouts_are_two_calls() -> None:
    """A response id joins only spans whose rollouts are equal or unknown."""
    one = call(1, [1], [2], response_id="x", attributes={"spanmill.rollout.id": "a"})
    other = call(2, [1], [3], response_id="x", trace=2, attributes={"spanmill.rollout.id": "b"})
    assert [("a", 0, "span", ["x"]), ("b", 0, "span", ["x"])] == rows(one, other)


def test_linking_needs_exactly_one_candidate() -> None:
    """An engine's span whose response id two rollouts show belongs to neither of them."""
    one = call(1, [1], [2], response_id="x", attributes={"spanmill.rollout.id": "a"})
    other = call(2, [1], [3], response_id="x", trace=2, attributes={"spanmill.rollout.id": "b"})
    engine = call(3, [1], [2], response_id="x", capture="engine", trace=3)
    expected = [("0" * 31 + "3", 0, "trace", ["x"]), ("a", 0, "span", ["x"]), ("b", 0, "span", ["x"])]
    assert expected == rows(one, other, engine)


def test_canned_response_ids_do_not_throw_traces_together() -> None:
    """Agents against a server that always answers with one id stay apart, each trace a rollout with its call."""
    calls = [call(n, [1], [2], response_id="canned", trace=n, start=n * 20) for n in (1, 2, 3)]
    assert [(f"{n:032x}", 0, "trace", ["canned"]) for n in (1, 2, 3)] == rows(*calls)


def test_an_empty_id_is_no_id() -> None:
    """A span with an empty rollout id belongs where its trace says."""
    assert [("0" * 31 + "1", 0, "trace", ["r1"])] == rows(call(1, [1], [2], attributes={"spanmill.rollout.id": ""}))


def test_the_resource_of_another_rollout_gives_no_attempt() -> None:
    """Attempt and group stand beside the id that was read; another rollout's resource says nothing."""
    resource = {"spanmill.rollout.id": "process", "spanmill.rollout.attempt": 3}
    assert [("mine", 0, "span", ["r1"])] == rows(
        call(1, [1], [2], attributes={"spanmill.rollout.id": "mine"}, resource=resource)
    )


def test_foreign_attempts_are_numbered_by_their_first_span() -> None:
    """Names of attempts become 0, 1, … in the order of their first spans, and the name is kept."""
    late = {"agentlightning.rollout_id": "ro", "agentlightning.attempt_id": "at-a"}
    early = {"agentlightning.rollout_id": "ro", "agentlightning.attempt_id": "at-b"}
    found = adapt([call(1, [1], [2], start=500, resource=late), call(2, [1], [2], trace=2, resource=early)]).rollouts
    assert [(0, "at-b"), (1, "at-a")] == attempt_names(found)


def test_a_parent_cycle_ends() -> None:
    """Spans that are each other's parents are read like any others."""
    looped = [call(1, [1], [2], parent=2), span(2, parent=1)]
    assert [("0" * 31 + "1", 0, "trace", ["r1"])] == rows(*looped)


def test_a_tree_of_two_thousand_levels_is_read() -> None:
    """Depth costs no stack: the rollout id at the top reaches the call at the bottom."""
    deep = [rollout(1, "r"), *(span(n, parent=n - 1) for n in range(2, 2001)), call(2001, [1], [2], parent=2000)]
    assert [("r", 0, "ancestor", ["r2001"])] == rows(*deep)


def test_numbers_that_no_column_holds_are_not_recorded() -> None:
    """An absurd parameter, choice or group size costs itself alone, not the commit that it would be in."""
    absurd = {"gen_ai.request.max_tokens": 2**40, "gen_ai.request.temperature": 1e300, "spanmill.choice.index": -1}
    (made,) = adapt([rollout(1, "r"), call(2, [1], [2], parent=1, attributes=absurd)]).rollouts
    (row,) = made.triplets
    assert (None, None, 0, True) == (row.max_tokens, row.temperature, row.choice, row.trainable)


def test_an_attempt_that_is_no_number_is_mixed_with_none() -> None:
    """Attempts out of range are runs of their own, after all others, and their metadata say what stood there."""
    odd = [
        call(n, [1], [2], trace=n, attributes={"spanmill.rollout.id": "r", "spanmill.rollout.attempt": a})
        for n, a in ((1, 2), (2, 2**40), (3, -1))
    ]
    plain = call(4, [1], [2], trace=4, attributes={"spanmill.rollout.id": "r"})
    found = adapt([*odd, plain]).rollouts
    expected = [(0, None), (2, None), (3, "-1"), (4, "1099511627776")]
    assert expected == attempt_names(found)


def test_choices_of_one_request_are_one_turn_without_a_response_id() -> None:
    """Our spans of n choices that begin together at one place are one request, its rows in the order of the choices."""
    index = "spanmill.choice.index"
    choices = [call(n, [1], [n], response_id="", parent=1, attributes={index: c}) for n, c in ((9, 0), (2, 1))]
    (made,) = adapt([rollout(1, "r"), *choices]).rollouts
    assert [(0, 0, f"{9:016x}"), (0, 1, f"{2:016x}#1")] == [(t.turn, t.choice, t.call_id) for t in made.triplets]
