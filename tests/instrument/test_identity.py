from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.context import Context
from opentelemetry.sdk.resources import OTELResourceDetector

from spanmill.instrument import identity
from spanmill.instrument.identity import Identity

WHOLE = Identity("batch/7 a,b=c%é", 2, "g;1", "task 3", "train", 8, "prompt-v2")

TEXTS = st.text(min_size=1, max_size=40).filter(lambda t: t == t.strip() and "\0" not in t and t.isprintable())
"""What an environment variable can hold."""

IDENTITIES = st.builds(
    Identity,
    TEXTS,
    st.integers(0, 2**31 - 1),
    st.none() | TEXTS,
    st.none() | TEXTS,
    st.none() | TEXTS,
    st.none() | st.integers(1, 1000),
    st.none() | TEXTS,
)


def test_attributes() -> None:
    """Every part that is known is an attribute, numbers as numbers; the others are none."""
    assert {
        "spanmill.rollout.id": "batch/7 a,b=c%é",
        "spanmill.rollout.attempt": 2,
        "spanmill.group.id": "g;1",
        "spanmill.task.id": "task 3",
        "spanmill.mode": "train",
        "spanmill.group.size": 8,
        "spanmill.resources.id": "prompt-v2",
    } == identity.attributes(WHOLE)
    assert {"spanmill.rollout.id": "r", "spanmill.rollout.attempt": 0} == identity.attributes(Identity("r"))


@given(IDENTITIES)
def test_baggage_and_environment_give_back_what_they_were_given(own: Identity) -> None:
    """No carrier changes an identity."""
    environ = identity.environment(own, {})
    only_resource = {"OTEL_RESOURCE_ATTRIBUTES": environ["OTEL_RESOURCE_ATTRIBUTES"]}
    assert [own] * 3 == [
        identity.from_baggage(identity.to_baggage(own, Context())),
        identity.from_environment(environ),
        identity.from_environment(only_resource),
    ]


def test_the_sdk_reads_the_resource_as_it_was_meant(monkeypatch: pytest.MonkeyPatch) -> None:
    """OpenTelemetry's own reader of OTEL_RESOURCE_ATTRIBUTES finds our values, and the program's beside them."""
    environ = identity.environment(WHOLE, {"OTEL_RESOURCE_ATTRIBUTES": "team=a%20b, spanmill.rollout.id=old"})
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", environ["OTEL_RESOURCE_ATTRIBUTES"])
    expected = {name: str(value) for name, value in identity.attributes(WHOLE).items()} | {"team": "a b"}
    assert expected == dict(OTELResourceDetector().detect().attributes)


def test_an_inner_identity_replaces_an_outer_one_whole() -> None:
    """Of the outer rollout nothing stays: a group or task of it is not the inner one's."""
    inner = Identity("inner")
    outer = identity.to_baggage(WHOLE, Context())
    assert inner == identity.from_baggage(identity.to_baggage(inner, outer))
    assert inner == identity.from_environment(identity.environment(inner, identity.environment(WHOLE, {})))


def test_headers_leave_out_what_no_header_can_carry() -> None:
    """Text outside ASCII, control characters and spaces at an end would break the client's request."""
    own = Identity("r/1", 3, group_id="é", task_id="a\r\nx-evil: 1", mode=" m")
    assert {"x-spanmill-rollout-id": "r/1", "x-spanmill-attempt": "3"} == identity.headers(own)


@pytest.mark.parametrize(
    ("held", "expected"),
    [
        ({}, None),
        ({"SPANMILL_ROLLOUT_ID": ""}, None),
        ({"SPANMILL_GROUP_ID": "g"}, None),
        ({"SPANMILL_ROLLOUT_ID": "r", "SPANMILL_ATTEMPT": "two"}, Identity("r")),
        ({"SPANMILL_ROLLOUT_ID": "r", "SPANMILL_ATTEMPT": "-1"}, None),
        ({"SPANMILL_ROLLOUT_ID": "r", "OTEL_RESOURCE_ATTRIBUTES": "spanmill.rollout.id=q"}, Identity("r")),
        ({"OTEL_RESOURCE_ATTRIBUTES": "nonsense,=,spanmill.rollout.id=q"}, Identity("q")),
    ],
)
def test_a_malformed_environment_names_no_rollout(held: dict[str, str], expected: Identity | None) -> None:
    """What cannot be read is left out; an identity that cannot be is none."""
    assert expected == identity.from_environment(held)


@pytest.mark.parametrize(
    ("parts", "error"),
    [
        ({"rollout_id": 7}, "rollout_id: expected str, found int 7"),
        ({"rollout_id": ""}, "rollout_id: expected a text that is not empty"),
        ({"rollout_id": None}, "rollout_id: expected str, found NoneType None"),
        ({"rollout_id": "r", "attempt": "1"}, "attempt: expected int, found str '1'"),
        ({"rollout_id": "r", "attempt": True}, "attempt: expected int, found bool True"),
        ({"rollout_id": "r", "attempt": -1}, "attempt: expected a number from 0 to 2147483647, found -1"),
        ({"rollout_id": "r", "group_size": 0}, "group_size: expected a number from 1 to 2147483647, found 0"),
        ({"rollout_id": "r", "task_id": 3}, "task_id: expected str, found int 3"),
    ],
)
def test_an_identity_that_cannot_be_is_refused(parts: dict[str, Any], error: str) -> None:
    """The message says what was found and what was expected."""
    with pytest.raises((TypeError, ValueError)) as raised:
        Identity(**parts)
    assert error == str(raised.value)
