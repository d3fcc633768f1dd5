"""Rewards for a collector that asks who sends them: the real service, over TLS and with tokens."""

from collections.abc import Generator
from pathlib import Path

import pytest
from certificates import make_certificates
from served import QUICK, Served

from spanmill.cli import main
from spanmill.errors import ConfigError
from spanmill.instrument.credentials import read_token, request_headers, tls

REWARD = ("reward", "r", "1", "--endpoint")
STORED = "1 reward stored"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Certificates, and the file `tokens` of the service."""
    made = make_certificates(tmp_path_factory.mktemp("certificates"))
    (made / "tokens").write_text("# senders\n\nsecret\nother\n")
    return made


@pytest.fixture(scope="module")
def address(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Generator[str]:
    """Of a service that serves over TLS, to clients of its authority that have a token."""
    options = ["--tls-cert", folder / "server.pem", "--tls-key", folder / "server.key"]
    options += ["--tls-client-ca", folder / "ca.pem", "--token-file", folder / "tokens"]
    with Served(tmp_path_factory.mktemp("secure") / "data", *QUICK, *map(str, options)) as service:
        yield f"https://{service.http_address.rpartition('//')[2]}"


@pytest.fixture
def trusted(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The standard variables name the authority and our certificate."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_CERTIFICATE", str(folder / "ca.pem"))
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_CLIENT_CERTIFICATE", str(folder / "client.pem"))
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_CLIENT_KEY", str(folder / "client.key"))


@pytest.mark.usefixtures("trusted")
@pytest.mark.parametrize("how", ["file", "SPANMILL_TOKEN", "OTEL_EXPORTER_OTLP_HEADERS"])
def test_a_token_lets_a_reward_in(
    how: str, address: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By file, by variable, or among the headers that spans have, in that order."""
    arguments = [*REWARD, address]
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "authorization=Bearer%20wrong,x-tenant=a")
    if how == "file":
        monkeypatch.setenv("SPANMILL_TOKEN", "wrong")
        arguments += ["--token-file", str(folder / "tokens")]
    else:
        monkeypatch.setenv(how, "other" if how == "SPANMILL_TOKEN" else "Authorization=Bearer%20other")
    assert 0 == main(arguments)
    assert STORED in capsys.readouterr().out


@pytest.mark.usefixtures("trusted")
def test_without_a_token(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The refusal says how to give one."""
    assert 1 == main([*REWARD, address])
    out, err = capsys.readouterr()
    assert ("", 1, True, True) == (out, err.count("\n"), " 401 " in err, "--token-file FILE or SPANMILL_TOKEN" in err)


def test_a_collector_of_an_unknown_authority(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    """It is told nothing, and the message says why."""
    assert 1 == main([*REWARD, address])
    out, err = capsys.readouterr()
    assert ("", 1, True) == (out, err.count("\n"), "cannot be trusted" in err)


@pytest.mark.usefixtures("trusted")
def test_an_http_address_is_no_https_address(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A collector that speaks TLS alone gets no token in the clear from who types the wrong scheme."""
    assert 1 == main([*REWARD, address.replace("https", "http")])
    assert 1 == capsys.readouterr().err.count("\n")


def test_files_that_cannot_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are named, with what is wrong."""
    with pytest.raises(ConfigError, match=r"none cannot be read: No such file"):
        read_token(tmp_path / "none")
    (tmp_path / "empty").write_text("# nothing\n")
    with pytest.raises(ConfigError, match="holds no token"):
        read_token(tmp_path / "empty")
    for name in ("OTEL_EXPORTER_OTLP_CERTIFICATE", "OTEL_EXPORTER_OTLP_CLIENT_CERTIFICATE"):
        with monkeypatch.context() as patch:
            patch.setenv(name, str(tmp_path / "empty"))
            with pytest.raises(ConfigError, match=name):
                tls()


def test_a_token_that_no_header_carries() -> None:
    """It stops the command in words of ours, and is not shown."""
    with pytest.raises(ConfigError, match="printable ASCII") as raised:
        request_headers("geheimnis-ä")
    assert "geheimnis" not in str(raised.value)
