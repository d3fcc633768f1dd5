"""What is installed in an interpreter, and what of it would be patched: spanmill, its extras, OpenTelemetry, clients.

An interpreter describes itself by `describe`, which needs nothing but the standard library: so any other one can be
asked, whatever is installed for it.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from typing import Any, Final, cast

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from spanmill.doctor.finding import Finding, error, ok, warning

Description = Mapping[str, Any]

GROUPS: Final = ("opentelemetry_distro", "opentelemetry_configurator", "opentelemetry_instrumentor")
EXTRAS: Final = {"collector": "serve, build, show and stats", "gateway": "the gateway"}
"""What each extra is needed for."""
OLDEST_PYTHON: Final = (3, 11)
BYTES_SINCE: Final = Version("1.45")
"""The SDK that keeps attributes of type bytes."""

TESTED: Final = {
    "openai": ">=1,<4",
    "anthropic": ">=2,<3",
    "litellm": ">=1.110,<2",
    "langchain-openai": ">=1.7,<2",
    "openai-agents": ">=0.24,<1",
    "pydantic-ai-slim": ">=2.68,<3",
    "openinference-instrumentation-openai": ">=0.1.30,<0.2",
    "opentelemetry-instrumentation-openai": ">=0.62,<0.63",
    "opentelemetry-instrumentation-genai-openai": ">=1.3b0,<1.4",
    "langfuse": ">=5,<6",
    "logfire": ">=5.4,<6",
    "mlflow-skinny": ">=3.17,<4",
    "langsmith": ">=0.15,<0.16",
    "agentlightning": ">=0.3,<0.4",
}
"""Packages whose calls or spans are read, and the versions that tests and recordings cover (docs/dialects.md)."""

ASK_TIMEOUT_S: Final = 30.0

_DESCRIBE: Final = """
import json, sys
found = {"python": list(sys.version_info[:3]), "executable": sys.executable, "packages": {}, "entry_points": {}}
try:
    from importlib.metadata import distributions
except ImportError:
    distributions = lambda: ()
for dist in distributions():
    name = (dist.metadata["Name"] or "").lower().replace("_", "-").replace(".", "-")
    found["packages"].setdefault(name, dist.version)
    if found["packages"][name] == dist.version:
        for point in dist.entry_points:
            if point.group in sys.argv[1:]:
                found["entry_points"].setdefault(point.group, []).append([point.name, name, point.value])
print(json.dumps(found))
"""


def describe(python: str = sys.executable) -> Description:
    """Version, packages (name to version) and OpenTelemetry's entry points ([name, package, value]) of an interpreter.

    Raises OSError if it cannot be run, ValueError if what runs is no Python.
    """
    here = os.path.samefile(python, sys.executable) if os.path.exists(python) else False
    path = os.pathsep.join(sys.path) if here else os.environ.get("PYTHONPATH", "")
    environ = {**os.environ, "PYTHONPATH": _without_ours(path)}
    try:
        done = subprocess.run(
            [python, "-c", _DESCRIBE, *GROUPS],
            env=environ,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=ASK_TIMEOUT_S,
            check=False,
        )
        found = json.loads(done.stdout)
    except subprocess.TimeoutExpired:
        raise OSError(f"does not answer within {ASK_TIMEOUT_S:g} s") from None
    except ValueError:
        raise ValueError("is no Python") from None
    if not isinstance(found, dict) or "packages" not in found:
        raise ValueError("is no Python")
    return cast("Description", found)


def _without_ours(path: str) -> str:
    """A search path without what makes Python children record themselves: asking is no rollout."""
    return os.pathsep.join(entry for entry in path.split(os.pathsep) if not entry.endswith("instrument/auto"))


def examine(described: Description, environ: Mapping[str, str]) -> list[Finding]:
    """What is installed here, and what of it is patched in an agent."""
    python = ".".join(map(str, described["python"]))
    packages = cast("Mapping[str, str]", described["packages"])
    return [
        ok(f"spanmill {packages.get('spanmill')} in Python {python} ({described['executable']})"),
        *_extras(packages),
        *_sdk(packages),
        *_tested(packages),
        *_patched(described, environ),
    ]


def examine_other(python: str) -> list[Finding]:
    """What is to be said of another interpreter, by which agents run."""
    try:
        described = describe(python)
    except (OSError, ValueError) as failure:
        said = getattr(failure, "strerror", None) or failure
        return [error(f"{python}: {said}", "name an interpreter, such as .venv/bin/python")]
    version = ".".join(map(str, described["python"]))
    packages = cast("Mapping[str, str]", described["packages"])
    if tuple(described["python"])[:2] < OLDEST_PYTHON:
        return [
            error(
                f"{python} is Python {version}: its agents do not record themselves",
                "use Python 3.11 or newer, or rely on the vLLM plugin or `spanmill gateway`, which record any agent",
            )
        ]
    if "spanmill" not in packages:
        return [
            error(
                f"{python} (Python {version}) has no spanmill: its agents do not record themselves",
                f"{python} -m pip install spanmill; or rely on the vLLM plugin or `spanmill gateway`",
            )
        ]
    return [
        ok(f"{python}: spanmill {packages['spanmill']} in Python {version}"),
        *_sdk(packages),
        *_tested(packages),
    ]


def _extras(packages: Mapping[str, str]) -> Iterator[Finding]:
    for extra, use in EXTRAS.items():
        wanted = list(_requirements(extra))
        if not wanted:
            continue
        lacking = [r for r in wanted if r.name.lower() not in packages]
        old = [r for r in wanted if r.name.lower() in packages and not _is_in(packages[r.name.lower()], r.specifier)]
        install = f"pip install 'spanmill[{extra}]'"
        if old:
            said = ", ".join(f"{r.name} {packages[r.name.lower()]} ({r.specifier})" for r in old)
            yield error(f"too old for spanmill[{extra}]: {said}", install)
        elif len(lacking) == len(wanted):
            yield ok(f"spanmill[{extra}] is not installed; {use} would need it: {install}")
        elif lacking:
            yield ok(f"of spanmill[{extra}] {', '.join(r.name for r in lacking)} is missing; {use}: {install}")
        else:
            yield ok(f"spanmill[{extra}] for {use}")


def _requirements(extra: str) -> Iterator[Requirement]:
    from importlib.metadata import requires

    for line in requires("spanmill") or ():
        wanted = Requirement(line)
        if wanted.marker and wanted.marker.evaluate({"extra": extra}) and not wanted.marker.evaluate({"extra": ""}):
            yield wanted


def _sdk(packages: Mapping[str, str]) -> Iterator[Finding]:
    sdk = packages.get("opentelemetry-sdk")
    if sdk is None:
        yield error("opentelemetry-sdk is missing: nothing is recorded", "pip install spanmill")
        return
    way = "bytes" if _version(sdk) >= BYTES_SINCE else "base64, since attributes of type bytes came with 1.45"
    yield ok(f"opentelemetry-sdk {sdk}: token ids travel as {way}")
    family = ("opentelemetry-api", "opentelemetry-exporter-otlp-proto-grpc", "opentelemetry-exporter-otlp-proto-http")
    others = {name: packages[name] for name in family if name in packages and packages[name] != sdk}
    if others:
        said = ", ".join(f"{name} {version}" for name, version in others.items())
        yield warning(
            f"opentelemetry-sdk is {sdk}, but {said}: mixed versions fail at import or export",
            "install one version of them all",
        )


def _tested(packages: Mapping[str, str]) -> Iterator[Finding]:
    for name, versions in TESTED.items():
        version = packages.get(name)
        if version is None:
            continue
        if _is_in(version, SpecifierSet(versions)):
            yield ok(f"{name} {version}, as tested")
        else:
            yield warning(
                f"{name} {version} is outside of what is tested ({versions})", "compare the rows of one rollout with it"
            )


def _patched(described: Description, environ: Mapping[str, str]) -> Iterator[Finding]:
    points = cast("Mapping[str, list[list[str]]]", described["entry_points"])
    packages = cast("Mapping[str, str]", described["packages"])
    yield ok("`spanmill run` patches Python agents of this interpreter, and their children")
    off = {name.strip() for name in environ.get("OTEL_PYTHON_DISABLED_INSTRUMENTATIONS", "").split(",")}
    if off & {"spanmill", "*"}:
        yield error(
            f"OTEL_PYTHON_DISABLED_INSTRUMENTATIONS={environ['OTEL_PYTHON_DISABLED_INSTRUMENTATIONS']}: under "
            "`opentelemetry-instrument` no call is recorded",
            "take spanmill and * out of it",
        )
    if "opentelemetry-instrumentation" not in packages:
        yield ok("`opentelemetry-instrument` is not installed: `spanmill run` works without it, by spanmill alone")
        return
    for group, kind in (("opentelemetry_distro", "distro"), ("opentelemetry_configurator", "configurator")):
        named = environ.get(f"OTEL_PYTHON_{kind.upper()}")
        names = [name for name, _, _ in points.get(group, [])]
        yield from _winner(kind, named, names)
    others = sorted({f"{n} ({package})" for n, package, _ in points.get(GROUPS[2], []) if package != "spanmill"})
    if others:
        yield ok(f"instrumentors beside ours: {', '.join(others)}; calls that several record become one row")


def _winner(kind: str, named: str | None, names: list[str]) -> Iterator[Finding]:
    """Of several entry points OpenTelemetry takes the one that is named, else the first that it happens to meet."""
    variable = f"OTEL_PYTHON_{kind.upper()}"
    winner = named or (names[0] if names else None)
    if named and named not in names:
        yield warning(f"{variable}={named}: no such {kind} is installed, none is used", f"set {variable}=spanmill")
    elif winner != "spanmill" and kind == "distro":
        yield warning(
            f"under plain `opentelemetry-instrument` the {kind} is {winner}: calls are recorded all the same, but "
            "spans of a program's own provider keep OpenTelemetry's limit of 128 attributes",
            f"set {variable}=spanmill (`spanmill run` does)",
        )
    elif winner != "spanmill":
        yield ok(f"under plain `opentelemetry-instrument` the {kind} is {winner}: its pipeline gets our processor, too")
    else:
        yield ok(f"under plain `opentelemetry-instrument` the {kind} is ours")


def _version(text: str) -> Version:
    try:
        return Version(text)
    except InvalidVersion:
        numbers = re.match(r"\d+(\.\d+)*", text)
        return Version(numbers[0] if numbers else "0")


def _is_in(version: str, versions: SpecifierSet) -> bool:
    return versions.contains(_version(version), prereleases=True)
