"""What every rank has of its own: ``RankLocal``, and the keys that such values are stored under.

The value of rank 1 of 4 at ``data`` is stored below ``data.rank-1-of-4``. So each rank writes keys
of its own, the number of ranks that saved stands in the key, and to everything else (plain DCP,
``load_keys``, ``inspect``) the value is a mapping like any other.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal, get_args

import torch.distributed as dist

from dcp_pipeline.core.errors import MissingKeyError
from dcp_pipeline.state.leaf_kinds import is_stateful
from dcp_pipeline.state.modules import state_of
from dcp_pipeline.state.placing import placed

__all__ = ["OnResize", "RankLocal", "parse_rank_key", "rank_key"]

OnResize = Literal["error", "fresh", "first"]

_KEY = re.compile(r"rank-(0|[1-9]\d{0,8})-of-([1-9]\d{0,8})")


class RankLocal:
    """A value that belongs to one rank: its random state, the position of its data loader.

    Every rank gets its own value back, whatever the value of another rank looks like. What comes
    back is what was saved, as a whole: its structure need not be that of the value that is there.

    Args:
        value: an object with ``state_dict`` and ``load_state_dict``, which takes its state on load;
            or tensors (of any shape and dtype, on every rank another), NumPy arrays and plain
            values, in dicts, lists and tuples at any depth. Not a DTensor, which is of all ranks.
        on_resize: what happens on load when another number of ranks has saved. Ranks count within
            the process group that saves or loads.

            - ``error``: nothing is touched, and every rank raises.
            - ``fresh``: the value stays as it is, on every rank.
            - ``first``: every rank takes the value of the lowest rank that saved one.

    Attributes:
        value: what it holds. Dicts, lists, arrays and tensors are filled in place where they can
            take what was saved; any other value is replaced, and read from here.

    Raises:
        ValueError: another rule.
        TypeError: a ``RankLocal`` in a ``RankLocal``.

    Example:
        >>> import tempfile, dcp_pipeline
        >>> position = RankLocal({"epoch": 2, "batch": 17}, on_resize="fresh")
        >>> with tempfile.TemporaryDirectory() as path:
        ...     saved = dcp_pipeline.save({"data": position}, checkpoint_id=path)
        ...     position.value = None
        ...     _ = dcp_pipeline.load({"data": position}, checkpoint_id=path)
        >>> position.value, saved.manifest.names
        ({'epoch': 2, 'batch': 17}, ('data.rank-0-of-1.epoch', 'data.rank-0-of-1.batch'))
    """

    def __init__(self, value: Any, on_resize: OnResize = "error") -> None:
        if on_resize not in get_args(OnResize):
            raise ValueError(
                f"on_resize is one of {', '.join(get_args(OnResize))}, found {on_resize!r}"
            )
        if isinstance(value, RankLocal):
            raise TypeError("a RankLocal in a RankLocal: what it holds is of one rank already")
        self.value = value
        self.on_resize: OnResize = on_resize

    def __repr__(self) -> str:
        return f"RankLocal({self.value!r}, on_resize={self.on_resize!r})"

    def state_dict(self) -> dict[str, Any]:
        """This rank's value under its key, for plain DCP. Ranks count in the default group."""
        value = self.value
        return {_own_key(): state_of(value) if is_stateful(value) else value}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take this rank's value from what plain DCP has loaded.

        Raises:
            MissingKeyError: there is none for this rank of so many.
        """
        key = _own_key()
        if key not in state_dict:
            raise MissingKeyError(
                f"there is no value for {key}, only for {', '.join(map(str, state_dict))}",
                missing=[key],
            )
        self.value = placed(self.value, state_dict[key])


def rank_key(rank: int, world_size: int) -> str:
    """The key of one rank's value.

    >>> rank_key(1, 4)
    'rank-1-of-4'
    """
    return f"rank-{rank}-of-{world_size}"


def parse_rank_key(component: object) -> tuple[int, int] | None:
    """Rank and number of ranks of a key that :func:`rank_key` made, ``None`` for any other.

    >>> parse_rank_key("rank-1-of-4"), parse_rank_key("rank-4-of-4"), parse_rank_key(1)
    ((1, 4), None, None)
    """
    match = _KEY.fullmatch(component) if isinstance(component, str) else None
    if match is None:
        return None
    rank, world_size = int(match[1]), int(match[2])
    return (rank, world_size) if rank < world_size else None


def _own_key() -> str:
    if dist.is_available() and dist.is_initialized():
        return rank_key(dist.get_rank(), dist.get_world_size())
    return rank_key(0, 1)
