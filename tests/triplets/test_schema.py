import json
from dataclasses import fields
from pathlib import Path

import polars as pl
import pyarrow as pa
import pytest

from spanmill.triplets.records import Episode, Quarantined, Rollout, Triplet
from spanmill.triplets.schema import (
    EPISODES,
    QUARANTINE,
    ROLLOUTS,
    TABLES,
    TRIPLETS,
    TableSpec,
    field_text,
    polars_schema,
)
from spanmill.triplets.schema_page import schema_page

GOLDEN = Path(__file__).parent / "golden" / "schema.json"
PAGE = Path(__file__).parents[2] / "docs" / "reference" / "schema.md"
NO_COLUMNS = {"triplets", "episodes", "quarantined", "announced"}


def test_the_schema_is_the_golden_one():
    """Names, order, types and nullability of columns change only together with the golden file (and the version)."""
    rendered = {
        table.name: [[c.name, field_text(c), str(polars_schema(table)[c.name])] for c in table.columns]
        for table in TABLES
    }
    assert json.loads(GOLDEN.read_text()) == rendered


@pytest.mark.parametrize(
    ("table", "record"),
    [(ROLLOUTS, Rollout), (TRIPLETS, Triplet), (EPISODES, Episode), (QUARANTINE, Quarantined)],
    ids=lambda value: value.name if isinstance(value, TableSpec) else "",
)
def test_a_column_is_a_field_of_its_record(table: TableSpec, record: type):
    """Every table has exactly the fields of its record as columns, each once."""
    names = [column.name for column in table.columns]
    assert sorted(names) == sorted({field.name for field in fields(record)} - NO_COLUMNS)


def test_the_reference_page_is_current():
    """The committed page is what `python -m spanmill.triplets.schema_page` prints."""
    assert PAGE.read_text() == schema_page()


def test_polars_reads_times_as_utc():
    """Timestamps are UTC microseconds in polars too."""
    assert polars_schema(QUARANTINE)["received_at"] == pl.Datetime("us", "UTC")


def test_types_are_named_with_their_nullability():
    """`?` stands where null may stand: at the list, at its element, or at a field of a struct."""
    kind = pa.list_(
        pa.field("element", pa.struct([pa.field("a", pa.int32()), pa.field("b", pa.string(), False)]), False)
    )
    assert field_text(pa.field("x", kind)) == "list<struct<a: int32?, b: string>>?"
