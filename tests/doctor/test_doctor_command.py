"""`spanmill doctor` as a command."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from otlp_sink import grpc_receiver

from spanmill.cli import main
from spanmill.doctor import as_document, as_text
from spanmill.doctor.finding import Finding

FOUND = [
    ("a", [Finding("ok", "well"), Finding("warning", "may be lost", "do this")]),
    ("b", [Finding("error", "is lost", "do that"), Finding("error", "is lost", "do that")]),
]


def test_as_text() -> None:
    """A line for each finding: what it means, and what to do."""
    assert [
        "a:",
        "  ok       well",
        "  warning  may be lost; do this",
        "b:",
        "  error    is lost; do that",
        "  error    is lost; do that",
        "data is lost (1 warning, 2 errors)",
    ] == as_text(FOUND).splitlines()
    assert "nothing loses data" == as_text([("a", [Finding("ok", "well")])]).splitlines()[-1]


def test_as_json() -> None:
    """The same for programs."""
    first = {"section": "a", "level": "ok", "text": "well", "do": None}
    found = json.loads(as_document(FOUND))
    assert (first, 2, 1, 4) == (found["findings"][0], found["errors"], found["warnings"], len(found["findings"]))


def test_the_exit_code(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """0 where nothing loses data, 1 where something does; every option that takes several is looked at."""
    with grpc_receiver() as sink:
        assert 0 == main(["doctor", "--endpoint", sink.endpoint, "--python", sys.executable])
        assert "data is lost" not in capsys.readouterr().out
        words = ["doctor", "--endpoint", sink.endpoint, "--collector-config", str(tmp_path / "none"), "--json"]
        assert 1 == main([*words, "--vllm", "http://127.0.0.1:9", "--vllm", "http://127.0.0.1:9/v1"])
    found = json.loads(capsys.readouterr().out)
    sections = list(dict.fromkeys(f["section"] for f in found["findings"] if f["level"] == "error"))
    assert [
        "vllm http://127.0.0.1:9",
        "vllm http://127.0.0.1:9/v1",
        f"collector config {tmp_path / 'none'}",
    ] == sections


def test_the_base_is_enough() -> None:
    """Without the collector's packages everything but a collector's configuration is examined."""
    code = (
        "import sys\n"
        "for name in ('yaml', 'numpy', 'polars', 'pyarrow', 'starlette'): sys.modules[name] = None\n"
        "from spanmill.cli import main\n"
        "codes = [main(['doctor', '--endpoint', 'http://127.0.0.1:9'])]\n"
        "codes.append(main(['doctor', '--endpoint', 'http://127.0.0.1:9', '--collector-config', 'x.yaml']))\n"
        "print(codes)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert ("[1, 1]", True) == (done.stdout.splitlines()[-1], "pip install 'spanmill[collector]'" in done.stderr)
