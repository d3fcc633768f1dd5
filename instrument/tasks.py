"""The tasks of `spanmill run --tasks`: a file of JSON lines, and the words of a command that each of them fills in.

    {"id": "add-1", "input": "What is 1 + 1?", "answer": 2}

`input` is anything; `id` (default: the number of the line), `mode` and `resources_id` are the rollout's; any other
field is free. `{input}`, `{answer}` in a word of the command stand for the fields, as text or JSON; `{{input}}` stands
for `{input}` itself, and what the shell would fill in, `${HOME}`, stays as it is. All of it is checked before anything
starts.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple, cast

from spanmill.errors import ConfigError, InputError

OURS: Final = ("task_id", "rollout_id", "attempt")
"""What a command can ask for beside the fields of its task."""

MAX_WORD: Final = 2**17 - 1
"""The longest word, in bytes, that Linux hands to a program."""

MOST_SAID: Final = 3
"""How many bad lines are told of in words."""

_LABELS: Final = ("mode", "resources_id")
_WORD: Final = re.compile(r"\{\{(?P<kept>[A-Za-z_]\w*)\}\}|(?<!\$)\{(?P<name>[A-Za-z_]\w*)\}")


class Task(NamedTuple):
    """One line of the file."""

    id: str
    line: int
    fields: dict[str, Any]
    """All that the line says, `id` and the like included."""

    @property
    def input(self) -> Any:
        """Anything that JSON can say; None if the task has none."""
        return self.fields.get("input")

    @property
    def labels(self) -> dict[str, str]:
        """Mode and resources id, those that the task has."""
        return {name: self.fields[name] for name in _LABELS if self.fields.get(name) is not None}


def read_tasks(path: str) -> list[Task]:
    """The tasks of a file. Raises InputError if it cannot be read, has none, or has lines that are no tasks."""
    tasks: list[Task] = []
    seen: dict[str, int] = {}
    wrong: list[str] = []
    try:
        with open(path, encoding="utf-8-sig") as file:
            for number, line in enumerate(file, 1):
                if not line.strip():
                    continue
                try:
                    task = _task(line, number)
                    if (before := seen.setdefault(task.id, number)) != number:
                        raise ValueError(f"the id {task.id!r} is that of line {before} too")
                    tasks.append(task)
                except ValueError as error:
                    wrong.append(f"line {number}: {error}")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: the tasks cannot be read: {error}") from error
    _refuse(path, wrong)
    if not tasks:
        raise InputError(f"{path}: there is no task in it")
    return tasks


def _refuse(path: str, wrong: Sequence[str]) -> None:
    if wrong:
        more = f"; and {len(wrong) - MOST_SAID} more" if len(wrong) > MOST_SAID else ""
        raise InputError(f"{path}: {'; '.join(wrong[:MOST_SAID])}{more}; nothing was started")


def _no_number(text: str) -> float:
    raise ValueError(f"{text} is no JSON")


def _task(line: str, number: int) -> Task:
    try:
        found = json.loads(line, parse_constant=_no_number)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"expected a JSON object, found {line.strip()[:60]!r} ({error.msg})") from None
    if not isinstance(found, dict):
        raise ValueError(f"expected a JSON object, found {line.strip()[:60]!r}")
    fields = cast("dict[str, Any]", found)
    try:
        as_text(fields).encode()
    except UnicodeEncodeError:
        raise ValueError("a lone surrogate, which no text can hold") from None
    own = fields.get("id")
    if isinstance(own, int) and not isinstance(own, bool):
        own = str(own)
    for name, value in (("id", own), *((label, fields.get(label)) for label in _LABELS)):
        if value is not None and not (isinstance(value, str) and value and value.isprintable()):
            raise ValueError(f"{name}: expected a text that is not empty, found {value!r}")
    return Task(str(number) if own is None else str(own), number, fields)


# ------------------------------------------------------------------ the command


def as_text(value: Any) -> str:
    """A field as a command gets it: text as it is, anything else as JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def fill(command: Sequence[str], values: Mapping[str, Any]) -> list[str]:
    """The command with the values in their places. Raises KeyError for a name that has none.

    fill(["ask", "{input}", "${HOME}"], {"input": "hi"}) == ["ask", "hi", "${HOME}"]
    """

    def replace(found: re.Match[str]) -> str:
        kept = found["kept"]
        return f"{{{kept}}}" if kept else as_text(values[found["name"]])

    return [_WORD.sub(replace, word) for word in command]


def names_in(command: Sequence[str]) -> set[str]:
    """The names that a command asks for."""
    return {found["name"] for word in command for found in _WORD.finditer(word) if found["name"]}


def check_command(command: Sequence[str], tasks: Sequence[Task], path: str) -> None:
    """Fill in every task, to see that it can be done.

    Raises ConfigError for a name that no task has, InputError for tasks that lack one or fit into no command line.
    """
    names = names_in(command) - set(OURS)
    for name in sorted(names):
        if all(name not in task.fields for task in tasks):
            known = ", ".join(sorted({*OURS, *(n for task in tasks for n in task.fields)}))
            raise ConfigError(f"CMD: no task has {{{name}}}, only {known}; {{{{{name}}}}} stands for the text itself")
    _refuse(path, list(_misfits(command, tasks, names)))


def _misfits(command: Sequence[str], tasks: Sequence[Task], names: set[str]) -> Iterator[str]:
    for task in tasks:
        missing = sorted(names - task.fields.keys())
        if missing:
            yield f"line {task.line}: the command asks for {missing[0]}, which the task has not"
            continue
        for word in fill(command, {**task.fields, **dict.fromkeys(OURS, "")}):
            size = len(word.encode())
            if "\0" in word or size > MAX_WORD:
                why = "a NUL character" if "\0" in word else f"{size} bytes"
                yield f"line {task.line}: {why} cannot be a word of a command; leave {{input}} out and read stdin"
                break
