"""DeepSpeed's checkpoints: see ``deepspeed_files`` for how they are made."""

import os
import resource
from pathlib import Path
from typing import Any

import pytest
import torch

from dcp_pipeline.core.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    FormatError,
    MissingFileError,
    UnsafeCheckpointError,
)
from dcp_pipeline.layout.foreign import recognize
from dcp_pipeline.layout.foreign.building import boxes_of_run
from dcp_pipeline.pipelines.steps import data_files
from tests.equal import assert_same
from tests.foreign.deepspeed_files import write_universal, write_zero
from tests.foreign.loading import assert_equal, load_foreign, nested, opened

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_weights_and_moments_of_every_stage(tmp_path: Path, stage: int, count: int) -> None:
    wanted = write_zero(tmp_path, stage, count, prefix="bf16_" if stage == 1 else "")
    assert recognize(str(tmp_path)) == "deepspeed"
    assert_equal(nested(tmp_path), wanted)
    assert_equal(nested(tmp_path / "global_step7", "deepspeed"), wanted)


def test_no_element_is_read_to_open(tmp_path: Path) -> None:
    write_zero(tmp_path, 3, 2)
    manifest = opened(tmp_path)
    key = manifest.names.index("model.embed.weight")
    rows = [row for row in range(len(manifest.table)) if manifest.table.key[row] == key]
    boxes = [manifest.table.boxes(row) for row in rows]
    # 21 elements of 7 rows: each rank has 11, which end in the middle of a row.
    assert boxes == [((0, 0), (3, 3)), ((3, 0), (1, 2)), ((3, 2), (1, 1)), ((4, 0), (3, 3))]
    assert manifest.table.length[rows].tolist() == [36, 8, 4, 36]


@pytest.mark.parametrize("shape", [(), (5,), (3, 4), (2, 3, 4), (1, 1, 7)])
def test_boxes_of_runs_cover_each_element_once(shape: tuple[int, ...]) -> None:
    whole = torch.arange(torch.Size(shape).numel()).view(shape)
    count = whole.numel()
    for first in range(count + 1):
        for last in range(first, count + 1):
            found = []
            for offsets, sizes, at in boxes_of_run(shape, first, last):
                box = whole
                for axis, (start, extent) in enumerate(zip(offsets, sizes, strict=True)):
                    box = box.narrow(axis, start, extent)
                assert box.flatten()[0] == at
                found += box.flatten().tolist()
            assert found == list(range(first, last))


def test_universal(tmp_path: Path) -> None:
    wanted = write_universal(tmp_path)
    assert recognize(str(tmp_path)) == "deepspeed_universal"
    assert recognize(str(tmp_path / "global_step7_universal")) == "deepspeed_universal"
    assert_equal(nested(tmp_path), wanted)
    template = {"model": {name: torch.empty_like(one) for name, one in wanted["model"].items()}}
    load_foreign(template, tmp_path)
    assert_same(template["model"], wanted["model"])


def test_more_files_than_may_be_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_files, "_MOST_OPEN", 3)
    wanted = write_universal(tmp_path)
    most, limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    held = len(os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (held + 12, limit))
    try:
        assert_equal(nested(tmp_path), wanted)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, limit))


def changed(path: Path, change: Any) -> None:
    content = torch.load(path, weights_only=False)
    change(content)
    torch.save(content, path)


def test_ranks_that_are_lacking(tmp_path: Path) -> None:
    write_zero(tmp_path, 2, 3)
    (tmp_path / "global_step7" / "zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink()
    with pytest.raises(MissingFileError, match="3 ranks have saved"):
        opened(tmp_path)
    (tmp_path / "latest").write_text("global_step8")
    with pytest.raises(CheckpointNotFoundError, match=r"no files \*_optim_states"):
        opened(tmp_path)
    (tmp_path / "latest").write_text("../other")
    with pytest.raises(UnsafeCheckpointError, match=r"\.\./other"):
        opened(tmp_path)


def wrong_stage(content: Any) -> None:
    content["optimizer_state_dict"]["zero_stage"] = 1 << 70


def wrong_count(content: Any) -> None:
    content["optimizer_state_dict"]["partition_count"] = -2


def too_short(content: Any) -> None:
    groups = content["optimizer_state_dict"]["single_partition_of_fp32_groups"]
    groups[0] = groups[0][:3].clone()


def no_groups(content: Any) -> None:
    del content["optimizer_state_dict"]["single_partition_of_fp32_groups"]


def whole_momentum(content: Any) -> None:
    states = content["optimizer_state_dict"]["base_optimizer_state"]["state"]
    states[0]["exp_avg"] = torch.cat([states[0]["exp_avg"], torch.ones(3)])


def state_named_fp32(content: Any) -> None:
    content["optimizer_state_dict"]["base_optimizer_state"]["state"][0]["fp32"] = torch.ones(1)


@pytest.mark.parametrize(
    "change", [wrong_stage, wrong_count, too_short, no_groups, whole_momentum, state_named_fp32]
)
def test_states_that_contradict_themselves(tmp_path: Path, change: Any) -> None:
    write_zero(tmp_path, 2, 2, has_objects=False)
    for rank in range(2):
        name = f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        changed(tmp_path / "global_step7" / name, change)
    with pytest.raises(CheckpointError):
        opened(tmp_path)


def huge(content: Any) -> None:
    content["param_shapes"][0]["embed.weight"] = torch.Size([1 << 40, 1 << 20])


def negative(content: Any) -> None:
    content["param_shapes"][0]["embed.weight"] = [-7, -3]


def a_shared_name_of_nothing(content: Any) -> None:
    content["shared_params"] = {"a": "b"}


def a_name_twice(content: Any) -> None:
    content["param_shapes"][1]["embed.weight"] = torch.Size([3, 7])


@pytest.mark.parametrize("change", [huge, negative, a_shared_name_of_nothing, a_name_twice])
def test_shapes_that_lie(tmp_path: Path, change: Any) -> None:
    write_zero(tmp_path, 2, 2, has_objects=False)
    changed(tmp_path / "global_step7" / "mp_rank_00_model_states.pt", change)
    with pytest.raises(CheckpointError):
        opened(tmp_path)


def test_a_parameter_without_weights(tmp_path: Path) -> None:
    write_universal(tmp_path)
    zero = tmp_path / "global_step7_universal" / "zero"
    torch.save("text", zero / "cube" / "fp32.pt")
    with pytest.raises(FormatError, match="expected a tensor"):
        opened(tmp_path)
    (zero / "cube" / "fp32.pt").unlink()
    with pytest.raises(FormatError, match=r"zero/cube has no fp32\.pt"):
        opened(tmp_path)
