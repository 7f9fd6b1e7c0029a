"""Exports killed at every change: what is there opens as the old one or the new one, never both."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.marks import slow


@pytest.mark.parametrize(
    ("layout", "before", "after"),
    [
        ("huggingface", 2, 2),
        slow("huggingface", 0, 1),
        slow("huggingface", 0, 4),
        slow("huggingface", 1, 1),
        slow("huggingface", 1, 4),
        slow("huggingface", 4, 1),
        slow("huggingface", 4, 2),
        slow("mega", 1, 1),
        slow("mega", 0, 1),
    ],
)
def test_an_export_killed_at_every_change(
    crash: Callable[..., Any], tmp_path: Path, layout: str, before: int, after: int
) -> None:
    found = crash("exports:kill_export", str(tmp_path), layout, before, after, False)
    assert found["problems"] == []
    assert found["points"] > 20 and len(found["seen"]) == 2
