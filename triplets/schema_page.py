"""The reference page of the schema: `python -m spanmill.triplets.schema_page > docs/reference/schema.md`."""

from spanmill.triplets.flags import FLAGS
from spanmill.triplets.schema import SCHEMA_VERSION, TABLES, TableSpec, field_text

_HEAD = f"""# Schema

Rendered from `triplets/schema.py` by `python -m spanmill.triplets.schema_page`. Schema version {SCHEMA_VERSION}.

A dataset is a folder of four table folders of plain Parquet files. `?` marks what may be null, and null always means
"not recorded", never 0. Letters: P prompt tokens, R response tokens, T tokens of a sequence. Elements of lists are
never null unless marked. The file metadata `spanmill.schema_version` names the version; a reader refuses a newer one.
"""


def schema_page() -> str:
    """The page as Markdown: a section per table, a line per column, and one of the flags."""
    return "\n".join([_HEAD, *map(_section, TABLES), _flags()])


def _section(table: TableSpec) -> str:
    lines = [
        f"## {table.name}",
        "",
        f"A row is {table.row}.",
        "",
        "| column | type | unit | meaning |",
        "|---|---|---|---|",
    ]
    lines += [f"| `{c.name}` | `{field_text(c)}` | {c.unit} | {c.meaning} |" for c in table.columns]
    return "\n".join(lines) + "\n"


def _flags() -> str:
    lines = ["## flags", "", "Flags of rows, and reasons in `quarantine`.", "", "| flag | meaning |", "|---|---|"]
    lines += [f"| `{flag}` | {meaning} |" for flag, meaning in FLAGS.items()]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(schema_page(), end="")
