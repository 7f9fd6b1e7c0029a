"""Checkpoints of DeepSpeed ZeRO, written by what its own files document.

``stage_1_and_2.py``, ``stage3.py`` and ``zero_to_fp32.py`` say how parameters are laid flat: end to
end over the ranks, filled up to a multiple, in ZeRO 1 and 2; an equal part of each, rank by rank,
in ZeRO 3.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from tests.foreign.pretended import pretended

__all__ = ["SHAPES", "write_universal", "write_zero"]

SHAPES: list[dict[str, tuple[int, ...]]] = [
    {"embed.weight": (7, 3), "norm.weight": (5,), "cube": (2, 3, 4), "one": ()},
    {"head.weight": (3, 7), "wide": (1, 9)},
]
STATES = ("fp32", "exp_avg", "exp_avg_sq")


def _tensors(shapes: Sequence[dict[str, tuple[int, ...]]]) -> list[dict[str, dict[str, Any]]]:
    """``[group][state][parameter]``, all elements different."""
    found, start = [], 0
    for group in shapes:
        states: dict[str, dict[str, Any]] = {}
        for state in STATES:
            states[state] = {}
            for name, shape in group.items():
                count = math.prod(shape)
                states[state][name] = torch.arange(start, start + count).float().view(shape)
                start += count
        found.append(states)
    return found


def _parts(tensors: Sequence[torch.Tensor], count: int, stage: int) -> list[torch.Tensor]:
    """What each rank has of a group."""
    if stage < 3:
        flat = torch.cat([one.flatten() for one in tensors])
        flat = torch.cat([flat, torch.full((-flat.numel() % (2 * count),), -1.0)])
        return list(flat.chunk(count))
    shares: list[list[torch.Tensor]] = [[] for _ in range(count)]
    for one in tensors:
        flat = torch.cat([one.flatten(), torch.full((-one.numel() % count,), -1.0)])
        for rank, share in enumerate(flat.chunk(count)):
            shares[rank].append(share)
    return [torch.cat(share) for share in shares]


class DynamicLossScaler:
    """Stands for DeepSpeed's class of that name, which is pickled as an object."""

    def __init__(self) -> None:
        self.cur_scale = 65536.0


def write_zero(
    path: Path, stage: int, count: int, prefix: str = "", has_objects: bool = True
) -> dict[str, Any]:
    """A run with one tag, saved by ``count`` ranks; what is to be read of it.

    Args:
        prefix: of the names of the optimizer's files.
        has_objects: whether objects of DeepSpeed's classes lie beside the tensors.
    """
    with pretended("deepspeed.runtime.fp16.loss_scaler", DynamicLossScaler):
        scaler = DynamicLossScaler() if has_objects else None
        return _write_zero(path, stage, count, prefix, scaler)


def _write_zero(path: Path, stage: int, count: int, prefix: str, scaler: object) -> dict[str, Any]:
    tag = path / "global_step7"
    tag.mkdir(parents=True)
    (path / "latest").write_text("global_step7")
    groups = _tensors(SHAPES)
    parts = [
        {state: _parts(list(one.values()), count, stage) for state, one in group.items()}
        for group in groups
    ]
    frozen = torch.arange(10.0).view(2, 5) + 1000
    fragments = _parts([frozen], count, stage) if stage == 3 else [frozen] * count
    for rank in range(count):
        steps = [torch.tensor(7.0), 7]
        state = {
            number: {"step": steps[number], **{s: part[s][rank] for s in STATES[1:]}}
            for number, part in enumerate(parts)
        }
        base = {"state": state, "param_groups": [{"lr": 0.1, "params": [0]}, {"lr": 0.2}]}
        weights = [part["fp32"][rank] for part in parts]
        if stage < 3 and rank == count - 1:
            # What fills a group up is left out of the weights, and of these alone.
            weights = [one[one >= 0].clone() for one in weights]
        states: dict[str, Any] = {"zero_stage": stage, "loss_scaler": scaler, "overflow": False}
        if stage == 3:
            states |= {"fp32_flat_groups": weights, "optimizer_state_dict": base}
            states["partition_count"] = count
        else:
            states |= {"single_partition_of_fp32_groups": weights, "base_optimizer_state": base}
            states["partition_count"] = [count, count]
        name = f"{prefix}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        torch.save({"optimizer_state_dict": states, "ds_version": "0.17"}, tag / name)
        if rank == 0 or stage == 3:
            name = "mp_rank_00_model_states.pt"
            model = {
                "module": {"buffer": torch.ones(3).bfloat16(), "head.weight": torch.zeros(1)},
                "buffer_names": ["buffer"],
                "optimizer": None,
                "param_shapes": [
                    OrderedDict((name, torch.Size(shape)) for name, shape in group.items())
                    for group in SHAPES
                ],
                "frozen_param_shapes": OrderedDict(frozen=torch.Size([2, 5])),
                "frozen_param_fragments": OrderedDict(frozen=fragments[rank]),
                "shared_params": {"tied.weight": "embed.weight"},
                "ds_config": {"train_batch_size": 8},
                "global_steps": 7,
                "lr_scheduler": None,
                **({"scaler": scaler} if scaler else {}),
            }
            torch.save(model, tag / (f"zero_pp_rank_{rank}_{name}" if stage == 3 else name))
    weights_of = {name: one for group in groups for name, one in group["fp32"].items()}
    states_of: dict[str, dict[str, Any]] = {}
    for number, group in enumerate(groups):
        for name in group["fp32"]:
            step: Any = [torch.tensor(7.0), 7][number]
            states_of[name] = {"step": step, **{s: group[s][name] for s in STATES[1:]}}
    return {
        "model": {
            **weights_of, "frozen": frozen, "buffer": torch.ones(3).bfloat16(),
            "tied.weight": weights_of["embed.weight"],
        },
        "optimizer": {
            "state": states_of,
            "param_groups": [{"lr": 0.1, "params": [0]}, {"lr": 0.2}],
        },
        "ds_config": {"train_batch_size": 8},
        "global_steps": 7,
        "lr_scheduler": None,
    }  # fmt: skip


def write_universal(path: Path) -> dict[str, Any]:
    """A universal checkpoint; what is to be read of it."""
    zero = path / "global_step7_universal" / "zero"
    (path / "latest_universal").write_text("global_step7_universal\n")
    wanted: dict[str, Any] = {"model": {}, "optimizer": {"state": {}}}
    for group in _tensors(SHAPES):
        for name in group["fp32"]:
            (zero / name).mkdir(parents=True)
            for state in STATES:
                content = {"param": group[state][name], "cat_dim": 0}
                torch.save(content, zero / name / f"{state}.pt")
            torch.save(7, zero / name / "step.pt")
            wanted["model"][name] = group["fp32"][name]
            wanted["optimizer"]["state"][name] = {
                "step": 7, **{state: group[state][name] for state in STATES[1:]}
            }  # fmt: skip
    return wanted
