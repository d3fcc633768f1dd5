import json
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from browsing import DESKTOP, LOW_CONTRAST, PHONE, Watched, launch, viewing
from desk import Desk, make_tokenizer, rollout, write_desk
from playwright.sync_api import Browser, expect, sync_playwright

import spanmill
from spanmill.adapters import adapt
from spanmill.triplets.records import Rollout
from spanmill.triplets.writer import DatasetWriter

pytestmark = pytest.mark.browser

HOSTILE = (
    "<script>alert('x')</script>\"'><img src=x onerror=alert(1)><svg onload=alert(2)>{{7*7}}${alert(3)}\u202e\u0000"
)
ROLLOUT = "rollout?id=desk%2Fv0%2F000-5"


@pytest.fixture(name="desk", scope="module")
def desk_fixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a dataset of 136 rollouts and its tokenizer."""
    folder = tmp_path_factory.mktemp("desk")
    write_desk(folder, 136)
    return folder


@pytest.fixture(name="address", scope="module")
def address_fixture(desk: Path) -> Iterator[str]:
    """Where the dataset's pages are, with tokens as text."""
    with viewing(desk / "data", "--tokenizer", str(desk)) as address:
        yield address


@pytest.fixture(name="browser", scope="module")
def browser_fixture() -> Iterator[Browser]:
    """Chromium."""
    with sync_playwright() as playwright:
        browser = launch(playwright)
        yield browser
        browser.close()


@pytest.fixture(name="tab")
def tab_fixture(browser: Browser, address: str) -> Iterator[Watched]:
    """A tab at the dataset; nothing may have gone wrong in it at the end."""
    tab = Watched(browser, address)
    yield tab
    tab.context.close()
    assert [] == tab.wrong


def hostile(made: Rollout) -> Rollout:
    """A rollout whose every text is an attack, and as wide as it can be."""
    long = HOSTILE + "W" * 500
    calls = [
        replace(
            call,
            call_id=f"{number}{long}",
            rollout_id=long,
            parent_call_id=f"{number - 1}{long}" if number else None,
            agent=long,
            model=long,
            finish_reason=long,
            policy_version=long,
            messages='[{"role": "'
            + long.replace('"', '\\"').replace("\0", "\\u0000")
            + '", "content": "</pre><script>alert(4)</script>"}]',
        )
        for number, call in enumerate(made.triplets)
    ]
    turns = tuple(replace(turn, call_id=call.call_id) for turn, call in zip(made.episodes[0].turns, calls, strict=True))
    episodes = [replace(made.episodes[0], rollout_id=long, agent=long, model=long, turns=turns, group_id=long)]
    quarantine = [
        replace(one, rollout_id=long, detail=long, span='{"name": "</pre><script>alert(5)</script>"}')
        for one in made.quarantined
    ]
    metadata = made.metadata.replace("invoke_agent desk", "</title><script>alert(6)</script>" + "W" * 300)
    told: dict[str, Any] = {"group_id": long, "task_id": long, "flags": ("<b onclick=alert(7)>",), "metadata": metadata}
    return replace(made, rollout_id=long, triplets=calls, episodes=episodes, quarantined=quarantine, **told)


@pytest.mark.parametrize(
    "look",
    [
        {"color_scheme": "light", "viewport": DESKTOP},
        {"color_scheme": "dark", "viewport": PHONE, "is_mobile": True, "has_touch": True},
    ],
    ids=["light desktop", "dark phone"],
)
def test_every_page_is_reached_by_links_and_can_be_read(browser: Browser, address: str, look: dict[str, Any]) -> None:
    """Links lead from the first page to every other; text has the contrast of WCAG AA, nothing is too wide.

    No request goes elsewhere, and the console stays empty: nothing offends against the page's own policy.
    """
    tab = Watched(browser, address, **look)
    kinds: set[str] = set()
    poor: list[str] = []
    for path in tab.crawl(each=4):
        kinds.add(path.partition("?")[0])
        if path.startswith("row.json"):
            continue
        texts, low = tab.page.evaluate(LOW_CONTRAST)
        assert texts > 10
        poor += [f"{path}: {one}" for one in low]
        assert tab.width() <= look["viewport"]["width"], path
    tab.context.close()
    assert {"", "rollouts", "rollout", "episode", "call", "group", "quarantine", "row.json"} == kinds
    assert [] == poor
    assert [] == tab.wrong


def test_hostile_text_stays_text(browser: Browser, tmp_path: Path) -> None:
    """Markup in any column raises no dialog, loads nothing and breaks no page, not even its width on a phone."""
    desk = Desk(np.random.default_rng(1), make_tokenizer())
    broken, *made = (adapt(list(rollout(desk, number, 300))).rollouts[0] for number in range(133, 150))
    whole = next(one for one in made if len(one.triplets) > 1 and len(one.episodes[0].turns) == len(one.triplets))
    with DatasetWriter(tmp_path / "data") as writer:
        writer.write([hostile(replace(whole, quarantined=broken.quarantined))])
    with viewing(tmp_path / "data") as address:
        tab = Watched(browser, address, viewport=PHONE)
        pages: list[str] = []
        wide: list[str] = []
        for path in tab.crawl(each=3):
            pages.append(path.partition("?")[0])
            if pages[-1] != "row.json" and tab.width() > PHONE["width"]:
                wide.append(path[:20])
        tab.open("rollouts?q=" + HOSTILE.replace("\0", ""))
        tab.context.close()
    assert {"", "rollouts", "rollout", "episode", "call", "group", "quarantine", "row.json"} == set(pages)
    assert [] == wide
    assert [] == tab.wrong


def test_the_table_is_filtered_sorted_and_paged(tab: Watched) -> None:
    """A filter keeps its rows, a heading sorts by its column and back, Next goes on with filter and order kept."""
    page = tab.open("rollouts")
    ids = page.locator("tbody td:first-child")
    expect(ids).to_have_count(50)
    page.get_by_role("link", name="Next").first.click()
    expect(page.locator(".pager").first).to_contain_text("136 in all, page 2 of 3")
    page.get_by_label("Status").select_option("failed")
    page.get_by_role("button", name="Filter").click()
    expect(ids).to_have_count(8)
    page.get_by_label("Status").select_option("")
    page.get_by_label("Reward from").fill("0.5")
    page.get_by_role("button", name="Filter").click()
    page.get_by_role("link", name="Reward", exact=True).click()
    page.get_by_role("link", name="Reward ↓").click()
    expect(page.locator("th[aria-sort=ascending]")).to_have_text("Reward ↑")
    first = [float(one) for one in page.locator("tbody td:nth-child(3)").all_inner_texts()]
    page.get_by_role("link", name="Next").first.click()
    expect(page.locator(".pager").first).to_contain_text("page 2")
    then = [float(one) for one in page.locator("tbody td:nth-child(3)").all_inner_texts()]
    assert (50, sorted([*first, *then])) == (len(first), [*first, *then])
    assert first[0] >= 0.5


def test_the_keyboard_is_enough(tab: Watched) -> None:
    """`/` goes to the search, Enter searches, Tab and Enter open a rollout, arrows walk through tokens."""
    page = tab.open()
    page.keyboard.press("Tab")
    expect(page.locator(".skip")).to_be_focused()
    page.keyboard.press("/")
    expect(page.locator("#find")).to_be_focused()
    page.keyboard.type("desk/v0/000-5")
    page.keyboard.press("Enter")
    expect(page.locator("tbody tr")).to_have_count(1)
    page.locator("thead a").last.focus()
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    expect(page.locator("h1")).to_have_text("Rollout desk/v0/000-5")
    strip = page.locator(".strip").first
    strip.focus()
    page.keyboard.press("ArrowRight")
    expect(page.locator(".readout").first).to_have_text(
        re.compile(r'^"<\|im_start\|>" · turn 0 · position 0 · id \d+$')
    )
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowLeft")
    expect(page.locator(".readout").first).to_contain_text("position 9 ")
    page.mouse.wheel(0, 100)
    strip.locator(".trained i").first.hover()
    expect(page.locator(".readout").first).to_have_text(re.compile(r"position \d+ · id \d+ · logprob -\d\.\d{4} · p "))


def test_where_a_rollout_parted_is_said(tab: Watched, desk: Path) -> None:
    """A call that could have extended another leads there, and its row says at which token it did not."""
    rows = spanmill.read_triplets(desk / "data").filter(pl.col("metadata").str.contains('"divergence"')).collect()
    row = rows.row(0, named=True)
    parent = json.loads(row["metadata"])["divergence"]["parent_call_id"]
    page = tab.open(f"rollout?id={row['rollout_id']}")
    apart = page.locator("td", has_text="at token").first
    expect(apart).to_contain_text("new; ")
    apart.get_by_role("link").click()
    expect(page.locator("h1")).to_have_text(f"Call {parent}")


def test_what_is_copied_as_python_finds_the_row(tab: Watched) -> None:
    """The program in the clipboard, run as it is, prints the row of the page."""
    tab.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page = tab.open(ROLLOUT)
    page.get_by_text("As Python", exact=True).click()
    page.get_by_role("button", name="Copy as Python").click()
    expect(page.get_by_role("button", name="Copied")).to_be_visible()
    code = page.evaluate("navigator.clipboard.readText()")
    ran = subprocess.run(
        [
            sys.executable,
            "-c",
            code.replace("spanmill.read", "found = spanmill.read") + "\nprint(found['rollout_id'].to_list())",
        ],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "['desk/v0/000-5']\n" == ran.stdout


def test_new_rollouts_appear_while_they_are_written(browser: Browser, tmp_path: Path) -> None:
    """The table shows a rollout soon after its commit, with nothing pressed; a page that is being read only says so."""
    desk = Desk(np.random.default_rng(1), make_tokenizer())
    with DatasetWriter(tmp_path / "data") as writer:
        writer.write(adapt(list(rollout(desk, 0, 8))).rollouts)
        with viewing(tmp_path / "data") as address:
            table, reader = (Watched(browser, address) for _ in range(2))
            rows = table.open("rollouts").locator("tbody tr")
            reader.open("rollout?id=desk%2Fv0%2F000-0")
            expect(rows).to_have_count(1)
            writer.write(adapt(list(rollout(desk, 1, 8))).rollouts)
            expect(rows).to_have_count(2)
            expect(rows.first).to_contain_text("desk/v1/000-1")
            expect(reader.page.locator("#news")).to_have_text("The dataset has changed since this page was made.")
            for tab in (table, reader):
                tab.context.close()
    assert [] == [*table.wrong, *reader.wrong]


def test_a_token_opens_the_pages(browser: Browser, desk: Path, tmp_path: Path) -> None:
    """With a token file a browser without a token sees nothing, one with it as the password all."""
    (tmp_path / "tokens").write_text("s3cret\n")
    with viewing(desk / "data", "--token-file", str(tmp_path / "tokens")) as address:
        stranger = Watched(browser, address)
        answer = stranger.context.request.get(address)
        said = answer.text()
        friend = Watched(browser, address, http_credentials={"username": "me", "password": "s3cret"})
        friend.open()
        expect(friend.page.locator("h1")).to_have_text("Dataset")
        for tab in (stranger, friend):
            tab.context.close()
    assert (401, "A token is needed.\n") == (answer.status, said)
    assert [] == friend.wrong
