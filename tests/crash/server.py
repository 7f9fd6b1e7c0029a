"""``python -m tests.crash.server``: calls functions by name, with torch imported once for all.

It has one thread, so that it may fork. A request is a line of JSON, ``["module:function", args]``;
so is the answer, ``{"value": ...}`` or ``{"trace": ...}``.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

import torch

from tests.crash import saves


def main() -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    _warm_up()
    # Whatever else is printed must not get between the answers.
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)
        for line in sys.stdin:
            answers.write(json.dumps(_answer(*json.loads(line))) + "\n")
            answers.flush()


def _warm_up() -> None:
    """What is imported late is imported here, and not again by every fork."""
    with tempfile.TemporaryDirectory() as folder:
        for serialization in ("torch_save", "safetensors"):
            path = Path(folder, serialization)
            saves.save(path, 1, serialization)
            saves.opened(path)
            saves.opened_by_dcp(path)
        saves.save_by_dcp(Path(folder, "dcp"), 1)
        saves.opened(Path(folder, "dcp"))


def _answer(name: str, args: list[Any]) -> dict[str, Any]:
    module, _, function = name.partition(":")
    try:
        return {"value": getattr(importlib.import_module(module), function)(*args)}
    except BaseException:
        return {"trace": traceback.format_exc()}


if __name__ == "__main__":
    main()
