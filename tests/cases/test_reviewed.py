"""What a reviewer found: each a test of its kind."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import dcp_pipeline
from dcp_pipeline import Pipeline
from dcp_pipeline.cli.main import main
from dcp_pipeline.core.errors import (
    CoordinationError,
    DtypeMismatchError,
    RollbackFailedError,
    ShapeConflictError,
    UnsupportedLeafError,
)
from tests.distributed.pool import Pool


@pytest.mark.parametrize("globs", [["emb"], ["head"], ["emb", "head"], ["*"], ["third"]])
def test_a_cast_of_tied_weights(tmp_path: Path, globs: list[str]) -> None:
    weight = torch.arange(4.0)
    state = {"emb": weight, "head": weight, "third": weight, "other": weight + 1}
    rule = {"kind": "cast", "keys": globs, "dtype": "bfloat16"}
    with Pipeline.from_config({"transforms": [rule]}) as pipeline:
        pipeline.save(state, tmp_path)
    for name, value in dcp_pipeline.load_keys(tmp_path).items():
        wanted = torch.bfloat16 if name in globs or globs == ["*"] else torch.float32
        assert value.dtype == wanted and torch.equal(value, state[name].to(wanted)), name


@pytest.mark.parametrize("serialization", ["torch_save", "safetensors"])
def test_lazy_views_are_no_aliases_of_their_base(tmp_path: Path, serialization: str) -> None:
    base = torch.randn(4, dtype=torch.complex64)
    state = {"a": base, "b": base.conj(), "c": base.imag, "d": base.conj().imag, "e": base}
    dcp_pipeline.save(state, checkpoint_id=tmp_path, config={"serialization": serialization})
    for name, value in dcp_pipeline.load_keys(tmp_path).items():
        assert torch.equal(value, state[name].resolve_conj().resolve_neg()), name


def save_lazy_shards(path: Path) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = torch.view_as_complex(torch.arange(12.0).view(6, 2))
    sharded = distribute_tensor(whole, mesh, [Shard(0)])
    dcp_pipeline.save({"a": sharded, "b": sharded.conj()}, checkpoint_id=path)


def test_lazy_views_of_shards(ranks: Pool, tmp_path: Path) -> None:
    ranks(2).run(save_lazy_shards, tmp_path)
    loaded = dcp_pipeline.load_keys(tmp_path)
    assert torch.equal(loaded["b"], loaded["a"].conj().resolve_conj())


def save_conflicting(path: Path) -> str:
    here = {"a": torch.ones(3)} if dist.get_rank() else {"a": {"x": 1}}
    with pytest.raises(ShapeConflictError) as caught:
        dcp_pipeline.save(here, checkpoint_id=path)
    return str(caught.value)


def save_empty_beside_list(path: Path) -> str:
    with pytest.raises(ShapeConflictError) as caught:
        dcp_pipeline.save({"a": {} if dist.get_rank() else []}, checkpoint_id=path)
    return str(caught.value)


def test_an_empty_dict_on_one_rank_and_a_list_on_another(ranks: Pool, tmp_path: Path) -> None:
    assert all("a" in message for message in ranks(2).run(save_empty_beside_list, tmp_path))


def test_a_value_on_one_rank_and_a_section_on_another(ranks: Pool, tmp_path: Path) -> None:
    for message in ranks(2).run(save_conflicting, tmp_path):
        assert "'a'" in message and "'a.x'" in message and "rank 1" in message


@pytest.mark.parametrize(
    ("dtype", "lost"),
    [
        (torch.float8_e4m3fn, 2),
        (torch.float8_e4m3fnuz, 2),
        (torch.float8_e5m2, 1),
        (torch.float16, 1),
        (torch.bfloat16, 0),
    ],
)
def test_overflow_is_counted_where_a_dtype_saturates(
    tmp_path: Path, dtype: torch.dtype, lost: int
) -> None:
    values = torch.tensor([1e10, 1.0, float("inf"), float("nan"), -3.0])
    dcp_pipeline.save({"a": values}, checkpoint_id=tmp_path)
    with Pipeline.from_config({"casts": ["a"]}) as pipeline:
        report = pipeline.load({"a": torch.zeros(5, dtype=dtype)}, tmp_path)
    assert [cast.overflowed for cast in report.casts] == [lost]
    strict = {"casts": [{"keys": "a", "on_overflow": "error"}]}
    if lost:
        with Pipeline.from_config(strict) as pipeline, pytest.raises(DtypeMismatchError):
            pipeline.load({"a": torch.zeros(5, dtype=dtype)}, tmp_path)


def test_inside_a_device_context(tmp_path: Path) -> None:
    state = {"a": torch.arange(3.0), "n": torch.arange(2).numpy()}
    with torch.device("meta"):
        dcp_pipeline.save(state, checkpoint_id=tmp_path, config={"stager": "host"})
        loaded = dcp_pipeline.load_keys(tmp_path)
    assert torch.equal(loaded["a"], state["a"]) and (loaded["n"] == state["n"]).all()


class Refusing:
    def __init__(self) -> None:
        self.x = torch.zeros(2)
        self.refusals = 1

    def state_dict(self) -> dict[str, Any]:
        return {"x": self.x}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.refusals:
            self.refusals -= 1
            raise RuntimeError("boom")


def test_what_verify_first_cannot_put_back_is_said(tmp_path: Path) -> None:
    dcp_pipeline.save({"s": {"x": torch.ones(2)}, "w": torch.ones(3)}, checkpoint_id=tmp_path)
    outcomes = {}
    for mode in ("copy", "verify_first", "none"):
        weight = torch.zeros(3)
        with Pipeline.from_config({"rollback": mode}) as pipeline:
            with pytest.raises(RuntimeError) as caught:
                pipeline.load({"s": Refusing(), "w": weight}, tmp_path)
        outcomes[mode] = (isinstance(caught.value, RollbackFailedError), float(weight.sum()))
    assert outcomes == {"copy": (False, 0.0), "verify_first": (True, 3.0), "none": (False, 3.0)}


def endless() -> list[Any]:
    inner: list[Any] = []
    inner.append(inner)
    return inner


@pytest.mark.parametrize(
    "state",
    [
        {"w": FakeTensorMode().from_tensor(torch.ones(2)), "ok": 1},
        {"w": endless()},
        {10**5000: torch.ones(1)},
        {"w": torch.nn.LazyLinear(3).weight},
        [torch.ones(2)],
        (1,),
        5,
        "text",
    ],
    ids=["fake", "endless", "huge key", "lazy", "list", "tuple", "int", "str"],
)
def test_what_no_checkpoint_can_hold(tmp_path: Path, state: Any) -> None:
    with pytest.raises(UnsupportedLeafError):
        dcp_pipeline.save(state, checkpoint_id=tmp_path)
    assert not os.listdir(tmp_path)


def test_an_empty_state(tmp_path: Path) -> None:
    dcp_pipeline.save({}, checkpoint_id=tmp_path)
    assert dcp_pipeline.load_keys(tmp_path) == {}
    state: dict[str, Any] = {}
    dcp_pipeline.load(state, checkpoint_id=tmp_path)
    assert state == {}


def test_a_template_that_cannot_be_written(tmp_path: Path) -> None:
    dcp_pipeline.save({"a": torch.ones(4, 3), "b": torch.ones(2)}, checkpoint_id=tmp_path)
    template = {"a": torch.zeros(3).expand(4, 3), "b": torch.zeros(2)}
    with pytest.raises(UnsupportedLeafError, match=r"into: a; clone"):
        dcp_pipeline.load(template, checkpoint_id=tmp_path)
    assert float(template["b"].sum()) == 0


def test_one_key_by_its_name(tmp_path: Path) -> None:
    dcp_pipeline.save({"a": 1, "b": 2}, checkpoint_id=tmp_path)
    assert dcp_pipeline.load_keys(tmp_path, "b") == {"b": 2}


def come_alone(path: Path) -> str:
    if dist.get_rank():
        return ""
    config = {"coordination": {"timeout_seconds": 2, "poll_seconds": 0.2}}
    with pytest.raises(CoordinationError) as caught:
        dcp_pipeline.save({"a": 1}, checkpoint_id=path, config=config)
    return str(caught.value)


def test_a_rank_that_never_comes(ranks: Pool, tmp_path: Path) -> None:
    message = ranks(2).run(come_alone, tmp_path)[0]
    assert "did not come" in message and "timeout_seconds" in message


def test_a_graph_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["graph", "load", "--json"])
    assert ended.value.code == 0
    names = [node["name"] for node in json.loads(capsys.readouterr().out)["nodes"]]
    assert names == ["collect", "open", "plan", "agree", "share", "read", "settle", "apply"]
