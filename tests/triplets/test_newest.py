import pytest
from hypothesis import given
from hypothesis import strategies as st

from spanmill.triplets import newest as module
from spanmill.triplets.newest import Newest
from spanmill.triplets.rewrite import Key

NAMES = [(name, attempt) for name in ("", "a", "b", "a 1", "\ud800") for attempt in (0, 1, 11)]
CHANGES = st.lists(st.tuples(st.sampled_from(NAMES), st.none() | st.tuples(st.integers(0, 9), st.integers(1, 9))))


def _place(key: Key) -> bytes:
    return NAMES.index(key).to_bytes(16, "big")


@pytest.mark.parametrize("few", [0, 3, 1 << 16])
@pytest.mark.parametrize("alike", [False, True], ids=["", "alike"])
def test_it_is_a_dict(few: int, alike: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is taken up and forgotten, what is found is what a dict holds, also of digests that begin alike."""
    monkeypatch.setattr(module, "_FEW", few)
    if alike:
        monkeypatch.setattr(module, "_digest", _place)

    @given(CHANGES)
    def check(changes: list[tuple[Key, tuple[int, int] | None]]) -> None:
        rows, expected = Newest(), dict[Key, tuple[int, int]]()
        for key, row in changes:
            if row is None:
                rows.remove([key])
                expected.pop(key, None)
            else:
                rows.update([(key, row)])
                expected[key] = row
            assert expected == rows.of(NAMES)
        assert {} == rows.of([])

    check()
