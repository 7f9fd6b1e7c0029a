"""Step directories, named as torchtitan names them: ``step-{n}``."""

from __future__ import annotations

import re
from collections.abc import Collection

__all__ = ["kept_steps", "step_name", "step_of"]

_STEP = re.compile(r"step-(0|[1-9]\d*)")


def step_name(step: int) -> str:
    """The directory of a step.

    >>> step_name(100)
    'step-100'
    """
    if step < 0:
        raise ValueError(f"a step is not negative: {step}")
    return f"step-{step}"


def step_of(name: str) -> int | None:
    """The step that a directory is of; ``None`` for any other name.

    >>> [step_of(name) for name in ("step-7", "step-7.backup", "foo-step-7", "step-007")]
    [7, None, None, None]
    """
    match = _STEP.fullmatch(name)
    return int(match[1]) if match else None


def kept_steps(
    steps: Collection[int], keep_last: int | None = None, keep_every: int | None = None
) -> set[int]:
    """Which of the committed ``steps`` stay: the last ``keep_last`` and every ``keep_every``-th.

    >>> sorted(kept_steps(range(10, 260, 10), keep_last=2, keep_every=100))
    [100, 200, 240, 250]
    """
    if keep_last is None:
        return set(steps)
    newest = sorted(steps)[-keep_last:] if keep_last else []
    return set(newest) | {step for step in steps if keep_every and step % keep_every == 0}
