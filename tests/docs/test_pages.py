import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pyarrow as pa
import pytest

from spanmill.adapters import dialects
from spanmill.adapters.adapt import adapt
from spanmill.triplets.exports import Fill
from spanmill.triplets.flags import FLAGS
from spanmill.triplets.records import Span

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
SPANMILL = Path(sys.executable).with_name("spanmill")
QUARANTINE_OR_FLAG = re.compile(r"^\| ((?:`\w+`(?: \([^)]*\))?(?:, )?)+) \|", re.MULTILINE)


def blocks(page: str, language: str) -> list[str]:
    """The code blocks of a page in one language."""
    return re.findall(rf"```{language}\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)


def module(code: str, name: str) -> ModuleType:
    """A block as the file that the page says it is."""
    made = ModuleType(name)
    exec(compile(code, f"{name}.py", "exec"), made.__dict__)
    return made


def test_the_example_of_the_concepts_runs_as_written(tmp_path: Path) -> None:
    """Every command of the page works on its spans, and its Python finds the rows that the page says."""
    (tmp_path / "docs").symlink_to(DOCS)
    for command in blocks("concepts.md", "sh"):
        here = command.replace("spanmill", str(SPANMILL), 1)
        subprocess.run(["sh", "-ec", here], cwd=tmp_path, check=True, capture_output=True)
    (code,) = blocks("concepts.md", "python")
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True)


def test_the_dialect_that_is_taught_reads_its_span(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reader on the page, put into the list as it says, makes a trainable call of the span on the page."""
    code, _ = blocks("extending.md", "python")
    (attributes,) = blocks("extending.md", "json")
    acme: Any = module(code, "spanmill.adapters.dialects.acme")
    monkeypatch.setattr(dialects, "READERS", (acme, *dialects.READERS))
    span = Span("1" * 32, "1" * 16, "", "", 2, 10**18, 10**18 + 1, json.loads(attributes), {})
    (rollout,) = adapt([span]).rollouts
    (row,) = rollout.triplets
    ids = [None if ids is None else ids.tolist() for ids in (row.prompt_token_ids, row.response_token_ids)]
    assert ("q-1", "acme", [[1, 2, 3], [4, 5]], True) == (row.call_id, row.dialect, ids, row.trainable)


def test_the_exporter_that_is_taught_converts_rows() -> None:
    """The target on the page gives the columns that it says."""
    _, code = blocks("extending.md", "python")
    plain: Any = module(code, "spanmill.triplets.exports.plain")
    (target,) = plain.TARGETS
    rows = pa.table({"input_ids": [[1, 2]], "loss_mask": [[0, 1]], "reward": [None]})
    assert [{"ids": [1, 2], "train": [0, 1], "reward": None}] == target.convert(rows, Fill()).to_pylist()


def test_flags_that_are_explained_exist() -> None:
    """Every flag and reason in the tables of troubleshooting is one."""
    named = {
        flag
        for cell in QUARANTINE_OR_FLAG.findall((DOCS / "troubleshooting.md").read_text())
        for flag in re.findall(r"`(\w+)`", cell)
    }
    assert len(named) > 20
    assert set() == {flag for flag in named if flag not in FLAGS and flag != "group_size"}


def _links() -> Iterator[tuple[str, str]]:
    for page in sorted([ROOT / "README.md", *DOCS.rglob("*.md")]):
        for link in re.findall(r"\]\(([^)#\s]+)", page.read_text()):
            if "://" not in link and not link.startswith("commands/"):
                yield str(page.relative_to(ROOT)), link


@pytest.mark.parametrize(("page", "link"), list(_links()))
def test_links_lead_somewhere(page: str, link: str) -> None:
    """A link of the README or a page leads to a file of the repository."""
    assert ((ROOT / page).parent / link).exists()
