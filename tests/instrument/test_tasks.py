from pathlib import Path
from typing import Any

import pytest

from spanmill.errors import ConfigError, InputError
from spanmill.instrument.tasks import MAX_WORD, Task, check_command, fill, read_tasks

PLACES = {"input": "hi", "n": 3, "tags": ["a", "é"]}


def tasks_of(path: Path, text: str) -> list[Task]:
    """The tasks in a file with this text."""
    path.write_text(text, encoding="utf-8")
    return read_tasks(str(path))


def test_tasks_are_lines(tmp_path: Path) -> None:
    """Ids are texts, numbers as texts, or the number of the line; every field is kept; empty lines count as lines."""
    first = '{"id": "a", "input": "x\u2028y", "mode": "val", "resources_id": "w2", "extra": [1]}'
    text = "\ufeff" + first + '\r\n\n{"id": 7}\n{"input": {"q": 1}}'
    found = [(task.id, task.line, task.input, task.labels) for task in tasks_of(tmp_path / "t.jsonl", text)]
    labels = {"mode": "val", "resources_id": "w2"}
    assert [("a", 1, "x\u2028y", labels), ("7", 3, None, {}), ("4", 4, {"q": 1}, {})] == found


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"id": "a"}\n{"id"\n', "line 2: expected a JSON object, found '{\"id\"' (Expecting ':' delimiter)"),
        ('["a"]\n', "line 1: expected a JSON object, found '[\"a\"]'"),
        ('{"id": "a"}\n\n{"id": "a"}\n', "line 3: the id 'a' is that of line 1 too"),
        ('{"id": "2"}\n{}\n', "line 2: the id '2' is that of line 1 too"),
        ('{"id": ""}\n', "line 1: id: expected a text that is not empty, found ''"),
        ('{"id": true}\n', "line 1: id: expected a text that is not empty, found True"),
        ('{"id": "a\\u0000"}\n', "line 1: id: expected a text that is not empty, found 'a\\x00'"),
        ('{"mode": 5}\n', "line 1: mode: expected a text that is not empty, found 5"),
        ('{"input": NaN}\n', "line 1: NaN is no JSON"),
        ('{"input": "\\ud800"}\n', "line 1: a lone surrogate, which no text can hold"),
        ("[" * 100_000 + "\n", "line 1: nested too deeply"),
        ("1\n2\n3\n4\n5\n", "line 3: expected a JSON object, found '3'; and 2 more"),
    ],
)
def test_bad_lines_are_named(text: str, said: str, tmp_path: Path) -> None:
    """By their numbers, before anything starts; the first three in words."""
    with pytest.raises(InputError) as raised:
        tasks_of(tmp_path / "t.jsonl", text)
    assert f"{said}; nothing was started" in str(raised.value)
    assert str(raised.value).startswith(f"{tmp_path}/t.jsonl: line ")


@pytest.mark.parametrize(("content", "said"), [(b"\xff\n", "cannot be read"), (b"\n \n", "there is no task in it")])
def test_a_file_without_tasks(content: bytes, said: str, tmp_path: Path) -> None:
    """No text, or nothing in it: one line that names the file."""
    path = tmp_path / "t.jsonl"
    path.write_bytes(content)
    with pytest.raises(InputError, match=said):
        read_tasks(str(path))
    with pytest.raises(InputError, match="cannot be read"):
        read_tasks(str(tmp_path / "missing.jsonl"))


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("{input}", "hi"),
        ("--q={input}!{n}", "--q=hi!3"),
        ("{tags}", '["a","é"]'),
        ("{{input}}", "{input}"),
        ("${input} $HOME {} {0} { input } {in-put}", "${input} $HOME {} {0} { input } {in-put}"),
        ('{"a": {"b": 1}}', '{"a": {"b": 1}}'),
    ],
)
def test_what_a_command_is_filled_with(word: str, expected: str) -> None:
    """Names in braces alone: JSON, and what a shell fills in, stay as they are."""
    assert [expected] == fill([word], PLACES)


def test_a_filled_in_text_is_not_filled_in_again() -> None:
    """Braces in an input are text."""
    assert ["{n} 3"] == fill(["{input} {n}"], {"input": "{n}", "n": 3})


@pytest.mark.parametrize(
    ("text", "word", "error", "said"),
    [
        ('{"id": "a", "n": 1}', "{inptu}", ConfigError, "CMD: no task has {inptu}, only attempt, id, n, rollout_id"),
        ('{"n": 1}\n{"m": 1}', "{n}", InputError, "line 2: the command asks for n, which the task has not"),
        ('{"input": "a\\u0000b"}', "{input}", InputError, "line 1: a NUL character cannot be a word of a command"),
    ],
)
def test_a_command_that_cannot_be_filled_in(text: str, word: str, error: Any, said: str, tmp_path: Path) -> None:
    """Said before anything starts."""
    tasks = tasks_of(tmp_path / "t.jsonl", text)
    with pytest.raises(error) as raised:
        check_command(["echo", word], tasks, "t.jsonl")
    assert said in str(raised.value)


def test_an_input_that_is_too_long_for_a_word(tmp_path: Path) -> None:
    """What Linux would refuse for each rollout is refused once; stdin takes any length."""
    tasks = tasks_of(tmp_path / "t.jsonl", f'{{"input": "{"é" * (MAX_WORD // 2 + 1)}"}}')
    with pytest.raises(InputError, match=r"leave \{input\} out and read stdin"):
        check_command(["echo", "{input}"], tasks, "t.jsonl")
    check_command(["cat"], tasks, "t.jsonl")
