"""The direction of imports: design section 1."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
STAGES = ("instrument", "collector", "adapters", "triplets")
ALLOWED = {
    "instrument": {"instrument"},
    "collector": {"collector", "triplets"},
    "adapters": {"adapters", "triplets"},
    "triplets": {"triplets"},
}
"""The stages that the files of a stage may import."""

LEAVES = {"semconv", "errors", "storage"}
"""What any file may import; the package itself and the command line are above the stages."""

SEE_EVERYTHING = {
    "collector/service.py",
    "collector/indexer.py",
    "collector/build.py",
    "collector/build_ray.py",
    "collector/late.py",
    "collector/partition.py",
    "collector/spill.py",
    "collector/survey.py",
}
"""Where the stages are put together."""

UPWARD = {("triplets/records.py", "spanmill.memory")}
"""`Rollout.from_result` may be given spans, so it hands on, when it is called, to what sees all stages."""

KEPT_OUT_OF_AGENTS = {"grpc", "polars", "pyarrow", "numpy", "google"}
"""What `instrument` never imports: it lives inside other people's agents and inside vLLM."""

FILES = [path.relative_to(ROOT) for stage in STAGES for path in sorted((ROOT / stage).rglob("*.py"))]


def imported(source: str) -> Iterator[str]:
    """Every module that the source imports, also inside functions and under TYPE_CHECKING."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = f"{'.' * node.level}{node.module or ''}"
            yield from (f"spanmill.{alias.name}" for alias in node.names) if module == "spanmill" else [module]


def wrong_imports(file: str, source: str) -> list[str]:
    """The imports of a stage's file that go against the direction of the flow."""
    stage = file.split("/")[0]
    allowed = LEAVES | (set(STAGES) if file in SEE_EVERYTHING else ALLOWED[stage])
    wrong: list[str] = []
    for module in imported(source):
        package, _, rest = module.partition(".")
        against = package == "spanmill" and rest.split(".")[0] not in allowed and (file, module) not in UPWARD
        heavy = stage == "instrument" and package in KEPT_OUT_OF_AGENTS
        if against or heavy or not package or package in STAGES:
            wrong.append(module)
    return wrong


@pytest.mark.parametrize("file", FILES, ids=str)
def test_imports_point_one_way(file: Path) -> None:
    """A stage imports only the stages right of it; only the files that put the stages together see all."""
    assert [] == wrong_imports(file.as_posix(), (ROOT / file).read_text())


@pytest.mark.parametrize(
    ("file", "source", "wrong"),
    [
        ("triplets/writer.py", "from spanmill.collector.journal import append", ["spanmill.collector.journal"]),
        ("adapters/calls.py", "def f():\n    import spanmill.collector.index", ["spanmill.collector.index"]),
        ("collector/journal.py", "from spanmill.adapters import calls", ["spanmill.adapters"]),
        ("collector/build.py", "from spanmill.adapters import calls", []),
        ("triplets/records.py", "def f():\n    from spanmill.memory import from_result", []),
        ("triplets/reader.py", "from spanmill.memory import adapt", ["spanmill.memory"]),
        ("instrument/vllm.py", "import grpc\nfrom spanmill.semconv import ROLLOUT_ID", ["grpc"]),
        ("adapters/calls.py", "from spanmill import errors, read_rollouts", ["spanmill.read_rollouts"]),
        ("triplets/reader.py", "import spanmill", ["spanmill"]),
        ("triplets/reader.py", "from .records import Span", [".records"]),
        ("triplets/reader.py", "from adapters.calls import read", ["adapters.calls"]),
    ],
)
def test_a_wrong_import_is_found(file: str, source: str, wrong: list[str]) -> None:
    """An import against the flow, a relative one and one by the bare stage name are found wherever they stand."""
    assert wrong == wrong_imports(file, source)
