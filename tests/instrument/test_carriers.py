import pytest
from hypothesis import given
from hypothesis import strategies as st

from spanmill.errors import ConfigError
from spanmill.instrument.carriers import api_key, headers, with_path
from spanmill.instrument.identity import Identity
from spanmill.instrument.vllm.requests import inner_key, read_key, read_path, read_request

IDS = st.text(st.characters(exclude_categories=("Cs",)), min_size=1)
ATTEMPTS = st.integers(0, 2**31 - 1)


@pytest.mark.parametrize(
    ("base_url", "expected"),
    [
        ("http://host:8000/v1", "http://host:8000/rollout/a%2Fb/attempt/2/v1"),
        ("http://host:8000/v1/", "http://host:8000/rollout/a%2Fb/attempt/2/v1"),
        ("http://host:8000", "http://host:8000/rollout/a%2Fb/attempt/2"),
        ("https://proxy/models/v1", "https://proxy/models/rollout/a%2Fb/attempt/2/v1"),
    ],
)
def test_a_url_with_a_rollout_in_its_path(base_url: str, expected: str) -> None:
    """The rollout stands before `/v1`, wherever that is."""
    assert expected == with_path(base_url, Identity("a/b", 2))


@pytest.mark.parametrize("base_url", ["host:8000", "/v1", "", "ftp://host/v1", "http:///v1"])
def test_what_is_no_url_of_a_server(base_url: str) -> None:
    """It is refused where the rollout is made, not at the first request."""
    from spanmill import rollout

    with pytest.raises(ConfigError, match="base_url: expected a URL"):
        rollout("r", base_url=base_url)


@given(IDS, ATTEMPTS)
def test_every_id_comes_back_from_path_and_key(rollout_id: str, attempt: int) -> None:
    """What the plugin and the gateway read is what was written, whatever characters the id has."""
    own = Identity(rollout_id, attempt)
    path = with_path("http://host/v1", own).removeprefix("http://host") + "/chat/completions"
    assert (own, b"/v1/chat/completions") == read_path(path.encode("ascii"))
    assert (own, None) == (read_key(api_key(own)), inner_key(api_key(own)))
    assert (own, "se:cr.et") == (read_key(api_key(own, "se:cr.et")), inner_key(api_key(own, "se:cr.et")))


@given(IDS.filter(lambda text: text == text.strip()), ATTEMPTS, st.none() | st.just("g\n1"))
def test_every_id_comes_back_from_headers(rollout_id: str, attempt: int, group_id: str | None) -> None:
    """Ids that are plain stand in headers of ours, all others in baggage, which no blank at an end survives."""
    own = Identity(rollout_id, attempt, group_id=group_id)
    read = read_request("/v1/chat/completions", headers(own), None).identity
    assert read is not None
    assert (rollout_id, attempt) == (read.rollout_id, read.attempt)
    assert read.group_id in (group_id, None)
    assert all(value.isascii() and value.isprintable() for value in headers(own).values())
