"""What was found, in the message of an error, when a stranger has chosen it.

A tuple of two tuples of two tuples and so on is a few bytes in a pickle and endless as text.
"""

from __future__ import annotations

from typing import Final

__all__ = ["shown"]

_DEEPEST: Final = 3
_MOST_PARTS: Final = 4
_MOST_BITS: Final = 512


def shown(value: object, most: int = 80) -> str:
    """The beginning of ``repr(value)``, made without looking at the rest of it.

    Of numbers, text, tuples, lists and dicts; of anything else the type.

    Args:
        most: characters.

    Example:
        >>> shown({"a": [1, 2.5, "x" * 100, None, 5]}, 60)
        "{'a': [1, 2.5, 'xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx"
    """
    return _text(value, most, 0)[:most]


def _text(value: object, most: int, depth: int) -> str:
    if isinstance(value, (str, bytes, bytearray)):
        return repr(value[:most])
    if isinstance(value, int) and value.bit_length() > _MOST_BITS:
        return f"an int of {value.bit_length()} bits"
    if value is None or isinstance(value, (int, float, complex)):
        return repr(value)
    if not isinstance(value, (tuple, list, dict)) or depth == _DEEPEST:
        return f"a {type(value).__name__}"
    is_dict = isinstance(value, dict)
    parts: list[str] = []
    for part in value:
        if len(parts) == _MOST_PARTS:
            parts.append("...")
            break
        text = _text(part, most, depth + 1)
        parts.append(f"{text}: {_text(value[part], most, depth + 1)}" if is_dict else text)
    inside = ", ".join(parts)
    if is_dict:
        return f"{{{inside}}}"
    if isinstance(value, list):
        return f"[{inside}]"
    return f"({inside},)" if len(value) == 1 else f"({inside})"
