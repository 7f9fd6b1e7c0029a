"""Megatron-LM's older format, by the layout of ``megatron/training/checkpointing.py``."""

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dcp_pipeline.core.errors import (
    CheckpointNotFoundError,
    FormatError,
    MissingFileError,
    UnsafeCheckpointError,
)
from dcp_pipeline.layout.foreign import open_source, recognize
from tests.foreign.loading import assert_equal, nested, opened

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def write(path: Path, tp: int, pp: int) -> dict[str, Any]:
    """An iteration of a run; what is to be read of it."""
    wanted: dict[str, Any] = {}
    for t in range(tp):
        for p in range(pp):
            folder = f"mp_rank_{t:02}" if pp == 1 else f"mp_rank_{t:02}_{p:03}"
            (path / "iter_0000012" / folder).mkdir(parents=True)
            weight = torch.full((2, 3), 10.0 * t + p)
            state = {
                "args": argparse.Namespace(hidden_size=8, padded_vocab_size=128),
                "iteration": 12,
                "model": {"language_model": {"layers.0.weight": weight, "_extra": None}},
                "rng_state": [{"random": (3, (1, 2), None), "np": np.arange(3)}],
            }
            torch.save(state, path / "iter_0000012" / folder / "model_optim_rng.pt")
            wanted.setdefault(f"tp{t}", {})[f"pp{p}"] = {
                "args": {"hidden_size": 8, "padded_vocab_size": 128},
                "iteration": 12,
                "model": {"language_model": {"layers.0.weight": weight, "_extra": None}},
                "rng_state": [{"random": (3, (1, 2), None)}],
            }
    (path / "latest_checkpointed_iteration.txt").write_text("12\n")
    return wanted


@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 1), (2, 3)])
def test_keys_begin_with_the_rank(tmp_path: Path, tp: int, pp: int) -> None:
    wanted = write(tmp_path, tp, pp)
    assert recognize(str(tmp_path)) == "megatron"
    assert recognize(str(tmp_path / "iter_0000012")) == "megatron"
    assert_equal(nested(tmp_path), wanted)
    assert_equal(nested(tmp_path / "iter_0000012"), wanted)


def test_a_rank_that_is_lacking(tmp_path: Path) -> None:
    write(tmp_path, 2, 2)
    file = tmp_path / "iter_0000012" / "mp_rank_01_000" / "model_optim_rng.pt"
    file.unlink()
    with pytest.raises(MissingFileError, match=r"mp_rank_01_000 has no model_optim_rng\.pt"):
        opened(tmp_path)
    file.parent.rmdir()
    with pytest.raises(MissingFileError, match="2 tensor-parallel and 2 pipeline ranks"):
        opened(tmp_path)


@pytest.mark.parametrize("text", ["../x", "-1", "1" * 40, "", "iter_1"])
def test_a_pointer_that_is_no_iteration(tmp_path: Path, text: str) -> None:
    write(tmp_path, 1, 1)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text(text)
    with pytest.raises(FormatError, match="expected the number of an iteration"):
        opened(tmp_path)


def test_other_classes_are_refused(tmp_path: Path) -> None:
    write(tmp_path, 1, 1)
    torch.save(
        {"model": {}, "hook": print}, tmp_path / "iter_0000012/mp_rank_00/model_optim_rng.pt"
    )
    with pytest.raises(UnsafeCheckpointError, match=r"mp_rank_00/model_optim_rng\.pt.*print"):
        opened(tmp_path)


def test_a_folder_that_leads_out_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "other", 1, 1)
    run = tmp_path / "run" / "iter_0000012"
    run.mkdir(parents=True)
    (run / "mp_rank_00").symlink_to(tmp_path / "other" / "iter_0000012" / "mp_rank_00")
    with pytest.raises(UnsafeCheckpointError, match="leads out"):
        open_source(str(run))


def test_nothing_there(tmp_path: Path) -> None:
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("3")
    with pytest.raises(CheckpointNotFoundError, match="iter_0000003 has no folder mp_rank_##"):
        opened(tmp_path)
