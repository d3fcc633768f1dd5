import ast
import json
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

import pytest
import yaml
from desk import write_desk
from typer.main import get_command

from spanmill.cli import app

ROOT: Final = Path(__file__).parents[2]
SPANMILL: Final = Path(sys.executable).with_name("spanmill")
PAGES: Final = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
COMMANDS: Final[Any] = get_command(app)
FENCE: Final = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
INLINE: Final = re.compile(r"`((?:\w+=\S+ )?spanmill [a-z][^`]*)`")
MEANT_TO_FILL: Final = re.compile(r"[\[|]|\.\.\.|\b[A-Z]{3,}\b")
"""A usage, not a command: brackets, dots or names in capitals stand for what is to be put there."""

ELSEWHERE: Final = {
    "docs/agents.md": (
        "tests/agents/test_agents.py",
        "tests/instrument/test_hooks.py",
        "tests/instrument/test_tasks.py",
    ),
    "docs/collectors.md": ("tests/peers/test_collectors.py",),
    "docs/concepts.md": ("tests/docs/test_pages.py",),
    "docs/extending.md": ("tests/docs/test_pages.py",),
    "docs/gateway.md": ("tests/instrument/test_gateway.py",),
    "docs/quickstart.md": ("tests/test_quickstart.py",),
    "docs/reading.md": ("tests/triplets/test_follow.py", "tests/collector/test_records.py", "tests/test_torch.py"),
    "docs/scale.md": ("tests/cluster/test_object_store.py", "tests/cluster/test_build_ray.py"),
    "docs/trainers.md": ("tests/trainers/test_trainers.py",),
    "docs/view.md": ("tests/browser/test_view_in_browser.py",),
    "docs/vllm.md": (
        "tests/vllm/test_vllm_plugin.py",
        "tests/vllm/test_vllm_offline.py",
        "tests/vllm/test_vllm_routes.py",
    ),
    "README.md": ("tests/test_demo.py", "tests/vllm/test_vllm_plugin.py"),
}
"""What needs a server, a GPU, another package or a second machine is parsed here and run there."""

OFFLINE: Final = {"show", "stats", "export", "build"}
"""Commands that need nothing but the dataset `data`."""


class Block(NamedTuple):
    """A fenced block of a page."""

    page: str
    number: int
    language: str
    code: str


def _blocks() -> Iterator[Block]:
    for page in PAGES:
        for number, found in enumerate(FENCE.finditer(page.read_text())):
            yield Block(str(page.relative_to(ROOT)), number, found[1], found[2])


BLOCKS: Final = list(_blocks())
PYTHON: Final = [block for block in BLOCKS if block.language in ("python", "py")]


def _name(block: Block) -> str:
    return f"{block.page}-{block.number}"


def commands(block: Block) -> Iterator[str]:
    """The shell commands of a block: continued lines joined, comments and explanations cut."""
    if block.language not in ("", "sh"):
        return
    for line in block.code.replace("\\\n", " ").splitlines():
        yield re.split(r" +# | {3,}(?=[a-z])", line.strip())[0]


def arguments(command: str) -> list[str] | None:
    """What a command line gives to spanmill; None if it runs something else."""
    found = re.match(r"(?:[A-Z_]+=\S* )*(?:\.venv/bin/)?spanmill +([a-z].*)", command)
    return shlex.split(found[1]) if found else None


SHELL: Final = [(block, given) for block in BLOCKS for one in commands(block) if (given := arguments(one))]


def local(block: Block) -> bool:
    """A program that reads the dataset `data`, with nothing but what an install of spanmill has."""
    tree = ast.parse(block.code)
    used = {
        name.name.partition(".")[0] for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names
    }
    used |= {(node.module or "").partition(".")[0] for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    if block.page == "docs/quickstart.md":  # its dataset is the one that the page makes
        return False
    return '("data"' in block.code and "spanmill" in used and not used & {"torch", "verl", "trl", "openai"}


@pytest.fixture(name="folder", scope="module")
def folder_fixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a dataset `data` of 48 rollouts."""
    folder = tmp_path_factory.mktemp("snippets")
    write_desk(folder, 48)
    return folder


@pytest.mark.parametrize("block", PYTHON, ids=_name)
def test_python_can_be_compiled(block: Block) -> None:
    """A block of Python is Python."""
    compile(block.code, _name(block), "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)


@pytest.mark.parametrize("block", [one for one in PYTHON if local(one)], ids=_name)
def test_python_that_reads_a_dataset_runs(block: Block, folder: Path) -> None:
    """A program of a page that reads the dataset `data` does so."""
    subprocess.run([sys.executable, "-W", "error", "-c", block.code], cwd=folder, check=True, capture_output=True)


@pytest.mark.parametrize(("block", "given"), SHELL, ids=lambda one: _name(one) if isinstance(one, Block) else one[0])
def test_commands_are_understood(block: Block, given: list[str]) -> None:
    """The real command line takes every command of a page; of a usage, it knows every option."""
    understood(given)


def _inline() -> Iterator[tuple[str, str]]:
    for page in (*PAGES, ROOT / "CHANGELOG.md"):
        for command in sorted(set(INLINE.findall(re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)))):
            yield str(page.relative_to(ROOT)), command


@pytest.mark.parametrize(("page", "command"), list(_inline()))
def test_commands_that_are_mentioned_exist(page: str, command: str) -> None:
    """A command in running text is one of ours, with options that it has."""
    given = arguments(" ".join(command.split()))
    assert given is not None
    known_options(given)


def understood(given: list[str]) -> None:
    """Parses a command line as spanmill does; fails on what it does not take."""
    name, *rest = given
    if MEANT_TO_FILL.search(" ".join(rest)):
        known_options(given)
    else:
        COMMANDS.commands[name].make_context(name, [*rest])


def known_options(given: list[str]) -> None:
    """Fails unless the command and its options exist."""
    name, *rest = given
    own = rest[: rest.index("--")] if "--" in rest else rest
    named = set(re.findall(r"(?<![\w-])--[a-z][\w-]*", " ".join(own)))
    known = {option for one in COMMANDS.commands[name].params for option in (*one.opts, *one.secondary_opts)} | {
        "--help"
    }
    assert set() == named - known


@pytest.mark.slow
def test_commands_that_need_only_a_dataset_run(folder: Path) -> None:
    """Every `show`, `stats` and `export` of the pages ends well, in their order."""
    ran = 0
    for block, given in SHELL:
        local_page = block.page not in (
            "docs/quickstart.md",
            "docs/concepts.md",
        )  # run as a whole by tests of their own
        if given[0] in OFFLINE and local_page and not MEANT_TO_FILL.search(" ".join(given)) and "s3:" not in str(given):
            if (
                "--out" in given and (made := folder / given[given.index("--out") + 1]).exists()
            ):  # two formats, one name
                made.rename(folder / f"before-{ran}")
            done = subprocess.run([str(SPANMILL), *given], cwd=folder, capture_output=True, text=True, check=False)
            assert (0, given) == (done.returncode, given), done.stderr
            ran += 1
    assert ran > 12


@pytest.mark.parametrize("block", [one for one in BLOCKS if one.language in ("yaml", "json")], ids=_name)
def test_data_can_be_parsed(block: Block) -> None:
    """A block of YAML or JSON is that."""
    assert (yaml.safe_load if block.language == "yaml" else json.loads)(block.code)


def test_verbs_and_extras_exist() -> None:
    """Every `make VERB` is in the Makefile, every `spanmill[EXTRA]` in pyproject.toml."""
    text = "\n".join(page.read_text() for page in PAGES)
    code = "\n".join([*re.findall(r"`([^`\n]*)`", text), *(block.code for block in BLOCKS)])
    verbs = set(re.findall(r"^\s*make ([a-z-]+)", code, re.MULTILINE))
    assert len(verbs) > 5
    assert set() == verbs - set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    extras = {one for found in re.findall(r"spanmill\[([\w,]+)\]", text) for one in found.split(",")}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert set() == extras - set(project["optional-dependencies"])


def test_what_is_not_run_here_is_run_elsewhere() -> None:
    """Every page with a program or a command has tests that run it, and these exist."""
    assert set() == ({block.page for block in PYTHON} | {block.page for block, _ in SHELL}) - set(ELSEWHERE) - {
        "docs/design/design.md",
        "docs/doctor.md",
    }
    assert [] == [test for tests in ELSEWHERE.values() for test in tests if not (ROOT / test).is_file()]
