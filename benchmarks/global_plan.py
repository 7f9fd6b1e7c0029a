"""The coordinator's work at scale beside plain DCP's: N ranks x 1,000 sharded tensors.

    python -m benchmarks.global_plan [--ranks 64 512 2048] [--dcp 64 512] [--output FILE]

Ours: unpack every rank's table, merge, remove replicas, balance, prove the tiling, make every
rank's share, combine the fingerprints and encode the manifest; what a rank sends is its table and
its receipt. Plain DCP's: ``DefaultSavePlanner.create_global_plan`` over
the plans of all ranks, and pickling the metadata; both travel between ranks as pickles.
Each size runs in a process of its own, whose peak memory is reported.
"""

from __future__ import annotations

import argparse
import json
import pickle
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

TENSORS = 1_000


def shapes() -> list[tuple[int, int]]:
    """Global shapes as of a large decoder's layers, each sharded by rows over all ranks."""
    kinds = [(4096, 4096), (1024, 4096), (14336, 4096), (4096, 14336), (8192, 1024)]
    return [kinds[i % len(kinds)] for i in range(TENSORS)]


def ours(ranks: int) -> dict[str, float]:
    from dcp_pipeline.core.contributions import fingerprints_of
    from dcp_pipeline.core.fingerprint import make_fingerprint
    from dcp_pipeline.core.manifest import FileEntry, Manifest
    from dcp_pipeline.core.table import ChunkTable, KeySpec, Kind
    from dcp_pipeline.pipelines.steps.save_agree import answer_to
    from dcp_pipeline.pipelines.steps.save_commit import encode_receipt
    from dcp_pipeline.pipelines.values import Receipt
    from dcp_pipeline.planning.default import DefaultPlanner

    keys = [
        KeySpec(("model", f"layers.{i}.mlp.weight"), Kind.TENSOR, "bfloat16", shape)
        for i, shape in enumerate(shapes())
    ]
    rows = np.asarray([shape[0] for shape in shapes()])
    columns = np.asarray([shape[1] for shape in shapes()])
    packed = []
    for rank in range(ranks):
        chunk = -(-rows // ranks)
        begin = np.minimum(chunk * rank, rows)
        extent = np.minimum(begin + chunk, rows) - begin
        held = np.flatnonzero(extent)
        offsets = np.stack([begin, np.zeros_like(begin)], axis=1)[held]
        sizes = np.stack([extent, columns], axis=1)[held]
        table = ChunkTable.build(keys, held, offsets.tolist(), sizes.tolist(), rank)
        packed.append(table.pack())
    started = time.perf_counter()
    cache: dict[bytes, tuple[KeySpec, ...]] = {}
    plan = DefaultPlanner().global_plan([ChunkTable.unpack(data, cache) for data in packed])
    answers = [answer_to(plan, rank, "0" * 32) for rank in range(ranks)]
    planned = time.perf_counter()
    nbytes = plan.table.nbytes
    # CRCs are as good as random numbers: they do not pack.
    words = np.random.default_rng(0).integers(0, 1 << 64, len(nbytes), np.uint64)
    recording = time.perf_counter()
    numbers = fingerprints_of(plan.table, words)
    fingerprint = make_fingerprint(plan.names, plan.table.keys, numbers)
    first = np.searchsorted(plan.table.owner, plan.table.owner)
    end = np.cumsum(nbytes + 704)
    offset = end - nbytes - 704
    columns_of = plan.table.columns("key", "owner") | {
        "file": plan.table.owner,
        "offset": offset - offset[first],
        "length": nbytes + 704,
        "payload": np.full(len(nbytes), 448, np.int64),
    }
    placed = ChunkTable.from_columns(plan.table.keys, columns_of).sort()
    files = tuple(FileEntry(f"__{rank}_0.00000000.distcp", 1 << 50) for rank in range(ranks))
    manifest = Manifest(
        "0" * 32, 0.0, ranks, "torch_save", "dcp", plan.names, placed, files,
        fingerprint=fingerprint,
    )  # fmt: skip
    encoded = manifest.encode()
    finished = time.perf_counter()
    Manifest.decode(encoded)
    read = time.perf_counter() - finished
    own = {name: column[plan.table.owner == 0] for name, column in columns_of.items()}
    receipt = Receipt(
        files[:1], None, own["file"], own["offset"], own["length"], own["payload"], 0,
        fingerprint=words[plan.table.owner == 0],
    )  # fmt: skip
    return {
        "chunks": len(placed),
        "plan": planned - started,
        "record": finished - recording,
        "read": read,
        "to_coordinator": sum(map(len, packed)) / ranks + len(encode_receipt(receipt)),
        "from_coordinator": sum(map(len, answers)) / ranks,
        "record_bytes": len(encoded),
    }


def plain_dcp(ranks: int) -> dict[str, float]:
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
    from torch.distributed.checkpoint.metadata import (
        ChunkStorageMetadata,
        MetadataIndex,
        TensorProperties,
    )
    from torch.distributed.checkpoint.planner import (
        SavePlan,
        TensorWriteData,
        WriteItem,
        WriteItemType,
    )

    packed = []
    for rank in range(ranks):
        items = []
        for i, (rows, columns) in enumerate(shapes()):
            chunk = -(-rows // ranks)
            begin = min(chunk * rank, rows)
            extent = min(begin + chunk, rows) - begin
            if not extent:
                continue
            offset, name = torch.Size([begin, 0]), f"model.layers.{i}.mlp.weight"
            data = TensorWriteData(
                ChunkStorageMetadata(offset, torch.Size([extent, columns])),
                TensorProperties(dtype=torch.bfloat16),
                torch.Size([rows, columns]),
            )
            index = MetadataIndex(name, offset)
            items.append(WriteItem(index=index, type=WriteItemType.SHARD, tensor_data=data))
        mappings = {f"model.layers.{i}.mlp.weight": ("model", str(i)) for i in range(TENSORS)}
        packed.append(pickle.dumps(SavePlan(items, planner_data=mappings)))
    started = time.perf_counter()
    planner = DefaultSavePlanner()
    decided, metadata = planner.create_global_plan([pickle.loads(data) for data in packed])
    answers = [pickle.dumps(plan) for plan in decided]
    planned = time.perf_counter()
    encoded = pickle.dumps(metadata)
    finished = time.perf_counter()
    pickle.loads(encoded)
    return {
        "chunks": sum(len(plan.items) for plan in decided),
        "plan": planned - started,
        "record": finished - planned,
        "read": time.perf_counter() - finished,
        "to_coordinator": sum(map(len, packed)) / ranks,
        "from_coordinator": sum(map(len, answers)) / ranks + len(encoded),
        "record_bytes": len(encoded),
    }


def in_a_process(kind: str, ranks: int) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.global_plan", "--one", kind, str(ranks)],
        capture_output=True,
        text=True,
        check=True,
    )
    figures: dict[str, Any] = json.loads(done.stdout)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="*", default=[64, 512, 2048])
    parser.add_argument("--dcp", type=int, nargs="*", default=[64, 512])
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--output", help="write the figures there, as JSON")
    options = parser.parse_args()
    if options.one:
        kind, ranks = options.one
        figures = (ours if kind == "ours" else plain_dcp)(int(ranks))
        figures["peak"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        print(json.dumps(figures))
        return
    runs = [("dcp_pipeline", "ours", n) for n in options.ranks]
    runs += [("plain DCP", "dcp", n) for n in options.dcp]
    table = Table(title=f"Global plan, N ranks x {TENSORS} sharded tensors, coordinator's work")
    for name in ("", "N", "chunks", "plan s", "record s", "read s", "KiB/rank to", "KiB/rank from",
                 "record MB", "peak GB"):  # fmt: skip
        table.add_column(name)
    collected = []
    for label, kind, ranks in sorted(runs, key=lambda run: run[2]):
        figures = in_a_process(kind, ranks)
        collected.append({"contender": label, "ranks": ranks, **figures})
        table.add_row(
            label,
            str(ranks),
            f"{figures['chunks']:,}",
            *(f"{figures[name]:.3f}" for name in ("plan", "record", "read")),
            *(f"{figures[name] / 1024:.1f}" for name in ("to_coordinator", "from_coordinator")),
            f"{figures['record_bytes'] / 1e6:.2f}",
            f"{figures['peak'] / 1e9:.2f}",
        )
    Console(width=140).print(table)
    if options.output:
        Path(options.output).write_text(json.dumps(collected, indent=1))


if __name__ == "__main__":
    main()
