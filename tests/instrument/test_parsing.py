"""Answers off the wire: what pydantic's parser gives is what `json` gives, and logprobs alone are the same numbers."""

import json
import sys
from typing import Any

import pydantic_core  # loaded, as the client library loads it
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spanmill.instrument.answers import read_answer
from spanmill.instrument.asking import strip
from spanmill.instrument.parsing import parse

ADDED = {"logprobs": True}
NUMBERS: st.SearchStrategy[Any] = st.one_of(
    st.none(), st.integers(-99, 0), st.floats(allow_nan=False, allow_infinity=False), st.text()
)
TOKENS: st.SearchStrategy[Any] = st.fixed_dictionaries(
    {"token": st.text()},
    optional={"logprob": NUMBERS, "bytes": st.lists(st.integers(0, 255)), "top_logprobs": st.just([{"logprob": -9.5}])},
)
LOGPROBS: st.SearchStrategy[Any] = st.one_of(
    st.none(),
    st.fixed_dictionaries(
        dict[str, Any](), optional={"content": st.one_of(st.none(), st.lists(TOKENS)), "refusal": st.none()}
    ),
)
CHOICES: st.SearchStrategy[Any] = st.fixed_dictionaries(
    {"index": st.integers(0, 3), "message": st.fixed_dictionaries({"content": st.text()})},
    optional={"logprobs": LOGPROBS, "token_ids": st.lists(st.integers(0, 2**31 - 1)), "stop_reason": st.text()},
)
ANSWERS: st.SearchStrategy[dict[str, Any]] = st.fixed_dictionaries(
    {"choices": st.lists(CHOICES), "id": st.text()}, optional={"usage": st.none(), "extra": st.lists(st.floats(0, 1))}
)


@pytest.mark.parametrize("content", [b'{"id": "a", "x": [1.5, -1e-7, 12345678901234567890]}', b'{"id": "\\ud800"}'])
def test_an_answer_is_read_with_and_without_pydantic(content: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its parser gives what `json` gives, also of what it refuses itself."""
    assert pydantic_core is sys.modules["pydantic_core"]
    found = parse(content)
    monkeypatch.delitem(sys.modules, "pydantic_core")
    assert [json.loads(content)] * 2 == [found, parse(content)]


@pytest.mark.parametrize("content", [b"", b"not JSON", b"\xff"])
def test_what_is_no_json(content: bytes) -> None:
    """It is nobody's business here, whichever parser is asked."""
    assert [None, None] == [parse(content), parse(content, with_logprobs=False)]


@given(ANSWERS)
def test_logprobs_alone_are_the_same_numbers(answer: dict[str, Any]) -> None:
    """Whatever the answer looks like: the same is recorded of it, and the program gets the same."""
    content = json.dumps(answer).encode()
    whole, alone = parse(content), parse(content, with_logprobs=False)
    assert read_answer(whole) == read_answer(alone)
    assert strip(whole, ADDED) == strip(alone, ADDED)
    assert whole == alone


@pytest.mark.parametrize("answer", [{"error": {"message": "no"}}, [1, {"choices": 2}], {"choices": [3]}, 7, None])
def test_an_answer_of_another_shape(answer: object) -> None:
    """It is read as it stands."""
    assert answer == parse(json.dumps(answer).encode(), with_logprobs=False)


def test_a_token_costs_no_object() -> None:
    """The logprobs of an ordinary answer become a list of numbers, without what else is said of each token."""
    token = {"token": "a", "logprob": -1.5, "bytes": [97], "top_logprobs": []}
    content = json.dumps({"choices": [{"logprobs": {"content": [token, {**token, "logprob": None}]}}]}).encode()
    assert {"choices": [{"logprobs": {"token_logprobs": [-1.5, None]}}]} == parse(content, with_logprobs=False)
