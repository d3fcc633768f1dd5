"""Token ids and logprobs as packed attribute values: little-endian int32 and float32, as bytes or as base64 of them.

Lists, tuples, arrays and anything with the buffer protocol (numpy) or `tolist` (torch) are packed without a loop over
the tokens in Python.
"""

import struct
import sys
from array import array
from base64 import b64encode
from collections.abc import Collection, Iterable
from functools import cache
from typing import Any, Final

from opentelemetry.attributes import BoundedAttributes

from spanmill.instrument.reports import report
from spanmill.semconv import (
    PROMPT_TOKEN_COUNT,
    PROMPT_TOKEN_IDS,
    RESPONSE_LOGPROBS,
    RESPONSE_TOKEN_COUNT,
    RESPONSE_TOKEN_IDS,
)

Packed = bytes | str | list[int]
"""An attribute value: packed bytes, base64 of them, or a plain list of ids that int32 cannot hold."""

_ZERO: Final = struct.pack("<i", 0)
_ONE: Final = struct.pack("<i", 1)
NO_IDS: Final = ("e", "f", "d", "?")
"""Buffer formats of fractions and truth values."""


@cache
def keeps_bytes() -> bool:
    """Whether this OpenTelemetry SDK keeps `bytes` attributes as they are (1.45 and later; before, they are lost)."""
    return BoundedAttributes(attributes={"probe": b"x"}).get("probe") == b"x"


def _packed(code: str, values: Any) -> tuple[bytes | str, int]:
    """`values` as int32 ("i") or float32 ("f"), and how many. Raises TypeError, ValueError or OverflowError."""
    if isinstance(values, (str, bytes, bytearray, dict)):
        raise TypeError("not a list of numbers")
    try:
        view = memoryview(values)
    except TypeError:
        numbers = values.tolist() if hasattr(values, "tolist") else values
    else:
        if view.ndim != 1:
            raise ValueError(f"expected one dimension, found {view.ndim}")
        if code == "i" and view.format in NO_IDS:
            raise TypeError(f"numbers of format {view.format} are no token ids")
        if view.format == code and view.c_contiguous and sys.byteorder == "little":
            return _wire(view.tobytes()), len(view)
        numbers = values.tolist() if hasattr(values, "tolist") else view.tolist()
    return _wire(_pack_numbers(code, numbers)), len(numbers)


def _pack_numbers(code: str, numbers: "Collection[Any]") -> bytes:
    try:
        data = struct.pack(f"<{len(numbers)}{code}", *numbers)  # in a quarter of an array's time
    except (struct.error, OverflowError):
        packed = array(code, numbers)  # says what is wrong; a logprob that is too large for a float32 is infinite
        if sys.byteorder == "big":
            packed.byteswap()
        data = packed.tobytes()
    # A truth value is packed as 0 or 1; where neither is, none was.
    if (code == "f" or _ZERO in data or _ONE in data) and bool in set(map(type, numbers)):
        raise TypeError("a truth value among the numbers")
    return data


def _wire(data: bytes) -> bytes | str:
    return data if keeps_bytes() else b64encode(data).decode("ascii")


def pack_ids(ids: Iterable[int] | None, what: str = "token ids") -> tuple[Packed, int] | None:
    """(packed token ids, how many), from anything that holds whole numbers; None if there are none to record.

    Ids outside int32 are handed on as a plain list, so that whoever reads them can say what is wrong. What holds
    something else than whole numbers is reported and not recorded.
    """
    if ids is None:
        return None
    values: Any = ids
    try:
        values = ids if hasattr(ids, "__len__") else list(ids)
        return _packed("i", values)
    except OverflowError:
        wide = [int(i) for i in values]
        if all(-(2**63) <= i < 2**63 for i in wide):
            return wide, len(wide)
        report(what, f"{what}: a number that 64 bits cannot hold; they are not recorded")
        return None
    except (TypeError, ValueError) as error:
        report(what, f"{what}: expected whole numbers, found {type(ids).__name__} ({error}); they are not recorded")
        return None


def pack_logprobs(logprobs: Iterable[float] | None) -> tuple[bytes | str, int] | None:
    """(packed logprobs, how many); None if there are none, or if one is missing: a list with a hole is not a list."""
    if logprobs is None:
        return None
    try:
        return _packed("f", logprobs if hasattr(logprobs, "__len__") else list(logprobs))
    except (TypeError, ValueError, OverflowError) as error:
        report(
            "logprobs",
            f"logprobs: expected numbers without a gap, found {type(logprobs).__name__} ({error}); not recorded",
        )
        return None


def token_attributes(
    prompt_token_ids: Iterable[int] | None = None,
    response_token_ids: Iterable[int] | None = None,
    logprobs: Iterable[float] | None = None,
) -> dict[str, Packed | int]:
    """Attributes of an LLM call span for its (P,) prompt ids, (R,) response ids and (R,) logprobs, and counts."""
    found: dict[str, Packed | int] = {}
    if (prompt := pack_ids(prompt_token_ids, "prompt_token_ids")) is not None:
        found[PROMPT_TOKEN_IDS], found[PROMPT_TOKEN_COUNT] = prompt
    if (response := pack_ids(response_token_ids, "response_token_ids")) is not None:
        found[RESPONSE_TOKEN_IDS], found[RESPONSE_TOKEN_COUNT] = response
    if (sampled := pack_logprobs(logprobs)) is not None:
        found[RESPONSE_LOGPROBS] = sampled[0]
    return found
