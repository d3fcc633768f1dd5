import struct
from array import array
from base64 import b64encode
from collections import deque
from typing import Any

import numpy as np
import pytest

from spanmill.instrument import packing
from spanmill.instrument.packing import keeps_bytes, pack_ids, pack_logprobs, token_attributes

IDS = [1, 151643, 0, 2**31 - 1]
LOGPROBS = [-0.5, 0.0, -9999.0, -1.25]


class Tensor:
    """Like a torch tensor: no buffer, but `tolist`."""

    def __init__(self, values: Any) -> None:
        self.values = values

    def __len__(self) -> int:
        return len(self.values)

    def tolist(self) -> Any:
        """As plain numbers."""
        return self.values


def wire(data: bytes) -> bytes | str:
    """Packed bytes as this SDK can carry them."""
    return data if keeps_bytes() else b64encode(data).decode()


PACKED_IDS = wire(struct.pack("<4i", *IDS))
PACKED_LOGPROBS = wire(struct.pack("<4f", *LOGPROBS))


@pytest.mark.parametrize(
    "ids",
    [
        IDS,
        tuple(IDS),
        deque(IDS),
        dict.fromkeys(IDS).keys(),
        (i for i in IDS),
        array("i", IDS),
        array("q", IDS),
        np.array(IDS, np.int32),
        np.array(IDS, np.int64),
        np.array(IDS, np.uint32),
        np.array(IDS, ">i4"),
        np.repeat(np.array(IDS, np.int32), 2)[::2],
        memoryview(array("i", IDS)),
        [np.int64(i) for i in IDS],
        Tensor(IDS),
    ],
    ids=lambda v: type(v).__name__,
)
def test_ids_of_any_container_are_packed_alike(ids: Any) -> None:
    """Whatever holds the ids, they are little-endian int32, in order, and counted."""
    assert (PACKED_IDS, 4) == pack_ids(ids)


@pytest.mark.parametrize(
    "logprobs",
    [
        LOGPROBS,
        tuple(LOGPROBS),
        (p for p in LOGPROBS),
        array("f", LOGPROBS),
        array("d", LOGPROBS),
        np.array(LOGPROBS, np.float32),
        np.array(LOGPROBS, np.float64),
        Tensor(LOGPROBS),
    ],
    ids=lambda v: type(v).__name__,
)
def test_logprobs_of_any_container_are_packed_alike(logprobs: Any) -> None:
    """Whatever holds the logprobs, they are little-endian float32, in order, and counted."""
    assert (PACKED_LOGPROBS, 4) == pack_logprobs(logprobs)


def test_nothing_recorded_and_nothing_sampled_differ() -> None:
    """None is no attribute; an empty list is one with a count of 0."""
    assert (None, (wire(b""), 0)) == (pack_ids(None), pack_ids([]))


@pytest.mark.parametrize(
    "ids", ["123", b"\x01\x02", [1, None], [1.0], np.array([1.0]), np.array([[1, 2]]), {1: 2}, 7, [2**64]], ids=str
)
def test_what_is_no_list_of_ids_is_not_recorded(ids: Any) -> None:
    """Text, fractions, holes and tables are no ids and make no attribute."""
    assert {} == token_attributes(response_token_ids=ids)


@pytest.mark.parametrize("ids", [[True, 5], (5, False), [7, 65536, True], deque([True]), Tensor([2, True])])
def test_a_truth_value_is_no_id(ids: Any) -> None:
    """True is not token 1, nor is False token 0; ids that look so packed are."""
    assert pack_ids(ids) is None
    assert pack_logprobs([-0.5, True]) is None
    assert (wire(struct.pack("<4i", 256, 65536, 1, 0)), 4) == pack_ids([256, 65536, 1, 0])


def test_ids_beyond_int32_are_handed_on_unpacked() -> None:
    """An id that int32 cannot hold is sent as it is, so that the collector can say what is wrong with it."""
    assert ([5, 2**31], 2) == pack_ids([5, 2**31])


@pytest.mark.parametrize("logprobs", [[-0.5, None], "[-0.5]", [[-0.5]], np.zeros((1, 2))], ids=str)
def test_logprobs_with_a_hole_are_not_recorded(logprobs: Any) -> None:
    """A list of logprobs with a hole is no list: nothing is shifted or made up."""
    assert {} == token_attributes(logprobs=logprobs)


def test_token_attributes_carry_their_counts() -> None:
    """Ids stand beside their count, by which the collector sees a cut array."""
    assert {
        "spanmill.prompt.token_ids": PACKED_IDS,
        "spanmill.prompt.token_count": 4,
        "spanmill.response.token_ids": wire(struct.pack("<i", 9)),
        "spanmill.response.token_count": 1,
        "spanmill.response.logprobs": wire(struct.pack("<f", -0.5)),
    } == token_attributes(IDS, [9], [-0.5])


def test_an_sdk_without_bytes_gets_base64(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the SDK would lose bytes, the same bytes go as base64."""
    monkeypatch.setattr(packing, "keeps_bytes", lambda: False)
    assert (b64encode(struct.pack("<4i", *IDS)).decode(), 4) == pack_ids(IDS)
