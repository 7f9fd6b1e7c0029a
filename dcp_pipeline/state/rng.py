"""The states of the random number generators of this process."""

from __future__ import annotations

import logging
import random
from typing import Any

import numpy as np
import torch

from dcp_pipeline.core.errors import StateError

__all__ = ["RngState"]

logger = logging.getLogger("dcp_pipeline")


class RngState:
    """The generators that a training script draws from without naming one.

    These are Python's ``random``, NumPy's ``numpy.random``, torch on the CPU and, once CUDA is in
    use, torch on every CUDA device. After a load they go on bit by bit as they would have after the
    save; a load sets them after everything else. Ranks have different ones, as a rule, so that
    it stands in a :class:`RankLocal`; alone it is for a single process, or for equal ranks.

    A checkpoint without the state of a CUDA device, or with that of one that is not here, is no
    error: a warning is logged and the other generators are set. Generators that objects of yours
    hold are not included.

    Example:
        >>> rng = RngState()
        >>> state = rng.state_dict()
        >>> drawn = random.gauss(0, 1), np.random.normal(), torch.randn(2).tolist()
        >>> rng.load_state_dict(state)
        >>> drawn == (random.gauss(0, 1), np.random.normal(), torch.randn(2).tolist())
        True
    """

    def state_dict(self) -> dict[str, Any]:
        """Copies of all states.

        Returns:
            ``python``: ``version``, ``words`` (``[625]`` uint32), ``gauss_next``;
            ``numpy``: as ``numpy.random.get_state(legacy=False)``, with ``key`` ``[624]`` uint32;
            ``torch``: ``[bytes]`` uint8; ``cuda``: for each device its state's bytes.
        """
        version, words, gauss_next = random.getstate()
        return {
            "python": {
                "version": version,
                "words": np.asarray(words, np.uint32),
                "gauss_next": gauss_next,
            },
            "numpy": np.random.get_state(legacy=False),
            "torch": torch.get_rng_state(),
            "cuda": _cuda_states(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Set all generators.

        Raises:
            StateError: the state is of another kind of generator, or none at all; nothing was set.
        """
        before = random.getstate(), np.random.get_state(legacy=False), torch.get_rng_state()
        try:
            python = state_dict["python"]
            words = tuple(int(word) for word in python["words"])
            random.setstate((python["version"], words, python["gauss_next"]))
            np.random.set_state(state_dict["numpy"])
            torch.set_rng_state(state_dict["torch"].cpu())
        except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
            random.setstate(before[0])
            np.random.set_state(before[1])
            torch.set_rng_state(before[2])
            raise StateError(
                f"this is not the state of the generators that are in use here:"
                f" {type(error).__name__}: {error}"
            ) from error
        _set_cuda_states(state_dict.get("cuda") or [])


def _cuda_states() -> list[bytes]:
    # Asking a device that is not in use would start CUDA, which costs memory and forbids forks.
    if not _is_cuda_in_use():
        return []
    return [
        bytes(torch.cuda.get_rng_state(device).numpy())
        for device in range(torch.cuda.device_count())
    ]


def _is_cuda_in_use() -> bool:
    is_initialized: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return is_initialized


def _set_cuda_states(states: list[bytes]) -> None:
    devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if len(states) > devices:
        logger.warning(
            "the checkpoint has random states of %d CUDA devices, here are %d: the others are left"
            " out",
            len(states),
            devices,
        )
    elif len(states) < devices and _is_cuda_in_use():
        logger.warning(
            "the checkpoint has random states of %d CUDA devices, here are %d: the others keep"
            " theirs",
            len(states),
            devices,
        )
    for device, state in enumerate(states[:devices]):
        torch.cuda.set_rng_state(torch.frombuffer(bytearray(state), dtype=torch.uint8), device)
