"""``inspect``, ``ls`` and ``verify`` on repositories of MEGA files."""

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import dcp_pipeline
from dcp_pipeline.formats.mega import parse_mega
from dcp_pipeline.tools.inspect import inspect
from dcp_pipeline.tools.opening import State, look, open_directory, state_of
from dcp_pipeline.tools.verify import verify
from tests import mega_files as forge
from tests.mega_files import FLOATS, SAMPLES, entry, mega

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

MEGA = {"layout": "mega", "serialization": {"kind": "mega", "compression": "zstd"}}


def sample(folder: Path, name: str) -> Path:
    shutil.copy(SAMPLES / f"{name}.mega", folder)
    return folder


def saved(folder: Path, **serialization: Any) -> Path:
    state = {"model": {"w": torch.arange(600.0).view(20, 30), "b": torch.ones(3)}, "step": 3}
    settings = {"kind": "mega", **serialization}
    config = {"layout": "mega", "serialization": settings}
    dcp_pipeline.save(state, checkpoint_id=folder, config=config)
    return folder


def test_inspect(tmp_path: Path) -> None:
    found = inspect(sample(tmp_path, "two_crc32_sha256"))
    assert found.summary.kind == "MEGA" and found.summary.tensor_bytes == 56
    assert {key.name: key.dtype for key in found.keys if key.dtype} == {
        "w.a": "float32",
        "w.b": "int64",
    }
    assert "metadata.flag" in {key.name for key in found.keys}
    assert found.problems == ()
    directory = open_directory(tmp_path)
    assert state_of(directory, look(directory))[0] is State.FOREIGN


def test_ours_shows_its_fingerprint_and_paths(tmp_path: Path) -> None:
    found = inspect(saved(tmp_path, compression="zstd"))
    assert found.fingerprint is not None
    assert {key.name for key in found.keys} == {"model.w", "model.b", "step"}


@pytest.mark.parametrize(
    "name", ["minimal", "two_crc32_sha256", "shuffled_sha256", "chunked_crc32", "overlay"]
)
def test_samples_are_well(tmp_path: Path, name: str) -> None:
    report = verify(sample(tmp_path, name))
    assert report.is_well and report.kind == "MEGA"
    unchecked = [text for text in report.not_verified if "neither a checksum" in text]
    assert bool(unchecked) == (name in ("minimal", "overlay"))


def test_damage_names_file_and_key(tmp_path: Path) -> None:
    report = verify(sample(tmp_path, "two_corrupt_payload"))
    (problem,) = report.problems
    assert (problem.file, problem.keys) == ("two_corrupt_payload.mega", ("w.a",))


@pytest.mark.parametrize("checksum", ["none", "crc32"])
@pytest.mark.parametrize("compression", ["none", "zstd"])
def test_every_damaged_tensor_and_value_of_ours_is_found(
    tmp_path: Path, checksum: str, compression: str
) -> None:
    """By its checksum, or else by the fingerprint that was noted."""
    path = saved(tmp_path, checksum=checksum, compression=compression) / "model.mega"
    assert verify(tmp_path).is_well
    good = path.read_bytes()
    file = parse_mega(lambda offset, nbytes: good[offset : offset + nbytes], len(good))
    places = {
        f"model.{t.name[6:]}": t.spans[0].offset + t.spans[0].stored - 1 for t in file.tensors
    }
    places["step"] = file.metadata["step"].offset + 4
    for key, place in places.items():
        data = bytearray(good)
        data[place] ^= 1
        path.write_bytes(data)
        report = verify(tmp_path)
        assert [problem.keys for problem in report.problems] == [(key,)], key


def test_a_digest_of_all_payloads_is_compared(tmp_path: Path) -> None:
    good = mega([entry("a")], FLOATS)
    digest = forge.sha(FLOATS)[1].hex()
    (tmp_path / "model.mega").write_bytes(
        forge.footer(good, {"mega.hash.payload.sha256": digest, "mega.trust.signature.value": "x"})
    )
    report = verify(tmp_path)
    assert report.is_well and "the signature of model.mega" in report.not_verified
    (tmp_path / "model.mega").write_bytes(
        forge.footer(good, {"mega.hash.payload.sha256": "00" * 32})
    )
    assert "its payload has" in verify(tmp_path).problems[0].found


def test_what_cannot_be_opened_is_a_problem(tmp_path: Path) -> None:
    (tmp_path / "model.mega").write_bytes(b"x" * 100)
    assert "model.mega: no MEGA file" in verify(tmp_path).problems[0].found


def test_no_torch_is_imported(tmp_path: Path) -> None:
    saved(tmp_path)
    program = (
        "import sys; from dcp_pipeline.tools.inspect import inspect;"
        "from dcp_pipeline.tools.verify import verify;"
        f"inspect({str(tmp_path)!r}); assert verify({str(tmp_path)!r}).is_well;"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
