"""T04: killed at any change, a save leaves the old checkpoint or the new one, whole."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


def killed_everywhere(path: Path, *arguments: str) -> list[dict[str, Any]]:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.cases.killed", str(path), *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    reports = [json.loads(line) for line in done.stdout.splitlines()]
    assert {report["code"] for report in reports} == {0, 9}
    return reports


@pytest.mark.slow
@pytest.mark.parametrize("serialization", ["torch_save", "safetensors"])
def test_a_save_over_a_checkpoint_killed_at_any_change(tmp_path: Path, serialization: str) -> None:
    reports = killed_everywhere(tmp_path, serialization, "again")
    for report in reports:
        assert report["ours"] in ([1.0], [2.0]), report
        assert report.get("dcp", [1.0]) in ([1.0], [2.0]), report
        assert report["next"] == [3.0], report
        assert report["left over"] == [], report
    # The commit is one change: before it the old one is there, from then on the new one.
    found = [report["ours"][0] for report in reports if report["when"] == "before"]
    assert found == sorted(found) and set(found) == {1.0, 2.0}


@pytest.mark.slow
def test_a_first_save_killed_at_any_change(tmp_path: Path) -> None:
    for report in killed_everywhere(tmp_path, "torch_save", "first"):
        nothing = ("CheckpointNotFoundError", "IncompleteCheckpointError")
        assert report["ours"] == [2.0] or report["ours"] in nothing, report
        assert report["next"] == [3.0], report
        assert report["left over"] == [], report
