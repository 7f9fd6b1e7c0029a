"""Step directories, named as torchtitan names them: ``step-{n}``."""

from __future__ import annotations

import re
from typing import Final

__all__ = ["PINNED", "step_name", "step_of"]

PINNED: Final = ".pinned"
"""A file of this name in the directory of a step says that the step stays."""

_STEP = re.compile(r"step-(0|[1-9]\d*)")


def step_name(step: int) -> str:
    """The directory of a step.

    >>> step_name(100)
    'step-100'

    Raises:
        ValueError: ``step`` is negative, or no integer.
    """
    if type(step) is not int or step < 0:
        raise ValueError(f"a step is an integer from 0 on, found {step!r}")
    return f"step-{step}"


def step_of(name: str) -> int | None:
    """The step that a directory is of; ``None`` for any other name.

    >>> [step_of(name) for name in ("step-7", "step-7.backup", "foo-step-7", "step-007")]
    [7, None, None, None]
    """
    match = _STEP.fullmatch(name)
    return int(match[1]) if match else None
