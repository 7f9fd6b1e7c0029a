import io
import os
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp

from dcp_pipeline.config.compose import compose
from dcp_pipeline.core.errors import (
    CheckpointNotFoundError,
    ChecksumError,
    ConfigError,
    FormatError,
    IncompleteCheckpointError,
    UnsafeCheckpointError,
)
from dcp_pipeline.pipeline import Pipeline
from dcp_pipeline.tools.inspect import inspect

SHARED = torch.randn(30, 4)


def state() -> dict[str, object]:
    return {
        "model": {"embed": SHARED, "head": SHARED, "bias": torch.zeros(5, dtype=torch.bfloat16)},
        "empty": torch.zeros(0, 3),
        "rng": np.arange(4),
        "loss": np.float32(2.5),
        "stream": io.BytesIO(b"abc"),
        "step": 3,
    }


def save(path: Path, *overrides: str) -> str:
    with Pipeline.from_recipe("tiny_decoder", overrides) as pipeline:
        return pipeline.save(state(), path).manifest.save_id


def test_summary(tmp_path: Path) -> None:
    save_id = save(tmp_path)
    summary = inspect(tmp_path).summary
    assert summary.path == str(tmp_path)
    assert (summary.kind, summary.save_id, summary.world_size) == ("dcp_pipeline", save_id, 1)
    assert (summary.keys, summary.chunks, summary.files) == (8, 6, 1)
    assert summary.tensor_bytes == 30 * 4 * 4 + 5 * 2 + 4 * 8 + 4
    assert summary.file_bytes == sum(p.stat().st_size for p in tmp_path.glob("*.distcp"))
    assert (summary.serialization, summary.checksum) == ("torch_save", "xxh3_64")
    assert summary.has_metadata
    assert summary.versions["torch"] == torch.__version__
    assert summary.config_digest == compose(recipe="tiny_decoder").config.digest()


def test_keys(tmp_path: Path) -> None:
    save(tmp_path)
    keys = {key.name: key for key in inspect(tmp_path).keys}
    assert list(keys) == [
        "model.embed", "model.head", "model.bias", "empty", "rng", "loss", "stream", "step",
    ]  # fmt: skip
    embed, head = keys["model.embed"], keys["model.head"]
    assert (embed.dtype, embed.shape, embed.chunks, embed.nbytes) == ("float32", (30, 4), 1, 480)
    assert (head.alias, head.chunks, head.nbytes) == ("model.embed", 0, 480)
    assert (keys["empty"].shape, keys["empty"].chunks, keys["empty"].nbytes) == ((0, 3), 0, 0)
    assert [keys[name].kind for name in ("rng", "loss", "stream", "step")] == [
        "array", "scalar", "stream", "value",
    ]  # fmt: skip
    assert (keys["step"].dtype, keys["step"].shape, keys["step"].chunks) == (None, None, 1)
    assert [key.name for key in inspect(tmp_path, "model.*").keys] == list(keys)[:3]
    assert inspect(tmp_path, "model.*").summary == inspect(tmp_path).summary


def test_safetensors_has_no_metadata(tmp_path: Path) -> None:
    save(tmp_path, "serialization=safetensors")
    found = inspect(tmp_path)
    assert (found.summary.serialization, found.summary.has_metadata) == ("safetensors", False)
    assert {key.name: key.nbytes for key in found.keys}["step"] == len("3")


def test_files(tmp_path: Path) -> None:
    save(tmp_path)
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "folder").mkdir()
    (tmp_path / ".committing.lock").symlink_to('{"host": "the owner"}')
    files = inspect(tmp_path).files
    assert [file.role for file in files] == ["manifest", "metadata", "data", "sums", "other"]
    assert all(file.is_well for file in files)
    assert {file.name for file in files} == set(os.listdir(tmp_path)) - {
        "folder",
        ".committing.lock",
    }


def test_files_that_are_gone_or_cut_off_are_problems(tmp_path: Path) -> None:
    save(tmp_path)
    (data,), (sums,) = tmp_path.glob("*.distcp"), tmp_path.glob("*.sums")
    size = data.stat().st_size
    os.truncate(data, size - 1)
    sums.unlink()
    assert inspect(tmp_path).problems == (
        f"{data.name} has {size - 1} bytes, {size} were written",
        f"{sums.name} is missing",
    )


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_plain_dcp(tmp_path: Path) -> None:
    dcp.save({"model": {"w": torch.ones(3, 2)}, "step": 3}, checkpoint_id=tmp_path)
    found = inspect(tmp_path)
    assert (found.summary.kind, found.summary.save_id) == ("plain DCP", None)
    assert (found.summary.world_size, found.summary.config_digest) == (None, None)
    assert [(k.name, k.dtype, k.shape, k.chunks) for k in found.keys] == [
        ("model.w", "float32", (3, 2), 1),
        ("step", None, None, 1),
    ]
    assert [file.role for file in found.files] == ["metadata", "data"]
    assert found.problems == ()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.filterwarnings("ignore:Detected an existing checkpoint")
def test_plain_dcp_over_ours(tmp_path: Path) -> None:
    save(tmp_path)
    dcp.save({"other": torch.ones(3)}, checkpoint_id=tmp_path)
    found = inspect(tmp_path)
    assert (found.summary.kind, [key.name for key in found.keys]) == ("plain DCP", ["other"])
    assert "plain DCP has saved over" in found.problems[0]


def test_what_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFoundError, match="nope is not there") as error:
        inspect(tmp_path / "nope")
    assert error.value.filename == str(tmp_path / "nope")
    with pytest.raises(CheckpointNotFoundError, match="has no checkpoint in it"):
        inspect(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointNotFoundError, match="file is not a directory"):
        inspect(tmp_path / "file")
    (tmp_path / "__0_0.0123abcd.distcp").write_bytes(b"x")
    with pytest.raises(IncompleteCheckpointError, match="its save never finished"):
        inspect(tmp_path)


def test_uris(tmp_path: Path) -> None:
    save(tmp_path)
    assert inspect(f"file://{tmp_path}").summary.path == str(tmp_path)
    with pytest.raises(ConfigError, match="in the memory of the process that saved it"):
        inspect("memory://x")
    with pytest.raises(ConfigError, match=r"paths and file:// URIs, found 's3://bucket/x'"):
        inspect("s3://bucket/x")


def test_a_damaged_manifest_is_named(tmp_path: Path) -> None:
    save(tmp_path)
    manifest = tmp_path / "manifest.json"
    good = manifest.read_bytes()
    manifest.write_bytes(good.replace(b'"world_size":1', b'"world_size":2'))
    with pytest.raises(ChecksumError, match=f"{tmp_path}: manifest.json does not match its own"):
        inspect(tmp_path)
    manifest.write_bytes(good[:100])
    with pytest.raises(FormatError, match=f"{tmp_path}: manifest.json is not JSON"):
        inspect(tmp_path)


def test_metadata_cannot_run_code(tmp_path: Path) -> None:
    (tmp_path / ".metadata").write_bytes(b"cos\nsystem\n(S'touch /tmp/owned'\ntR.")
    with pytest.raises(UnsafeCheckpointError, match=f"{tmp_path}: .metadata asks for os.system"):
        inspect(tmp_path)
