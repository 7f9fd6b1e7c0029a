"""Names of a model's parameters and buffers without what wrappers add to them.

``torch.compile``, DDP, ``DataParallel``, activation checkpointing, FSDP1 and averages of weights
each put a module of their own around the user's, whose name would end up in every key below it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import ActivationWrapper
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

from dcp_pipeline.core.errors import StateError, list_some

__all__ = ["ModelNames", "bare", "spellings"]

_WRAPPERS: tuple[tuple[type[nn.Module], str], ...] = (
    (DistributedDataParallel, "module"),
    (DataParallel, "module"),
    (ActivationWrapper, "_checkpoint_wrapped_module"),
    (FullyShardedDataParallel, "_fsdp_wrapped_module"),
    (torch._dynamo.eval_frame.OptimizedModule, "_orig_mod"),
    (AveragedModel, "module"),
)
_COUNT = "n_averaged"
"""The buffer that an average has beside the user's module."""

_ADDED = frozenset(name for _, name in _WRAPPERS)


class ModelNames:
    """How the keys of one model's state dict are called in a checkpoint.

    Args:
        model: with or without wrappers, in any nesting.
        modifiers: name of a method that a module may have, which says what its state-dict hooks
            leave out of keys: a mapping whose values are names of its children; torch's
            ``dsd_fqn_modifiers``.
    """

    def __init__(self, model: nn.Module, modifiers: str = "_fqn_modifiers") -> None:
        self._modifiers = modifiers
        self._prefixes: dict[str, str] = {"": ""}
        self._walk(model, [""], "", [])
        self._model = model

    def of(self, key: str) -> str:
        """The name of a key of the model's state dict, or of a parameter.

        >>> model = nn.Sequential(torch.compile(nn.Linear(2, 2)))
        >>> ModelNames(model).of("0._orig_mod.weight")
        '0.weight'
        """
        prefix, _, rest = key.rpartition(".")
        while prefix not in self._prefixes:
            prefix, _, part = prefix.rpartition(".")
            rest = f"{part}.{rest}"
        above = self._prefixes[prefix]
        return f"{above}.{rest}" if above else rest

    def of_parameters(self) -> dict[int, str]:
        """``id`` of each parameter to the first of its names."""
        return {id(value): self.of(key) for key, value in self._model.named_parameters()}

    @property
    def are_changed(self) -> bool:
        """Whether any name differs from its key."""
        return any(spelled != name for spelled, name in self._prefixes.items())

    def keys(self, keys: Iterable[str]) -> dict[str, str]:
        """Name to key of the model's state dict.

        Raises:
            StateError: two keys have one name.
        """
        listed = list(keys)
        names = [self.of(key) for key in listed]
        twice = [name for name, count in Counter(names).items() if count > 1]
        if twice:
            raise StateError(
                "several entries of the model's state dict have one name once those of wrappers are"
                f" taken off: {list_some(twice)}"
            )
        return dict(zip(names, listed, strict=True))

    def _walk(self, module: nn.Module, spelled: list[str], name: str, above: list[int]) -> None:
        """Note how the prefixes of children are spelled; hooks leave out any of the wrappers'."""
        hidden = self._hidden(module)
        for child_name, child in module._modules.items():
            if child is None or id(child) in above:
                continue
            longer = [_join(prefix, child_name) for prefix in spelled]
            below = name
            if child_name in hidden:
                longer = list(dict.fromkeys([*longer, *spelled]))
            else:
                below = _join(name, child_name)
            self._prefixes.update(dict.fromkeys(longer, below))
            self._walk(child, longer, below, [*above, id(module)])

    def _hidden(self, module: nn.Module) -> set[str]:
        hidden = {name for kind, name in _WRAPPERS if isinstance(module, kind)}
        if isinstance(module, AveragedModel) and hasattr(module.module, _COUNT):
            hidden.clear()  # an average of averages has two
        modifiers = getattr(module, self._modifiers, None)
        return hidden | set(modifiers().values()) if callable(modifiers) else hidden


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name


def bare(name: str) -> str:
    """A name without any part that a wrapper may have added.

    >>> bare("module._orig_mod.layer.weight")
    'layer.weight'
    """
    return ".".join(part for part in name.split(".") if part not in _ADDED)


def spellings(wanted: Iterable[str], given: Iterable[str]) -> dict[str, str]:
    """Where each wanted name is found among the given ones, if it is spelled otherwise there.

    A name that is there as it is wanted stands for itself; so do all that can be told apart only
    by what wrappers add.
    """
    found = set(given)
    by_bare = _unique((bare(name), name) for name in found)
    wanted_by_bare = _unique((bare(name), name) for name in wanted)
    return {
        name: by_bare[short]
        for short, name in wanted_by_bare.items()
        if name not in found and short in by_bare
    }


def _unique(pairs: Iterator[tuple[str, str]]) -> Mapping[str, Any]:
    listed = list(pairs)
    times = Counter(short for short, _ in listed)
    return {short: name for short, name in listed if times[short] == 1}
