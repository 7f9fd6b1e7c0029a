"""Codes and scales are read as the numbers that they stand for, whole or in parts."""

import json
import math
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch.distributed.checkpoint import QuantizedHuggingFaceStorageReader as TorchReader
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.state_dict_loader import load as plain_load

import dcp_pipeline
from dcp_pipeline.core.errors import ConfigError, DtypeMismatchError, FormatError
from dcp_pipeline.core.manifest import Manifest
from dcp_pipeline.core.quantized import Quantized
from dcp_pipeline.formats.dequantize import dequantize, scale_box
from dcp_pipeline.layout.huggingface import HuggingFaceLayout
from dcp_pipeline.pipelines.steps import read_quantized
from dcp_pipeline.pipelines.steps.destinations import Destination
from dcp_pipeline.pipelines.steps.read_items import locate_rows
from dcp_pipeline.pipelines.steps.read_quantized import quantized_reads
from dcp_pipeline.storage.filesystem import FileSystemStorage
from tests.equal import assert_same
from tests.huggingface_files import index_of

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def config(dtype: str, **more: Any) -> dict[str, Any]:
    layout = {"kind": "huggingface", "dequantize": dtype, **more}
    return {"layout": layout, "serialization": "safetensors"}


def codes(*sizes: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, sizes, dtype=torch.uint8, generator=generator)


def repository(path: Path) -> dict[str, torch.Tensor]:
    """Float8 in blocks and MXFP4, scales in a file of their own behind that of the codes."""
    generator = torch.Generator().manual_seed(1)
    float8 = torch.randn(300, 260, generator=generator).to(torch.float8_e4m3fn)
    state = {
        "l.weight": float8,
        "l.weight_scale_inv": torch.rand(3, 3, generator=generator),
        "mlp.gate_blocks": codes(3, 5, 4, 16),
        "mlp.gate_scales": codes(3, 5, 4, seed=2) % 30 + 100,
        "norm.weight": torch.rand(7, generator=generator).to(torch.bfloat16),
    }
    weight_map = {}
    for file, wanted in (("a.safetensors", False), ("b.safetensors", True)):
        part = {name: one for name, one in state.items() if ("scale" in name) is wanted}
        save_file(part, path / file)
        weight_map |= dict.fromkeys(part, file)
    (path / "model.safetensors.index.json").write_text(index_of(weight_map))
    return state


def by_hand(state: dict[str, torch.Tensor], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Number by number, in Python's arithmetic."""
    weight, scales = state["l.weight"].float(), state["l.weight_scale_inv"]
    result = torch.empty(weight.shape)
    for row in range(0, 300, 128):
        for column in range(0, 260, 128):
            block = (slice(row, row + 128), slice(column, column + 128))
            result[block] = weight[block] * scales[row // 128, column // 128]
    numbers = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    table = [*numbers, *(-number for number in numbers)]
    values = [
        math.copysign(math.ldexp(table[nibble], int(power) - 127), -1 if nibble > 7 else 1)
        for group, power in zip(
            state["mlp.gate_blocks"].view(-1, 16).tolist(),
            state["mlp.gate_scales"].flatten().tolist(),
            strict=True,
        )
        for byte in group
        for nibble in (byte & 15, byte >> 4)
    ]
    gate = torch.tensor(values, dtype=torch.float64).view(3, 5, 128)
    norm = state["norm.weight"]
    return {"l.weight": result.to(dtype), "mlp.gate_blocks": gate.to(dtype), "norm.weight": norm}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_by_hand(tmp_path: Path, dtype: str) -> None:
    expected = by_hand(repository(tmp_path), getattr(torch, dtype))
    read = dcp_pipeline.load_keys(tmp_path, config=config(dtype))
    assert_same(dict(sorted(read.items())), expected)


class RepairedReader(TorchReader):
    """torch 2.13 fills as many elements of a row of MXFP4 as it has groups, and leaves the rest:
    it changes the size of the tensor to that of the result, but not that of its chunk.
    """

    def read_metadata(self) -> Any:
        metadata = super().read_metadata()
        for name, stored in metadata.state_dict_metadata.items():
            if name.endswith("_blocks"):
                (chunk,) = stored.chunks
                info = metadata.storage_data[MetadataIndex(name, chunk.offsets)]
                chunk.offsets, chunk.sizes = torch.Size([0] * len(stored.size)), stored.size
                metadata.storage_data[MetadataIndex(name, chunk.offsets)] = info
        return metadata


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_as_torchs_reader_reads_it(tmp_path: Path, dtype: torch.dtype) -> None:
    repository(tmp_path)
    names = {"l.weight": (300, 260), "mlp.gate_blocks": (3, 5, 128)}
    theirs = {name: torch.zeros(sizes, dtype=dtype) for name, sizes in names.items()}
    reader = RepairedReader(str(tmp_path), target_dtype=dtype)
    plain_load(theirs, storage_reader=reader, no_dist=True)
    own = dcp_pipeline.QuantizedHuggingFaceStorageReader(tmp_path, target_dtype=dtype)
    for load in (plain_load, dcp_pipeline.load):
        ours = {name: torch.zeros(sizes, dtype=dtype) for name, sizes in names.items()}
        ours["norm.weight"] = torch.zeros(7, dtype=torch.bfloat16)
        load(ours, storage_reader=own, no_dist=True)
        assert_same({name: ours[name] for name in theirs}, theirs)


def test_codes_and_scales_stay_as_they_are_unless_asked(tmp_path: Path) -> None:
    state = repository(tmp_path)
    read = dcp_pipeline.load_keys(tmp_path, config=config("none"))
    assert_same(dict(sorted(read.items())), dict(sorted(state.items())))


def test_a_template_of_another_dtype_needs_a_cast(tmp_path: Path) -> None:
    expected = by_hand(repository(tmp_path), torch.bfloat16)
    state = {name: torch.zeros(one.shape) for name, one in expected.items()}
    with pytest.raises(DtypeMismatchError, match="3 places"):
        dcp_pipeline.load(state, checkpoint_id=tmp_path, config=config("bfloat16"))
    casts = {"casts": [{"keys": "*", "target": "float32"}]}
    dcp_pipeline.load(state, checkpoint_id=tmp_path, config=config("bfloat16") | casts)
    assert_same(state, {name: one.float() for name, one in expected.items()})


@pytest.mark.parametrize("rollback", ["copy", "verify_first", "none"])
def test_every_kind_of_rollback(tmp_path: Path, rollback: str) -> None:
    expected = by_hand(repository(tmp_path), torch.bfloat16)
    state = {name: torch.zeros_like(one) for name, one in expected.items()}
    more = {"rollback": rollback}
    dcp_pipeline.load(state, checkpoint_id=tmp_path, config=config("bfloat16") | more)
    assert_same(state, expected)


def test_a_transposed_template(tmp_path: Path) -> None:
    """Memory that is not in row-major order takes the elements all the same."""
    expected = by_hand(repository(tmp_path), torch.bfloat16)
    state = {name: torch.zeros_like(one.t().contiguous()).t() if one.dim() == 2 else
             torch.zeros_like(one) for name, one in expected.items()}  # fmt: skip
    dcp_pipeline.load(state, checkpoint_id=tmp_path, config=config("bfloat16"))
    assert_same(state, expected)


def test_a_number_that_does_not_fit_fails_and_is_undone(tmp_path: Path) -> None:
    state = {"w.weight": torch.ones(4, 4).to(torch.float8_e4m3fn)}
    state["w.weight_scale_inv"] = torch.full((1, 1), 1e5)
    save_file(state, tmp_path / "model.safetensors")
    template = {"w.weight": torch.full((4, 4), 7.0, dtype=torch.float16)}
    with pytest.raises(DtypeMismatchError, match=r"w\.weight, 16 of them .* do not fit"):
        dcp_pipeline.load(template, checkpoint_id=tmp_path, config=config("float16"))
    assert_same(template, {"w.weight": torch.full((4, 4), 7.0, dtype=torch.float16)})


@pytest.mark.parametrize("where", ["config", "layout", "text_config"])
def test_the_size_of_a_block(tmp_path: Path, where: str) -> None:
    weight = torch.randn(10, 9).to(torch.float8_e5m2)
    scales = torch.rand(3, 3).to(torch.bfloat16)
    state = {"w.weight": weight, "w.weight_scale_inv": scales}
    save_file(state, tmp_path / "model.safetensors")
    more = {}
    if where == "layout":
        more["block_size"] = 4
    else:
        settings: dict[str, Any] = {"quantization_config": {"weight_block_size": [4, 3]}}
        settings = settings if where == "config" else {"text_config": settings}
        (tmp_path / "config.json").write_text(json.dumps(settings))
    spread = scales.float().repeat_interleave(4, 0)[:10]
    spread = spread.repeat_interleave(4 if where == "layout" else 3, 1)[:, :9]
    read = dcp_pipeline.load_keys(tmp_path, config=config("float32", **more))
    assert_same(read, {"w.weight": weight.float() * spread})


def test_experts_in_blocks(tmp_path: Path) -> None:
    weight = torch.randn(2, 130, 4).to(torch.float8_e4m3fn)
    scales = torch.tensor([[[0.5], [2.0]], [[4.0], [1.0]]])
    state = {"w.weight": weight, "w.weight_scale_inv": scales.to(torch.float8_e8m0fnu)}
    save_file(state, tmp_path / "model.safetensors")
    read = dcp_pipeline.load_keys(tmp_path, config=config("bfloat16"))
    spread = scales.repeat_interleave(128, 1)[:, :130]
    assert_same(read, {"w.weight": (weight.float() * spread).bfloat16()})


def test_what_only_looks_like_codes(tmp_path: Path) -> None:
    state = {
        "w.weight": torch.ones(2, 2),
        "w.weight_scale_inv": torch.ones(1, 1),
        "x_scales": torch.ones(2, dtype=torch.uint8),
        "y_blocks": torch.ones(2, 16),
        "y_scales": torch.ones(2),
    }
    save_file(state, tmp_path / "model.safetensors")
    read = dcp_pipeline.load_keys(tmp_path, config=config("bfloat16"))
    assert_same(dict(sorted(read.items())), state)


@pytest.mark.parametrize(
    ("state", "said"),
    [
        ({"a.weight": codes(4, 4).view(torch.float8_e4m3fn),
          "a.weight_scale_inv": torch.ones(2, 1)},
         r"do not fit 'a\.weight' of sizes \[4, 4\] in blocks of \[128, 128\]"),
        ({"a.weight": codes(4).view(torch.float8_e4m3fn), "a.weight_scale_inv": torch.ones(1)},
         "do not fit"),
        ({"a.weight": codes(4, 4).view(torch.float8_e4m3fn),
          "a.weight_scale_inv": torch.ones(1, 1, dtype=torch.int64)}, "is int64"),
        ({"a_blocks": codes(4, 16), "a_scales": codes(5)}, "do not fit"),
        ({"a_blocks": codes(4, 8), "a_scales": codes(4)}, "do not fit"),
        ({"a_blocks": codes(), "a_scales": codes()}, "do not fit"),
        ({"a_blocks": codes(4, 16), "a_scales": torch.ones(4)}, "is float32"),
    ],
)  # fmt: skip
def test_codes_and_scales_that_do_not_fit(
    tmp_path: Path, state: dict[str, torch.Tensor], said: str
) -> None:
    save_file(state, tmp_path / "model.safetensors")
    with pytest.raises(FormatError, match=said):
        dcp_pipeline.load_keys(tmp_path, config=config("bfloat16"))


def test_codes_that_are_cut(tmp_path: Path) -> None:
    for number in range(2):
        info = {"a_blocks": {"saved_offsets": [2 * number, 0]}}
        part = {"a_blocks": codes(2, 16)}
        if number:
            info["a_scales"], part["a_scales"] = {"saved_offsets": [0]}, codes(4)
        save_file(
            part,
            tmp_path / f"shard-{number + 1:05}-model-00001-of-00001.safetensors",
            metadata={"DCP_SHARDING_INFO": json.dumps(info)},
        )
    assert dcp_pipeline.load_keys(tmp_path, config=config("none"))["a_blocks"].shape == (4, 16)
    with pytest.raises(FormatError, match="'a_blocks' is cut or shared"):
        dcp_pipeline.load_keys(tmp_path, config=config("bfloat16"))


@pytest.mark.parametrize("size", [[0, 4], [4], "x", [4, 1 << 40], [True, 4], [4.0, 4]])
def test_a_block_size_that_is_none(tmp_path: Path, size: Any) -> None:
    repository(tmp_path)
    text = json.dumps({"quantization_config": {"weight_block_size": size}})
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(FormatError, match="weight_block_size"):
        dcp_pipeline.load_keys(tmp_path, config=config("bfloat16"))


def test_the_dtypes_of_the_reader() -> None:
    with pytest.raises(ConfigError, match="float64"):
        dcp_pipeline.QuantizedHuggingFaceStorageReader("x", target_dtype=torch.float64)


def opened(path: Path) -> Manifest:
    directory = FileSystemStorage().open(str(path), follow_links=True)
    return HuggingFaceLayout("float32").open(directory)


def test_the_manifest_goes_to_other_ranks(tmp_path: Path) -> None:
    repository(tmp_path)
    manifest = opened(tmp_path)
    again = Manifest.decode(manifest.encode())
    assert again.quantized == manifest.quantized and len(again.quantized) == 2
    gate = manifest.quantized[manifest.names.index("mlp.gate_blocks")]
    assert (gate.per_code, gate.block) == (2, (1, 1, 16))
    assert gate.codes_shape((3, 5, 128)) == (3, 5, 64)
    assert gate.scales_shape((3, 5, 128)) == (3, 5, 4)


WRONG: dict[str, dict[str, Any]] = {
    "method": {"method": "other"},
    "codes": {"codes": "float32"},
    "scales": {"scales": "int64"},
    "block": {"block": (1, 0, 16)},
    "dimensions": {"block": (1, 16)},
    "file": {"file": 7},
    "negative": {"offset": -1},
    "behind the end": {"offset": 1 << 40},
    "scales too large": {"block": (1, 1, 1)},
}


@pytest.mark.parametrize("name", WRONG)
def test_a_manifest_that_lies_about_scales(tmp_path: Path, name: str) -> None:
    repository(tmp_path)
    manifest = opened(tmp_path)
    key = manifest.names.index("mlp.gate_blocks")
    wrong = manifest.quantized | {key: replace(manifest.quantized[key], **WRONG[name])}
    with pytest.raises(FormatError):
        Manifest.decode(replace(manifest, quantized=wrong).encode())


@pytest.mark.parametrize("key", [-1, 5, 2])
def test_a_manifest_of_quantized_keys_that_are_not(tmp_path: Path, key: int) -> None:
    repository(tmp_path)
    manifest = opened(tmp_path)
    one = manifest.quantized[manifest.names.index("l.weight")]
    with pytest.raises(FormatError):
        Manifest.decode(replace(manifest, quantized={key: one}).encode())


@pytest.mark.parametrize("seed", range(4))
def test_every_box_in_any_order_of_its_reads(tmp_path: Path, seed: int) -> None:
    """Scales may come before, between or after the codes."""
    expected = by_hand(repository(tmp_path), torch.float32)
    manifest, chance = opened(tmp_path), random.Random(seed)
    directory = FileSystemStorage().open(str(tmp_path))
    files = [directory.read(entry.name) for entry in manifest.files]
    rows = range(len(manifest.table))
    located = locate_rows(manifest, rows, lambda file: pytest.fail("nothing is looked up"))
    for _ in range(60):
        name = chance.choice(["l.weight", "mlp.gate_blocks"])
        key = manifest.names.index(name)
        whole = expected[name]
        begin = tuple(chance.randrange(extent) for extent in whole.shape)
        extent = tuple(
            chance.randint(1, size - at) for at, size in zip(begin, whole.shape, strict=True)
        )
        row = manifest.table.key.tolist().index(key)
        view = torch.full(extent, math.nan)
        destination = Destination(name, torch.float32, view)
        reads = list(
            quantized_reads(located.table, row, manifest.quantized[key], begin, extent, destination)
        )
        chance.shuffle(reads)
        for file, read in reads:
            assert read.deliver is not None and read.target is None
            # As a reader does it: the bytes are there during the call alone.
            buffer = bytearray(files[file][read.offset : read.offset + read.length])
            read.deliver(memoryview(buffer))
            buffer[:] = b"\xa5" * len(buffer)
        for dimension, (at, count) in enumerate(zip(begin, extent, strict=True)):
            whole = whole.narrow(dimension, at, count)
        assert_same(view, whole.contiguous())


def test_scales_are_read_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Codes that had to wait would be in memory meanwhile: here they come first in the files."""
    repository(tmp_path)
    waited: list[bool] = []
    real = read_quantized._Scales.when_there

    def when_there(self: Any, action: Any, codes: torch.Tensor) -> None:
        waited.append(self._left > 0)
        real(self, action, codes)

    monkeypatch.setattr(read_quantized._Scales, "when_there", when_there)
    one_thread = {"storage": {"thread_count": 1}, "rollback": "none"}
    dcp_pipeline.load_keys(tmp_path, config=config("bfloat16") | one_thread)
    assert waited == [False, False]


def test_special_numbers() -> None:
    """NaN stays NaN; the largest exponent of E8M0, which is none, gives no number or infinity."""
    one = Quantized("blocks", "float8_e4m3fn", "float32", (2, 2), 0, 0)
    weight = torch.tensor([[0x7F, 0xFF], [0x80, 0x7E]], dtype=torch.uint8)
    found = dequantize(one, weight.view(torch.float8_e4m3fn), torch.tensor([[2.0]]), (0, 0))
    assert found.isnan().tolist() == [[True, True], [False, False]]
    assert math.copysign(1, found[1, 0]) == -1 and found[1, 1] == 896
    four = Quantized("mxfp4", "uint8", "uint8", (16,), 0, 0)
    tiny = dequantize(four, torch.tensor([0x10], dtype=torch.uint8), codes(1) * 0, (0,))
    assert tiny.tolist() == [0.0, 0.5 * 2.0**-127]
    assert scale_box(four, (15,), (2,)) == ((0,), (2,))
