import dataclasses
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import spanmill
from spanmill.cli import main
from spanmill.collector.config import BuildConfig, ServeConfig
from spanmill.collector.config_values import Address
from spanmill.errors import DatasetError


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[ServeConfig]:
    """The configurations that `spanmill serve` was started with, instead of a service."""
    from spanmill.collector import service

    configs: list[ServeConfig] = []

    def serve(config: ServeConfig) -> int:
        configs.append(config)
        return 0

    monkeypatch.setattr(service, "serve", serve)
    return configs


def without_variables(monkeypatch: pytest.MonkeyPatch, variables: Mapping[str, str]) -> None:
    """An environment with these variables of ours and no other."""
    for option in dataclasses.fields(ServeConfig):
        monkeypatch.delenv(f"SPANMILL_{option.name.upper()}", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


def test_flag_beats_environment_beats_file(
    served: list[ServeConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was typed counts before the environment, that before the file, and what nobody gave has its default."""
    without_variables(monkeypatch, {"SPANMILL_SETTLE": "2s", "SPANMILL_MAX_OPEN": "2h"})
    file = tmp_path / "serve.toml"
    file.write_text('out = "data"\nsettle = 3\nmax_open = "3h"\nidle-timeout = "3m"\ntrain_failed = true\n')
    arguments = ["serve", "--config", str(file), "--settle", "1s", "--grpc", "[::1]:0", "--flush-on-exit"]
    assert 0 == main(arguments)
    expected = ServeConfig(
        out=Path("data"),
        settle=1,
        max_open=7200,
        idle_timeout=180,
        train_failed=True,
        flush_on_exit=True,
        grpc=Address("::1", 0),
    )
    assert [expected] == served


@pytest.mark.parametrize("option", [option.name for option in dataclasses.fields(ServeConfig)])
def test_every_field_of_the_configuration_is_an_option(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Help names every field of the configuration with what it does."""
    assert 0 == main(["serve", "--help"])
    assert f"--{option.replace('_', '-')} " in capsys.readouterr().out


def test_build_hands_on_inputs_and_options(monkeypatch: pytest.MonkeyPatch) -> None:
    """`build` takes any number of inputs, and its options from the command line."""
    from spanmill.collector import build

    seen: list[tuple[list[Path], BuildConfig]] = []

    def built(inputs: list[Path], config: BuildConfig) -> int:
        seen.append((inputs, config))
        return 0

    monkeypatch.setattr(build, "build", built)
    assert 0 == main(["build", "a.jsonl", "b.binpb", "--out", "data", "--merge", "none", "--reward-names", "x,y"])
    expected = BuildConfig(out=Path("data"), merge="none", reward_names=("x", "y"))
    assert [([Path("a.jsonl"), Path("b.binpb")], expected)] == seen


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["serve", "--out", "data", "--bogus", "1"], 2, "--bogus"),
        (["serve", "--out", "data", "--settle", "soon"], 2, "spanmill: --settle is 'soon'"),
        (["serve"], 2, "spanmill: --out is missing"),
        (["serve", "--out", "data", "--config", "none.toml"], 2, "spanmill: --config none.toml cannot be read"),
        (["build", "--out", "data"], 2, "INPUT"),
        (["build", "none.jsonl", "--out", "data"], 1, "spanmill: none.jsonl"),
        (["stats", "none"], 1, "spanmill: none is no dataset"),
        (["frobnicate"], 2, "frobnicate"),
    ],
)
def test_errors_name_what_is_wrong(
    arguments: list[str],
    code: int,
    says: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Wrong usage ends with 2, a failure with 1; our own errors are one line on stderr that names what was wrong."""
    without_variables(monkeypatch, {})
    monkeypatch.chdir(tmp_path)
    assert code == main(arguments)
    said = capsys.readouterr()
    assert "" == said.out
    assert says in said.err
    assert not says.startswith("spanmill:") or (says == said.err[: len(says)] and 1 == said.err.count("\n"))


def test_failure_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """An error that ends a command is one line on stderr, and the exit code 1."""
    from spanmill.collector import service

    def full(_: ServeConfig) -> int:
        raise DatasetError("data cannot be written: disk full")

    monkeypatch.setattr(service, "serve", full)
    assert 1 == main(["serve", "--out", "data"])
    assert ("", "spanmill: data cannot be written: disk full\n") == capsys.readouterr()


def test_failure_has_its_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """A command that returns a code ends the process with it."""
    from spanmill.collector import service

    def serve(_: ServeConfig) -> int:
        return 1

    monkeypatch.setattr(service, "serve", serve)
    assert 1 == main(["serve", "--out", "data"])


def python(program: str) -> subprocess.CompletedProcess[str]:
    """A program run by an interpreter of its own."""
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)


def test_install_without_the_collector_says_what_is_missing() -> None:
    """Where the collector's libraries are not installed, a command that needs them says in one line what to install."""
    missing = "sys.modules.update(dict.fromkeys(('polars', 'pyarrow', 'numpy'), None))"
    done = python(f"import sys; {missing}; from spanmill.cli import main; sys.exit(main(['serve', '--out', 'data']))")
    assert (1, "") == (done.returncode, done.stdout)
    assert done.stderr.startswith("spanmill: this command needs ")
    assert done.stderr.endswith(", which is not installed: pip install 'spanmill[collector]'\n")
    assert 1 == done.stderr.count("\n")


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    """`spanmill --version` tells the version that the package has."""
    assert 0 == main(["--version"])
    assert f"spanmill {spanmill.__version__}\n" == capsys.readouterr().out


def test_console_script_is_main() -> None:
    """The installed command runs `main` and passes its exit code on."""
    script = Path(sys.executable).with_name("spanmill")
    done = subprocess.run([script, "stats", "/no/such/dataset"], capture_output=True, text=True)
    assert (1, "", True) == (done.returncode, done.stdout, done.stderr.startswith("spanmill: /no/such/dataset "))


def test_package_hands_on_readers() -> None:
    """`spanmill.read_rollouts` and its like are the reader's functions; no other name is made up."""
    from spanmill.triplets import reader

    handed_on: dict[str, Any] = {name: getattr(spanmill, name) for name in spanmill.__all__ if name.startswith("read_")}
    assert {name: getattr(reader, name) for name in ("read_rollouts", "read_triplets", "read_episodes")} == handed_on
    assert ["no such name"] == [getattr(spanmill, name, "no such name") for name in ["frobnicate"]]
