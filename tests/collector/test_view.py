import json
import re
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow.parquet as pq
import pytest
from starlette.testclient import TestClient

from spanmill.collector.view.app import view_app
from spanmill.collector.view.data import PAGE_ROWS, histogram
from spanmill.triplets.records import Episode, PolicyRun, Quarantined, RewardSeen, Rollout, Triplet, Turn
from spanmill.triplets.writer import DatasetWriter

HOSTILE = "<script>alert('x')</script>\"onload=alert(1)&{{7*7}}"
T0 = int(datetime(2026, 5, 1, 12, tzinfo=UTC).timestamp() * 1e6)


def rollout(
    name: str = "r/1", number: int = 0, *, reward: float | None = 1.0, context: int = 4, **more: Any
) -> Rollout:
    """A rollout of two calls, the second extending the first, one Episode; `context` tokens stand before the first."""
    first, second = f"call-{number}-a", f"call-{number}-b"
    ids = np.arange(context + 7, dtype=np.int32) + 100
    mask = np.zeros(len(ids), np.int8)
    mask[[context, context + 1, context + 5, context + 6]] = 1
    logprobs = np.where(mask, np.float32(-0.5), np.float32(0)).astype(np.float32)
    text = json.dumps([{"role": "user", "content": "What is six times seven?"}])
    triplets = [
        Triplet(
            name,
            0,
            turn,
            0,
            call_id,
            f"{number + 1:032x}",
            f"{2 * number + turn + 1:016x}",
            "engine",
            T0 + number * 10**6 + turn * 1000,
            T0 + number * 10**6 + turn * 1000 + 900,
            "spanmill",
            True,
            agent="solver",
            prompt_token_ids=ids[:end],
            response_token_ids=ids[end : end + 2],
            response_logprobs=logprobs[end : end + 2],
            parent_call_id=first if turn else None,
            policy_version="7",
            policy_versions=(PolicyRun("7", 0, 2),),
            messages=text,
            response=json.dumps({"role": "assistant", "content": "42"}),
        )
        for turn, (call_id, end) in enumerate(((first, context), (second, context + 5)))
    ]
    turns = (Turn(first, context, context + 2, True), Turn(second, context + 5, context + 7, True))
    episode = Episode(
        name,
        0,
        0,
        ids,
        mask,
        context,
        turns,
        (None, 0.25),
        False,
        logprobs=logprobs,
        num_turns=2,
        reward=reward,
        policy_versions=(PolicyRun("7", context, 2), PolicyRun("7", context + 5, 2)),
        rollout_tokens_trained=4,
        messages=text,
    )
    fields: dict[str, Any] = {"group_id": "g", "group_size": 3, "num_calls": 2, "num_triplets": 2, "num_episodes": 1}
    fields |= {"tokens_captured": 4, "tokens_trained": 4, "triplets": triplets, "episodes": [episode], **more}
    start = T0 + number * 10**6
    return Rollout(name, 0, "span", "succeeded", "end", start, start + 5000, reward=reward, **fields)


@pytest.fixture(name="dataset")
def dataset_fixture(tmp_path: Path) -> Path:
    """A dataset of three rollouts: two of one group, one alone and without a reward."""
    with DatasetWriter(tmp_path / "data") as writer:
        writer.write([rollout("r/1", 0), rollout("r/2", 1, reward=0.0), rollout("s", 2, reward=None, group_id=None)])
    return tmp_path / "data"


@pytest.fixture(name="browse")
def browse_fixture(dataset: Path) -> Iterator[Callable[..., Any]]:
    """Get a page of the dataset."""
    with client_of(dataset) as client:

        def get(path: str, **query: str) -> Any:
            return client.get(path, params=query)

        yield get


def client_of(dataset: Path) -> TestClient:
    """A browser at the pages of a dataset."""
    return TestClient(view_app(dataset), "http://127.0.0.1:8080")


def words(page: Any) -> str:
    """What of a page can be read."""
    body = re.sub(r"(?s)<(script|title)\b.*?</\1>", "", page.text)
    return " ".join(re.sub(r"<[^>]*>", " ", body).split())


def test_the_first_page_says_what_became_of_everything(browse: Callable[..., Any]) -> None:
    """Counts, mean reward, token accounting and plots of the dataset."""
    page = browse("/")
    said = words(page)
    assert 200 == page.status_code
    for expected in ("3 rollouts", "0.5 mean reward", "6 calls", "12 tokens sampled", "1 without a reward"):
        assert expected in said
    assert "Every sampled token is accounted for." in said
    assert 5 == page.text.count('class="pygal-chart"')


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ({}, ["s", "r/2", "r/1"]),
        ({"sort": "rollout", "order": "asc"}, ["r/1", "r/2", "s"]),
        ({"sort": "reward"}, ["r/1", "r/2", "s"]),
        ({"q": "r/"}, ["r/2", "r/1"]),
        ({"group": "g", "least": "0.5"}, ["r/1"]),
        ({"agent": "solver", "version": "7", "most": "0.5"}, ["r/2"]),
        ({"version": "8"}, []),
        ({"status": "failed"}, []),
        ({"flag": "orphan"}, []),
    ],
)
def test_rollouts_are_sorted_and_filtered(
    browse: Callable[..., Any], query: dict[str, str], expected: list[str]
) -> None:
    """The table holds what the address asks for, in its order; rollouts without a reward come last."""
    page = browse("/rollouts", **query)
    found = re.findall(r'href="/rollout\?[^"]*">([^<]*)</a>', page.text)
    assert (200, expected) == (page.status_code, found)


def test_the_table_has_pages(tmp_path: Path) -> None:
    """One page holds PAGE_ROWS rollouts, and links to the next keep the filter."""
    with DatasetWriter(tmp_path) as writer:
        writer.write([rollout(f"r{n:03}", n) for n in range(PAGE_ROWS + 2)])
    with client_of(tmp_path) as client:
        first = client.get("/rollouts", params={"q": "r", "sort": "rollout", "order": "asc"})
        following = re.findall(r'rel="next" href="([^"]*)"', first.text)[0].replace("&amp;", "&")
        second = client.get(following)
    found = re.findall(r'href="/rollout\?[^"]*">([^<]*)</a>', second.text)
    assert [f"r{PAGE_ROWS:03}", f"r{PAGE_ROWS + 1:03}"] == found


def test_a_rollout_is_shown_token_by_token(browse: Callable[..., Any]) -> None:
    """Each token of an Episode stands there with position, id and logprob, in what it is: context or trained."""
    page = browse("/rollout", id="r/1", attempt="0")
    tokens = re.findall(r'<i class="(\w+)" title="position (\d+) · id (\d+)([^"]*)">', page.text)
    shown = [(int(at), int(token), kind, "logprob -0.5000" in more) for kind, at, token, more in tokens]
    sampled = {4, 5, 9, 10}
    expected = [(n, 100 + n, "l2" if n in sampled else "plain", n in sampled) for n in range(11)]
    assert expected == shown
    assert "4 tokens were sampled: 4 trained, 0 masked, 0 superseded, 0 quarantined." in words(page)


def test_the_same_row_as_json(browse: Callable[..., Any]) -> None:
    """A stored row comes as it is stored."""
    row = browse("/row.json", id="r/1", attempt="0", table="episodes").json()
    assert ([100 + n for n in range(11)], 1.0, [None, 0.25]) == (row["input_ids"], row["reward"], row["step_rewards"])


def test_long_contexts_are_folded_and_open_in_windows(tmp_path: Path) -> None:
    """A context of a million tokens is some tokens at both ends, and a link to those between."""
    with DatasetWriter(tmp_path) as writer:
        writer.write([rollout("big", context=1_000_000)])
    with client_of(tmp_path) as client:
        page = client.get("/rollout", params={"id": "big"})
        assert "999,952 more" in page.text
        assert 2 * 24 + 7 == page.text.count('title="position')
        last = client.get("/episode", params={"id": "big", "episode": "0", "from": "1000000"})
        assert [str(n) for n in range(1_000_000, 1_000_007)] == re.findall(r"position (\d+)", last.text)


def test_a_group_says_who_is_missing(browse: Callable[..., Any]) -> None:
    """The rollouts of a group side by side, their spread, and how many of its size are not there."""
    said = words(browse("/group", id="g"))
    assert "2 rollouts of 3, 2 trainable with a reward. 1 missing." in said
    assert "Mean reward 0.5 Standard deviation 0.5 Smallest 0 Largest 1" in said


def test_values_of_spans_are_escaped(tmp_path: Path) -> None:
    """Whatever a span says is text on every page: no tag, no attribute, no template and no script of its own."""
    name = f"{HOSTILE}/‮gnp"
    text = json.dumps([{"role": HOSTILE, "content": [{"type": "text", "text": HOSTILE}], "tool_call_id": HOSTILE}])
    answer = {"role": "assistant", "tool_calls": [{"function": {"name": HOSTILE, "arguments": HOSTILE}}]}
    span = {"trace_id": "0" * 31 + "1", "span_id": "0" * 16, "name": HOSTILE, "kind": HOSTILE, "start_us": T0}
    bad = rollout(name, group_id=HOSTILE, task_id=HOSTILE, mode=HOSTILE, flags=(HOSTILE,))
    bad.metadata = json.dumps({"spans": [span], HOSTILE: HOSTILE})
    bad.rewards = (RewardSeen(HOSTILE, 1.0, HOSTILE, HOSTILE),)
    bad.quarantined = [Quarantined(HOSTILE, HOSTILE, "", "", HOSTILE, None, name, 0)]
    for triplet in bad.triplets:
        triplet.messages, triplet.response, triplet.tools = text, json.dumps(answer), json.dumps([HOSTILE])
        triplet.agent = triplet.model = triplet.policy_version = HOSTILE
        triplet.flags = (HOSTILE,)
    bad.triplets[0].call_id = HOSTILE
    bad.episodes[0].messages, bad.episodes[0].agent, bad.episodes[0].flags = text, HOSTILE, (HOSTILE,)
    with DatasetWriter(tmp_path) as writer:
        writer.write([bad])
    key = {"id": name, "attempt": "0"}
    addresses: list[tuple[str, dict[str, str]]] = [
        ("/", {}),
        ("/rollouts", {"q": HOSTILE, "agent": HOSTILE}),
        ("/rollout", key),
        ("/episode", {**key, "episode": "0"}),
        ("/call", {**key, "call": HOSTILE}),
        ("/group", {"id": HOSTILE}),
        ("/quarantine", {"reason": HOSTILE}),
        ("/rollout", {"id": HOSTILE}),
        ("/rollouts", {"sort": HOSTILE}),
    ]
    with client_of(tmp_path) as client:
        for path, query in addresses:
            page = client.get(path, params=query)
            assert escape("<script>alert(") in page.text, path
            assert ["/static/view.js"] == re.findall(r"<script[^>]*src=\"([^\"]*)\"[^>]*></script>", page.text)
            assert 1 == page.text.count("<script"), path
            assert not re.search(r"<[^>]*\sonload=", page.text), path
            assert "‮" not in page.text, path
            assert "default-src 'none'" in page.headers["content-security-policy"]


@pytest.mark.parametrize(
    ("path", "query", "status", "said"),
    [
        ("/rollout", {"id": "nobody"}, 404, "There is no rollout nobody."),
        ("/rollout", {}, 404, "There is no rollout ."),
        (
            "/rollout",
            {"id": "r/1", "attempt": "3"},
            404,
            "There is no rollout r/1 with attempt 3; there are attempts 0.",
        ),
        ("/episode", {"id": "r/1", "episode": "9"}, 404, "Rollout r/1 has no Episode 9; it has 1."),
        ("/call", {"id": "r/1", "call": "x"}, 404, "Rollout r/1 has no call x."),
        ("/group", {"id": "x"}, 404, "There is no group x."),
        ("/rollouts", {"page": "0"}, 400, "page is &#39;0&#39;: expected a whole number from 1."),
        ("/rollouts", {"least": "much"}, 400, "least is &#39;much&#39;: expected a number."),
        ("/rollouts", {"sort": "x"}, 400, "sort is &#39;x&#39;: expected one of started, rollout"),
    ],
)
def test_what_is_not_there_is_said(
    browse: Callable[..., Any], path: str, query: dict[str, str], status: int, said: str
) -> None:
    """An address that names nothing, or means nothing, is answered in a sentence."""
    page = browse(path, **query)
    assert status == page.status_code
    assert said in page.text


def test_a_dataset_that_is_not_there_yet(tmp_path: Path) -> None:
    """Before the first row, and for a folder that is none, every page says so."""
    with client_of(tmp_path / "absent") as client:
        page = client.get("/rollouts")
        assert (503, True) == (page.status_code, "is no dataset" in page.text)
    with DatasetWriter(tmp_path / "empty"), client_of(tmp_path / "empty") as client:
        assert (200, True) == ((page := client.get("/")).status_code, "There is no rollout yet." in page.text)
        assert 200 == client.get("/rollouts").status_code


def test_rows_of_another_shape_are_said_to_be(dataset: Path) -> None:
    """A column that is not there makes a page that says so, not a traceback."""
    (file,) = (dataset / "rollouts").glob("*.parquet")
    table = pq.ParquetFile(file).read()
    pq.write_table(table.drop_columns(["status"]), file)
    with client_of(dataset) as client:
        page = client.get("/rollouts")
    assert (503, True) == (page.status_code, "The dataset cannot be read" in page.text)


def test_new_rows_appear(dataset: Path) -> None:
    """The stamp changes with a commit, and the pages show what was committed."""
    with client_of(dataset) as client:
        before = client.get("/stamp").text
        assert "3 rollouts" in words(client.get("/"))
        with DatasetWriter(dataset) as writer:
            writer.write([rollout("new", 5)])
        assert before != client.get("/stamp").text
        assert "4 rollouts" in words(client.get("/"))


def test_only_local_names_are_answered(dataset: Path) -> None:
    """A web page whose name was pointed at this machine gets nothing; numbers and localhost are served."""
    with client_of(dataset) as client:
        hosts = ("127.0.0.1:8080", "localhost", "[::1]:8080", "evil.example", "evil.example:8080", "")
        assert [200, 200, 200, 421, 421, 421] == [client.get("/", headers={"host": h}).status_code for h in hosts]


def test_a_histogram_has_all_values_in_equal_bins() -> None:
    """Whole numbers get bins of whole width, equal values one bin, and what is no finite number is left out."""
    assert [(0.0, 1.0, 1), (1.0, 2.0, 0), (2.0, 3.0, 2)] == histogram(pl.Series([0, 2, 2, None]))
    assert [(0.5, 0.5, 2)] == histogram(pl.Series([0.5, 0.5, float("nan"), None]))
    found = histogram(pl.Series([0.0, 0.1, 1.0]))
    assert (20, 3, 1) == (len(found), sum(n for _, _, n in found), found[-1][2])
    assert [] == histogram(pl.Series([], dtype=pl.Float64))
