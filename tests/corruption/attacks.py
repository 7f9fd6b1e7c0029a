"""``python -m tests.corruption.attacks FOLDER``: what is made of hostile checkpoints.

Each is made of a good one of ours or of plain DCP. For each, one JSON object is printed: what
``load``, ``load_keys`` and ``verify`` said, how long they took, and by how much the memory of the
process grew.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

import dcp_pipeline
from dcp_pipeline.core.errors import CheckpointError
from dcp_pipeline.tools.verify import verify
from tests.corruption.hostile_ours import OURS, SAFETENSORS
from tests.corruption.hostile_plain import PLAIN
from tests.equal import assert_same
from tests.memory import begin_peak, peak


def state(value: float = -1.0) -> dict[str, Any]:
    tied = torch.full((6, 4), value)
    return {
        "w": tied,
        "tied": tied,
        "v": torch.full((8, 3), value),
        "list": [torch.full((2,), value), torch.full((3,), value)],
        "settings": {"lr": value},
    }


def _said(action: Callable[[], Any]) -> str:
    try:
        result = action()
    except CheckpointError as error:
        for cause, _ in getattr(error, "failures", {}).values():
            if not isinstance(cause, CheckpointError):
                return f"UNNAMED {type(cause).__name__}: {cause}"
        return type(error).__name__
    except BaseException as error:
        return f"UNNAMED {type(error).__module__}.{type(error).__name__}: {error}"
    return str(result)


def _load(path: Path) -> str:
    template = state()
    try:
        dcp_pipeline.load(template, checkpoint_id=path)
    finally:
        if not torch.equal(template["w"], torch.full((6, 4), 1.0)):
            assert_same(template, state())
    assert_same(template, state(1.0))
    return "right"


def _load_keys(path: Path) -> str:
    assert_same(dcp_pipeline.load_keys(path), state(1.0))
    return "right"


def _verify(path: Path) -> str:
    report = verify(path, threads=1)
    return "well" if report.is_well else "; ".join(map(str, report.problems))[:500]


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    good = {kind: folder / f"good-{kind}" for kind in ("torch_save", "safetensors", "plain")}
    for kind in ("torch_save", "safetensors"):
        config = {"serialization": kind}
        dcp_pipeline.save(state(1.0), checkpoint_id=good[kind], config=config)
    dcp.save(state(1.0), checkpoint_id=good["plain"], no_dist=True)
    groups = {"torch_save": OURS, "safetensors": SAFETENSORS, "plain": PLAIN}
    for kind, attacks in groups.items():
        for name, attack in {"none": lambda path: None, **attacks}.items():
            path = folder / f"{kind}-{name}".replace("*", "any")
            shutil.copytree(good[kind], path)
            attack(path)
            actions = {"load": _load, "load_keys": _load_keys, "verify": _verify}
            # From here on, so that what is measured is what this one takes.
            before, started = begin_peak(), time.perf_counter()
            said = {what: _said(lambda act=action: act(path)) for what, action in actions.items()}  # type: ignore[misc]  # noqa: B023
            seconds, grown = time.perf_counter() - started, peak() - before
            made = (folder / "made-by-a-pickle").exists()
            report = {"kind": kind, "name": name, "seconds": seconds, "grown": grown, "made": made}
            print(json.dumps(report | {"said": said}), flush=True)
            shutil.rmtree(path)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
