import json
from pathlib import Path

import pytest

from spanmill.errors import InputError
from spanmill.instrument.claims import opened


def test_a_run_goes_on_where_it_was(tmp_path: Path) -> None:
    """The run's id, the attempts made and what is done are in the file, whenever its process was killed."""
    path = str(tmp_path / "claims")
    with opened(path, "run", is_given=False) as first:
        times = [first.claim("a"), first.claim("b"), first.claim("b")]
        first.end("a", status="succeeded", exit_code=0, timed_out=False, done=True)
        first.end("b", status="failed", exit_code=3, timed_out=False, done=False)
    with open(path, "a") as file:
        file.write('{"rollout_id": "a", "att')  # cut
    with opened(path, "another", is_given=False) as again:
        assert ("run", True, False) == (again.run, again.is_done("a"), again.is_done("b"))
        third = again.claim("b")
    assert (times[2], 3) == (third[:2], len(third))
    with opened(path, "run", is_given=True) as last:
        assert 4 == len(last.claim("b"))
    lines = [json.loads(line) for line in Path(path).read_text().splitlines()]
    assert [0, 0, 1, 0, 1, 2, 3] == [line["attempt"] for line in lines[1:]]


def test_without_a_file_nothing_is_kept() -> None:
    """Each run is new."""
    with opened(None, "run", is_given=False) as claims:
        claims.claim("a")
        claims.end("a", status="succeeded", exit_code=0, timed_out=False, done=True)
        assert claims.is_done("a")


def test_a_file_of_another_run_is_refused(tmp_path: Path) -> None:
    """Else its rollouts would be taken for those of this one."""
    path = str(tmp_path / "claims")
    with opened(path, "one", is_given=True):
        pass
    with pytest.raises(InputError, match="it is of the run 'one', not of 'two'"), opened(path, "two", is_given=True):
        pass


def test_two_runs_at_once_cannot_share_a_file(tmp_path: Path) -> None:
    """They would make the same attempts."""
    path = str(tmp_path / "claims")
    used = pytest.raises(InputError, match="another spanmill run uses it")
    with opened(path, "one", is_given=False), used, opened(path, "one", is_given=False):
        pass


@pytest.mark.parametrize("line", ["text", "[]", "{}", '{"rollout_id": "a"}'])
def test_a_file_that_is_something_else_is_left_as_it_is(line: str, tmp_path: Path) -> None:
    """Named with the line, and not written to."""
    path = tmp_path / "claims"
    for content, number in ((f"{line}\n", 1), (f'{{"run": "r"}}\n{line}\n', 2)):
        path.write_text(content)
        refused = pytest.raises(InputError, match=f"claims:{number}: expected a line that spanmill run wrote")
        with refused, opened(str(path), "run", is_given=False):
            pass
        assert content == path.read_text()
