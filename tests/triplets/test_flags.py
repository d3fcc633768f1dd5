import json
import re
from pathlib import Path
from typing import Any, cast

from spanmill.triplets.flags import FLAGS, in_words

ROOT = Path(__file__).parent.parent.parent
CASES = sorted((ROOT / "tests" / "conformance" / "cases").rglob("expect.json"))


def test_every_flag_of_the_design_has_words() -> None:
    """The table of flags in the design names nothing that is not explained."""
    rows = re.findall(r"^\| ((?:`\w+`(?:, )?)+) \| (?:Q|no|yes)", (ROOT / "docs/design/design.md").read_text(), re.M)
    named = {name for row in rows for name in re.findall(r"\w+", row)}
    assert (True, set[str]()) == (len(named) > 20, named - set(FLAGS))


def test_every_flag_that_a_case_expects_has_words() -> None:
    """Whatever flag or reason the conformance cases expect is explained."""
    rows: list[dict[str, Any]] = [
        row
        for case in CASES
        for table in cast("dict[str, Any]", json.loads(case.read_text())).values()
        if isinstance(table, list)
        for row in cast("list[Any]", table)
        if isinstance(row, dict)
    ]
    lists = [row.get(column, ()) for row in rows for column in ("flags", "flags_exact")]
    expected = {name for names in lists for name in names} | {row["reason"] for row in rows if "reason" in row}
    assert (True, set[str]()) == (len(expected) > 10, expected - set(FLAGS))


def test_words_are_a_sentence() -> None:
    """Each explanation is one line that ends with a full stop, and an unknown flag is said to be that."""
    assert [] == [words for words in FLAGS.values() if not re.fullmatch(r"[A-Z][^\n|]+\.", words)]
    assert "Not known to this version of spanmill." == in_words("from_the_future")
