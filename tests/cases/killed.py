"""``python -m tests.cases.killed PATH KIND FIRST``: a save killed at every change it makes.

One process imports torch; each save runs in a fork of it, which ends by ``os._exit`` before the
next change of a long list, then halfway through each write. What a load finds after it is printed
as JSON, one object a line.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

import tests.faults  # noqa: F401  (registers the storage that fails)
from dcp_pipeline.core.errors import CheckpointError
from dcp_pipeline.core.manifest import Manifest
from dcp_pipeline.pipeline import Pipeline

ROWS = 3 << 19


def state_with(value: float) -> dict[str, Any]:
    return {"a": torch.full((ROWS,), value), "b": {"c": torch.full((ROWS,), value), "d": value}}


def pipeline(serialization: str, **fault: Any) -> Pipeline:
    storage = {"kind": "faulty", "buffer_bytes": "2MiB", "sync_files": False} | fault
    return Pipeline.from_config({"serialization": serialization, "storage": storage})


def found_by(load: Any) -> Any:
    state = state_with(-1.0)
    try:
        load(state)
    except (CheckpointError, dcp.api.CheckpointException) as error:
        return type(error).__name__
    ends = [float(end) for part in (state["a"], state["b"]["c"]) for end in part.aminmax()]
    return sorted({*ends, state["b"]["d"]})


def kill_at(path: Path, serialization: str, when: str, skip: int) -> int:
    child = os.fork()
    if child == 0:
        try:
            method = "write" if when == "halfway" else "*"
            fault = {"method": method, "when": when, "skip": skip, "code": 0}
            pipeline(serialization, **fault).save(state_with(2.0), path)
            os._exit(0)
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def main(root: Path, serialization: str, first: bool) -> None:
    torch.set_num_threads(1)
    for when in ("before", "halfway"):
        for skip in range(1000):
            path = root / f"{when}-{skip}"
            if not first:
                pipeline(serialization, skip=9999).save(state_with(1.0), path)
            code = kill_at(path, serialization, when, skip)
            reader = pipeline(serialization, skip=9999)
            report = {
                "when": when,
                "skip": skip,
                "code": code,
                "ours": found_by(lambda state: reader.load(state, path)),  # noqa: B023
            }
            if serialization == "torch_save" and not first:
                report["dcp"] = found_by(
                    lambda state: dcp.load(state, checkpoint_id=path, no_dist=True)  # noqa: B023
                )
            pipeline(serialization, skip=9999).save(state_with(3.0), path)
            report["next"] = found_by(lambda state: reader.load(state, path))  # noqa: B023
            manifest = Manifest.decode((path / "manifest.json").read_bytes())
            wanted = {entry.name for entry in (*manifest.files, *manifest.sums)}
            wanted |= {"manifest.json"} | ({".metadata"} if manifest.metadata else set())
            report["left over"] = sorted(set(os.listdir(path)) ^ wanted)
            print(json.dumps(report), flush=True)
            shutil.rmtree(path)
            if code == 0:
                break


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3] == "first")
