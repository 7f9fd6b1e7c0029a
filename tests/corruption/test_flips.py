import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import dcp_pipeline
from dcp_pipeline.core.errors import (
    CheckpointError,
    ChecksumError,
    CorruptCheckpointError,
    MissingFileError,
)
from dcp_pipeline.pipeline import Pipeline
from dcp_pipeline.tools.verify import verify
from tests.corruption.flips import whole
from tests.distributed.pool import Pool
from tests.equal import assert_same

ROOT = Path(__file__).parents[2]
KINDS = ["torch_save", "safetensors"]


def save_sharded(path: Path, kind: str) -> None:
    """Two ranks: two sharded tensors, the rest replicated, so that each writes a file."""
    state = whole()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for name in ("a", "b"):
        state[name] = distribute_tensor(state[name], mesh, [Shard(0)])
    with Pipeline.from_config({"serialization": kind}) as pipeline:
        pipeline.save(state, path)


def flips(path: Path, kind: str, count: int) -> list[dict[str, Any]]:
    command = [sys.executable, "-m", "tests.corruption.flips", str(path), kind, str(count)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    first, *rest = map(json.loads, done.stdout.splitlines())
    assert first == {"good": ["right"] * 4, "well": True}
    return rest


@pytest.mark.parametrize("count", [20, pytest.param(200, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", KINDS)
def test_u02_every_flip_is_refused_and_found(
    ranks: Pool, tmp_path: Path, kind: str, count: int
) -> None:
    ranks(2).run(save_sharded, tmp_path, kind)
    reports = flips(tmp_path, kind, count)
    assert len(reports) == count
    assert len({report["file"] for report in reports}) == 2
    for report in reports:
        whole_load, *parts = report["outcomes"]
        # A part that does not touch the block is right to the last bit; none is ever wrong.
        assert all(part == "right" or part.startswith("refused") for part in parts), report
        assert any(part.startswith("refused") for part in parts), report
        assert whole_load.startswith("refused"), report
        ((file, keys, rank),) = report["problems"]
        assert (file, rank) == (report["file"], int(file[2])), report
        assert keys, report
        for outcome in report["outcomes"]:
            if outcome != "right":
                assert file in outcome, report
                assert any(key in outcome.partition("it holds")[2] for key in keys), report


@pytest.mark.parametrize("kind", KINDS)
def test_flips_in_records_are_found(tmp_path: Path, kind: str) -> None:
    """A flip in the manifest or the digests refuses the load; one in ``.metadata`` harms none."""
    dcp_pipeline.save(whole(), checkpoint_id=tmp_path, config={"serialization": kind})
    for file in sorted(tmp_path.iterdir()):
        if file.suffix in (".distcp", ".safetensors"):
            continue
        good = file.read_bytes()
        for number in range(10):
            at = (2 * number + 1) * len(good) // 20
            data = bytearray(good)
            data[at] ^= 1 << number % 8
            file.write_bytes(data)
            assert file.name in {problem.file for problem in verify(tmp_path, threads=1).problems}
            state = whole(-1.0)
            try:
                dcp_pipeline.load(state, checkpoint_id=tmp_path)
            except CheckpointError:
                assert_same(state, whole(-1.0))
            else:
                assert file.name == ".metadata"
                assert_same(state, whole())
        file.write_bytes(good)


def data_file(path: Path) -> Path:
    (found,) = [*path.glob("*.distcp"), *path.glob("*.safetensors")]
    return found


def refused(path: Path, error: type[CheckpointError], *said: str) -> None:
    state = whole(-1.0)
    with pytest.raises(error) as caught:
        dcp_pipeline.load(state, checkpoint_id=path)
    assert_same(state, whole(-1.0))
    for text in said:
        assert text in str(caught.value)
    assert not verify(path).is_well


@pytest.mark.parametrize("kind", KINDS)
def test_t75_cut_off_deleted_appended_and_u03_swapped(tmp_path: Path, kind: str) -> None:
    config = {"serialization": kind}
    dcp_pipeline.save(whole(), checkpoint_id=tmp_path / "a", config=config)
    dcp_pipeline.save(whole(3.0), checkpoint_id=tmp_path / "b", config=config)
    path, file = tmp_path / "a", data_file(tmp_path / "a")
    good = file.read_bytes()
    for size in (0, 1, len(good) // 2, len(good) - 1):
        os.truncate(file, size)
        refused(path, CorruptCheckpointError, file.name, "cut off")
        file.write_bytes(good)
    with open(file, "ab") as stream:
        stream.write(b"x")
    refused(path, CorruptCheckpointError, file.name, "appended to")
    file.unlink()
    refused(path, MissingFileError, file.name)
    # U03: of the same name and size, from another save of the same model.
    other = data_file(tmp_path / "b").read_bytes()
    assert len(other) - len(good) < 1000
    file.write_bytes(other[: len(good)].ljust(len(good), b"\0"))
    refused(path, ChecksumError, file.name)
    file.write_bytes(good)
    (sums,) = path.glob("*.sums")
    (other_sums,) = (tmp_path / "b").glob("*.sums")
    kept = sums.read_bytes()
    shutil.copy(other_sums, sums)
    refused(path, ChecksumError, sums.name)
    sums.unlink()
    refused(path, MissingFileError, sums.name)
    sums.write_bytes(kept)
    record = (path / "manifest.json").read_bytes()
    shutil.copy(tmp_path / "b" / "manifest.json", path / "manifest.json")
    refused(path, CheckpointError)
    (path / "manifest.json").write_bytes(record)
    assert verify(path).is_well


def swap_files_of_ranks(path: Path) -> None:
    files = sorted(path.glob("*.distcp"))
    first, second = (file.read_bytes() for file in files)
    files[0].write_bytes(second)
    files[1].write_bytes(first)


def save_alike(path: Path) -> None:
    mesh = init_device_mesh("cpu", (2,))
    tensor = torch.arange(40_000.0).view(200, 200)
    with Pipeline() as pipeline:
        pipeline.save({"w": distribute_tensor(tensor, mesh, [Shard(0)])}, path)


def test_u03_files_of_two_ranks_that_change_places(ranks: Pool, tmp_path: Path) -> None:
    ranks(2).run(save_alike, tmp_path)
    swap_files_of_ranks(tmp_path)
    state = {"w": torch.full((200, 200), -1.0)}
    with pytest.raises(ChecksumError):
        dcp_pipeline.load(state, checkpoint_id=tmp_path)
    assert bool((state["w"] == -1).all())
    problems = verify(tmp_path).problems
    assert [(problem.rank, problem.keys) for problem in problems] == [(0, ("w",)), (1, ("w",))]
    assert all("it is another file of that size" in problem.found for problem in problems)
