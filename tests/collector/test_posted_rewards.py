import math

import pytest

from spanmill.collector.rewards import decode, encode, parse
from spanmill.errors import DecodeError
from spanmill.triplets.records import Reward


@pytest.mark.parametrize(
    ("body", "rewards"),
    [
        (b'{"rollout_id": "a", "value": 1}', [Reward("a", 1.0, received_ns=7)]),
        (
            b'[{"rollout_id": "a", "value": true}, {"rollout_id": "b", "value": -0.5}]',
            [Reward("a", 1.0, received_ns=7), Reward("b", -0.5, received_ns=7)],
        ),
        (
            b'{"rewards":[{"rollout_id":"a","value":2,"attempt":3,"call_id":"c","name":"n","source":"cli"}]}',
            [Reward("a", 2.0, 3, "c", "n", "cli", 7)],
        ),
        (
            b'{"rollout_id": "a", "value": 0, "attempt": null, "call_id": null, "name": null}',
            [Reward("a", 0.0, received_ns=7)],
        ),
        (b'{"rollout_id": "a", "value": Infinity}', [Reward("a", math.inf, received_ns=7)]),
        (b"[]", []),
        (b'{"rewards": []}', []),
    ],
)
def test_what_may_be_posted(body: bytes, rewards: list[Reward]) -> None:
    """One object, a list, or an object with a list; it goes through the journal unchanged."""
    assert parse(body, 7) == rewards
    assert decode(encode(rewards)) == rewards


def test_nan_is_kept() -> None:
    """A reward that is no number is quarantined later, so it has to get there."""
    (reward,) = decode(encode(parse(b'{"rollout_id": "a", "value": NaN}', 7)))
    assert math.isnan(reward.value)


def test_the_journal_holds_lines_of_json() -> None:
    """One line a reward, keys sorted, what was not given left out: the same rewards give the same bytes."""
    assert encode(
        parse(b'[{"value": 1, "rollout_id": "\xc3\xa4"}, {"rollout_id": "b", "value": 2, "attempt": 0}]', 7)
    ) == (
        b'{"name":"","received_ns":7,"rollout_id":"\\u00e4","source":"http","value":1.0}\n'
        b'{"attempt":0,"name":"","received_ns":7,"rollout_id":"b","source":"http","value":2.0}\n'
    )


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "the body is no JSON: Expecting value: line 1 column 1 (char 0)"),
        (b"[" * 100_000, "the body is no JSON: "),
        (b"3", "the body: expected an object with rollout_id and value"),
        (b"[3]", "rewards[0]: expected an object with rollout_id and value"),
        (b'{"rewards": 3}', "rewards: expected a list of objects"),
        (b'{"rewards": [], "value": 1}', "unknown field 'value' beside rewards"),
        (b'{"value": 1}', "rollout_id: expected a non-empty string, found nothing"),
        (b'{"rollout_id": "", "value": 1}', 'rollout_id: expected a non-empty string, found ""'),
        (b'{"rollout_id": "\\ud800", "value": 1}', "rollout_id: half of a surrogate pair is no text"),
        (b'[{"rollout_id": "a", "value": 1}, {"rollout_id": "a"}]', "rewards[1].value: expected a number or boolean"),
        (b'{"rollout_id": "a", "value": "1"}', 'value: expected a number or boolean, found "1"'),
        (b'{"rollout_id": "a", "value": 1' + b"0" * 400 + b"}", "value: a whole number beyond the range of a double"),
        (b'{"rollout_id": "a", "value": 1, "attempt": -1}', "attempt: expected a whole number from 0, found -1"),
        (b'{"rollout_id": "a", "value": 1, "attempt": true}', "attempt: expected a whole number from 0, found true"),
        (b'{"rollout_id": "a", "value": 1, "call_id": 4}', "call_id: expected a string, found 4"),
        (b'{"rollout_id": "a", "value": 1, "source": "table"}', 'source: expected one of http, cli, found "table"'),
        (b'{"rollout_id": "a", "value": 1, "callid": "c"}', "callid: unknown field; known are rollout_id, value, "),
    ],
)
def test_what_is_wrong_is_named(body: bytes, message: str) -> None:
    """The field, what was expected and what was found; a field with a typing error is not left out in silence."""
    with pytest.raises(DecodeError) as caught:
        parse(body, 7)
    assert str(caught.value).startswith(message)


def test_damaged_lines_are_an_error() -> None:
    """A body that `encode` did not write is refused as a whole."""
    with pytest.raises(DecodeError, match="does not parse"):
        decode(b'{"rollout_id": "a", "worth": 1}\n')
