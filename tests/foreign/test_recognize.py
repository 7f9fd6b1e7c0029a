"""What kind of checkpoint lies somewhere, and what is said where none does."""

import io
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from dcp_pipeline.core.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    ConfigError,
    FormatError,
    UnsafeCheckpointError,
)
from dcp_pipeline.layout.foreign import KINDS, open_source, recognize
from dcp_pipeline.storage.memory import MemoryStorage
from tests.equal import assert_same
from tests.foreign.loading import nested, opened
from tests.huggingface_files import save_shards

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

STATE = {"w": torch.arange(6.0).view(2, 3), "b": torch.ones(2, dtype=torch.bfloat16)}


def test_nothing_there_says_what_was_looked_for(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "absent"):
        with pytest.raises(CheckpointNotFoundError, match="nothing there") as error:
            recognize(str(path))
        for sign in (".snapshot_metadata", "mp_rank_##", "latest_universal", "step-{N}", "*.mega"):
            assert sign in str(error.value)
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(CheckpointNotFoundError, match="no checkpoint that is known"):
        recognize(str(tmp_path))
    with pytest.raises(CheckpointNotFoundError, match=r"notes\.txt is no file that is known"):
        recognize(str(tmp_path / "notes.txt"))


def test_a_repository_and_one_file_of_it(tmp_path: Path) -> None:
    save_shards(tmp_path, dict(STATE), 2)
    assert recognize(str(tmp_path)) == "huggingface"
    assert_same(nested(tmp_path), STATE)
    file = tmp_path / "model-00002-of-00002.safetensors"
    assert recognize(str(file)) == "huggingface"
    assert_same(nested(file), {"b": STATE["b"]})


@pytest.mark.parametrize("name", ["x.pt", "x.pth", "x.bin", "x.ckpt"])
def test_one_file_of_torch_save(tmp_path: Path, name: str) -> None:
    torch.save(STATE, tmp_path / name)
    assert recognize(str(tmp_path / name)) == recognize(str(tmp_path)) == "torch_save"
    assert_same(nested(tmp_path / name), STATE)
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked" / name).symlink_to(tmp_path / name)
    assert_same(nested(tmp_path / "linked" / name), STATE)


def test_several_files_of_torch_save_have_to_be_named(tmp_path: Path) -> None:
    for name in ("a.pt", "b.pt"):
        torch.save(STATE, tmp_path / name)
    with pytest.raises(FormatError, match=r"a\.pt, b\.pt: name the one"):
        recognize(str(tmp_path))
    with pytest.raises(CheckpointNotFoundError, match=r"2 files of torch\.save"):
        opened(tmp_path, "torch_save")


def test_pytorch_model_bin_is_a_repository(tmp_path: Path) -> None:
    torch.save(STATE, tmp_path / "pytorch_model.bin")
    assert recognize(str(tmp_path)) == "huggingface"
    assert_same(nested(tmp_path), STATE)


def test_options_reach_the_layout(tmp_path: Path) -> None:
    codes = torch.ones(4, 4).to(torch.float8_e4m3fn)
    state = {"a.weight": codes, "a.weight_scale_inv": torch.full((1, 1), 2.0)}
    save_file(state, tmp_path / "model.safetensors")
    options = {"dequantize": "float32"}
    manifest = open_source(str(tmp_path), "huggingface", options)[1]
    assert (manifest.names, manifest.table.keys[0].dtype) == (("a.weight",), "float32")
    with pytest.raises(ConfigError, match="no options"):
        open_source(str(tmp_path), "deepspeed", options)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_refuses_an_empty_folder_and_a_stray_file(tmp_path: Path, kind: str) -> None:
    with pytest.raises(CheckpointError):
        opened(tmp_path, kind)
    (tmp_path / "file").write_bytes(b"stray")
    with pytest.raises(CheckpointError):
        opened(tmp_path / "file", kind)


def test_an_unknown_kind(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'zarr': dcp"):
        opened(tmp_path, "zarr")


def test_in_memory() -> None:
    storage = MemoryStorage()
    directory = storage.open("memory://foreign/run")
    buffer = io.BytesIO()
    torch.save(STATE, buffer)
    directory.put_whole("x.pt", buffer.getvalue())
    for path in ("memory://foreign/run/x.pt", "memory://foreign/run"):
        assert recognize(path, storage) == "torch_save"
        assert open_source(path, storage=storage)[1].names == ("w", "b")


def test_a_pointer_that_leads_out(tmp_path: Path) -> None:
    (tmp_path / "latest_universal").write_text("../elsewhere")
    with pytest.raises(UnsafeCheckpointError, match=r"\.\./elsewhere"):
        opened(tmp_path)
    (tmp_path / "latest_universal").write_bytes(b"\xff")
    with pytest.raises(FormatError, match="is no text"):
        opened(tmp_path)
