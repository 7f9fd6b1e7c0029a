"""Checkpoints as MEGA repositories, by one process and by ranks, and data files of layout dcp."""

import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import dcp_pipeline
from dcp_pipeline.core.errors import (
    CheckpointExistsError,
    ConfigError,
    FormatError,
    UnsupportedLeafError,
)
from dcp_pipeline.formats.mega import MegaFile, parse_mega
from dcp_pipeline.layout.mega import MegaLayout
from dcp_pipeline.storage.filesystem import FileSystemStorage
from dcp_pipeline.types.dtypes import DTYPES
from tests.distributed.pool import Pool
from tests.equal import assert_same
from tests.marks import mostly_slow, slow

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

INDEX = "model.mega.index.json"
MEGA_DTYPES = [
    name for name in DTYPES if not name.startswith("complex") and not name.endswith("fnuz")
]


def config(checksum: str = "crc32", packed: bool = False, **layout: Any) -> dict[str, Any]:
    serialization = {"kind": "mega", "checksum": checksum, "chunk_bytes": "64KiB"}
    if packed:
        serialization |= {"compression": "zstd", "shuffle": True}
    return {"layout": {"kind": "mega", **layout}, "serialization": serialization}


def parse(path: Path) -> MegaFile:
    data = path.read_bytes()
    return parse_mega(lambda offset, nbytes: data[offset : offset + nbytes], len(data))


def names_in(path: Path) -> list[str]:
    return sorted(entry.name for entry in path.iterdir())


def bits(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.detach().contiguous().flatten().view(torch.uint8).tolist())


def in_order(tree: Any) -> Any:
    """The same with the keys of all dicts in one order."""
    if isinstance(tree, dict):
        return {key: in_order(tree[key]) for key in sorted(tree, key=repr)}
    return [in_order(item) for item in tree] if type(tree) is list else tree


def every_dtype() -> dict[str, torch.Tensor]:
    state = {}
    for seed, name in enumerate(MEGA_DTYPES):
        torch.manual_seed(seed)
        high = 2 if name == "bool" else 256
        raw = torch.randint(0, high, (6, 5, DTYPES[name].itemsize), dtype=torch.uint8)
        state[f"{name}.w"] = raw.view(DTYPES[name]).reshape(6, 5)
        if name != "float4_e2m1fn_x2":
            state[f"{name}.s"] = raw.view(DTYPES[name]).reshape(-1)[7].clone()
    return state | {"empty": torch.zeros(0, 3), "none": torch.zeros(3, 0)}


VALUES = {
    "step": 3, "big": 1 << 63, "huge": 1 << 70, "rate": 0.1, "nan": float("inf"), "on": True,
    "name": "é", "json": "dcp_pipeline.json:x", "torn": "\ud800", "none": None, "bytes": b"\0x",
    "pair": (1, 2.0), "list": [1, 2, 3], "mixed": [1, "a"], "texts": ["a", "b"], "empty list": [],
    "nested": [{"a": {1: (2,)}}, [[]]],
}  # fmt: skip


def nested() -> dict[str, Any]:
    weight = torch.arange(24.0).view(6, 4)
    return {
        "app": {
            "model": {"layers.0.weight": weight, 3: torch.ones(2), "tied": weight},
            "progress": dict(VALUES),
            "list": [torch.zeros(2), {"x": torch.ones(1)}],
        },
        "mega.step": 5,
        "general.alignment": 7,
        "dcp_pipeline.state": {"y": 1},
        "nothing": {},
    }


@pytest.mark.parametrize(
    ("checksum", "packed"), [("none", False), ("crc32", False), ("sha256", True)]
)
@pytest.mark.parametrize("serialized", ["layout", "serialization"])
def test_nested_states_come_back_as_they_were(
    tmp_path: Path, checksum: str, packed: bool, serialized: str
) -> None:
    settings = config(checksum, packed)
    if serialized == "serialization":
        settings["layout"] = {"kind": "dcp"}
    saved = dcp_pipeline.save(nested(), checkpoint_id=tmp_path, config=settings)
    assert str(saved.manifest.fingerprint) == str(dcp_pipeline.fingerprint(nested()))
    assert_same(in_order(dcp_pipeline.load_keys(tmp_path, config=settings)), in_order(nested()))
    template = nested()
    template["app"]["model"]["layers.0.weight"].zero_()
    template["app"]["progress"] = dict.fromkeys(VALUES)
    dcp_pipeline.load(template, checkpoint_id=tmp_path, config=settings)
    assert_same(template, nested())
    assert template["app"]["model"]["tied"] is template["app"]["model"]["layers.0.weight"]
    if serialized == "layout":
        assert names_in(tmp_path) == ["model.mega"]
        opened = MegaLayout().open(FileSystemStorage().open(str(tmp_path)))
        assert opened.fingerprint == saved.manifest.fingerprint and opened.is_foreign


@pytest.mark.parametrize("packed", [False, True])
def test_every_dtype_comes_back_bit_by_bit(tmp_path: Path, packed: bool) -> None:
    state = every_dtype() | {"zeros": torch.zeros(90, 40), "strided": torch.ones(40, 900).t()}
    dcp_pipeline.save(state, checkpoint_id=tmp_path, config=config(packed=packed))
    back = {name: torch.empty(tensor.shape, dtype=tensor.dtype) for name, tensor in state.items()}
    report = dcp_pipeline.load(back, checkpoint_id=tmp_path, config=config())
    assert report.is_verified
    for name, tensor in state.items():
        assert bits(back[name]) == bits(tensor), name


def test_values_have_the_types_of_the_format_where_these_fit(tmp_path: Path) -> None:
    dcp_pipeline.save(dict(VALUES), checkpoint_id=tmp_path, config=config())
    found = {key: pair.value for key, pair in parse(tmp_path / "model.mega").metadata.items()}
    assert found["step"] == 3 and found["rate"] == 0.1 and found["on"] is True
    assert found["texts"] == ["a", "b"] and found["name"] == "é"
    assert found["pair"] == 'dcp_pipeline.json:{"$tuple":[1,2.0]}'


def test_large_tensors_are_chunked_each_chunk_with_its_checksum(tmp_path: Path) -> None:
    tensor = torch.arange(50_000.0)
    dcp_pipeline.save({"w": tensor, "s": tensor[:3]}, checkpoint_id=tmp_path, config=config())
    large, small = parse(tmp_path / "model.mega").tensors
    assert [span.size for span in large.spans] == [65536] * 3 + [200_000 - 3 * 65536]
    assert {span.checksum for span in (*large.spans, *small.spans)} == {"crc32"}
    data = bytearray((tmp_path / "model.mega").read_bytes())
    data[large.spans[2].offset + 5] ^= 1
    (tmp_path / "model.mega").write_bytes(data)
    template = {"w": torch.full((50_000,), -1.0), "s": torch.zeros(3)}
    with pytest.raises(dcp_pipeline.CheckpointException, match=r"model\.mega, w is damaged"):
        dcp_pipeline.load(template, checkpoint_id=tmp_path, config=config())
    assert (template["w"] == -1).all()


@pytest.mark.parametrize("layout", ["mega", "dcp"])
def test_what_gets_smaller_is_compressed_chunk_by_chunk(tmp_path: Path, layout: str) -> None:
    torch.manual_seed(0)
    state = {
        "ramp": torch.arange(60_000, dtype=torch.int64),
        "strided": torch.arange(40_000.0).view(200, 200).t(),
        "noise": torch.randint(0, 256, (70_000,), dtype=torch.uint8),
    }
    settings = config(packed=True) | {"layout": {"kind": layout}}
    saved = dcp_pipeline.save(state, checkpoint_id=tmp_path, config=settings)
    assert str(saved.manifest.fingerprint) == str(dcp_pipeline.fingerprint(state))
    (path,) = tmp_path.glob("*.mega")
    assert path.stat().st_size < 0.5 * sum(t.numel() * t.element_size() for t in state.values())
    spans = {tensor.name: tensor.spans for tensor in parse(path).tensors}
    assert {(span.codec, span.shuffle) for span in spans["ramp"]} == {("zstd", 8)}
    assert [span.size for span in spans["ramp"]] == [65536] * 7 + [480_000 - 7 * 65536]
    assert {span.codec for span in spans["noise"]} == {"raw"}
    loaded = dcp_pipeline.load_keys(tmp_path, config=settings)
    assert_same(in_order(loaded), in_order(state))
    template = {"ramp": torch.zeros(60_000, dtype=torch.int64)}
    strict = {"strict": {"strided": False, "noise": False}}
    report = dcp_pipeline.load(template, checkpoint_id=tmp_path, config=settings | strict)
    assert torch.equal(template["ramp"], state["ramp"]) and report.is_verified


def test_what_is_not_kept_is_compressed_again_to_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = "dcp_pipeline.serialization.mega_packing.Kept.add"
    monkeypatch.setattr(kept, lambda *span: None)
    state = {"ramp": torch.arange(60_000, dtype=torch.int64)}
    dcp_pipeline.save(state, checkpoint_id=tmp_path, config=config(packed=True))
    assert_same(load_all(tmp_path), state)


def test_no_elements_are_taken_for_a_footer(tmp_path: Path) -> None:
    hostile = torch.tensor(list(b"MGTF" + bytes(64)), dtype=torch.uint8)
    settings = config() | {"layout": {"kind": "dcp"}}
    dcp_pipeline.save({"w": hostile}, checkpoint_id=tmp_path, config=settings)
    (data,) = tmp_path.glob("*.mega")
    assert [tensor.name for tensor in parse(data).tensors] == ["w"]


@pytest.mark.parametrize("layout", ["mega", "dcp"])
def test_what_it_cannot_hold_is_named_before_anything_is_written(
    tmp_path: Path, layout: str
) -> None:
    state = {
        "w": torch.ones(2),
        "z": torch.zeros(2, dtype=torch.complex64),
        "f": torch.zeros(2).to(torch.float8_e4m3fnuz),
        "\ud800": 1,
    }
    settings = config() | {"layout": {"kind": layout}}
    with pytest.raises(UnsupportedLeafError) as caught:
        dcp_pipeline.save(state, checkpoint_id=tmp_path / "x", config=settings)
    for text in ("3 leaves", "'z' is a tensor of torch.complex64", "'f' is a tensor", "surrogate"):
        assert text in str(caught.value)
    assert not (tmp_path / "x").exists() or names_in(tmp_path / "x") == []


def shard(tensor: torch.Tensor, number: int) -> Any:
    size = torch.distributed.get_world_size()
    if size == 4 and number % 3 == 0 and tensor.dim() == 2:
        mesh = init_device_mesh("cpu", (2, 2))
        return distribute_tensor(tensor, mesh, [Shard(number % 2), Shard((number + 1) % 2)])
    mesh = init_device_mesh("cpu", (size,))
    if not tensor.dim() or number % 5 == 4:
        return distribute_tensor(tensor, mesh, [Replicate()])
    return distribute_tensor(tensor, mesh, [Shard(number % tensor.dim())])


def state_of(value: float) -> dict[str, torch.Tensor]:
    return {f"layers.{i}.w": torch.arange(600.0).view(20, 30) + value + i for i in range(6)}


def save_sharded(path: Path, value: float, packed: bool = False) -> str:
    given: dict[str, Any] = {
        name: shard(tensor, number) for number, (name, tensor) in enumerate(state_of(value).items())
    }
    given |= {"step": 7, "own": {f"rank{torch.distributed.get_rank()}": torch.ones(3)}}
    saved = dcp_pipeline.save(given, checkpoint_id=path, config=config(packed=packed))
    return str(saved.manifest.fingerprint)


def load_sharded(path: Path, value: float) -> list[str]:
    wanted = state_of(value)
    given: dict[str, Any] = {
        name: shard(torch.zeros_like(tensor), number + 1)
        for number, (name, tensor) in enumerate(wanted.items())
    }
    given["step"] = None
    dcp_pipeline.load(given, checkpoint_id=path, config=config() | {"strict": {"own*": False}})
    wrong = [] if given.pop("step") == 7 else ["step"]
    full = {
        name: tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        for name, tensor in given.items()
    }
    return wrong + [name for name in wanted if not torch.equal(full[name], wanted[name])]


def load_all(path: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = dcp_pipeline.load_keys(path, config=config())
    return loaded


@pytest.mark.parametrize("size", [slow(1), 2, slow(4)])
def test_on_ranks(ranks: Pool, tmp_path: Path, size: int) -> None:
    prints = ranks(size).run(save_sharded, tmp_path, 1.0, size == 2)
    state = {**state_of(1.0), "step": 7, "own": {f"rank{r}": torch.ones(3) for r in range(size)}}
    assert set(prints) == {str(dcp_pipeline.fingerprint(state))}
    assert_same(in_order(load_all(tmp_path)), in_order(state))
    opened = MegaLayout().open(FileSystemStorage().open(str(tmp_path)))
    assert str(opened.fingerprint) == prints[0]
    if size == 1:
        assert names_in(tmp_path) == ["model.mega"]
        return
    shards = [f"model-{rank:05}-of-{size:05}.mega" for rank in range(1, size + 1)]
    assert names_in(tmp_path) == [*shards, INDEX]
    index = json.loads((tmp_path / INDEX).read_text())
    assert index["shards"] == {name: name for name in shards}
    assert index["metadata"]["format"] == "mega-sharded-index-v1"
    held = {tensor.name: name for name in shards for tensor in parse(tmp_path / name).tensors}
    assert index["weight_map"] == held
    boxes = json.loads(str(parse(tmp_path / shards[0]).metadata["dcp_pipeline.boxes"].value))
    assert all(name.startswith(f"{key}@") for name, (key, _, _) in boxes.items())
    assert {tuple(shape) for _, _, shape in boxes.values()} == {(20, 30)}


QUICK = [(1, 4), (4, 2), (2, 1)]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param(one, other, marks=() if (one, other) in QUICK else pytest.mark.slow)
        for one in (1, 2, 4)
        for other in (1, 2, 4)
    ],
)
def test_resharded_and_saved_over(ranks: Pool, tmp_path: Path, before: int, after: int) -> None:
    """What is left of the checkpoint before is nothing, and the new one is loaded anywhere."""
    (tmp_path / "README.md").write_text("mine")
    ranks(before).run(save_sharded, tmp_path, 1.0)
    assert ranks(after).run(load_sharded, tmp_path, 1.0) == [[]] * after
    for value in (2.0, 3.0):
        ranks(after).run(save_sharded, tmp_path, value)
        assert len(names_in(tmp_path)) == 1 + after + (after > 1)
    assert ranks(before).run(load_sharded, tmp_path, 3.0) == [[]] * before


def test_overwrite_can_be_refused(tmp_path: Path) -> None:
    dcp_pipeline.save(state_of(1.0), checkpoint_id=tmp_path, config=config())
    with pytest.raises(CheckpointExistsError):
        refusing = {**config(), "overwrite": "error"}
        dcp_pipeline.save(state_of(2.0), checkpoint_id=tmp_path, config=refusing)
    assert_same(load_all(tmp_path), state_of(1.0))


@pytest.mark.parametrize("tied", ["drop", "write"])
def test_tied_tensors(tmp_path: Path, tied: str) -> None:
    weight = torch.arange(6.0)
    state = {"embed": weight, "head": weight}
    dcp_pipeline.save(state, checkpoint_id=tmp_path, config=config(tied=tied))
    stored = {tensor.name for tensor in parse(tmp_path / "model.mega").tensors}
    assert stored == ({"embed", "head"} if tied == "write" else {"embed"})
    again = torch.zeros(6)
    dcp_pipeline.load({"embed": again, "head": again}, checkpoint_id=tmp_path, config=config())
    assert torch.equal(again, weight)


def test_no_state_at_all(tmp_path: Path) -> None:
    dcp_pipeline.save({}, checkpoint_id=tmp_path, config=config())
    assert load_all(tmp_path) == {}


def test_serialization_follows_the_layout() -> None:
    assert dcp_pipeline.PipelineConfig(layout={"kind": "mega"}).serialization.kind == "mega"
    with pytest.raises(ConfigError, match="works with: mega"):
        dcp_pipeline.Pipeline.from_config({"layout": "mega", "serialization": "torch_save"})


def test_in_memory(tmp_path: Path) -> None:
    settings = config() | {"storage": "memory"}
    place = f"memory://{tmp_path}"
    dcp_pipeline.save(nested(), checkpoint_id=place, config=settings)
    assert_same(in_order(dcp_pipeline.load_keys(place, config=settings)), in_order(nested()))


def test_a_shard_of_another_save_is_refused(tmp_path: Path) -> None:
    """An index says which tensors lie where, so that shards of two saves are not mixed."""
    (tmp_path / "model-00001-of-00002.mega").write_bytes(b"")
    (tmp_path / INDEX).write_text('{"weight_map":{"a":"model-00001-of-00002.mega"}}')
    with pytest.raises(FormatError, match=r"model-00001-of-00002\.mega: no MEGA file"):
        MegaLayout().open(FileSystemStorage().open(str(tmp_path)))


def load_shared(path: Path, rollback: str) -> tuple[list[bool], int, str]:
    """Everything on every rank, read by one and passed on; the bytes that this rank has read."""
    settings = config() | {"read_replicas": "once", "rollback": rollback}
    template = {"w": torch.full((300, 200), -1.0), "r": torch.full((5,), -1.0)}
    try:
        report = dcp_pipeline.load(template, checkpoint_id=path, config=settings)
    except dcp_pipeline.CheckpointException as error:
        untouched = all(bool((tensor == -1).all()) for tensor in template.values())
        return [untouched], 0, str(error)
    wanted = shared_state()
    return [torch.equal(template[key], wanted[key]) for key in wanted], report.bytes_read, ""


def shared_state() -> dict[str, torch.Tensor]:
    return {"w": torch.arange(60_000.0).view(300, 200), "r": torch.ones(5)}


@pytest.mark.parametrize(
    ("packed", "rollback"),
    mostly_slow(product([False, True], ["copy", "verify_first"]), [(True, "copy")]),
)
def test_what_is_read_once_is_verified_and_unpacked_by_every_rank(
    ranks: Pool, tmp_path: Path, packed: bool, rollback: str
) -> None:
    dcp_pipeline.save(shared_state(), checkpoint_id=tmp_path, config=config(packed=packed))
    found = ranks(2).run(load_shared, tmp_path, rollback)
    assert [same for same, _, _ in found] == [[True, True]] * 2
    path = tmp_path / "model.mega"
    span = parse(path).tensors[0].spans[1]
    data = bytearray(path.read_bytes())
    data[span.offset + 9] ^= 1
    path.write_bytes(data)
    for untouched, _, text in ranks(2).run(load_shared, tmp_path, rollback):
        assert untouched == [True] and "model.mega, w is damaged" in text
