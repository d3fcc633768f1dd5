"""Draws the pictures of the documentation anew: what Chromium shows of the order desk's dataset.

tests/browser/pictures.py FOLDER
"""

import sys
import tempfile
from pathlib import Path

from browsing import Watched, launch, viewing
from desk import write_desk
from playwright.sync_api import FloatRect, sync_playwright

import spanmill

SPANS_TO_TOKENS = """() => {
  const spans = document.querySelector(".waterfall").previousElementSibling.getBoundingClientRect();
  return [spans.top + scrollY - 8, document.querySelector(".readout").getBoundingClientRect().bottom + scrollY + 8];
}"""
"""From the heading of the spans to what is said below the first strip of tokens."""


def main() -> None:
    """Writes dataset.png and rollout.png into the folder."""
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as made, sync_playwright() as playwright:
        write_desk(Path(made))
        with viewing(Path("data"), "--tokenizer", ".", folder=Path(made)) as address:
            browser = launch(playwright)
            tab = Watched(browser, address, viewport={"width": 1180, "height": 900})
            tab.open().screenshot(path=folder / "dataset.png")
            wanted = spanmill.read_rollouts(Path(made) / "data").filter(num_calls=3, num_episodes=1, status="succeeded")
            page = tab.open(f"rollout?id={wanted.collect()['rollout_id'][-1]}")
            page.locator(".trained .l5, .trained .l6").first.hover()
            top, bottom = page.evaluate(SPANS_TO_TOKENS)
            part: FloatRect = {"x": 0, "y": top, "width": 1180, "height": bottom - top}
            page.screenshot(path=folder / "rollout.png", full_page=True, clip=part)
            browser.close()
    if tab.wrong:
        raise SystemExit("\n".join(tab.wrong))


if __name__ == "__main__":
    main()
