import stat
import sys
from pathlib import Path
from typing import Any

import pytest

from spanmill.doctor.finding import Finding
from spanmill.doctor.installed import describe, examine, examine_other

DESCRIBED: dict[str, Any] = {
    "python": [3, 11, 7],
    "executable": "/usr/bin/python",
    "packages": {"spanmill": "1", "opentelemetry-sdk": "1.45.2", "opentelemetry-instrumentation": "0.66b2"},
    "entry_points": {
        "opentelemetry_distro": [["spanmill", "spanmill", "x"]],
        "opentelemetry_configurator": [["spanmill", "spanmill", "x"]],
    },
}


def losing(described: dict[str, Any], **environ: str) -> list[tuple[str, str]]:
    """(level, what to do) of all that is not well."""
    return [(f.level, f.do) for f in examine(described, environ) if f.level != "ok"]


def packages(**more: str) -> dict[str, Any]:
    """The description with more packages; `_` for `-`."""
    return DESCRIBED | {"packages": DESCRIBED["packages"] | {k.replace("_", "-"): v for k, v in more.items()}}


def test_this_interpreter() -> None:
    """The one that runs describes itself, and a sound one has nothing to complain of."""
    described = describe()
    assert (list(sys.version_info[:3]), True) == (described["python"], "spanmill" in described["packages"])
    assert [] == losing(DESCRIBED)


def test_versions() -> None:
    """What is outside of what is tested, mixed or too old is found."""
    assert ["warning"] == [level for level, _ in losing(packages(openai="4.0.0"))]
    assert [] == losing(packages(openai="3.57.0"))
    assert ["warning"] == [level for level, _ in losing(packages(opentelemetry_api="1.30.0"))]
    assert [("error", "pip install 'spanmill[collector]'")] == losing(packages(protobuf="5.29.0"))
    bare = DESCRIBED | {"packages": {"spanmill": "1"}}
    assert ["error"] == [level for level, _ in losing(bare)]
    assert "base64" in str(examine(packages(opentelemetry_sdk="1.30.0"), {}))
    assert ["warning"] == [level for level, _ in losing(packages(openai="not a version"))]


def test_who_wins() -> None:
    """Of several distros the one that wins is told, and what turns our instrumentor off is an error."""
    both = [["other", "opentelemetry-distro", "x"], ["spanmill", "spanmill", "x"]]
    two = DESCRIBED | {"entry_points": {"opentelemetry_distro": both, "opentelemetry_configurator": both}}
    assert [("warning", "set OTEL_PYTHON_DISTRO=spanmill (`spanmill run` does)")] == losing(two)
    assert [] == losing(two, OTEL_PYTHON_DISTRO="spanmill", OTEL_PYTHON_CONFIGURATOR="spanmill")
    assert [("warning", "set OTEL_PYTHON_DISTRO=spanmill")] == losing(two, OTEL_PYTHON_DISTRO="missing")
    for off in ("spanmill", "*", "x, spanmill"):
        found = losing(DESCRIBED, OTEL_PYTHON_DISABLED_INSTRUMENTATIONS=off)
        assert [("error", "take spanmill and * out of it")] == found
    assert [] == losing(DESCRIBED, OTEL_PYTHON_DISABLED_INSTRUMENTATIONS="urllib3")


def script(folder: Path, text: str) -> str:
    """An executable that prints a text."""
    path = folder / "python"
    path.write_text(f"#!/bin/sh\ncat <<'END'\n{text}\nEND\n")
    path.chmod(path.stat().st_mode | stat.S_IEXEC)
    return str(path)


def test_another_interpreter(tmp_path: Path) -> None:
    """One that has spanmill is well; one that lacks it, is too old, or is no Python is an error with a way out."""
    assert Finding("ok", "") == examine_other(sys.executable)[0]._replace(text="")
    bare = script(tmp_path, '{"python": [3, 12, 1], "executable": "x", "packages": {}, "entry_points": {}}')
    (found,) = examine_other(bare)
    assert ("error", True) == (found.level, f"{bare} -m pip install spanmill" in found.do)
    old = script(
        tmp_path, '{"python": [3, 8, 1], "executable": "x", "packages": {"spanmill": "1"}, "entry_points": {}}'
    )
    assert ["error"] == [f.level for f in examine_other(old)]
    for text in ("hello", "[]", '{"a": 1}', ""):
        assert [("error", True)] == [(f.level, "is no Python" in f.text) for f in examine_other(script(tmp_path, text))]
    for path in (str(tmp_path), "/no/such/python", str(tmp_path / "plain")):
        (tmp_path / "plain").write_text("x")
        assert ["error"] == [f.level for f in examine_other(path)]


def test_asking_an_interpreter_makes_no_rollout(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Under `spanmill run` the interpreter that is asked does not record itself."""
    auto = tmp_path / "instrument" / "auto"
    auto.mkdir(parents=True)
    (auto / "sitecustomize.py").write_text("raise SystemExit('recorded')")
    monkeypatch.setenv("PYTHONPATH", str(auto))
    assert list(sys.version_info[:3]) == describe("/proc/self/exe" if not sys.executable else sys.executable)["python"]
