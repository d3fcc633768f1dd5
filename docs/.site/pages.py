"""What the site has beside its pages: one for each command, made from its help, and the files that pages link to."""

import re
from pathlib import Path
from typing import Any, Final

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from typer.main import get_command

from spanmill.cli import app

ROOT: Final = Path(__file__).parents[2]
_OUTSIDE: Final = re.compile(r"\]\((?:\.\./)+([\w./-]+)\)")
"""A link to a file of the repository that is no page."""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds `commands/<name>.md` for every command; mkdocs calls it."""
    group: Any = get_command(app)
    for name, command in group.commands.items():
        files.append(File.generated(config, f"commands/{name}.md", content=command_page(name, command)))
    for page in files.documentation_pages():
        for path in _OUTSIDE.findall(page.content_string):
            known = path == "README.md" or (ROOT / "docs" / path).exists() or f"repository/{path}" in files.src_uris
            if not known and (ROOT / path).is_file():
                files.append(File.generated(config, f"repository/{path}", abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Lets a link that leaves `docs/` lead to the file's copy in the site; mkdocs calls it."""

    def moved(found: re.Match[str]) -> str:
        up = "../" * page.file.src_uri.count("/")
        if found[1] == "README.md":
            return f"]({up}index.md)"
        return f"]({up}repository/{found[1]})" if f"repository/{found[1]}" in files.src_uris else found[0]

    return _OUTSIDE.sub(moved, markdown)


def command_page(name: str, command: Any) -> str:
    """The page of one command: what it does, its usage, and a table of its arguments and options."""
    context = command.make_context(f"spanmill {name}", [], resilient_parsing=True)
    usage = " ".join(command.collect_usage_pieces(context))
    rows = [record for one in command.get_params(context) if (record := one.get_help_record(context))]
    lines = [f"# spanmill {name}", "", command.help.strip(), "", "```", f"spanmill {name} {usage}", "```", ""]
    lines += ["| option | meaning |", "|---|---|", *(f"| `{option}` | {_cell(said)} |" for option, said in rows)]
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").replace("<", "&lt;").split())
