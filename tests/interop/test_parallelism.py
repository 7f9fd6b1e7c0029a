"""Plain DCP opens what we write and we open what it writes, whatever splits the tensors."""

from pathlib import Path

import pytest
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from dcp_pipeline.api import load, save
from tests.distributed.pool import Pool
from tests.interop.states import KINDS, NO_SHARD, check, fill, state_of
from tests.marks import mostly_slow


def write(path: Path, kind: str) -> None:
    state = fill(state_of(kind))
    save(state, checkpoint_id=path / "ours")
    dcp.save(state, checkpoint_id=path / "dcp")


def read(path: Path, kind: str) -> None:
    fresh = state_of(kind)
    pairs = [("ours", dcp.load), ("dcp", load), ("ours", load)]
    if kind == NO_SHARD and dist.get_world_size() == 4:
        # DCP takes the key that this rank has no shard of for one of torch 2.3's, and then looks
        # for the names of torch 2.3.
        pairs.pop(0)
    for writer, reader in pairs:
        state = state_of(kind)
        reader(state, checkpoint_id=path / writer)
        check(state, fresh)


ALWAYS = ["FSDP2 over TP, uneven", "HSDP", "ShardedTensor", NO_SHARD, "mixed"]
"""Of the others, each splits its tensors as a part of one of these does."""


@pytest.mark.parametrize("kind", mostly_slow(KINDS, ALWAYS))
def test_both_ways_on_other_numbers_of_ranks(ranks: Pool, tmp_path: Path, kind: str) -> None:
    ranks(2).run(write, tmp_path, kind)
    for loaded_on in (1, 4):
        ranks(loaded_on).run(read, tmp_path, kind)


@pytest.mark.slow
@pytest.mark.parametrize("saved_on", [1, 2, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_both_ways_from_every_number_of_ranks_to_every(
    ranks: Pool, tmp_path: Path, kind: str, saved_on: int
) -> None:
    ranks(saved_on).run(write, tmp_path, kind)
    for loaded_on in (1, 2, 4):
        ranks(loaded_on).run(read, tmp_path, kind)
