"""Text of spans as it may stand on a page."""

from typing import Final

_DIRECTION: Final = {n: f"\\u{n:04x}" for n in (*range(0x202A, 0x202F), *range(0x2066, 0x206A), 0x200E, 0x200F, 0x061C)}


def visible(text: str) -> str:
    r"""Without changes of direction, by which a text can show in another order than it has: those as `\u202e`."""
    return text if text.isascii() else text.translate(_DIRECTION)
