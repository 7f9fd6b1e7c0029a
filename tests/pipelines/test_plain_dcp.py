"""Plain ``torch.distributed.checkpoint`` opens what we write, and we open what it writes."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from torch.distributed.checkpoint.state_dict import set_state_dict

from dcp_pipeline.config.model import PipelineConfig
from dcp_pipeline.pipeline import Pipeline
from dcp_pipeline.types.dtypes import DTYPES
from tests.distributed.pool import Pool
from tests.equal import assert_same, bits
from tests.marks import mostly_slow
from tests.pipelines.training import full, sharded_training, state_of, train_step


def write(writer: str, path: Path) -> dict[str, Any]:
    """Train, save with ``writer``; the whole state."""
    state = state_of(*sharded_training(dist.get_world_size(), seed=1))
    if writer == "dcp":
        dcp.save(state, checkpoint_id=path)
    else:
        with Pipeline(PipelineConfig()) as pipeline:
            pipeline.save(state, path)
    return full(state)


def read(reader: str, path: Path) -> dict[str, Any]:
    """Load with ``reader`` into a run that came elsewhere; the whole state afterwards."""
    state = state_of(*sharded_training(dist.get_world_size(), seed=2, steps=1))
    if reader == "dcp":
        dcp.load(state, checkpoint_id=path)
    else:
        with Pipeline(PipelineConfig()) as pipeline:
            pipeline.load(state, path)
    return full(state)


@pytest.mark.parametrize(
    ("writer", "reader", "saved_on"),
    mostly_slow(
        [
            (*who, saved_on)
            for who in (("ours", "dcp"), ("dcp", "ours"), ("ours", "ours"))
            for saved_on in (1, 2, 4)
        ],
        [("ours", "dcp", 2), ("dcp", "ours", 2), ("ours", "ours", 1)],
    ),
)
def test_fsdp2_and_adamw_on_the_same_and_other_numbers_of_ranks(
    ranks: Pool, tmp_path: Path, writer: str, reader: str, saved_on: int
) -> None:
    saved = ranks(saved_on).run(write, writer, tmp_path)
    for loaded_on in (1, 2, 4):
        for loaded in ranks(loaded_on).run(read, reader, tmp_path):
            assert_same(loaded, saved[0])


def resume(path: Path, writer: str, serialization: str) -> dict[str, Any]:
    """Save after two steps, load into a fresh run, and take a third step."""
    world_size = dist.get_world_size()
    config = PipelineConfig(serialization=serialization)
    unbroken = sharded_training(world_size, seed=1)
    with Pipeline(config) as pipeline:
        if writer == "dcp":
            dcp.save(state_of(*unbroken), checkpoint_id=path)
        else:
            pipeline.save(state_of(*unbroken), path)
        resumed = sharded_training(world_size, seed=2, steps=0)
        state = state_of(*resumed)
        pipeline.load(state, path)
    set_state_dict(*resumed, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    for run in (unbroken, resumed):
        train_step(*run, 2)
    assert_same(full(state_of(*resumed)), full(state_of(*unbroken)))
    return full(state_of(*resumed))


@pytest.mark.parametrize(
    ("writer", "serialization"),
    [("ours", "torch_save"), ("ours", "safetensors"), ("dcp", "torch_save")],
)
def test_a_resumed_run_goes_on_bit_for_bit(
    ranks: Pool, tmp_path: Path, writer: str, serialization: str
) -> None:
    ranks(2).run(resume, tmp_path, writer, serialization)


def tensor_of(name: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Every bit pattern of the first bytes, NaN included; for bool, both."""
    dtype = DTYPES[name]
    count = int(torch.tensor(shape).prod()) * dtype.itemsize
    raw = (torch.arange(count) * 37 + 11).to(torch.uint8)
    return (raw & 1).bool().view(shape) if name == "bool" else raw.view(dtype).view(shape)


def of_every_dtype() -> dict[str, Any]:
    tensors = {
        f"{name}-{len(shape)}": tensor_of(name, shape)
        for name in DTYPES
        for shape in ((), (7,), (3, 5))
    }
    return tensors | {"empty": torch.empty(0, 3), "nested": {"a.b": torch.ones(2), "n": 3}}


def zeros_like(state: dict[str, Any]) -> dict[str, Any]:
    """The same keys and tensors, every byte of them 0."""
    template: dict[str, Any] = {}
    for key, value in state.items():
        if isinstance(value, dict):
            template[key] = zeros_like(value)
        elif isinstance(value, torch.Tensor):
            template[key] = value.clone()
            bits(template[key]).zero_()
        else:
            template[key] = None
    return template


def test_plain_dcp_reads_every_dtype_that_we_write(tmp_path: Path) -> None:
    state = of_every_dtype()
    Pipeline(PipelineConfig()).save(state, tmp_path)
    # Plain DCP fills tensors by copy_, which not every dtype of one byte has.
    template = zeros_like(state)
    lacking = {"float4_e2m1fn_x2"}
    wanted = {k: v for k, v in state.items() if k.split("-")[0] not in lacking}
    template = {k: v for k, v in template.items() if k in wanted}
    dcp.load(template, checkpoint_id=tmp_path, no_dist=True)
    assert_same(template, wanted)


def test_we_read_every_dtype_that_plain_dcp_writes(tmp_path: Path) -> None:
    state = of_every_dtype()
    dcp.save(state, checkpoint_id=tmp_path, no_dist=True)
    template = zeros_like(state)
    report = Pipeline(PipelineConfig()).load(template, tmp_path)
    assert_same(template, state)
    assert not report.is_verified and report.save_id == ""


@pytest.mark.parametrize("serialization", ["torch_save", "safetensors"])
@pytest.mark.parametrize("checksum", ["xxh3_64", "crc32", "sha256"])
def test_every_dtype_comes_back(tmp_path: Path, serialization: str, checksum: str) -> None:
    state = of_every_dtype()
    layout = {"checksum": checksum, "block_bytes": 4096}
    with Pipeline(PipelineConfig(serialization=serialization, layout=layout)) as pipeline:
        pipeline.save(state, tmp_path)
        template = zeros_like(state)
        assert pipeline.load(template, tmp_path).is_verified
    assert_same(template, state)


def test_data_files_open_as_safetensors(tmp_path: Path) -> None:
    state = of_every_dtype()
    Pipeline(PipelineConfig(serialization="safetensors")).save(state, tmp_path)
    assert not (tmp_path / ".metadata").exists()
    (path,) = tmp_path.glob("*.safetensors")
    with safe_open(path, "pt") as file:
        assert file.metadata() == {"format": "pt"}
        stored = {key: file.get_tensor(key) for key in file.keys() if "-" in key}
    assert set(stored) == {key for key in state if "-" in key}
    for key, tensor in stored.items():
        assert torch.equal(bits(tensor), bits(state[key])), key
        # Neither pairs of reals nor half a byte can be 0-dim there.
        if not key.startswith(("complex", "float4_e2m1fn_x2-0")):
            assert (tensor.dtype, tensor.shape) == (state[key].dtype, state[key].shape)


def write_sharded(path: Path) -> dict[str, Any]:
    state = state_of(*sharded_training(dist.get_world_size(), seed=1))
    with Pipeline(PipelineConfig(serialization="safetensors")) as pipeline:
        pipeline.save(state, path)
    return full(state["model"])


def test_sharded_data_files_open_as_safetensors(ranks: Pool, tmp_path: Path) -> None:
    model = ranks(2).run(write_sharded, tmp_path)[0]
    found: dict[str, torch.Tensor] = {}
    for path in tmp_path.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            for name in file.keys():
                key, _, offsets = name.partition("@")
                key = key.removeprefix("model.")
                if key not in model:
                    continue
                part = file.get_tensor(name)
                begin = [int(at) for at in offsets.split(",")] if offsets else [0] * part.dim()
                whole = found.setdefault(key, torch.full_like(model[key], torch.nan))
                whole[tuple(slice(b, b + n) for b, n in zip(begin, part.shape, strict=True))] = part
    assert_same(dict(sorted(found.items())), dict(sorted(model.items())))
