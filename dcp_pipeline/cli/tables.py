"""Tables and numbers as the commands show them."""

from __future__ import annotations

import time

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

__all__ = ["age", "cell", "moment", "show", "size", "table", "terminal_width"]


def table(*columns: str, right: tuple[str, ...] = ()) -> Table:
    """An empty table whose first column is never cut off; those in ``right`` hold numbers."""
    result = Table()
    for position, column in enumerate(columns):
        if column in right:
            result.add_column(column, justify="right", no_wrap=True)
        else:
            result.add_column(column, overflow="fold", no_wrap=position > 0)
    return result


def show(*parts: RenderableType) -> None:
    """Print to standard output; what a checkpoint says is never taken for markup."""
    console = Console(markup=False, highlight=False, emoji=False)
    for part in parts:
        console.print(part)


def terminal_width() -> int:
    """Columns of the terminal, 80 where there is none."""
    return Console().width


def cell(text: object, style: str = "") -> Text:
    """Text of a checkpoint, with everything that would steer a terminal made visible."""
    shown = "" if text is None else str(text)
    return Text("".join(c if c.isprintable() else repr(c)[1:-1] for c in shown), style=style)


def size(nbytes: int | None) -> str:
    """Bytes for people.

    >>> size(999), size(16_060_522_496), size(None)
    ('999 B', '16.1 GB', '')
    """
    if nbytes is None:
        return ""
    if nbytes < 1000:
        return f"{nbytes} B"
    units = ("kB", "MB", "GB", "TB", "PB")
    power = next((p for p in range(1, len(units)) if nbytes < 999.5 * 1000**p), len(units))
    return f"{nbytes / 1000**power:.3g} {units[power - 1]}"


def age(seconds: float) -> str:
    """A span of time for people.

    >>> age(12.3), age(7300), age(200_000)
    ('12 s', '2 h', '2 d')
    """
    for limit, length, unit in ((120, 1, "s"), (7200, 60, "min"), (172_800, 3600, "h")):
        if seconds < limit:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds / 86_400:.0f} d"


def moment(seconds: float) -> str:
    """A point in time, in the zone of this machine."""
    return time.strftime("%Y-%m-%d %H:%M:%S %Z", time.localtime(seconds))
