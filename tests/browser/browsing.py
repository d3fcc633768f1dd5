"""A real Chromium at the pages of a real `spanmill view`, and everything that must not happen in it."""

import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final
from urllib.parse import urldefrag, urlsplit

from playwright.sync_api import Browser, Page, Playwright, ViewportSize

SPANMILL: Final = Path(sys.executable).with_name("spanmill")
PHONE: Final[ViewportSize] = {"width": 390, "height": 844}
DESKTOP: Final[ViewportSize] = {"width": 1280, "height": 900}


def chromium_path() -> str:
    """The browser's program; tests/browser/get.sh installs one."""
    named = os.environ.get("SPANMILL_CHROMIUM", "")
    found = named or next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), "")
    if not found:
        raise FileNotFoundError("no Chromium: run tests/browser/get.sh, or set SPANMILL_CHROMIUM")
    return found


def launch(playwright: Playwright) -> Browser:
    """A headless Chromium. Root has no sandbox to run it in."""
    arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
    return playwright.chromium.launch(executable_path=chromium_path(), args=arguments)


@contextmanager
def viewing(dataset: Path, *options: str, folder: Path | None = None) -> Generator[str]:
    """The address, ending in a slash, of `spanmill view` of a dataset, run in a folder."""
    command = [str(SPANMILL), "view", str(dataset), "--port", "0", *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=folder)
    try:
        assert process.stdout is not None
        yield process.stdout.readline().split()[-1]
    finally:
        process.terminate()
        process.communicate()
    assert 0 == process.returncode


class Watched:
    """A tab, with what went wrong in it."""

    def __init__(self, browser: Browser, base: str, **context: Any) -> None:
        self.base = base
        given: dict[str, Any] = {"viewport": DESKTOP, **context}
        self.context = browser.new_context(**given)
        self.context.set_default_timeout(20_000)
        self.page: Page = self.context.new_page()
        self.wrong: list[str] = []
        self.page.on("console", lambda said: self.wrong.append(f"console: {said.text}"))
        self.page.on("pageerror", lambda error: self.wrong.append(f"error: {error}"))
        self.page.on("dialog", self._dialog)
        self.page.on("request", self._request)

    def _dialog(self, dialog: Any) -> None:
        self.wrong.append(f"dialog: {dialog.message}")
        dialog.dismiss()

    def _request(self, request: Any) -> None:
        if not request.url.startswith((self.base, "data:")):
            self.wrong.append(f"request to {request.url}")

    def open(self, path: str = "") -> Page:
        """Go to a page by its address below the base."""
        answer = self.page.goto(self.base + path)
        assert answer is not None
        if not answer.ok:
            self.wrong.append(f"{answer.status} of {self.page.url}")
        return self.page

    def crawl(self, each: int) -> Iterator[str]:
        """Clicks through the site from its first page by links: the path of each page, at most `each` of a kind."""
        waiting, seen, kinds = [""], {""}, Counter[str]()
        while waiting:
            path = waiting.pop(0)
            kind = urlsplit(path).path
            if kinds[kind] == each:
                continue
            kinds[kind] += 1
            if kind == "row.json":
                answer = self.context.request.get(self.base + path)
                if not isinstance(answer.json(), dict):
                    self.wrong.append(f"no row: {path}")
                yield path
                continue
            page = self.open(path)
            yield path
            links: list[str] = page.locator("a[href]").evaluate_all("links => links.map(link => link.href)")
            for link in links:
                found = urldefrag(link)[0].removeprefix(self.base)
                if found not in seen:
                    seen.add(found)
                    waiting.append(found)

    def width(self) -> int:
        """Of the page's content, in pixels."""
        return self.page.evaluate("document.documentElement.scrollWidth")


LOW_CONTRAST: Final = """() => {
  const parse = (text) => { const n = text.match(/[\\d.]+/g).map(Number); return n.length < 4 ? [...n, 1] : n; };
  const over = (top, under) => [0, 1, 2].map((i) => top[i] * top[3] + under[i] * (1 - top[3])).concat(1);
  const light = ([r, g, b]) => [r, g, b].map((v) => v / 255)
    .map((v) => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const behind = (element) => {
    const layers = [];
    for (let at = element; at; at = at.parentElement) layers.push(parse(getComputedStyle(at).backgroundColor));
    return layers.reverse().reduce((under, top) => over(top, under), [255, 255, 255, 1]);
  };
  const found = new Map();
  const judge = (element, colour, style, words) => {
    const back = behind(element), ink = over(parse(colour), back);
    const [high, low] = [light(ink), light(back)].sort((a, b) => b - a);
    const size = parseFloat(style.fontSize);
    const least = size >= 24 || (size >= 18.66 && style.fontWeight >= 700) ? 3 : 4.5;
    const ratio = (high + 0.05) / (low + 0.05);
    const where = `${element.tagName}.${element.getAttribute("class")}`;
    if (ratio < least) found.set(`${where} ${ratio.toFixed(2)} < ${least}`, words);
  };
  document.querySelectorAll("details").forEach((one) => { one.open = true; });
  const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  let count = 0;
  while (texts.nextNode()) {
    const words = texts.currentNode.textContent.trim(), element = texts.currentNode.parentElement;
    if (!words || element.closest("title, option, .hidden") || !element.getClientRects().length) continue;
    const style = getComputedStyle(element);
    judge(element, element.closest("svg") ? style.fill : style.color, style, words.slice(0, 40));
    count += 1;
  }
  for (const field of document.querySelectorAll("input, select")) {
    judge(field, getComputedStyle(field).color, getComputedStyle(field), "what is typed");
    const hint = getComputedStyle(field, "::placeholder");
    if (field.placeholder) judge(field, hint.color, hint, field.placeholder);
  }
  return [count, [...found].map(([where, words]) => `${where}: ${words}`)];
}"""
"""How many texts a page has, and those whose contrast is below WCAG 2's AA."""
