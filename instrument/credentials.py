"""What a collector asks for before it takes anything by HTTP: a token, headers, certificates.

SPANMILL_TOKEN                          the bearer token
OTEL_EXPORTER_OTLP_HEADERS              headers, as for spans: name=value, percent-encoded, with commas between
OTEL_EXPORTER_OTLP_CERTIFICATE          the authority to trust (PEM), else those of the system or `SSL_CERT_FILE`
OTEL_EXPORTER_OTLP_CLIENT_CERTIFICATE   our own certificate (PEM), and
OTEL_EXPORTER_OTLP_CLIENT_KEY           its private key (PEM)
"""

import os
import ssl
from pathlib import Path
from typing import Final

from opentelemetry.util.re import parse_env_headers

from spanmill.errors import ConfigError

TOKEN: Final = "SPANMILL_TOKEN"
HEADERS: Final = "OTEL_EXPORTER_OTLP_HEADERS"
AUTHORITY: Final = "OTEL_EXPORTER_OTLP_CERTIFICATE"
CERTIFICATE: Final = "OTEL_EXPORTER_OTLP_CLIENT_CERTIFICATE"
KEY: Final = "OTEL_EXPORTER_OTLP_CLIENT_KEY"


def read_token(path: Path) -> str:
    """The first token of a file such as `spanmill serve --token-file` takes: one a line, # begins a remark.

    Raises ConfigError if the file cannot be read or holds none.
    """
    try:
        lines = [line.strip() for line in path.read_text().splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--token-file {path} cannot be read: {getattr(error, 'strerror', error)}") from error
    token = next((line for line in lines if line and not line.startswith("#")), None)
    if token is None:
        raise ConfigError(f"--token-file {path} holds no token: expected one a line")
    return token


def request_headers(token: str | None = None) -> dict[str, str]:
    """The headers of a request, by their names in lower case: a token counts before what the environment says.

    Raises ConfigError for a token that no header can carry.
    """
    found = dict(parse_env_headers(os.environ.get(HEADERS, ""), liberal=True))
    token = token or os.environ.get(TOKEN)
    if token:
        if not token.isascii() or not token.isprintable():
            raise ConfigError("the token has characters that no header can carry: expected printable ASCII")
        found["authorization"] = f"Bearer {token}"
    return found


def tls() -> ssl.SSLContext:
    """How the collector's certificate is checked, and ours shown. Raises ConfigError for files that cannot work."""
    authority, certificate, key = (os.environ.get(name) or None for name in (AUTHORITY, CERTIFICATE, KEY))
    try:
        context = ssl.create_default_context(cafile=authority)
    except OSError as error:
        raise ConfigError(f"{AUTHORITY}: {authority} is no file of certificates: {error.strerror or error}") from error
    if certificate:
        try:
            context.load_cert_chain(certificate, key)
        except OSError as error:
            raise ConfigError(
                f"{CERTIFICATE}, {KEY}: not a certificate and its key: {error.strerror or error}"
            ) from error
    return context
