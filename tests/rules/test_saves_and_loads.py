"""Rules on their way through a save and a load, on one process and on ranks, against torch."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import dcp_pipeline as dcp
from dcp_pipeline.core.errors import (
    LoadMismatchError,
    RuleError,
)
from tests.distributed.pool import Pool
from tests.marks import slow

HEADS, KV, SIZE, WIDTH = 4, 2, 6, 8

RULES: list[dict[str, Any]] = [
    {"kind": "rotary", "keys": ["*.wq", "*.wk"], "head_dim": SIZE},
    {
        "kind": "fuse",
        "from": ["layers.{i}.wq", "layers.{i}.wk", "layers.{i}.wv"],
        "to": "model.layers.{i}.qkv",
        "parts": [HEADS // KV, 1, 1],
        "groups": KV,
    },
    {"kind": "stack", "from": "layers.{i}.experts.{e}.w1", "to": "model.layers.{i}.experts",
     "over": "e", "count": 4},
    {"kind": "transpose", "keys": ["model.layers.*.experts"], "axes": [0, 2, 1]},
    {"kind": "tie", "key": "head", "to": "embed"},
    {"kind": "pad", "keys": ["embed"], "here": 10, "there": 12, "fill": 0.5},
    {"kind": "cast", "keys": ["norm"], "dtype": "bfloat16", "back": "float32"},
    {"kind": "rename", "keys": {"embed": "model.embed.weight", "norm": "model.norm",
                                "step": "step"}},
    {"kind": "constant", "key": "version", "shape": [2], "dtype": "int64", "value": 7},
]  # fmt: skip


def numbers(*shape: int, start: int = 0) -> torch.Tensor:
    count = int(torch.tensor(shape).prod())
    return torch.arange(start, start + count, dtype=torch.float32).reshape(shape)


def state(fill: float | None = None) -> dict[str, Any]:
    tensors: dict[str, Any] = {"embed": numbers(10, WIDTH), "norm": numbers(WIDTH, start=50)}
    for i in range(2):
        tensors[f"layers.{i}.wq"] = numbers(HEADS * SIZE, WIDTH, start=1000 + i)
        tensors[f"layers.{i}.wk"] = numbers(KV * SIZE, WIDTH, start=2000 + i)
        tensors[f"layers.{i}.wv"] = numbers(KV * SIZE, WIDTH, start=3000 + i)
        for e in range(4):
            tensors[f"layers.{i}.experts.{e}.w1"] = numbers(3, WIDTH, start=4000 + 10 * i + e)
    if fill is not None:
        tensors = {name: torch.full_like(tensor, fill) for name, tensor in tensors.items()}
    tensors["head"] = tensors["embed"]
    tensors["step"] = 5 if fill is None else 0
    return tensors


def halves(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(-1, SIZE // 2, 2, WIDTH).transpose(1, 2).reshape(tensor.shape)


def exported() -> dict[str, Any]:
    """What the rules are to make of :func:`state`, by torch."""
    made, given = dict[str, Any](), state()
    for i in range(2):
        q, k = halves(given[f"layers.{i}.wq"]), halves(given[f"layers.{i}.wk"])
        v = given[f"layers.{i}.wv"]
        groups = [torch.cat([q.chunk(KV)[g], k.chunk(KV)[g], v.chunk(KV)[g]]) for g in range(KV)]
        made[f"model.layers.{i}.qkv"] = torch.cat(groups)
        experts = [given[f"layers.{i}.experts.{e}.w1"] for e in range(4)]
        made[f"model.layers.{i}.experts"] = torch.stack(experts).transpose(1, 2).contiguous()
    made["model.embed.weight"] = torch.cat([given["embed"], torch.full((2, WIDTH), 0.5)])
    made["model.norm"] = given["norm"].bfloat16()
    made["step"] = 5
    made["version"] = torch.tensor([7, 7])
    return made


def assert_equal(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        if isinstance(value, torch.Tensor):
            assert found[name].dtype == value.dtype, name
            assert torch.equal(found[name], value), name
        else:
            assert found[name] == value, name


@pytest.mark.parametrize("serialization", ["torch_save", "safetensors"])
def test_there_and_back(tmp_path: Path, serialization: str) -> None:
    config = {"transforms": RULES, "serialization": serialization}
    dcp.save(state(), checkpoint_id=tmp_path, config=config)
    assert_equal(dcp.load_keys(tmp_path), exported())
    found = state(-1.0)
    dcp.load(found, checkpoint_id=tmp_path, config=config)
    assert_equal(found, state())
    assert found["head"] is found["embed"]


def sharded(tensors: dict[str, Any], kind: str) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    given = dict(tensors)
    for name, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor) or name == "head":
            continue
        axis = {"rows": 0, "columns": tensor.dim() - 1, "mixed": len(name) % tensor.dim()}[kind]
        given[name] = distribute_tensor(tensor, mesh, [Shard(axis)])
    given["head"] = given["embed"]
    return given


def on_ranks(path: Path, kind: str, load_kind: str) -> dict[str, Any]:
    config = {"transforms": RULES}
    dcp.save(sharded(state(), kind), checkpoint_id=path, config=config)
    found = sharded(state(-1.0), load_kind)
    report = dcp.load(found, checkpoint_id=path, config=config)
    assert report is not None
    return {
        name: value.full_tensor() if isinstance(value, DTensor) else value
        for name, value in found.items()
    }


@pytest.mark.parametrize(
    ("size", "kind", "load_kind"),
    [(2, "rows", "columns"), slow(2, "mixed", "rows"), slow(4, "rows", "columns"),
     (4, "mixed", "rows")],
)  # fmt: skip
def test_on_ranks(ranks: Pool, tmp_path: Path, size: int, kind: str, load_kind: str) -> None:
    for found in ranks(size).run(on_ranks, tmp_path, kind, load_kind):
        assert_equal(found, state())
    assert_equal(dcp.load_keys(tmp_path), exported())


def experts_apart(path: Path) -> dict[str, Any]:
    """T73: each rank holds two of the four experts; they are loaded stacked, and back again."""
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    mine = range(rank * 4 // size, (rank + 1) * 4 // size)
    config = {"transforms": [
        {"kind": "stack", "from": "experts.{e}.w", "to": "w", "over": "e", "count": 4}
    ]}  # fmt: skip
    given = {f"experts.{e}.w": numbers(2, 3, start=10 * e) for e in mine}
    dcp.save(given, checkpoint_id=path, config=config)
    back = {name: torch.zeros(2, 3) for name in given}
    dcp.load(back, checkpoint_id=path, config={**config, "strict": False})
    assert_equal(back, given)
    mesh = init_device_mesh("cpu", (size,))
    stacked = {"w": distribute_tensor(torch.zeros(4, 2, 3), mesh, [Shard(0)])}
    dcp.load(stacked, checkpoint_id=path)
    return {"w": stacked["w"].full_tensor()}


@pytest.mark.parametrize("size", [1, 2, 4])
def test_experts_on_ranks(ranks: Pool, tmp_path: Path, size: int) -> None:
    for found in ranks(size).run(experts_apart, tmp_path):
        assert torch.equal(found["w"], torch.stack([numbers(2, 3, start=10 * e) for e in range(4)]))


def joined_on_two(path: Path) -> bool:
    """T47: the target is what two stored tensors are together, one on each rank."""
    if torch.distributed.get_rank() == 0:
        dcp.save({"a": numbers(4), "b": numbers(4, start=40)}, checkpoint_id=path, no_dist=True)
    torch.distributed.barrier()
    rules = [{"kind": "split", "from": "ab", "to": ["a", "b"]}]
    mesh = init_device_mesh("cpu", (2,))
    found = {"ab": distribute_tensor(torch.zeros(8), mesh, [Shard(0)])}
    dcp.load(found, checkpoint_id=path, config={"transforms": rules})
    mine = numbers(4) if torch.distributed.get_rank() == 0 else numbers(4, start=40)
    return torch.equal(found["ab"].to_local(), mine)


def test_joined_while_loading(ranks: Pool, tmp_path: Path) -> None:
    assert ranks(2).run(joined_on_two, tmp_path) == [True, True]


def test_what_is_forgotten_is_named_while_saving(tmp_path: Path) -> None:
    rules = [
        {"kind": "rename", "keys": {"a.{i}": "b.{i}"}},
        {"kind": "fuse", "from": ["q.{i}", "k.{i}"], "to": "qk.{i}"},
        {"kind": "stack", "from": "e.{n}", "to": "e", "over": "n"},
    ]
    given = {
        "a.0": numbers(2), "b.0": numbers(2), "c": numbers(1), "q.0": numbers(2),
        "e.0": numbers(2), "e.2": numbers(2),
    }  # fmt: skip
    with pytest.raises(RuleError) as caught:
        dcp.save(given, checkpoint_id=tmp_path, config={"transforms": rules})
    for line in (
        "rename renames 'a.0' to 'b.0', which is there already",
        "fuse: 'qk.0' lacks 'k.0'",
        "stack: 'e' lacks n = 1",
        "no rule takes 'c'",
        "no rule takes 'b.0'",
    ):
        assert line in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_what_is_forgotten_is_named_while_loading(tmp_path: Path) -> None:
    """T71: a stored key that no rule takes and a target that nobody fills, in one error."""
    dcp.save({"w.0": numbers(2), "extra": numbers(1)}, checkpoint_id=tmp_path)
    rules = [{"kind": "rename", "keys": {"layer.{i}": "w.{i}"}}]
    found = {"layer.0": torch.zeros(2), "layer.1": torch.zeros(2)}
    with pytest.raises(LoadMismatchError) as caught:
        dcp.load(found, checkpoint_id=tmp_path, config={"transforms": rules})
    assert "in the checkpoint but not asked for: extra (no rule takes it)" in str(caught.value)
    assert "missing from the checkpoint: layer.1" in str(caught.value)
    assert caught.value.missing == ["layer.1"]
    assert torch.equal(found["layer.0"], torch.zeros(2))
    with pytest.raises(LoadMismatchError, match="rules: split: 'qk' lacks 'k'"):
        rules.append({"kind": "split", "from": "qk", "to": ["extra", "k"]})
        dcp.load(found, checkpoint_id=tmp_path, config={"transforms": rules})


@pytest.mark.parametrize("fill", [0.0, 3.0, None])
@pytest.mark.parametrize("size", [3, 5, 4])
def test_a_vocabulary_that_changes(tmp_path: Path, size: int, fill: float | None) -> None:
    dcp.save({"emb": numbers(4, 2), "adam.emb.exp_avg": numbers(4, 2)}, checkpoint_id=tmp_path)
    rules = [
        {"kind": "resize", "keys": ["emb", "*.exp_avg"], "size": size, "fill": fill},
    ]
    found = {"emb": torch.full((size, 2), 9.0), "adam.emb.exp_avg": torch.full((size, 2), 9.0)}
    dcp.load(found, checkpoint_id=tmp_path, config={"transforms": rules})
    wanted = torch.full((size, 2), 9.0 if fill is None else fill)
    wanted[:4] = numbers(4, 2)[:size]
    assert torch.equal(found["emb"], wanted) and torch.equal(found["adam.emb.exp_avg"], wanted)


def test_untied_weights_are_not_lost(tmp_path: Path) -> None:
    rules = [{"kind": "tie", "key": "head", "to": "embed"}, {"kind": "keep", "keys": ["embed"]}]
    given = {"embed": numbers(3), "head": numbers(3)}
    with pytest.raises(RuleError, match="'head' does not share its memory with 'embed'"):
        dcp.save(given, checkpoint_id=tmp_path, config={"transforms": rules})
    rules[0]["write"] = True  # type: ignore[assignment]
    dcp.save(given, checkpoint_id=tmp_path, config={"transforms": rules})
    assert_equal(dcp.load_keys(tmp_path), given)


def test_names_that_change_places(tmp_path: Path) -> None:
    rules = [{"kind": "rename", "keys": {"a": "b", "b": "a"}}]
    dcp.save({"a": numbers(2), "b": 3}, checkpoint_id=tmp_path, config={"transforms": rules})
    assert_equal(dcp.load_keys(tmp_path), {"b": numbers(2), "a": 3})
    found = {"a": torch.zeros(2), "b": 0}
    dcp.load(found, checkpoint_id=tmp_path, config={"transforms": rules})
    assert_equal(found, {"a": numbers(2), "b": 3})


def test_a_failed_load_puts_constants_back(tmp_path: Path) -> None:
    dcp.save({"w": numbers(2), "v": numbers(3)}, checkpoint_id=tmp_path)
    (data,) = tmp_path.glob("*.distcp")
    raw = bytearray(data.read_bytes())
    raw[-40] ^= 1
    data.write_bytes(raw)
    rules = [
        {"kind": "constant", "key": "c", "shape": [3], "value": 4.0, "side": "state"},
        {"kind": "keep", "keys": ["w", "v"]},
    ]
    found = {"w": torch.ones(2), "v": torch.ones(3), "c": torch.ones(3)}
    with pytest.raises(dcp.CheckpointException):
        dcp.load(found, checkpoint_id=tmp_path, config={"transforms": rules})
    assert_equal(found, {"w": torch.ones(2), "v": torch.ones(3), "c": torch.ones(3)})
