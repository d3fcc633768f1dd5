import json
from pathlib import Path

import pytest
from rows_of import rows_of, spans_of

from spanmill.adapters.dialects import READERS, read
from spanmill.adapters.keys import keys

DATA = Path(__file__).parents[2] / "data" / "dialects"
FILES = sorted(DATA.glob("*/*.jsonl"))
NAMES = [f"{path.parent.name}/{path.stem}" for path in FILES]
WITHOUT_A_PACKAGE = {"spanmill", "vllm", "sglang", "agentlightning"}
"""Ours, two engines', and one whose recordings stand in tests/conformance/recorded."""


@pytest.mark.parametrize("path", FILES, ids=NAMES)
def test_real_spans_become_these_rows(path: Path) -> None:
    """The spans of a real package, version in the README beside them, become exactly the Triplets beside them."""
    assert json.loads(path.with_suffix(".rows.json").read_text()) == rows_of(path)


@pytest.mark.parametrize("path", FILES, ids=NAMES)
def test_index_knows_every_id_that_a_reader_reads(path: Path) -> None:
    """Each response id and tool-call id of a call is among its span's keys: a missing one tears a rollout apart."""
    for span in spans_of(path):
        known = set(keys(span))
        calls = [] if span.is_log else read(span)
        wanted = {("response", c.response_id) for c in calls if c.response_id}
        wanted |= {("response", i) for c in calls for i in c.tool_call_ids}
        assert set() == wanted - known


def test_every_dialect_with_a_package_has_real_spans() -> None:
    """Each reader of a foreign package is held against spans that the package itself wrote."""
    names = {reader.__name__.rpartition(".")[2] for reader in READERS}
    assert names - WITHOUT_A_PACKAGE == {path.parent.name for path in FILES}
