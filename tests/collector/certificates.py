"""Certificates for tests: an authority, a server on 127.0.0.1, a client, and a client of another authority."""

import shutil
import subprocess
from pathlib import Path

import pytest


def make_certificates(folder: Path) -> Path:
    """The folder, with `ca`, `server`, `client`, `stranger`, each a .pem and a .key."""
    if shutil.which("openssl") is None:
        pytest.skip("needs openssl: apt install openssl")
    folder.mkdir(exist_ok=True)
    _signed(folder, "ca", None)
    _signed(folder, "other-ca", None)
    _signed(folder, "server", "ca")
    _signed(folder, "client", "ca")
    _signed(folder, "stranger", "other-ca")
    return folder


def _signed(folder: Path, name: str, ca: str | None) -> None:
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]
    command += ["-days", "2", "-subj", f"/CN={name}", "-keyout", f"{name}.key", "-out", f"{name}.pem"]
    command += ["-addext", "subjectAltName=IP:127.0.0.1,DNS:localhost"]
    if ca:
        command += ["-CA", f"{ca}.pem", "-CAkey", f"{ca}.key", "-addext", "basicConstraints=critical,CA:FALSE"]
    subprocess.run(command, cwd=folder, check=True, capture_output=True)
