"""What a save and a load take beyond the state itself, measured in a process of their own."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

STATE_BYTES = 1 << 30
BUFFER_BYTES = 8 << 20
THREADS = 2
ALLOWED = (64 << 20) + THREADS * BUFFER_BYTES

PROGRAM = """
import json, resource, sys
import torch
from dcp_pipeline import Pipeline

action, path, config = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
count, parts = {state_bytes} // 4, 16
# Touched, so that it counts before the measurement; sharing nothing with what is measured.
state = {{f"w{{i}}": torch.full((count // parts // 1024, 1024), float(i)) for i in range(parts)}}
pipeline = Pipeline.from_config(config)
small = {{"w": torch.ones(2000, 1000)}}
pipeline.save(small, path + "-small")
pipeline.load(small, path + "-small")
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
if action == "save":
    pipeline.save(state, path)
else:
    for value in state.values():
        value.fill_(-1.0)
    pipeline.load(state, path)
after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
assert all(bool((value == float(key[1:])).all()) for key, value in state.items())
print(json.dumps((after - before) * 1024))
"""


def measured(action: str, path: Path, **config: object) -> int:
    """Bytes by which the peak of resident memory grew."""
    storage = {"kind": "filesystem", "thread_count": THREADS, "buffer_bytes": BUFFER_BYTES}
    settings = json.dumps({"storage": storage, **config})
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(state_bytes=STATE_BYTES), action, path, settings],
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    return int(json.loads(done.stdout))


@pytest.mark.slow
def test_memory_beyond_the_state(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    assert measured("save", path) <= ALLOWED
    assert measured("load", path, rollback="none") <= ALLOWED


@pytest.mark.slow
@pytest.mark.parametrize("serialization", ["torch_save", "safetensors"])
def test_memory_with_every_rollback(tmp_path: Path, serialization: str) -> None:
    path = tmp_path / "checkpoint"
    assert measured("save", path, serialization=serialization) <= ALLOWED
    for rollback, allowed in (
        ("none", ALLOWED),
        ("verify_first", ALLOWED),
        ("copy", STATE_BYTES + ALLOWED),
    ):
        taken = measured("load", path, serialization=serialization, rollback=rollback)
        assert taken <= allowed, f"{rollback}: {taken >> 20} MiB"
