from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spanmill.instrument.identity import Identity
from spanmill.instrument.reports import ignored
from spanmill.instrument.vllm.requests import OPERATIONS, inner_key, read_key, read_path, read_request


def _encoded(rollout_id: str) -> str:
    return quote(rollout_id, safe="").replace(".", "%2E")


@pytest.mark.parametrize(
    ("key", "identity", "inner"),
    [
        ("sk-rollout-a", Identity("a"), None),
        ("sk-rollout-a.3", Identity("a", 3), None),
        ("sk-rollout-a%2Fb.2:secret", Identity("a/b", 2), "secret"),
        ("sk-rollout-a%2E1", Identity("a.1"), None),
        ("sk-rollout-a:sk-x:y", Identity("a"), "sk-x:y"),
        ("sk-other", None, None),
    ],
)
def test_keys(key: str, identity: Identity | None, inner: str | None) -> None:
    """An API key may name a rollout, its attempt, and hold the key that vLLM checks."""
    assert (identity, inner) == (read_key(key), inner_key(key))


@pytest.mark.parametrize("key", ["sk-rollout-", "sk-rollout-a.b", "sk-rollout-a.", "sk-rollout-%FF", "sk-rollout-a.-1"])
def test_malformed_keys(key: str) -> None:
    """A key that names a rollout in no known way names none, and is counted: no part of it is guessed."""
    before = ignored()
    assert (None, before + 1) == (read_key(key), ignored())


@pytest.mark.parametrize(
    ("path", "identity", "rest"),
    [
        (b"/rollout/a/v1/messages", Identity("a"), b"/v1/messages"),
        (b"/rollout/a/attempt/2/v1/messages", Identity("a", 2), b"/v1/messages"),
        (b"/rollout/a%2Fb%2E/v1", Identity("a/b."), b"/v1"),
        (b"/rollout/a", None, b"/rollout/a"),
        (b"/rollout//v1", None, b"/rollout//v1"),
        (b"/v1/rollout/a/v1", None, b"/v1/rollout/a/v1"),
    ],
)
def test_paths(path: bytes, identity: Identity | None, rest: bytes) -> None:
    """A path may begin with a rollout and its attempt; the rest is vLLM's."""
    assert (identity, rest) == read_path(path)


def test_malformed_attempt_in_a_path() -> None:
    """The request goes its way without an identity, and is counted."""
    before = ignored()
    assert (None, b"/v1") == read_path(b"/rollout/a/attempt/first/v1")
    assert before + 1 == ignored()


@given(st.text(min_size=1).filter(lambda s: s.isprintable()), st.integers(0, 2**31 - 1))
def test_any_id_survives_path_and_key(rollout_id: str, attempt: int) -> None:
    """Whatever an id is made of, percent-encoded it comes out of path and key as it went in."""
    encoded = _encoded(rollout_id)
    expected = Identity(rollout_id, attempt)
    assert (expected, b"/v1/x") == read_path(f"/rollout/{encoded}/attempt/{attempt}/v1/x".encode())
    assert expected == read_key(f"sk-rollout-{encoded}.{attempt}")


def test_only_these_routes_are_recorded() -> None:
    """Chat, completions, responses, messages and tokens in, tokens out are calls of an agent; nothing else is."""
    recorded = {
        "/v1/chat/completions",
        "/v1/chat/completions/batch",
        "/v1/completions",
        "/v1/responses",
        "/v1/messages",
    }
    assert {*recorded, "/inference/v1/generate"} == {p for p in OPERATIONS if read_request(p, {}, None).is_recorded}
    others = (
        "/health",
        "/tokenize",
        "/v1/embeddings",
        "/v1/audio/transcriptions",
        "/score",
        "/v1/messages/count_tokens",
    )
    assert [False] * 6 == [read_request(path, {}, None).is_recorded for path in others]


def test_skip() -> None:
    """A request that says so is not recorded."""
    assert not read_request("/v1/messages", {"x-spanmill-skip": "1"}, None).is_recorded
    assert read_request("/v1/messages", {"x-spanmill-skip": "0"}, None).is_recorded
