import os
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
from exported_rollouts import call, rollout, write

from spanmill import cli
from spanmill.collector.config import ExportConfig
from spanmill.triplets.exports import TARGETS, Fill
from spanmill.triplets.select import Selection


def dataset(path: Path) -> Path:
    """Two rollouts of one call."""
    return write(path / "data", [rollout(name, [call(0, [1, 2], [3])], mode=name) for name in ("train", "val")])


def test_options_are_those_of_selection_and_fill() -> None:
    """Every field of both is an option, with the same default, and there is none beside them, --to and --out."""
    options = {option.name: option.default for option in fields(ExportConfig)}
    fill = {name if name == "pad_token_id" else f"fill_{name}": Fill._field_defaults[name] for name in Fill._fields}
    expected = {option.name: option.default for option in fields(Selection)} | fill
    assert expected == {name: default for name, default in options.items() if name not in ("to", "out")}


def test_help_names_every_format() -> None:
    """What --to takes is told by --help, in the order of the list."""
    (option,) = (option for option in fields(ExportConfig) if option.name == "to")
    *names, last = (target.name for target in TARGETS)
    assert f"{', '.join(names)} or {last}" == option.metadata["help"]


def test_export_prints_its_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The report goes to stdout, the exit code is 0; the environment of a running agent, its mode say, is not heard."""
    os.environ["SPANMILL_MODE"] = "test"
    try:
        arguments = ["export", str(dataset(tmp_path)), "--to", "sft", "--out", str(tmp_path / "out"), "--mode", "val,x"]
        assert 0 == cli.main(arguments)
    finally:
        del os.environ["SPANMILL_MODE"]
    assert "rows written 1 rollouts 2 exported 1 50.0% mode 1 50.0%" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["--to", "pickle", "--out", "x"], 1, "--to 'pickle' is no format; there are verl,"),
        (["--to", "sft"], 2, "--out is missing"),
        (["--to", "sft", "--out", "x", "--max-tokens", "0"], 2, "--max-tokens is '0': expected a whole number from 1"),
        (["--to", "sft", "--out", "x", "--min-reward", "nan"], 2, "--min-reward is 'nan': expected a number"),
        (["--to", "sft", "--out", "x", "--logprobs", "both"], 2, "expected one of one, raw, processed, any, none"),
        (["--to", "sft", "--out", "x", "--mode", "none"], 1, "nothing is selected, so nothing was written"),
    ],
)
def test_what_is_wrong_is_said_in_a_line(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    code: int,
    says: str,
) -> None:
    """Wrong usage is 2, what the data does not allow is 1; never a traceback, and nothing is left behind."""
    monkeypatch.chdir(tmp_path)
    assert code == cli.main(["export", str(dataset(tmp_path)), *arguments])
    assert says in capsys.readouterr().err
    assert ["data"] == os.listdir(tmp_path)


def test_a_package_that_is_missing_is_named(tmp_path: Path) -> None:
    """Formats of tensors say which extra they need, and leave nothing behind."""
    code = "import sys; sys.modules['safetensors'] = None\nfrom spanmill.cli import main\nsys.exit(main(sys.argv[1:]))"
    arguments = ["export", str(dataset(tmp_path)), "--to", "areal", "--out", str(tmp_path / "out")]
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False)
    expected = "spanmill: this command needs safetensors, which is not installed: pip install 'spanmill[export]'\n"
    assert (1, expected) == (done.returncode, done.stderr)
    assert ["data"] == os.listdir(tmp_path)
