"""FSDP2 and AdamW on several gloo ranks: save and load beside plain DCP, interleaved.

    python -m torch.distributed.run --standalone --nproc-per-node 2 -m benchmarks.distributed
        [--runs 5] [--quick] [--output FILE]

Every rank times the same calls; a run's time is the slowest rank's.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.fsdp import fully_shard

from benchmarks.common import Measurement, Result, drop_cache, report
from dcp_pipeline import AppState, Pipeline


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="a tenth of the data")
    parser.add_argument("--directory", help="where to write, instead of the temporary directory")
    parser.add_argument("--output", help="write the figures there, as JSON")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    app, nbytes = trained(320 if options.quick else 1024)
    box = [tempfile.mkdtemp(dir=options.directory) if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(box)
    root = Path(box[0])
    ours, none = Pipeline.from_config({}), Pipeline.from_config({"rollback": "none"})

    def plain_load() -> None:
        state = {"app": app.state_dict()}
        dcp.load(state, checkpoint_id=root / "plain")
        app.load_state_dict(state["app"])

    saves = {
        "plain DCP": lambda: dcp.save({"app": app}, checkpoint_id=root / "plain"),
        "dcp_pipeline": lambda: ours.save({"app": app}, root / "ours"),
    }
    loads = {
        "plain DCP": plain_load,
        "dcp_pipeline, rollback copy": lambda: ours.load({"app": app}, root / "ours"),
        "dcp_pipeline, rollback none": lambda: none.load({"app": app}, root / "ours"),
    }
    ranks = dist.get_world_size()
    title = f"FSDP2 + AdamW, {ranks} ranks"
    results = [
        Result(f"save, {title}", nbytes, "plain DCP", timed(saves, options.runs, os.sync)),
        Result(f"load warm, {title}", nbytes, "plain DCP", timed(loads, options.runs)),
        Result(
            f"load cold, {title}",
            nbytes,
            "plain DCP",
            timed(loads, options.runs, lambda: drop_cache(root)),
        ),
    ]
    if dist.get_rank() == 0:
        report("Save and load, several ranks", results, options.output)
        for path in sorted(root.rglob("*"), reverse=True):
            path.unlink() if path.is_file() else path.rmdir()
        root.rmdir()
    dist.destroy_process_group()


def trained(width: int) -> tuple[AppState, int]:
    """A sharded model whose optimizer has state, and the bytes of both on all ranks."""
    torch.manual_seed(0)
    model = nn.Sequential(*[block(width) for _ in range(8)])
    for part in model:
        fully_shard(part)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(2, width)).sum().backward()
    optimizer.step()
    numbers = sum(parameter.numel() for parameter in model.parameters())
    return AppState(model, optimizer), 3 * 4 * numbers


def block(width: int) -> nn.Module:
    return nn.Sequential(
        nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
    )


def timed(
    contenders: dict[str, Callable[[], object]],
    runs: int,
    between: Callable[[], object] = lambda: None,
) -> list[Measurement]:
    """Every contender in turn; the slowest rank's time counts."""
    measurements = {name: Measurement(name) for name in contenders}
    for number in range(runs + 1):
        for name, run in contenders.items():
            between()
            dist.barrier()
            started = time.perf_counter()
            run()
            seconds = torch.tensor(time.perf_counter() - started)
            dist.all_reduce(seconds, dist.ReduceOp.MAX)
            if number:
                measurements[name].seconds.append(float(seconds))
    return list(measurements.values())


if __name__ == "__main__":
    main()
