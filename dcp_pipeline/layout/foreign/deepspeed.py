"""Kind ``deepspeed``: ZeRO 1, 2 and 3, whose ranks each have a part of every flat group.

``latest`` names a folder; in it are ``[zero_pp_rank_{d}_]mp_rank_{m:02}_model_states.pt`` and
``[bf16_]zero_pp_rank_{d}_mp_rank_{m:02}_optim_states.pt``. Weights of 32 bits, and the states that
the optimizer has of each, lie flat in the latter. In ZeRO 1 and 2 a group's parameters, in the
order of ``param_shapes``, lie end to end over the parts of all ranks; in ZeRO 3 every rank has an
equal part of each parameter, the last ones filled up. A stretch of a flat part is a few boxes of a
parameter, each of which lies in one piece in the file, so nothing is read to put them together.
Source: ``deepspeed/utils/zero_to_fp32.py``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Final

from dcp_pipeline.core.dtypes import ITEM_SIZES
from dcp_pipeline.core.errors import (
    CheckpointNotFoundError,
    FormatError,
    MissingFileError,
    list_some,
)
from dcp_pipeline.core.manifest import Manifest
from dcp_pipeline.core.path import Path
from dcp_pipeline.formats.torch_tree import TorchTree
from dcp_pipeline.formats.torch_zip import Rebuilt
from dcp_pipeline.layout.foreign.building import Building, Chunk, boxes_of_run, opened_tree
from dcp_pipeline.layout.foreign.deepspeed_files import (
    CLASSES,
    Flat,
    Line,
    flat_of,
    names_of,
    optim_states,
    shapes_of,
)
from dcp_pipeline.storage.base import Directory

__all__ = ["OPTIM_STATES", "open_deepspeed"]

OPTIM_STATES: Final = re.compile(
    r"(?:bf16_|fp16_)?zero_pp_rank_(\d{1,6})_mp_rank_(\d{2,6})_optim_states\.pt"
)

_MOST_FILLER: Final = 1 << 16
_TAKEN: Final = (
    "module", "optimizer", "param_shapes", "frozen_param_shapes", "frozen_param_fragments",
    "shared_params", "buffer_names",
)  # fmt: skip


def open_deepspeed(directory: Directory) -> Manifest:
    """Weights as ``model.{parameter}``, states as ``optimizer.state.{parameter}.{state}``.

    With several model-parallel ranks, all keys begin with ``mp{m}.``. What else the first file of
    model states holds keeps its name.

    Raises:
        MissingFileError: of the ranks that have saved, not all have left their files.
        FormatError: the flat parts do not add up to the parameters.
    """
    found: dict[int, dict[int, str]] = {}
    for name in directory.names():
        match = OPTIM_STATES.fullmatch(name)
        if match:
            ranks = found.setdefault(int(match[2]), {})
            other = ranks.setdefault(int(match[1]), name)
            if other != name:
                raise FormatError(f"{name} and {other} are of the same rank")
    if not found:
        raise CheckpointNotFoundError(
            f"{directory.location} has no files *_optim_states.pt", directory.location
        )
    building = Building(directory, "deepspeed")
    for model_rank, files in sorted(found.items()):
        prefix = (f"mp{model_rank}",) if len(found) > 1 else ()
        _Model(building, model_rank, [files[rank] for rank in sorted(files)], prefix).add()
    return building.manifest()


class _Model:
    """The files of one model-parallel rank.

    Args:
        optim_files: of its data-parallel ranks.
        prefix: of all keys.
    """

    def __init__(
        self, building: Building, model_rank: int, optim_files: Sequence[str], prefix: Path
    ) -> None:
        self._building, self._prefix, self._model_rank = building, prefix, model_rank
        self._ranks = [
            optim_states(building, name, None if number else prefix)
            for number, name in enumerate(optim_files)
        ]
        first = self._ranks[0]
        for rank in self._ranks:
            if (rank.stage, rank.count) != (first.stage, first.count):
                raise FormatError(f"the files {list_some(optim_files, 3)} are not of one save")
            if [set(one) for one in rank.flat] != [set(one) for one in first.flat]:
                raise FormatError(f"{list_some(optim_files, 3)} have different groups or states")
        self._check_counts()
        if first.count != len(optim_files):
            raise MissingFileError(
                f"{first.count} ranks have saved, {building.directory.location} has"
                f" *_optim_states.pt of {len(optim_files)}",
                building.directory.location,
            )

    def _check_counts(self) -> None:
        """States have to be laid flat as the weights are, but for what fills up the last part."""
        first = self._ranks[0]
        for number, rank in enumerate(self._ranks):
            is_last = first.stage < 3 and number == len(self._ranks) - 1
            for group, states in enumerate(rank.flat):
                weights = states["fp32"].count
                for state, part in states.items():
                    filled = first.flat[group]["fp32"].count if number else weights + _MOST_FILLER
                    fits = part.count == weights
                    if not fits and not (is_last and weights < part.count <= filled):
                        raise FormatError(
                            f"the {state!r} of group {group} on rank {number} has {part.count}"
                            f" elements, its weights {weights}: it is laid out in another way"
                        )

    def add(self) -> None:
        """Put all there is into the manifest."""
        building, directory = self._building, self._building.directory
        names = [f"mp_rank_{self._model_rank:02}_model_states.pt"]
        if self._ranks[0].stage == 3:
            names = [f"zero_pp_rank_{rank}_{names[0]}" for rank in range(len(self._ranks))]
        with opened_tree(directory, names[0], CLASSES) as tree:
            root = tree.root
            if not isinstance(root, dict) or "param_shapes" not in root:
                raise FormatError("it has no param_shapes that say what the flat groups hold")
            groups = shapes_of(root["param_shapes"])
            if self._ranks[0].stage == 3:
                self._add_divided([pair for group in groups for pair in group.items()])
            else:
                self._add_end_to_end(groups)
            self._add_rest(tree, building.file(names[0]))
        frozen = root.get("frozen_param_shapes")
        if frozen:
            self._add_frozen(shapes_of(frozen)[0], names)
        shared = root.get("shared_params") or {}
        for pair in shared.items() if isinstance(shared, dict) else shared:
            name, other = names_of(pair)
            building.same((*self._prefix, "model", name), (*self._prefix, "model", other))

    def _add_rest(self, tree: TorchTree, file: int) -> None:
        """Buffers, and what is no tensor."""
        module = tree.root.get("module")
        for name in names_of(tree.root.get("buffer_names") or ()):
            if isinstance(module, dict) and type(module.get(name)) is Rebuilt:
                path = (*self._prefix, "model", name)
                self._building.leaves(tree, module[name], file, path)
        for key, part in tree.root.items():
            if key not in _TAKEN:
                self._building.leaves(tree, part, file, (*self._prefix, key))

    def _add_end_to_end(self, groups: Sequence[Mapping[str, tuple[int, ...]]]) -> None:
        """ZeRO 1 and 2."""
        first = self._ranks[0]
        if len(first.flat) != len(groups):
            raise FormatError(f"{len(groups)} groups of parameters, states of {len(first.flat)}")
        for number, group in enumerate(groups):
            wanted = sum(map(prod, group.values()))
            for state in first.flat[number]:
                line = Line([rank.flat[number][state] for rank in self._ranks])
                if line.count < wanted:
                    raise FormatError(
                        f"the parameters of group {number} have {wanted} elements, their {state}"
                        f" has {line.count}"
                    )
                at = 0
                for name, shape in group.items():
                    self._add(name, shape, state, line.cut(at, prod(shape)))
                    at += prod(shape)
            for name in group:
                self._add_values(name, number)

    def _add_divided(self, shapes: Sequence[tuple[str, tuple[int, ...]]]) -> None:
        """ZeRO 3: a rank's flat groups lie end to end, with its part of each parameter in them."""
        first, count = self._ranks[0], len(self._ranks)
        states = first.flat[0] if first.flat else {}
        if any(set(group) != set(states) for group in first.flat):
            raise FormatError("flat groups of different states")
        for state in states:
            lines = [Line([group[state] for group in rank.flat]) for rank in self._ranks]
            held, at = min(line.count for line in lines), 0
            for name, shape in shapes:
                numel, share = prod(shape), -(-prod(shape) // count)
                if at + share > held:
                    raise FormatError(f"the flat groups end before the {state} of {name!r}")
                runs: list[Flat] = []
                for rank, line in enumerate(lines):
                    runs += line.cut(at, min(share, numel - rank * share))
                self._add(name, shape, state, runs)
                if state == "fp32":
                    self._add_values(name, lines[0].part_at(at))
                at += share

    def _add_frozen(self, shapes: Mapping[str, tuple[int, ...]], names: Sequence[str]) -> None:
        """Parameters that are not trained, which lie beside the model, in ZeRO 3 in parts."""
        found: dict[str, list[Flat]] = {name: [] for name in shapes}
        for file in names:
            with opened_tree(self._building.directory, file, CLASSES) as tree:
                parts = tree.root.get("frozen_param_fragments") if tree.root else None
                for name, runs in found.items():
                    part = parts.get(name) if isinstance(parts, dict) else None
                    runs.append(flat_of(tree, part, self._building.file(file), name))
        for name, shape in shapes.items():
            self._add(name, shape, "fp32", Line(found[name]).cut(0, prod(shape)))

    def _add(self, name: str, shape: tuple[int, ...], state: str, runs: Sequence[Flat]) -> None:
        dtypes = {run.dtype for run in runs} or {"float32"}
        if len(dtypes) > 1 or sum(run.count for run in runs) != prod(shape):
            raise FormatError(f"the parts of the {state} of {name!r} do not fit together")
        path = (*self._prefix, "optimizer", "state", name, state)
        if state == "fp32":
            path = (*self._prefix, "model", name)
        self._building.tensor(path, dtypes.pop(), shape, list(_chunks(shape, runs)))

    def _add_values(self, name: str, number: int) -> None:
        for state, value in self._ranks[0].values[number].items():
            path = (*self._prefix, "optimizer", "state", name, state)
            if isinstance(value, Flat):
                self._building.tensor(path, value.dtype, (), list(_chunks((), [value])))
            else:
                self._building.value(path, value)


def _chunks(shape: tuple[int, ...], runs: Sequence[Flat]) -> Iterator[Chunk]:
    at = 0
    for run in runs:
        width = ITEM_SIZES[run.dtype]
        for offsets, sizes, first in boxes_of_run(shape, at, at + run.count):
            begin = run.begin + (first - at) * width
            yield Chunk(run.file, begin, prod(sizes) * width, offsets, sizes)
        at += run.count
