"""Whenever a run is killed, the next one goes on from a whole step and leaves nothing behind."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["foreground", "background"])
def test_killed_at_every_change(tmp_path: Path, mode: str) -> None:
    command = [sys.executable, "-m", "tests.cases.manager_killed", str(tmp_path), mode]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["problems"] == []
    tried = {(method, name) for _, method, name in found["points"]}
    # The claim, the commit, the move out of sight, the deletion, and the end of the claim.
    assert tried >= {
        ("replace", ".run.json"),
        ("replace", "manifest.json"),
        ("replace", ".removed-step-1-*"),
        ("remove_directory", ".removed-step-1-*"),
        ("remove", ".run.json"),
    }
