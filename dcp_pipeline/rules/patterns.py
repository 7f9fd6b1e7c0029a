"""Patterns of dotted keys with numbers and texts in them, which read the same both ways.

``layers.{i}.weight`` is every key of that form with a number at ``{i}``; ``{*name}`` is any text
that is not empty. ``{i+4}`` is a number that is 4 greater on this side than ``i`` is.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

__all__ = ["Bound", "Pattern"]

Bound = Mapping[str, str | int]
"""What stands at the places of a pattern, by name."""

_PLACE = re.compile(r"\{(\*?)([A-Za-z_]\w*)(?:([+-])(\d+))?\}")
_NUMBER = r"0|[1-9][0-9]{0,8}"


class Pattern:
    """One pattern.

    >>> Pattern("layers.{i}.wq.weight").match("layers.12.wq.weight")
    {'i': 12}
    >>> Pattern("model.{*rest}.q.{i+1}").format({"rest": "a.b", "i": 3})
    'model.a.b.q.4'

    Args:
        text: what is not in braces is taken as it stands.

    Attributes:
        places: names of its places.

    Raises:
        ValueError: braces that are no place, or a text that is shifted.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self._pieces: list[str | tuple[str, bool, int]] = []
        self.places: tuple[str, ...] = ()
        regex, end = "", 0
        for found in _PLACE.finditer(text):
            self._add_text(text[end : found.start()])
            is_text, name, sign, shift = found[1] == "*", found[2], found[3], int(found[4] or 0)
            if is_text and shift:
                raise ValueError(f"{text!r}: {found[0]} is a text, and nothing can be added to it")
            regex += re.escape(text[end : found.start()])
            # A place that stands twice is compared once both are known.
            regex += f"(?P<p{len(self._pieces)}>{'.+?' if is_text else _NUMBER})"
            self._pieces.append((name, is_text, -shift if sign == "-" else shift))
            self.places = tuple(dict.fromkeys((*self.places, name)))
            end = found.end()
        self._add_text(text[end:])
        self._regex = re.compile(regex + re.escape(text[end:]))

    def _add_text(self, text: str) -> None:
        if "{" in text or "}" in text:
            raise ValueError(
                f"{self.text!r}: a place is {{i}}, {{i+1}} or {{*name}}, found {text!r}"
            )
        self._pieces.append(text)

    def match(self, key: str) -> dict[str, str | int] | None:
        """What stands at the places of a key, ``None`` for a key of another form."""
        found = self._regex.fullmatch(key)
        if found is None:
            return None
        bound: dict[str, str | int] = {}
        for number, piece in enumerate(self._pieces):
            if isinstance(piece, str):
                continue
            name, is_text, shift = piece
            value = found[f"p{number}"] if is_text else int(found[f"p{number}"]) - shift
            if bound.setdefault(name, value) != value or (not is_text and int(value) < 0):
                return None
        return bound

    def format(self, bound: Bound) -> str:
        """The key with these values at its places."""
        parts = []
        for piece in self._pieces:
            if isinstance(piece, str):
                parts.append(piece)
            else:
                name, is_text, shift = piece
                parts.append(str(bound[name]) if is_text else str(int(bound[name]) + shift))
        return "".join(parts)
