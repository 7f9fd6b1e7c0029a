"""Plain DCP's saves with ``use_collectives=False``: ``__{rank}.metadata`` and no ``.metadata``."""

import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from dcp_pipeline.api import load, load_keys, save
from dcp_pipeline.core.errors import (
    CheckpointExistsError,
    CorruptCheckpointError,
    IncompleteCheckpointError,
    MissingFileError,
    UnsafeCheckpointError,
)
from dcp_pipeline.tools.inspect import inspect
from dcp_pipeline.tools.listing import list_directory
from tests.distributed.pool import Pool
from tests.equal import assert_same


def sharded(shape: tuple[int, ...], placement: Any, scale: float) -> DTensor:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    count = int(torch.tensor(shape).prod())
    return distribute_tensor(torch.arange(float(count)).reshape(shape) * scale, mesh, [placement])


def state_of(scale: float = 1.0, own: bool = True) -> dict[str, Any]:
    """Shards (uneven, or empty on most ranks), replicas, values, and what one rank has alone."""
    state = {
        "rows": sharded((7, 3), Shard(0), scale),
        "columns": sharded((2, 5), Shard(1), scale),
        "single": sharded((1,), Shard(0), scale),
        "whole": sharded((6,), Replicate(), scale),
        "plain": torch.arange(3.0) * scale,
        "nested": {"step": int(7 * scale), "list": [int(scale), 2]},
    }
    if own:
        rank = dist.get_rank()
        state["of_rank"] = {f"{rank}": torch.full((2,), rank * scale), f"v{rank}": rank * scale}
    return state


def save_plainly(path: Path, writer: str) -> None:
    if writer == "torch":
        dcp.save(state_of(), checkpoint_id=path, use_collectives=False)
    else:
        save(state_of(), checkpoint_id=path, use_collectives=False)


def load_here(path: Path, saved_on: int) -> None:
    state = state_of(scale=-1.0, own=False)
    for rank in range(saved_on):
        state.setdefault("of_rank", {})[f"{rank}"] = torch.full((2,), -1.0)
        state["of_rank"][f"v{rank}"] = None
    report = load(state, checkpoint_id=path)
    assert report.save_id == "" and not report.missing and not report.unexpected
    wanted = state_of()
    for key in ("rows", "columns", "single", "whole"):
        assert_same(state[key].full_tensor(), wanted[key].full_tensor())
    assert_same(state["plain"], wanted["plain"])
    assert_same(state["nested"], wanted["nested"])
    for rank in range(saved_on):
        assert_same(state["of_rank"][f"{rank}"], torch.full((2,), float(rank)))
        assert state["of_rank"][f"v{rank}"] == rank


@pytest.mark.parametrize(("writer", "saved_on"), [("torch", 1), ("torch", 4), ("ours", 2)])
def test_they_load_on_any_number_of_ranks(
    ranks: Pool, tmp_path: Path, writer: str, saved_on: int
) -> None:
    ranks(saved_on).run(save_plainly, tmp_path, writer)
    assert not (tmp_path / ".metadata").exists() and (tmp_path / "__0.metadata").exists()
    for loaded_on in (1, 2, 4):
        ranks(loaded_on).run(load_here, tmp_path, saved_on)
    found = load_keys(tmp_path)
    assert_same(found["rows"], torch.arange(21.0).reshape(7, 3))
    assert set(found["of_rank"]) == {f"{kind}{r}" for r in range(saved_on) for kind in ("", "v")}


def test_replicas_are_taken_once(ranks: Pool, tmp_path: Path) -> None:
    ranks(4).run(save_plainly, tmp_path, "torch")
    found = inspect(tmp_path)
    assert found.summary.kind == "plain DCP" and not found.problems
    chunks = {key.name: key.chunks for key in found.keys}
    assert chunks["whole"] == chunks["plain"] == chunks["nested.step"] == chunks["single"] == 1
    assert chunks["rows"] == 4 and chunks["columns"] == 3
    (listed,) = list_directory(tmp_path).checkpoints
    assert listed.state == "foreign"


def test_a_rank_that_is_lacking_is_named(ranks: Pool, tmp_path: Path) -> None:
    ranks(4).run(save_plainly, tmp_path, "torch")
    (tmp_path / "__2.metadata").unlink()
    with pytest.raises(IncompleteCheckpointError, match=r"ranks 0, 1, 3 .* ranks 2 have not"):
        load_keys(tmp_path)
    # The last rank's absence shows in what the others lack.
    (tmp_path / "__3.metadata").unlink()
    with pytest.raises(IncompleteCheckpointError, match=r"ranks 0 to 1 .*rows .* gap"):
        load_keys(tmp_path)
    (listed,) = list_directory(tmp_path).checkpoints
    assert listed.state == "incomplete"


def test_what_other_ranks_left_of_an_older_save_is_refused(ranks: Pool, tmp_path: Path) -> None:
    ranks(4).run(save_plainly, tmp_path, "torch")
    ranks(2).run(save_plainly, tmp_path, "torch")
    with pytest.raises(IncompleteCheckpointError, match=r"several saves.*rows .*overlap"):
        load_keys(tmp_path)


def change(path: Path, edit: Any) -> None:
    metadata = pickle.loads(path.read_bytes())
    edit(metadata)
    path.write_bytes(pickle.dumps(metadata))


def test_metadata_that_do_not_fit_are_refused(ranks: Pool, tmp_path: Path) -> None:
    ranks(2).run(save_plainly, tmp_path, "torch")
    kept = (tmp_path / "__1.metadata").read_bytes()

    def other_shape(metadata: Any) -> None:
        metadata.state_dict_metadata["rows"].size = torch.Size([8, 3])

    change(tmp_path / "__1.metadata", other_shape)
    with pytest.raises(CorruptCheckpointError, match=r"'rows' .*\[8, 3\] in __1.metadata"):
        load_keys(tmp_path)

    (tmp_path / "__1.metadata").write_bytes(kept)
    change(tmp_path / "__1.metadata", lambda m: m.storage_data.clear())
    with pytest.raises(CorruptCheckpointError, match=r"__1.metadata does not say where"):
        load_keys(tmp_path)

    class Attack:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(tmp_path / "made"),)

    (tmp_path / "__1.metadata").write_bytes(pickle.dumps(Attack()))
    with pytest.raises(UnsafeCheckpointError, match="mkdir"):
        load_keys(tmp_path)
    assert not (tmp_path / "made").exists()

    (tmp_path / "__1.metadata").write_bytes(kept)
    (tmp_path / "__1_0.distcp").unlink()
    with pytest.raises(MissingFileError, match=r"__1_0.distcp"):
        load_keys(tmp_path)


def test_a_common_metadata_goes_before_those_of_ranks(tmp_path: Path) -> None:
    dcp.save({"w": torch.ones(2)}, checkpoint_id=tmp_path, no_dist=True)
    (tmp_path / "__0.metadata").write_bytes(b"not looked at")
    assert_same(load_keys(tmp_path)["w"], torch.ones(2))


def test_a_save_of_ours_replaces_all_of_it(ranks: Pool, tmp_path: Path) -> None:
    ranks(2).run(save_plainly, tmp_path, "torch")
    with pytest.raises(CheckpointExistsError):
        save({"w": torch.ones(2)}, checkpoint_id=tmp_path, config={"overwrite": "error"})
    save({"w": torch.ones(2)}, checkpoint_id=tmp_path)
    assert list(load_keys(tmp_path)) == ["w"]
    assert not [name for name in os.listdir(tmp_path) if name.startswith("__1")]
    assert not (tmp_path / "__0.metadata").exists() and not (tmp_path / "__0_0.distcp").exists()
