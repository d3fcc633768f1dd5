from pathlib import Path
from urllib.request import Request, urlopen

import pytest
from made_spans import make_request, make_span
from served import QUICK, Served, wait_for

from spanmill.collector.access import Tokens


def get(service: Served, path: str) -> str:
    """A page of a running service, as a browser asks for it."""
    with urlopen(Request(f"http://{service.http_address}{path}", headers={"Accept": "text/html"}), timeout=10) as page:
        return page.read().decode()


@pytest.mark.parametrize("workers", ["1", "2"])
def test_a_running_service_shows_what_it_has_written(tmp_path: Path, workers: str) -> None:
    """At `/` of `serve` are the pages of its dataset, whichever worker answers; a new rollout appears."""
    with Served(tmp_path / "out", *QUICK, "--workers", workers) as service:
        assert "There is no rollout yet." in get(service, "/")
        before = get(service, "/stamp")
        told = {"spanmill.rollout.id": "r-shown", "spanmill.rollout.status": "succeeded"}
        service.send(make_request(make_span("t", "root", attributes=told)))
        wait_for(lambda: get(service, "/stamp") != before)
        assert "r-shown" in get(service, "/rollouts")


def test_a_browser_sends_a_token_as_a_password(tmp_path: Path) -> None:
    """Scheme Basic carries a token as the password of any name; anything else in it is refused."""
    (tmp_path / "tokens").write_text("s3cret:with-colon\n")
    tokens = Tokens(tmp_path / "tokens")
    assert tokens.allow("Basic YW55Ym9keTpzM2NyZXQ6d2l0aC1jb2xvbg==")
    assert not any(map(tokens.allow, ("Basic czNjcmV0OndpdGgtY29sb24=", "Basic ???", "Basic", "", None)))
