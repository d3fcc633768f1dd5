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

from spanmill.collector.config import ServeConfig
from spanmill.collector.config_values import Address
from spanmill.errors import ConfigError

_LOOK_S: Final = 1.0
"""Files are looked at this often at most."""

_log = logging.getLogger(__name__)


class _Watched:
    """Files that are looked at now and then; for use under a lock."""

    def __init__(self, *paths: Path) -> None:
        self._paths = paths
        self._stamps = [_stamp(path) for path in paths]
        self._look_at = time.monotonic() + _LOOK_S

    @property
    def due(self) -> bool:
        """Whether it is time to look."""
        return time.monotonic() >= self._look_at

    def changed(self) -> bool:
        """Whether any is another than when it was last looked at."""
        self._look_at = time.monotonic() + _LOOK_S
        before, self._stamps = self._stamps, [_stamp(path) for path in self._paths]
        return before != self._stamps


class Pems(NamedTuple):
    """What the files of TLS hold, in PEM."""

    cert: bytes
    key: bytes
    client_ca: bytes | None
    """With one, clients must show a certificate by it."""


class Tls:
    """Certificate, key and authority of clients, from files that have been tried and hold together. Thread-safe.

    The files are read again when they have changed, so certificates are exchanged without a restart, for connections
    that are made from then on. While they cannot be read, or do not hold together, those of before count.
    """

    def __init__(self, cert: Path, key: Path, client_ca: Path | None) -> None:
        """Raises ConfigError, naming the option, if a file cannot be used."""
        self.cert, self.key, self.client_ca = cert, key, client_ca
        self._lock = threading.Lock()
        self._files = _Watched(*(path for path in (cert, key, client_ca) if path))
        self._pems, self._context = self._read()

    def pems(self) -> Pems:
        """What counts now."""
        self._look()
        return self._pems

    def context(self) -> ssl.SSLContext:
        """The same, for a server."""
        self._look()
        return self._context

    def _look(self) -> None:
        if not self._files.due:
            return
        with self._lock:
            if not self._files.due or not self._files.changed():
                return
            try:
                self._pems, self._context = self._read()
            except ConfigError as error:
                _log.warning("%s; the certificate of before goes on to count", error)
            else:
                _log.warning("--tls-cert %s or what belongs to it has changed: it counts from now on", self.cert)

    def _read(self) -> tuple[Pems, ssl.SSLContext]:
        client_ca = _readable("--tls-client-ca", self.client_ca) if self.client_ca else None
        pems = Pems(_readable("--tls-cert", self.cert), _readable("--tls-key", self.key), client_ca)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            # Without a password of our own, OpenSSL would ask for it at the terminal.
            context.load_cert_chain(self.cert, self.key, password=lambda: "")
        except (ssl.SSLError, ValueError) as error:
            raise ConfigError(
                f"--tls-cert {self.cert} and --tls-key {self.key} are no certificate chain and its key without "
                f"a password, in PEM: {_cause(error)}"
            ) from error
        if client_ca is not None:
            context.verify_mode = ssl.CERT_REQUIRED
            try:
                context.load_verify_locations(cadata=client_ca.decode("ascii", "replace"))
            except (ssl.SSLError, ValueError) as error:
                raise ConfigError(f"--tls-client-ca {self.client_ca} is no PEM: {_cause(error)}") from error
        return pems, context


def tls_of(config: ServeConfig) -> Tls | None:
    """What to serve TLS with, None for none. ConfigError, naming the option, if a file cannot be used."""
    if config.tls_cert is None or config.tls_key is None:
        return None
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
        self._file = _Watched(path)
        self._digests = _digests(_readable("--token-file", path))
        if not self._digests:
            raise ConfigError(f"--token-file {path} holds no token: expected one a line")

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
        if not self._file.due:
            return
        with self._lock:
            if not self._file.due or not self._file.changed():
                return
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
