"""Repositories of Hugging Face, read by several ranks into their shards; bytes are counted."""

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.distributed.checkpoint import HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_saver import save as plain_save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor

from dcp_pipeline import HuggingFaceStorageReader, Pipeline, load
from tests.distributed.pool import Pool
from tests.equal import bits
from tests.huggingface_files import every_dtype, save_shards
from tests.marks import mostly_slow, slow
from tests.parallelism.layouts import Decoder, build
from tests.state.placements import placements_of

CONFIG = {"layout": "huggingface", "serialization": "safetensors"}
TOLERATED = 1.05


def quantized_config(dtype: str) -> dict[str, Any]:
    layout = {"kind": "huggingface", "dequantize": dtype}
    return {"layout": layout, "serialization": "safetensors"}


def different(found: dict[str, Any], wanted: dict[str, torch.Tensor]) -> list[str]:
    """Names whose bits are not what is wanted."""
    return [
        name
        for name, one in found.items()
        if not torch.equal(
            bits(one.full_tensor() if isinstance(one, DTensor) else one), bits(wanted[name])
        )
    ]


def load_a_model(path: Path, name: str) -> list[str]:
    """What of a model on the layout ``name`` is not as the repository has it."""
    model = build(name).model
    state = model.state_dict()
    for one in state.values():
        one.zero_()
    with Pipeline.from_config(CONFIG) as pipeline:
        report = pipeline.load(state, path)
    assert set(report.loaded) == set(state)
    return different(state, Decoder().state_dict())


LAYOUTS = [("alone", 1), ("fsdp2", 1), ("fsdp2", 2), ("fsdp2", 4), ("tensor", 2), ("tensor", 4)]
LAYOUTS += [("fsdp2 over tensor", 4)]


@pytest.mark.parametrize(
    ("name", "size", "kind"),
    mostly_slow(
        [(*layout, kind) for layout in LAYOUTS for kind in ("safetensors", "bin")],
        [("fsdp2", 2, "safetensors"), ("fsdp2 over tensor", 4, "bin")],
    ),
)
def test_a_model_on_every_layout(
    ranks: Pool, tmp_path: Path, name: str, size: int, kind: str
) -> None:
    state = Decoder().state_dict()
    if kind == "bin":
        torch.save(state, tmp_path / "pytorch_model.bin")
    else:
        save_shards(tmp_path, dict(state), 3)
    assert ranks(size).run(load_a_model, tmp_path, name) == [[]] * size


def sharded(whole: torch.Tensor, placement: str) -> DTensor:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    raw = distribute_tensor(whole.view(torch.uint8), mesh, placements_of([placement]))
    local = raw.to_local().contiguous().view(whole.dtype)
    return DTensor.from_local(
        local, mesh, raw.placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )


def load_every_dtype(path: Path, placement: str) -> list[str]:
    wanted = {name: one for name, one in every_dtype().items() if one.dim() == 2 and one.numel()}
    state = {name: sharded(torch.zeros_like(one.view(torch.uint8)).view(one.dtype), placement)
             for name, one in wanted.items()}  # fmt: skip
    with Pipeline.from_config({**CONFIG, "strict": False}) as pipeline:
        report = pipeline.load(state, path)
    assert not report.shapes and not report.dtypes and not report.missing
    return [
        name
        for name, one in state.items()
        if not torch.equal(bits(one.to_local()), bits(sharded(wanted[name], placement).to_local()))
    ]


@pytest.mark.parametrize(
    ("placement", "size"),
    mostly_slow(product(["S0", "S1", "R"], [2, 4]), [("S0", 4), ("S1", 2)]),
)
def test_u04_every_dtype_in_shards(ranks: Pool, tmp_path: Path, placement: str, size: int) -> None:
    save_file(every_dtype(), tmp_path / "model.safetensors")
    assert ranks(size).run(load_every_dtype, tmp_path, placement) == [[]] * size


ROWS, COLUMNS = 1024, 1536


def large() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    weight = torch.randn(ROWS, COLUMNS, generator=generator)
    groups = torch.randint(0, 256, (8, 128, 48, 16), dtype=torch.uint8, generator=generator)
    return {
        "plain.weight": weight,
        "float8.weight": weight.to(torch.float8_e4m3fn),
        "float8.weight_scale_inv": torch.rand(ROWS // 128, COLUMNS // 128, generator=generator),
        "experts_blocks": groups,
        "experts_scales": groups[..., 0] % 50 + 100,
    }


def results(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    state = large()
    spread = state["float8.weight_scale_inv"].repeat_interleave(128, 0).repeat_interleave(128, 1)
    table = torch.tensor([0.0, 0.5, 1, 1.5, 2, 3, 4, 6])
    table = torch.cat([table, -table])
    codes = state["experts_blocks"].long()
    pairs = torch.stack([table[codes & 15], table[codes >> 4]], -1).flatten(-2)
    experts = torch.ldexp(pairs, state["experts_scales"].int().unsqueeze(-1) - 127).flatten(-2)
    return {
        "plain.weight": state["plain.weight"],
        "float8.weight": (state["float8.weight"].float() * spread).to(dtype),
        "experts_blocks": experts.to(dtype),
    }


def load_large(
    path: Path, placement: str, dtype: str | None, more: dict[str, Any] | None = None
) -> tuple[list[str], int]:
    """What differs, and the bytes read."""
    wanted = large() if dtype is None else results(getattr(torch, dtype))
    state = {name: sharded(torch.zeros_like(one.view(torch.uint8)).view(one.dtype), placement)
             for name, one in wanted.items()}  # fmt: skip
    config = CONFIG if dtype is None else quantized_config(dtype)
    with Pipeline.from_config(config | (more or {})) as pipeline:
        report = pipeline.load(state, path)
    wrong = [
        name
        for name, one in state.items()
        if not torch.equal(bits(one.to_local()), bits(sharded(wanted[name], placement).to_local()))
    ]
    return wrong, report.bytes_read


@pytest.mark.parametrize(
    ("dtype", "placement", "size"),
    mostly_slow(
        product([None, "bfloat16", "float32"], ["S0", "S1"], [1, 2, 4]),
        [("bfloat16", "S1", 2), ("float32", "S0", 1)],
    ),
)
def test_each_rank_reads_what_its_shards_need(
    ranks: Pool, tmp_path: Path, dtype: str | None, placement: str, size: int
) -> None:
    state = large()
    save_shards(tmp_path, state, 2)
    found = ranks(size).run(load_large, tmp_path, placement, dtype)
    assert [wrong for wrong, _ in found] == [[]] * size
    needed = sum(one.numel() * one.element_size() for one in state.values())
    assert sum(nbytes for _, nbytes in found) <= TOLERATED * needed
    # What ranks pass on to one another is read in pieces of a megabyte.
    assert max(nbytes for _, nbytes in found) <= TOLERATED * needed / size + (1 << 20)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [slow(None), "bfloat16"])
@pytest.mark.parametrize("size", [2, slow(4)])
def test_replicas_are_read_once_where_that_is_asked_for(
    ranks: Pool, tmp_path: Path, dtype: str | None, size: int
) -> None:
    state = large()
    save_shards(tmp_path, state, 2)
    once = {"read_replicas": "once"}
    found = ranks(size).run(load_large, tmp_path, "R", dtype, once)
    assert [wrong for wrong, _ in found] == [[]] * size
    needed = sum(one.numel() * one.element_size() for one in state.values())
    assert sum(nbytes for _, nbytes in found) <= TOLERATED * needed


def write_with_torch(path: Path, settings: dict[str, Any]) -> None:
    state = {name: sharded(one, "S0") for name, one in results(torch.bfloat16).items()}
    writer = HuggingFaceStorageWriter(str(path), save_distributed=True, **settings)
    plain_save(state, storage_writer=writer)


def read_what_torch_wrote(path: Path, placement: str) -> list[str]:
    wanted = results(torch.bfloat16)
    wrong = []
    for how in ("ours", "reader", "plain"):
        state = {name: sharded(torch.zeros_like(one), placement) for name, one in wanted.items()}
        if how == "ours":
            load(state, checkpoint_id=path, config=CONFIG)
        elif how == "reader":
            load(state, storage_reader=HuggingFaceStorageReader(path))
        else:
            torch.distributed.checkpoint.load(state, storage_reader=HuggingFaceStorageReader(path))
        wrong += [f"{how} {name}" for name in different(state, wanted)]
    return wrong


@pytest.mark.parametrize(
    ("consolidated", "sizes"),
    mostly_slow(
        product([False, True], [(2, 1), (2, 4), (4, 2)]), [(False, (2, 4)), (True, (2, 1))]
    ),
)
def test_what_torchs_writer_wrote_on_several_ranks(
    ranks: Pool, tmp_path: Path, consolidated: bool, sizes: tuple[int, int]
) -> None:
    settings = {"enable_consolidation": True} if consolidated else {}
    ranks(sizes[0]).run(write_with_torch, tmp_path, settings)
    if settings:
        assert (tmp_path / "model.safetensors.index.json").exists()
    size = sizes[1]
    assert ranks(size).run(read_what_torch_wrote, tmp_path, "S1") == [[]] * size
