"""Whose rollout this is, and every carrier that says so: span attributes, baggage, environment, request headers.

One table (`FIELDS`) spells each part in each carrier; a part that is missing or malformed is left out, never guessed.
"""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple, cast
from urllib.parse import quote, unquote

from opentelemetry import baggage
from opentelemetry.context import Context

from spanmill.instrument.reports import report
from spanmill.semconv import GROUP_ID, GROUP_SIZE, MODE, RESOURCES_ID, ROLLOUT_ATTEMPT, ROLLOUT_ID, TASK_ID

RESOURCE_ATTRIBUTES: Final = "OTEL_RESOURCE_ATTRIBUTES"
RUN: Final = "SPANMILL_RUN"
"""Set by `spanmill run` to the id of the rollout whose start and end it reports itself."""

CUSTOM_HEADERS: Final = ("OPENAI_CUSTOM_HEADERS", "ANTHROPIC_CUSTOM_HEADERS")
"""Variables in which client libraries look for more request headers, a `Name: value` on each line."""


@dataclass(frozen=True, slots=True)
class Identity:
    """A rollout attempt and where it stands. None means not known."""

    rollout_id: str
    attempt: int = 0
    group_id: str | None = None
    task_id: str | None = None
    mode: str | None = None
    group_size: int | None = None
    """How many rollouts the group is meant to have."""
    resources_id: str | None = None

    def __post_init__(self) -> None:
        for field in FIELDS:
            value: object = getattr(self, field.name)
            wanted = int if field.is_int else str
            if value is None and field.name not in ("rollout_id", "attempt"):
                continue
            if not isinstance(value, wanted) or isinstance(value, bool):
                raise TypeError(f"{field.name}: expected {wanted.__name__}, found {type(value).__name__} {value!r}")
            if value == "":
                raise ValueError(f"{field.name}: expected a text that is not empty")
            if isinstance(value, int) and not field.least <= value < 2**31:
                raise ValueError(f"{field.name}: expected a number from {field.least} to {2**31 - 1}, found {value}")


class Field(NamedTuple):
    """One part of an identity and its name in each carrier."""

    name: str
    attribute: str
    """As a span or resource attribute and in baggage."""
    header: str
    """Of an HTTP request to a model server."""
    env: str
    is_int: bool = False
    least: int = 0


FIELDS: Final = (
    Field("rollout_id", ROLLOUT_ID, "x-spanmill-rollout-id", "SPANMILL_ROLLOUT_ID"),
    Field("attempt", ROLLOUT_ATTEMPT, "x-spanmill-attempt", "SPANMILL_ATTEMPT", is_int=True),
    Field("group_id", GROUP_ID, "x-spanmill-group-id", "SPANMILL_GROUP_ID"),
    Field("task_id", TASK_ID, "x-spanmill-task-id", "SPANMILL_TASK_ID"),
    Field("mode", MODE, "x-spanmill-mode", "SPANMILL_MODE"),
    Field("group_size", GROUP_SIZE, "x-spanmill-group-size", "SPANMILL_GROUP_SIZE", is_int=True, least=1),
    Field("resources_id", RESOURCES_ID, "x-spanmill-resources-id", "SPANMILL_RESOURCES_ID"),
)


def usable(name: str, value: object) -> str | int | None:
    """The value of an identity's field as it can be used: a number is taken as text where an id is wanted, and back.

    None for what cannot be used, which is reported once. None stays None.
    """
    if value is None:
        return None
    field = next(f for f in FIELDS if f.name == name)
    if field.is_int and isinstance(value, str) and value.isdecimal():
        value = int(value)
    elif not field.is_int and isinstance(value, int) and not isinstance(value, bool):
        value = str(value)
    wanted = int if field.is_int else str
    fits = isinstance(value, wanted) and not isinstance(value, bool) and value != ""
    if not fits or (isinstance(value, int) and not field.least <= value < 2**31):
        what = f"a number from {field.least}" if field.is_int else "a text that is not empty"
        report(name, f"{name}: expected {what}, found {type(value).__name__} {str(value)[:80]!r}; it is left out")
        return None
    return cast("str | int", value)


def read(get: Callable[[Field], object]) -> Identity | None:
    """The identity that a carrier holds; None if it names no rollout.

    `get` looks a field up in the carrier. A number may be text; one that cannot be read is reported and left out.
    """
    parts: dict[str, object] = {}
    for field in FIELDS:
        value = get(field)
        if value is None or value == "":
            continue
        try:
            parts[field.name] = int(str(value)) if field.is_int else str(value)
        except ValueError:
            report(f"identity {field.name}", f"{field.attribute}: expected a number, found {value!r}; it is left out")
    try:
        return Identity(**parts) if "rollout_id" in parts else None  # pyright: ignore[reportArgumentType]
    except ValueError as error:
        report("identity", f"an identity that cannot be is left out: {error}")
        return None


def attributes(identity: Identity) -> dict[str, str | int]:
    """As span attributes."""
    return {f.attribute: value for f in FIELDS if (value := getattr(identity, f.name)) is not None}


def to_baggage(identity: Identity, context: Context) -> Context:
    """`context` with this identity in its baggage in place of any other."""
    for field in FIELDS:
        value = getattr(identity, field.name)
        if value is not None:
            context = baggage.set_baggage(field.attribute, str(value), context)
        elif baggage.get_baggage(field.attribute, context) is not None:
            context = baggage.remove_baggage(field.attribute, context)
    return context


def from_baggage(context: Context | None = None) -> Identity | None:
    """The identity in the baggage of `context`, by default the current one."""
    held = baggage.get_all(context)
    return read(lambda field: held.get(field.attribute)) if ROLLOUT_ID in held else None


def from_environment(environ: Mapping[str, str] = os.environ) -> Identity | None:
    """The identity of this process: `SPANMILL_ROLLOUT_ID` and the like, else `OTEL_RESOURCE_ATTRIBUTES`."""
    if environ.get(FIELDS[0].env) and (named := read(lambda field: environ.get(field.env))) is not None:
        return named
    text = environ.get(RESOURCE_ATTRIBUTES, "")
    if ROLLOUT_ID not in text:
        return None
    pairs = (item.partition("=") for item in text.split(","))
    resource = {key.strip(): unquote(value.strip()) for key, _, value in pairs}
    return read(lambda field: resource.get(field.attribute))


def headers(identity: Identity) -> dict[str, str]:
    """As request headers; what no header can carry (control characters, text outside ASCII) is left out."""
    texts = {f.header: str(value) for f in FIELDS if (value := getattr(identity, f.name)) is not None}
    return {
        name: text for name, text in texts.items() if text.isascii() and text.isprintable() and text == text.strip()
    }


def environment(identity: Identity, environ: Mapping[str, str]) -> dict[str, str]:
    """`environ` with this identity in place of any other, for a child process."""
    parts = {f: str(value) for f in FIELDS if (value := getattr(identity, f.name)) is not None}
    kept = {name: value for name, value in environ.items() if name not in {f.env for f in FIELDS}}
    ours = {f.attribute for f in FIELDS}
    resource = [
        i for i in kept.get(RESOURCE_ATTRIBUTES, "").split(",") if i.strip() and i.partition("=")[0].strip() not in ours
    ]
    resource += [f"{f.attribute}={quote(text, safe='')}" for f, text in parts.items()]
    return kept | {f.env: text for f, text in parts.items()} | {RESOURCE_ATTRIBUTES: ",".join(resource)}


def with_headers(lines: str, identity: Identity) -> str:
    """The value of such a variable with the headers of this identity in place of those of any other."""
    names = {field.header for field in FIELDS}
    kept = [line for line in lines.splitlines() if line.strip() and line.partition(":")[0].strip().lower() not in names]
    return "\n".join([*kept, *(f"{name}: {value}" for name, value in headers(identity).items())])
