"""What the demo claims, each claim as a check that names itself and can fail."""

import json
import re
import signal
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

Losses = Mapping[int, float]
"""Step to loss, with every bit of it."""


@dataclass(frozen=True)
class Check:
    """A claim, whether it holds, and what was found."""

    name: str
    holds: bool
    found: str


def read_losses(path: Path) -> dict[int, float]:
    """What one job has written; nothing if it wrote nothing.

    Raises:
        ValueError: a step is there twice, so that it is not one job's.
    """
    losses: dict[int, float] = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        entry = json.loads(line)
        if entry["step"] in losses:
            raise ValueError(f"{path} has step {entry['step']} twice")
        losses[entry["step"]] = float.fromhex(entry["loss"])
    return losses


def losses_within(
    name: str, expected: Losses, found: Losses, steps: Collection[int], tolerance: float = 0.0
) -> Check:
    """``found`` has exactly ``steps``, and each loss is the expected one.

    Args:
        tolerance: how far a loss may be off, as a part of it; 0 wants every bit equal.
    """
    if not steps or sorted(found) != sorted(steps):
        return Check(name, False, f"steps {sorted(found)}, expected {sorted(steps)}")
    absent = sorted(set(steps) - set(expected))
    if absent:
        return Check(name, False, f"there is nothing to compare steps {absent} with")
    off = {step: abs(found[step] - expected[step]) / abs(expected[step]) for step in steps}
    # A loss that is no number compares as false and must not pass.
    wrong = [step for step in sorted(steps) if not off[step] <= tolerance]
    where = f"steps {min(steps)} to {max(steps)}"
    if wrong:
        return Check(name, False, f"off by {off[wrong[0]]:.1e} of the loss at step {wrong[0]}")
    if not tolerance:
        return Check(name, True, f"{where}: every bit")
    return Check(name, True, f"{where}: off by at most {max(off.values()):.1e} of the loss")


def same_state(name: str, expected: Any, found: Any) -> Check:
    """Both states have the same keys, and every tensor and value is the same bit for bit."""
    wrong = list(_differences(expected, found, "state"))
    tensors = list(_tensors(expected))
    if wrong:
        return Check(name, False, f"{len(wrong)} differences, the first: {wrong[0]}")
    nbytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    return Check(name, bool(tensors), f"{len(tensors)} tensors, {nbytes:,} bytes: every bit")


def _differences(expected: Any, found: Any, path: str) -> Iterator[str]:
    if type(expected) is not type(found):
        yield f"{path} is a {type(found).__name__}, expected a {type(expected).__name__}"
    elif isinstance(expected, torch.Tensor):
        if (expected.dtype, expected.shape) != (found.dtype, found.shape):
            yield f"{path} is {found.dtype} {list(found.shape)}"
        elif not torch.equal(_bits(expected), _bits(found)):
            yield f"{path} has other values"
    elif isinstance(expected, Mapping):
        if expected.keys() != found.keys():
            yield f"{path} has other keys: {sorted(map(str, expected.keys() ^ found.keys()))}"
        for key in expected.keys() & found.keys():
            yield from _differences(expected[key], found[key], f"{path}.{key}")
    elif isinstance(expected, list | tuple):
        if len(expected) != len(found):
            yield f"{path} has {len(found)} entries, expected {len(expected)}"
        for position, (one, other) in enumerate(zip(expected, found, strict=False)):
            yield from _differences(one, other, f"{path}.{position}")
    elif expected != found:
        yield f"{path} is {found!r}, expected {expected!r}"


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _tensors(state: Any) -> Iterator[torch.Tensor]:
    if isinstance(state, torch.Tensor):
        yield state
    elif isinstance(state, Mapping):
        for value in state.values():
            yield from _tensors(value)
    elif isinstance(state, list | tuple):
        for value in state:
            yield from _tensors(value)


def finished(name: str, exit_code: int | None, log: str) -> Check:
    """The job ended well."""
    if exit_code == 0:
        return Check(name, True, "exit code 0")
    last = log.strip().splitlines()[-1:] or ["nothing was printed"]
    state = "did not end in time" if exit_code is None else f"exit code {exit_code}"
    return Check(name, False, f"{state}: {last[0]}")


def ended_by_sigkill(name: str, exit_code: int | None, log: str, rank: int) -> Check:
    """The job ended, not well, because ``rank`` had died of SIGKILL, as torchrun's report says."""
    died = re.search(rf"rank\s*: {rank} .*\n\s*exitcode\s*: {-signal.SIGKILL:d} ", log)
    holds = exit_code not in (None, 0) and died is not None
    return Check(
        name, holds, f"torchrun: exit code {exit_code}, SIGKILL {'' if died else 'not '}seen"
    )


def died_in_its_data(name: str, log: str, torso: Path, whole: Path, rank: int) -> Check:
    """The kill came when a part of a data file of ``rank`` was written, and not all of it.

    Args:
        torso: what the killed save has left.
        whole: the same step of the unbroken run, whose files are as large as these should be.
    """
    match = re.search(r"SIGKILL after (\d+) bytes of ((\S+?)\.\S+)", log)
    if match is None:
        return Check(name, False, "nobody was killed while writing")
    written, file, begin = int(match[1]), match[2], match[3]
    sizes = [other.stat().st_size for other in whole.glob(f"{begin}.*.distcp")]
    if not (torso / file).is_file() or len(sizes) != 1:
        return Check(name, False, f"there is no {file} in {torso}, or none like it in {whole}")
    holds = begin.startswith(f"__{rank}_") and 0 < written < sizes[0]
    return Check(name, holds, f"{written:,} of {sizes[0]:,} bytes of {file}")


def not_a_checkpoint(name: str, steps: list[int], expected: list[int], torso: Path) -> Check:
    """The committed ``steps`` are the expected ones, though a killed save has left files."""
    left = names_in(torso)
    records = {"manifest.json", ".metadata"} & left
    holds = steps == expected and bool(left) and not records
    what = ", ".join(sorted(records)) or "no commit record"
    return Check(name, holds, f"steps {steps}; {torso.name}: {len(left)} files, {what}")


def tidied(name: str, left: Collection[str], directory: Path) -> Check:
    """The save that succeeded has removed the files that the killed one had ``left``."""
    still = sorted(set(left) & names_in(directory))
    found = f"still there: {', '.join(still)}" if still else f"{len(left)} files are gone"
    return Check(name, bool(left) and directory.is_dir() and not still, found)


def names_in(directory: Path) -> set[str]:
    """The names in a directory, none if it is not there."""
    return {file.name for file in directory.iterdir()} if directory.is_dir() else set()
