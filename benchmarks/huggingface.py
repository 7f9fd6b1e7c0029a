"""Exports and imports of Hugging Face repositories beside DCP's, safetensors and raw I/O.

    python -m benchmarks.huggingface [--runs 3] [--quick] [--output FILE]
    python -m torch.distributed.run --standalone --nproc-per-node 2 -m benchmarks.huggingface

2 GiB of bfloat16, on several ranks as DTensors, rows and columns sharded in turn. Everything is
synced to disk. A run's time is the slowest rank's. The memory is what the process holds at its
peak beyond what it held before the call, on rank 0.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from benchmarks.common import Measurement, Result, drop_cache, report
from dcp_pipeline import Pipeline
from dcp_pipeline.types.memory import bytes_of

Contender = Callable[[], object]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="an eighth of the data")
    parser.add_argument("--directory", help="where to write, instead of the temporary directory")
    parser.add_argument("--output", help="write the figures there, as JSON")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    dist.init_process_group("gloo") if "RANK" in os.environ else None
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    torch.set_num_threads(max(1, 2 // size))
    state, nbytes = state_of(16 if options.quick else 128, size)
    root = shared_folder(options.directory, rank)
    saves, loads = contenders(state, root, rank, size)
    is_first = rank == 0
    title = f"2 GiB, {size} ranks" if size > 1 else "2 GiB, one process"
    results = [
        Result(f"export, {title}", nbytes, "DCP", timed(saves, options.runs, os.sync)),
        Result(f"import warm, {title}", nbytes, "DCP", timed(loads, options.runs)),
        Result(f"import cold, {title}", nbytes, "DCP",
               timed(loads, options.runs, lambda: drop_cache(root) if is_first else None)),
    ]  # fmt: skip
    peaks = {f"{what}, {name}": peak_of(run)
             for what, runs in (("export", saves), ("import", loads))
             for name, run in runs.items()}  # fmt: skip
    if is_first:
        report("Hugging Face repositories", results, options.output)
        for name, peak in peaks.items():
            print(f"peak memory beyond the state: {name}: {peak / 2**20:.0f} MiB")
        for path in sorted(root.rglob("*"), reverse=True):
            path.unlink() if path.is_file() else path.rmdir()
        root.rmdir()
    if size > 1:
        dist.destroy_process_group()


def state_of(count: int, size: int) -> tuple[dict[str, torch.Tensor], int]:
    """Tensors of 16 MiB, and the bytes of all."""
    generator = torch.Generator().manual_seed(0)
    whole = torch.randn(2048, 4096, generator=generator).to(torch.bfloat16)
    state: dict[str, torch.Tensor] = {}
    mesh = init_device_mesh("cpu", (size,)) if size > 1 else None
    for number in range(count):
        tensor: Any = whole + number
        if mesh is not None:
            axis = int(number % 4 == 3)
            local = tensor.chunk(size, axis)[dist.get_rank()].clone()
            tensor = DTensor.from_local(local, mesh, [Shard(axis)], run_check=False)
        state[f"model.layers.{number}.weight"] = tensor
    return state, count * whole.nbytes


def contenders(
    state: dict[str, Any], root: Path, rank: int, size: int
) -> tuple[dict[str, Contender], dict[str, Contender]]:
    """What exports, and what imports again into tensors that are there."""
    target = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    local = [t.to_local() if isinstance(t, DTensor) else t for t in state.values()]
    into = [t.to_local() if isinstance(t, DTensor) else t for t in target.values()]
    ours = Pipeline.from_config({"layout": "huggingface", "rollback": "none"})
    kept = Pipeline.from_config({"layout": "huggingface"})
    mapping = dict.fromkeys(state, 1)

    def plain_save() -> object:
        writer = dcp.HuggingFaceStorageWriter(
            str(root / "dcp"), fqn_to_index_mapping=mapping, save_distributed=True,
            enable_consolidation=True, thread_count_consolidation=2,
        )  # fmt: skip
        return dcp.save(state, storage_writer=writer)

    def plain_load() -> object:
        return dcp.load(target, storage_reader=dcp.HuggingFaceStorageReader(str(root / "ours")))

    saves: dict[str, Contender] = {
        "DCP": plain_save,
        "dcp_pipeline": lambda: ours.save(state, root / "ours"),
        "raw write": lambda: raw_write(local, root / f"raw{rank}"),
    }
    loads: dict[str, Contender] = {
        "DCP": plain_load,
        "dcp_pipeline, rollback none": lambda: ours.load(target, root / "ours"),
        "dcp_pipeline, rollback copy": lambda: kept.load(target, root / "ours"),
        "raw read": lambda: raw_read(into, root / f"raw{rank}"),
    }
    if size == 1:
        saves["safetensors"] = lambda: safetensors_save(state, root / "st.safetensors")
        loads["safetensors"] = lambda: safetensors_load(target, root / "st.safetensors")
    return saves, loads


def safetensors_save(state: dict[str, torch.Tensor], path: Path) -> None:
    save_file(state, path)
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def safetensors_load(target: dict[str, torch.Tensor], path: Path) -> None:
    for name, tensor in load_file(path).items():
        target[name].copy_(tensor)


def raw_write(tensors: list[torch.Tensor], path: Path) -> None:
    descriptor = os.open(path, os.O_CREAT | os.O_TRUNC | os.O_WRONLY)
    offset = 0
    for tensor in tensors:
        view = bytes_of(tensor)
        while len(view):
            count = os.pwrite(descriptor, view, offset)
            offset, view = offset + count, view[count:]
    os.fsync(descriptor)
    os.close(descriptor)


def raw_read(tensors: list[torch.Tensor], path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    offset = 0
    for tensor in tensors:
        view = bytes_of(tensor)
        while len(view):
            count = os.preadv(descriptor, [view], offset)
            offset, view = offset + count, view[count:]
    os.close(descriptor)


def shared_folder(parent: str | None, rank: int) -> Path:
    box = [tempfile.mkdtemp(prefix="dcp-pipeline-bench-", dir=parent) if rank == 0 else ""]
    if dist.is_initialized():
        dist.broadcast_object_list(box)
    return Path(box[0])


def timed(
    runs_of: dict[str, Contender], runs: int, between: Contender = lambda: None
) -> list[Measurement]:
    """Every contender in turn; the slowest rank's time counts."""
    measurements = {name: Measurement(name) for name in runs_of}
    for number in range(runs + 1):
        for name, run in runs_of.items():
            between()
            together()
            started = time.perf_counter()
            run()
            seconds = torch.tensor(time.perf_counter() - started)
            if dist.is_initialized():
                dist.all_reduce(seconds, dist.ReduceOp.MAX)
            if number:
                measurements[name].seconds.append(float(seconds))
    return list(measurements.values())


def together() -> None:
    if dist.is_initialized():
        dist.barrier()


def peak_of(run: Contender) -> int:
    """Bytes that the process holds at its peak while it runs, beyond what it held before."""
    together()
    Path("/proc/self/clear_refs").write_text("5")
    before = resident("VmRSS")
    run()
    return resident("VmHWM") - before


def resident(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise LookupError(name)


if __name__ == "__main__":
    main()
