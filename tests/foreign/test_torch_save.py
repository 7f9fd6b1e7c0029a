"""Files of ``torch.save``, written by torch: what ``torch.load(weights_only=True)`` gives."""

import argparse
import struct
from collections import Counter, OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch

from dcp_pipeline.core.errors import CheckpointError, FormatError, UnsafeCheckpointError
from dcp_pipeline.core.manifest import Manifest
from dcp_pipeline.formats.torch_zip import write_value
from tests.foreign.loading import assert_equal, load_foreign, nested, opened

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def training_state() -> dict[str, Any]:
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4, 4])
    return {
        "model": dict(model.state_dict()),
        "optimizer": optimizer.state_dict(),
        "scheduler": {"milestones": scheduler.milestones, "gamma": 0.1},
        "epoch": 3,
        "best": float("-inf"),
        "name": "run ä",
        "raw": b"\0\xff",
        "flags": [True, None, 2.5],
        "shape": torch.Size([2, 3]),
        "dtype": torch.bfloat16,
        "device": torch.device("cpu"),
        "nothing": {},
        "parts": [torch.arange(3), {"a": torch.ones(2, dtype=torch.bfloat16)}],
        "pair": (torch.zeros(()), 1),
        "set": {1, 2},
    }


def test_every_kind_of_value_without_a_template(tmp_path: Path) -> None:
    torch.save(training_state(), tmp_path / "run.pt")
    wanted = torch.load(tmp_path / "run.pt", weights_only=True)
    assert_equal(nested(tmp_path / "run.pt"), wanted)
    assert isinstance(wanted["scheduler"]["milestones"], Counter)


def test_into_a_template(tmp_path: Path) -> None:
    saved, template = training_state(), training_state()
    torch.save(saved, tmp_path / "run.pt")
    for part in (template["model"], *template["optimizer"]["state"].values()):
        for tensor in part.values():
            tensor.zero_()
    template["epoch"] = 0
    before = template["model"]["0.weight"]
    load_foreign(template, tmp_path)  # the only file of the folder
    assert_equal(template, saved)
    assert template["model"]["0.weight"] is before


def test_strides_views_and_ties(tmp_path: Path) -> None:
    base = torch.arange(24.0).view(4, 6)
    state = {
        "whole": base,
        "turned": base.t(),
        "middle": base[1:3, 2:5],
        "tied": base,
        "expanded": torch.ones(1).expand(3, 2),
        "parameter": torch.nn.Parameter(torch.ones(2)),
        "empty": torch.zeros(0, 4),
    }
    torch.save(state, tmp_path / "w.pth")
    wanted = {name: one.detach() for name, one in state.items()}
    assert_equal(nested(tmp_path / "w.pth"), wanted)
    manifest = opened(tmp_path / "w.pth")
    assert manifest.table.keys[3].alias == 0
    assert len(manifest.strided) == 3
    again = Manifest.decode(manifest.encode())
    assert (again.strided, again.inline) == (manifest.strided, manifest.inline)


def test_the_state_dict_of_a_module(tmp_path: Path) -> None:
    state = torch.nn.BatchNorm1d(3).state_dict()  # an OrderedDict with an attribute
    torch.save(state, tmp_path / "x.pt")
    assert_equal(nested(tmp_path / "x.pt"), dict(state))


def test_attributes_of_tensors_are_left_out(tmp_path: Path) -> None:
    tensor, parameter = torch.ones(2), torch.nn.Parameter(torch.ones(3))
    tensor.tag = 1  # type: ignore[attr-defined]
    parameter.is_parallel = True  # type: ignore[attr-defined]
    torch.save({"tensor": tensor, "parameter": parameter}, tmp_path / "x.pt")
    assert_equal(nested(tmp_path / "x.pt"), {"tensor": torch.ones(2), "parameter": torch.ones(3)})


@pytest.mark.parametrize(
    ("value", "wanted"),
    [
        (torch.arange(3), {"value": torch.arange(3)}),
        (5, {"value": 5}),
        (OrderedDict(w=torch.ones(2)), {"w": torch.ones(2)}),
    ],
)
def test_roots(tmp_path: Path, value: Any, wanted: Any) -> None:
    torch.save(value, tmp_path / "x.bin")
    assert_equal(nested(tmp_path / "x.bin"), wanted)


class Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return print, ("run",)


@pytest.mark.parametrize(
    "value", [Evil(), argparse.Namespace(a=1), {"w": torch.ones(1), "e": [Evil()]}, torch.nn.Linear]
)
def test_a_class_or_function_is_refused_by_name(
    tmp_path: Path, value: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.save(value, tmp_path / "x.pt")
    with pytest.raises(UnsafeCheckpointError, match=r"x\.pt.*(print|Namespace|Linear)"):
        opened(tmp_path / "x.pt")
    assert capsys.readouterr().out == ""


def test_the_format_before_torch_1_6_is_refused(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(1)}, tmp_path / "x.pt", _use_new_zipfile_serialization=False)
    with pytest.raises(FormatError, match=r"before 1\.6"):
        opened(tmp_path / "x.pt")


def zip_with(pickle: bytes, path: Path) -> None:
    """A file of ``torch.save`` with another pickle in it."""
    filler = "x" * len(pickle)
    data = bytearray(write_value(filler))
    start = data.index(b"\x80\x02X" + struct.pack("<I", len(filler)) + filler.encode())
    data[start : start + len(pickle)] = pickle
    path.write_bytes(data)


BOMB = b"\x80\x02]q\x00" + b"".join(
    b"(h" + bytes([n]) + b"h" + bytes([n]) + b"lq" + bytes([n + 1]) for n in range(40)
)
DOUBLING = b"\x80\x02]q\x00" + b"".join(
    b"]q" + bytes([n + 1]) + b"(h" + bytes([n]) + b"h" + bytes([n]) + b"e" for n in range(60)
)
ATTACKS = {
    "it holds itself": b"\x80\x02]q\x00h\x00a.",
    "doubled sixty times": DOUBLING + b".",
    "nested without end": b"\x80\x02" + b"]" * 3000 + b"a" * 2999 + b".",
    "an opcode that runs code": b"\x80\x02cos\nsystem\n(X\x02\x00\x00\x00idtR.",
    "a list by an old opcode": BOMB + b".",
    "a key that is no name": b"\x80\x02}q\x00(K\x01K\x02\x86q\x01h\x00s.",
    "cut off": b"\x80\x02}q\x00(X\xff\x00\x00\x00",
}


@pytest.mark.parametrize("name", list(ATTACKS))
def test_pickles_that_attack_are_refused(tmp_path: Path, name: str) -> None:
    zip_with(ATTACKS[name], tmp_path / "x.pt")
    with pytest.raises(CheckpointError):
        opened(tmp_path / "x.pt")


def test_an_expanded_tensor_that_would_fill_memory_is_refused(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(1).expand(1 << 20, 1 << 20)}, tmp_path / "x.pt")
    with pytest.raises(UnsafeCheckpointError, match="claim to be"):
        opened(tmp_path / "x.pt")
