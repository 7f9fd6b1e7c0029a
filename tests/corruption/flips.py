"""``python -m tests.corruption.flips PATH KIND COUNT``: bits flipped one at a time, everywhere.

Every flip is met by a load of everything, by the loads of three ranks that each want a part (under
a process group that exists in name only), and by ``verify``. What became of it is printed as JSON.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from dcp_pipeline.core.errors import CheckpointError
from dcp_pipeline.pipeline import Pipeline
from dcp_pipeline.tools.verify import verify
from tests.equal import bits

WORLD = 3
SHAPES = {"a": (601, 257), "b": (90, 700), "tiny": (5,), "half": (1000, 33)}
_DTYPES = {"half": torch.bfloat16, "tiny": torch.int64}


def whole(value: float | None = None) -> dict[str, Any]:
    """The state that is saved, or one full of ``value``."""
    generator = torch.Generator().manual_seed(7)
    state: dict[str, Any] = {}
    for name, shape in SHAPES.items():
        dtype = _DTYPES.get(name, torch.float32)
        random = (torch.rand(shape, generator=generator) * 1000).to(dtype)
        state[name] = random if value is None else torch.full(shape, value).to(dtype)
    state["settings"] = (
        {"lr": 0.1, "names": ["x", "y"]} if value is None else {"lr": 0, "names": []}
    )
    return state


def part(rank: int) -> dict[str, Any]:
    """What one of three ranks wants: rows of two tensors, columns of another, all of a third."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=WORLD)
    try:
        mesh = init_device_mesh("cpu", (WORLD,))
        state = whole(-1.0)
        for name, dimension in (("a", 0), ("b", 1), ("half", 0)):
            shape = SHAPES[name]
            extent = -(-shape[dimension] // WORLD)
            extent = max(0, min(extent, shape[dimension] - rank * extent))
            local = state[name].narrow(dimension, 0, extent).contiguous()
            stride = torch.empty(shape).stride()
            state[name] = DTensor.from_local(
                local, mesh, [Shard(dimension)], shape=torch.Size(shape), stride=stride
            )
        return state
    finally:
        dist.destroy_process_group()


def wanted_by(rank: int, name: str) -> torch.Tensor:
    """The elements that ``part(rank)`` gets of a tensor."""
    dimension = {"a": 0, "b": 1, "half": 0}.get(name)
    tensor = whole()[name]
    if dimension is None:
        return tensor
    return tensor.chunk(WORLD, dimension)[rank]


def local(value: Any) -> Any:
    return value.to_local() if isinstance(value, DTensor) else value


def is_same(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    return bool(torch.equal(bits(found), bits(wanted)))


class Reader:
    """One template, loaded again and again."""

    def __init__(self, pipeline: Pipeline, path: Path, rank: int | None) -> None:
        self._pipeline, self._path = pipeline, path
        self._state = whole(-1.0) if rank is None else part(rank)
        self._wanted = {
            name: whole()[name] if rank is None else wanted_by(rank, name) for name in SHAPES
        }

    def outcome(self) -> str:
        """``right``, or the error's text if nothing was changed; anything else is a failure."""
        before = {name: local(self._state[name]).fill_(-1).clone() for name in SHAPES}
        self._state["settings"] = {"lr": 0, "names": []}
        settings = self._state["settings"]
        try:
            self._pipeline.load(self._state, self._path, no_dist=True)
        except CheckpointError as error:
            same = all(is_same(local(self._state[name]), before[name]) for name in SHAPES)
            kept = self._state["settings"] is settings and settings == {"lr": 0, "names": []}
            return f"refused: {error}" if same and kept else f"CHANGED: {error}"
        same = all(is_same(local(self._state[name]), self._wanted[name]) for name in SHAPES)
        return "right" if same and self._state["settings"]["lr"] == 0.1 else "WRONG"


def places(files: list[Path], count: int) -> list[tuple[Path, int]]:
    """Bytes spread over all files together."""
    sizes = [file.stat().st_size for file in files]
    found = []
    for number in range(count):
        at = (2 * number + 1) * sum(sizes) // (2 * count)
        for file, size in zip(files, sizes, strict=True):
            if at < size:
                found.append((file, at))
                break
            at -= size
    return found


def main(path: Path, kind: str, count: int) -> None:
    torch.set_num_threads(1)
    with Pipeline.from_config({"serialization": kind}) as pipeline:
        readers = [Reader(pipeline, path, rank) for rank in (None, *range(WORLD))]
        good = [reader.outcome() for reader in readers]
        print(json.dumps({"good": good, "well": verify(path).is_well}), flush=True)
        files = sorted([*path.glob("*.distcp"), *path.glob("*.safetensors")])
        for number, (file, at) in enumerate(places(files, count)):
            data = bytearray(file.read_bytes())
            data[at] ^= 1 << number % 8
            file.write_bytes(data)
            outcomes = [reader.outcome() for reader in readers]
            problems = verify(path, threads=1).problems
            data[at] ^= 1 << number % 8
            file.write_bytes(data)
            report = {
                "file": file.name,
                "at": at,
                "outcomes": outcomes,
                "problems": [[p.file, p.keys, p.rank] for p in problems],
            }
            print(json.dumps(report), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
