import ast
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
STAGES = ("adapters", "collector", "instrument", "triplets")


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what git has, links as links."""
    target = tmp_path_factory.mktemp("clone")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True)
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).exists():  # a file deleted and not yet committed is still listed
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name, follow_symlinks=False)
    return target


@pytest.fixture(scope="module")
def wheel(clone: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel built from that copy, unpacked."""
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(clone)]
    done = subprocess.run(build, capture_output=True, text=True)
    assert 0 == done.returncode, done.stdout + done.stderr
    (built,) = folder.glob("*.whl")
    zipfile.ZipFile(built).extractall(folder / "site")
    return folder / "site"


def modules(folder: Path) -> set[str]:
    """The Python files under a folder, by their path below it."""
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*.py")}


@pytest.mark.parametrize("stage", STAGES)
def test_every_stage_is_in_the_wheel(wheel: Path, clone: Path, stage: str) -> None:
    """The wheel holds every file of a stage under the project's name; a clone without symbolic links drops them all."""
    assert modules(clone / stage) == modules(wheel / "spanmill" / stage)


def test_every_stage_imports_from_the_wheel(wheel: Path) -> None:
    """Each stage of the installed wheel imports under the project's name, from the wheel and not from the checkout."""
    program = f"import spanmill.{', spanmill.'.join(STAGES)}; print(spanmill.__file__)"
    environment = os.environ | {"PYTHONPATH": str(wheel), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, cwd="/", capture_output=True, text=True)
    assert (f"{wheel / 'spanmill' / '__init__.py'}\n", "") == (done.stdout, done.stderr)


def test_no_generic_name_is_installed(wheel: Path) -> None:
    """Nothing is installed but `spanmill`: packages named adapters and triplets exist, and would be overwritten."""
    assert {"spanmill"} == {path.name for path in wheel.iterdir() if not path.name.endswith(".dist-info")}


def test_the_wheel_is_typed_and_licensed(wheel: Path) -> None:
    """Type checkers find the marker, and the licence text is in the wheel."""
    (metadata,) = wheel.glob("*.dist-info")
    assert (ROOT / "LICENSE").read_bytes() == (metadata / "licenses" / "LICENSE").read_bytes()
    assert (wheel / "spanmill" / "py.typed").exists()


def test_links_of_the_stages_are_committed_as_links() -> None:
    """Git holds one relative link (mode 120000) per stage: src/spanmill/collector -> ../../collector."""
    listed = subprocess.run(
        ["git", "ls-files", "-s", "src/spanmill"], cwd=ROOT, check=True, capture_output=True, text=True
    )
    links = {line.split("\t")[1] for line in listed.stdout.splitlines() if line.startswith("120000")}
    assert {f"src/spanmill/{stage}" for stage in STAGES} == links
    assert {stage: f"../../{stage}" for stage in STAGES} == {
        s: str((ROOT / "src/spanmill" / s).readlink()) for s in STAGES
    }


@pytest.mark.parametrize(
    "module", ["spanmill", "spanmill.cli", "spanmill.semconv", "spanmill.errors", "spanmill.instrument"]
)
def test_base_install_needs_no_collector_library(module: str) -> None:
    """What an instrumented process imports loads none of the collector's libraries: they are an extra."""
    program = (
        f"import sys, {module}; print(sorted(set(sys.modules) & {{'grpc', 'polars', 'pyarrow', 'numpy', 'starlette'}}))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert [] == ast.literal_eval(done.stdout)
