"""A dataset in the browser: `spanmill view`, and the same pages at `/` of a running `spanmill serve`."""

from typing import Final

PATHS: Final = (
    "/",
    "/rollouts",
    "/rollout",
    "/episode",
    "/call",
    "/group",
    "/quarantine",
    "/row.json",
    "/stamp",
    "/static/{path:path}",
)
"""Where the pages are. The rest of the package is loaded when somebody looks: `serve` starts without it."""
