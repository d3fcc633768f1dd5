"""Who may send: TLS, client certificates and bearer tokens.

Nothing here is ever logged: neither a token nor what a sender offered as one.
"""

import base64
import hmac
import ipaddress
import logging
import os
import ssl
import threading
import time
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from typing import Final, NamedTuple

from spanmill.collector.config import Address, ServeConfig
from spanmill.errors import ConfigError

_LOOK_S: Final = 1.0
"""The token file is looked at this often at most."""

_log = logging.getLogger(__name__)


class Tls(NamedTuple):
    """Files in PEM that have been tried and hold together."""

    cert: Path
    key: Path
    client_ca: Path | None
    """With one, clients must show a certificate by it."""


def tls_of(config: ServeConfig) -> Tls | None:
    """The files to serve TLS with, None for none. ConfigError, naming the option, if they cannot be used."""
    if config.tls_cert is None or config.tls_key is None:
        return None
    for flag, path in (("cert", config.tls_cert), ("key", config.tls_key), ("client-ca", config.tls_client_ca)):
        if path is not None:
            _readable(f"--tls-{flag}", path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        # Without a password of our own, OpenSSL would ask for it at the terminal.
        context.load_cert_chain(config.tls_cert, config.tls_key, password=lambda: "")
    except (ssl.SSLError, ValueError) as error:
        raise ConfigError(
            f"--tls-cert {config.tls_cert} and --tls-key {config.tls_key} are no certificate chain and its key without "
            f"a password, in PEM: {_cause(error)}"
        ) from error
    if config.tls_client_ca is not None:
        try:
            context.load_verify_locations(config.tls_client_ca)
        except (ssl.SSLError, ValueError) as error:
            raise ConfigError(f"--tls-client-ca {config.tls_client_ca} is no PEM: {_cause(error)}") from error
    return Tls(config.tls_cert, config.tls_key, config.tls_client_ca)


def _cause(error: Exception) -> str:
    return (error.reason if isinstance(error, ssl.SSLError) else None) or str(error)


def _readable(flag: str, path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{flag} {path} cannot be read: {error.strerror}") from error


class Tokens:
    """The bearer tokens in a file, one a line, empty lines and those that begin with # left out. Thread-safe.

    The file is read again when it has changed, so tokens are exchanged without a restart: add the new one, move the
    senders, take the old one out. While it cannot be read, or holds none, the tokens of before count.
    """

    def __init__(self, path: Path) -> None:
        """Raises ConfigError if the file cannot be read or holds no token."""
        self._path = path
        self._lock = threading.Lock()
        self._stamp = _stamp(path)
        self._digests = _digests(_readable("--token-file", path))
        if not self._digests:
            raise ConfigError(f"--token-file {path} holds no token: expected one a line")
        self._look_at = time.monotonic() + _LOOK_S

    def allow(self, authorization: str | None) -> bool:
        """Whether a header `Authorization` carries one of the tokens; how long it takes tells nothing about them.

        A browser sends one as the password of scheme Basic, whatever the name.
        """
        self._look()
        scheme, _, offered = (authorization or "").partition(" ")
        token = offered.strip().encode("utf-8", "surrogateescape")
        if scheme.lower() == "basic":
            try:
                token = base64.b64decode(token, validate=True).partition(b":")[2]
            except ValueError:
                return False
        elif scheme.lower() != "bearer":
            return False
        digest = _digest(token)
        # Every token is compared, whichever it is.
        return sum([hmac.compare_digest(digest, known) for known in self._digests]) > 0

    def _look(self) -> None:
        if time.monotonic() < self._look_at:
            return
        with self._lock:
            if time.monotonic() < self._look_at:
                return
            self._look_at = time.monotonic() + _LOOK_S
            stamp = _stamp(self._path)
            if stamp == self._stamp:
                return
            self._stamp = stamp
            try:
                digests = _digests(_readable("--token-file", self._path))
            except ConfigError as error:
                _log.warning("%s; the tokens of before go on to count", error)
                return
            if digests:
                self._digests = digests
                _log.warning("--token-file %s has changed: %d tokens count now", self._path, len(digests))
            else:
                _log.warning("--token-file %s holds no token; those of before go on to count", self._path)


def _digest(token: bytes) -> bytes:
    return sha256(token).digest()


def _digests(content: bytes) -> Sequence[bytes]:
    lines = [line.strip() for line in content.splitlines()]
    return [_digest(line) for line in lines if line and not line.startswith(b"#")]


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


class Access(NamedTuple):
    """What stands between the network and the journal."""

    tls: Tls | None = None
    tokens: Tokens | None = None

    def warn_if_open(self, hosts: Sequence[tuple[str, Address]]) -> None:
        """Say once if an address, given as it is bound and as it was named, is open to the network."""
        if self.tls or self.tokens:
            return
        shown = [f"{address}" for bound, address in hosts if not ipaddress.ip_address(bound.split("%")[0]).is_loopback]
        if shown:
            _log.warning(
                "anybody who reaches %s can send spans: set --tls-cert and --tls-key, and --token-file",
                " and ".join(shown),
            )


def access_of(config: ServeConfig) -> Access:
    """What a configuration asks for. Raises ConfigError if its files cannot be used."""
    return Access(tls_of(config), Tokens(config.token_file) if config.token_file else None)
