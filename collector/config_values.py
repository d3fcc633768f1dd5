"""What may stand in an option: from text, or a TOML value, to the field's type.

Every parser raises ValueError with what was expected.
"""

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple, cast

from spanmill.errors import ConfigError
from spanmill.storage import Location, ObjectPath, locate

_ADDRESS: Final = re.compile(r"(?:\[([0-9a-fA-F:.]+(?:%\w+)?)\]|([^\s:\[\]/]+)):(\d{1,5})")
_URL: Final = re.compile(r"(https?://[^\s/@?#]+(/[^\s?#]*)?|grpcs?://[^\s/@?#]+:\d{1,5}/?)")
_DURATION: Final = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|s|m|h|d|)")
_SECONDS: Final = {"ms": 0.001, "": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_TRUE: Final = ("1", "true", "yes", "on")
_FALSE: Final = ("0", "false", "no", "off")


class Address(NamedTuple):
    """Where a server listens; `str` is HOST:PORT, an IPv6 host in brackets."""

    host: str
    port: int
    """0 takes a free one."""

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_address(value: object) -> Address:
    """HOST:PORT, `[::1]:4317` for IPv6. ValueError if it is none."""
    if isinstance(value, Address):
        return value
    match = _ADDRESS.fullmatch(value.strip()) if isinstance(value, str) else None
    if match is None or int(match[3]) > 65535:
        raise ValueError("HOST:PORT, such as 127.0.0.1:4317 or [::1]:4317")
    return Address(match[1] or match[2], int(match[3]))


def parse_duration(value: object) -> float:
    """Seconds: a number, or text such as 90, 500ms, 10s, 5m, 24h, 7d. ValueError if it is none or negative."""
    if isinstance(value, str) and (match := _DURATION.fullmatch(value.strip())):
        return float(match[1]) * _SECONDS[match[2]]
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < math.inf:
        return float(value)
    raise ValueError("seconds or a duration, such as 90, 500ms, 10s, 24h or 7d")


def parse_positive_duration(value: object) -> float:
    """As `parse_duration`, but more than nothing."""
    seconds = parse_duration(value)
    if seconds == 0:
        raise ValueError("a duration above 0")
    return seconds


def parse_count(least: int, most: int) -> Callable[[object], int]:
    """A parser of whole numbers from `least` to `most`."""

    def parse(value: object) -> int:
        if isinstance(value, str) and re.fullmatch(r"\s*\d{1,18}\s*", value):
            value = int(value)
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            raise ValueError(f"a whole number from {least} to {most}")
        return value

    return parse


def parse_switch(value: object) -> bool:
    """True or false, also as 1, 0, yes, no, on, off."""
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.strip().lower() in _TRUE + _FALSE:
        return value.strip().lower() in _TRUE
    raise ValueError("true or false")


def parse_names(value: object) -> tuple[str, ...]:
    """Names, separated by commas or as a list."""
    names = value.split(",") if isinstance(value, str) else value
    if isinstance(names, list | tuple):
        stripped = [name.strip() if isinstance(name, str) else "" for name in cast("list[object]", names)]
        if all(stripped):
            return tuple(stripped)
    raise ValueError("names separated by commas")


def parse_text(value: object) -> str:
    """A text that is not empty."""
    if isinstance(value, str) and value:
        return value
    raise ValueError("a text")


def parse_number(value: object) -> float:
    """A finite number."""
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            value = math.nan
    if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
        return float(value)
    raise ValueError("a number")


def parse_one_of(*names: str) -> Callable[[object], str]:
    """A parser of one of these names."""

    def parse(value: object) -> str:
        if isinstance(value, str) and value in names:
            return value
        raise ValueError(f"one of {', '.join(names)}")

    return parse


def parse_path(value: object) -> Path:
    """A path of a file or folder."""
    if isinstance(value, str | Path) and str(value):
        return Path(value)
    raise ValueError("a path")


def parse_location(value: object) -> Location:
    """A folder, or a URL in an object store."""
    expected = "a folder, s3://BUCKET/... or gs://BUCKET/..."
    if not isinstance(value, str | Path | ObjectPath) or not str(value):
        raise ValueError(expected)
    try:
        return locate(value)
    except ConfigError as error:
        raise ValueError(expected) from error


def parse_gib(value: object) -> float:
    """GiB: a number above 0, such as 50 or 0.5."""
    if isinstance(value, str) and re.fullmatch(r"\s*\d{1,9}(\.\d{1,9})?\s*", value):
        value = float(value)
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
        raise ValueError("a number of GiB above 0, such as 50 or 0.5")
    return float(value)


def parse_url(value: object) -> str:
    """An OTLP endpoint: http:// or https:// for HTTP, grpc:// or grpcs:// for gRPC, a host, and a port or path."""
    url = value.strip() if isinstance(value, str) else ""
    if not _URL.fullmatch(url):
        raise ValueError("http://HOST:PORT, https://HOST, grpc://HOST:PORT or grpcs://HOST:PORT")
    return url.rstrip("/")


def parse_headers(value: object) -> tuple[str, ...]:
    """NAME=VALUE, separated by commas or as a list. What was given may be a secret, so the error does not repeat it."""
    found = parse_names(value)
    if not all(re.fullmatch(r"[A-Za-z0-9-]+\s*=[^\r\n]*", header) for header in found):
        raise ValueError("NAME=VALUE, separated by commas")
    return found
