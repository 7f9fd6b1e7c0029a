"""Tensor-like types of a user's own."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from dcp_pipeline import (
    CheckpointableTensor,
    ChunkStorageMetadata,
    MetadataIndex,
    ShapeMismatchError,
    load,
    save,
)
from tests.distributed.pool import Pool


class Striped(CheckpointableTensor):
    """Rows are dealt out to the ranks in turn."""

    def __init__(self, rows: int, start: float) -> None:
        self._rows = rows
        rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        self.mine = {row: torch.full((1, 3), start + row) for row in range(rank, rows, size)}

    @property
    def shape(self) -> tuple[int, int]:
        return self._rows, 3

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size([row, 0]), torch.Size([1, 3])) for row in self.mine]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        assert index.offset is not None
        return self.mine[index.offset[0]]


def write(path: Path) -> None:
    save({"striped": Striped(7, 1.0)}, checkpoint_id=path / "c")


def read(path: Path) -> list[str]:
    problems = []
    found, plain = Striped(7, 100.0), torch.zeros(7, 3)
    load({"striped": found}, checkpoint_id=path / "c")
    if any(part.tolist() != [[1.0 + row] * 3] for row, part in found.mine.items()):
        problems.append(f"{found.mine}")
    # To plain DCP what was written is a tensor in chunks, like any other.
    for reader in (load, dcp.load):
        reader({"striped": plain.zero_()}, checkpoint_id=path / "c")
        if plain[:, 0].tolist() != [1.0 + row for row in range(7)]:
            problems.append(f"{reader.__module__}: {plain}")
    return problems


@pytest.mark.parametrize(("saved_on", "loaded_on"), [(3, 2), (1, 4)])
def test_saved_on_some_ranks_loaded_on_others(
    ranks: Pool, tmp_path: Path, saved_on: int, loaded_on: int
) -> None:
    ranks(saved_on).run(write, tmp_path)
    assert ranks(loaded_on).run(read, tmp_path) == [[]] * loaded_on


def test_alone(tmp_path: Path) -> None:
    save({"striped": Striped(2, 1.0)}, checkpoint_id=tmp_path / "c")
    plain = {"striped": torch.zeros(2, 3)}
    load(plain, checkpoint_id=tmp_path / "c")
    assert plain["striped"].tolist() == [[1.0] * 3, [2.0] * 3]
    with pytest.raises(ShapeMismatchError):
        load({"striped": Striped(3, 0.0)}, checkpoint_id=tmp_path / "c")
    with pytest.raises(TypeError, match="abstract"):
        CheckpointableTensor()  # type: ignore[abstract]
