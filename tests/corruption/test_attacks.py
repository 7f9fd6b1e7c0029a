import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.corruption.hostile_ours import OURS, SAFETENSORS
from tests.corruption.hostile_plain import PLAIN
from tests.memory import needs_peak

ROOT = Path(__file__).parents[2]
SECONDS, BYTES = 2.0, 200e6

HARMLESS = {
    # Who wrote a chunk is said in messages and decides nothing.
    ("torch_save", "owner_is_huge"): ("right", "well"),
    # Elements are found through the manifest, whatever the header says.
    ("safetensors", "header_is_huge"): ("right", None),
    ("safetensors", "header_is_of_100_MB"): ("right", None),
    ("safetensors", "header_is_deep"): ("right", None),
    ("safetensors", "header_is_empty"): ("right", None),
    # Bytes and structure are as they were written: what a pickle asks for is the load's to refuse.
    ("plain", "value_runs_code"): (None, "well"),
    # It may be a kind that is installed elsewhere.
    ("torch_save", "serialization_is_unknown"): (None, "well"),
}
ATTACKS = [
    (kind, name)
    for kind, attacks in (("torch_save", OURS), ("safetensors", SAFETENSORS), ("plain", PLAIN))
    for name in attacks
]


pytestmark = needs_peak


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[tuple[str, str], Any]]:
    """What one process has made of every attack, each measured by itself."""
    folder = tmp_path_factory.mktemp("attacks")
    command = [sys.executable, "-W", "ignore", "-m", "tests.corruption.attacks", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    yield {(report["kind"], report["name"]): report for report in found}


def test_the_good_ones_are_good(reports: dict[tuple[str, str], Any]) -> None:
    good = {"load": "right", "load_keys": "right", "verify": "well"}
    assert len(reports) == len(ATTACKS) + 3
    for kind in ("torch_save", "safetensors", "plain"):
        assert reports[kind, "none"]["said"] == good


@pytest.mark.parametrize(("kind", "name"), ATTACKS)
def test_t76_u14_attacks_are_refused(
    reports: dict[tuple[str, str], Any], kind: str, name: str
) -> None:
    report = reports[kind, name]
    loads, verified = HARMLESS.get((kind, name), (None, None))
    said = report["said"]
    assert not report["made"], "code of the file was run"
    for what in ("load", "load_keys"):
        if loads is None:
            assert said[what].endswith("Error") and " " not in said[what], said
        else:
            assert said[what] == loads
    assert not said["verify"].startswith("UNNAMED"), said
    assert (said["verify"] == "well") == (verified == "well"), said
    assert report["seconds"] < SECONDS, report
    assert report["grown"] < BYTES, report


@pytest.mark.parametrize("what", ["link_outside", "pipe", "folder", "device"])
def test_verify_blames_the_data_file(reports: dict[tuple[str, str], Any], what: str) -> None:
    assert reports["plain", f"data_is_a_{what}"]["said"]["verify"].startswith("__0_0.distcp: ")


@pytest.mark.parametrize(
    ("kind", "name", "error"),
    [
        ("torch_save", "file_named_absolute", "UnsafeCheckpointError"),
        ("torch_save", "file_named_parent", "UnsafeCheckpointError"),
        ("torch_save", "data_is_a_link_outside", "UnsafeCheckpointError"),
        ("torch_save", "manifest_is_a_link_outside", "UnsafeCheckpointError"),
        ("torch_save", "*.distcp_is_a_pipe", "UnsafeCheckpointError"),
        ("torch_save", "metadata_over_ours_runs_mkdir", "ForeignOverwriteError"),
        ("torch_save", "newer_format", "NewerFormatError"),
        ("torch_save", "chunks_overlap_and_leave_a_gap", "FormatError"),
        ("torch_save", "shape_overflows_to_little", "FormatError"),
        ("torch_save", "alias_of_an_alias", "FormatError"),
        ("torch_save", "list_of_billions", "UnsafeCheckpointError"),
        ("plain", "metadata_runs_mkdir", "UnsafeCheckpointError"),
        ("plain", "metadata_runs_system", "UnsafeCheckpointError"),
        ("plain", "value_runs_code", "UnsafeCheckpointError"),
        ("plain", "tensor_runs_code", "UnsafeCheckpointError"),
        ("plain", "place_parent", "UnsafeCheckpointError"),
        ("plain", "place_absolute", "UnsafeCheckpointError"),
        ("plain", "data_is_a_link_outside", "UnsafeCheckpointError"),
        ("plain", "data_is_a_pipe", "UnsafeCheckpointError"),
        ("plain", "data_is_a_folder", "UnsafeCheckpointError"),
        ("plain", "value_asks_for_a_buffer", "UnsafeCheckpointError"),
        ("plain", "metadata_of_keys_with_one_hash", "UnsafeCheckpointError"),
        ("torch_save", "paths_with_one_hash", "UnsafeCheckpointError"),
    ],
)
def test_the_error_says_which(
    reports: dict[tuple[str, str], Any], kind: str, name: str, error: str
) -> None:
    assert reports[kind, name]["said"]["load"] == error
