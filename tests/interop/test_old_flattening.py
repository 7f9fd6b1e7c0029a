"""Checkpoints as torch 2.3 and older named their keys: mappings without tensors stored whole."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import _version

from dcp_pipeline.api import load, load_keys
from tests.distributed.pool import Pool
from tests.equal import assert_same
from tests.interop.states import check, fill, state_of as state_of_kind


@contextmanager
def torch_2_3() -> Iterator[None]:
    """Let DCP flatten as it did then."""
    _version._derived_version = "2_3"
    try:
        yield
    finally:
        _version._derived_version = None


def state_of(scale: float) -> dict[str, Any]:
    return {
        "model": {"w": torch.arange(4.0) * scale, "deep": {"b": torch.ones(2) * scale}},
        "optimizer": {
            "state": {"w": {"step": torch.tensor(scale), "exp_avg": torch.ones(4) * scale}},
            "param_groups": [
                {"lr": 0.1 * scale, "betas": (0.9, 0.99), "params": ["w", "deep.b"]},
                {"lr": scale, "nested": {"a": [1, scale], "none": None}},
            ],
        },
        "progress": {"step": int(scale), "names": ["a", "b"], "more": {"x": {"y": scale}}},
        "plain": scale,
    }


def test_ours_and_plain_dcp_load_it(tmp_path: Path) -> None:
    with torch_2_3():
        dcp.save(state_of(3.0), checkpoint_id=tmp_path, no_dist=True)
    stored = dcp.FileSystemReader(tmp_path).read_metadata().state_dict_metadata
    assert "progress" in stored and "progress.step" not in stored
    found = state_of(7.0)
    dcp.load(found, checkpoint_id=tmp_path, no_dist=True)
    assert_same(found, state_of(3.0))
    found = state_of(7.0)
    report = load(found, checkpoint_id=tmp_path)
    assert_same(found, state_of(3.0))
    assert not report.missing and not report.unexpected


def test_it_loads_without_a_template(tmp_path: Path) -> None:
    with torch_2_3():
        dcp.save(state_of(3.0), checkpoint_id=tmp_path, no_dist=True)
    found, wanted = load_keys(tmp_path), state_of(3.0)
    assert {key: found[key] for key in sorted(found)}.keys() == {*wanted}
    for key in wanted:
        assert_same(found[key], wanted[key], key)
    assert_same(load_keys(tmp_path, ["progress"])["progress"], wanted["progress"])


def save_old(path: Path, kind: str) -> None:
    with torch_2_3():
        dcp.save(fill(state_of_kind(kind)), checkpoint_id=path)


def load_old(path: Path, kind: str) -> None:
    for reader in (load, dcp.load):
        state = state_of_kind(kind)
        reader(state, checkpoint_id=path)
        check(state, state_of_kind(kind))


def test_sharded_with_an_optimizer(ranks: Pool, tmp_path: Path) -> None:
    ranks(2).run(save_old, tmp_path, "FSDP2")
    for loaded_on in (1, 4):
        ranks(loaded_on).run(load_old, tmp_path, "FSDP2")
