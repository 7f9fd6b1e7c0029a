import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

import dcp_pipeline
from dcp_pipeline.cli.main import main
from dcp_pipeline.core.checksum import digest_of
from dcp_pipeline.core.errors import CheckpointNotFoundError, ConfigError, IncompleteCheckpointError
from dcp_pipeline.core.liveness import ProcessIdentity
from dcp_pipeline.core.manifest import Manifest, MetadataEntry
from dcp_pipeline.formats.metadata_pickle import read_metadata, write_metadata
from dcp_pipeline.tools.verify import VerifyReport, verify, verify_all

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.filterwarnings("ignore:Detected an existing checkpoint"),
]

KINDS = ["torch_save", "safetensors"]


def state() -> dict[str, object]:
    tied = torch.arange(30_000.0).view(300, 100)
    return {
        "model": {"w": tied, "tied": tied, "c": torch.randn(50, 3, dtype=torch.complex64)},
        "empty": torch.zeros(0, 4),
        "half": torch.zeros(9, dtype=torch.bfloat16),
        "pairs": torch.zeros(7, dtype=torch.complex128),
        "step": 3,
        "scheduler": {"last": [1, 2], "name": "cosine"},
    }


def save(path: Path, kind: str = "torch_save", **layout: object) -> Manifest:
    config = {"serialization": kind, "layout": {"block_bytes": "4KiB", **layout}}
    dcp_pipeline.save(state(), checkpoint_id=path, config=config)
    return Manifest.decode((path / "manifest.json").read_bytes())


def data_file(path: Path) -> Path:
    (found,) = [*path.glob("*.distcp"), *path.glob("*.safetensors")]
    return found


def flip(file: Path, at: int) -> None:
    data = bytearray(file.read_bytes())
    data[at] ^= 1
    file.write_bytes(data)


def said(report: VerifyReport) -> str:
    return "\n".join(map(str, report.problems))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("checksum", ["xxh3_64", "crc32", "sha256"])
def test_a_good_checkpoint(tmp_path: Path, kind: str, checksum: str) -> None:
    manifest = save(tmp_path, kind, checksum=checksum)
    seen: list[tuple[int, int]] = []
    report = verify(tmp_path, progress=lambda done, total: seen.append((done, total)))
    assert (report.problems, report.notes, report.not_verified) == ((), (), ())
    assert (report.kind, report.save_id) == ("dcp_pipeline", manifest.save_id)
    assert (report.keys, report.chunks) == (len(manifest.names), len(manifest.table))
    assert report.files == len(os.listdir(tmp_path))
    assert report.nbytes == sum(file.stat().st_size for file in tmp_path.iterdir())
    assert seen == sorted(seen) and seen[-1][0] == report.nbytes


def test_without_digests_of_blocks_nothing_is_claimed(tmp_path: Path) -> None:
    dcp.save(state(), checkpoint_id=tmp_path)
    report = verify(tmp_path)
    assert (report.problems, report.kind, report.save_id) == ((), "plain DCP", "")
    assert "plain DCP keeps no digest" in report.not_verified[0]


@pytest.mark.parametrize("kind", KINDS)
def test_a_changed_byte_names_file_keys_and_rank(tmp_path: Path, kind: str) -> None:
    manifest = save(tmp_path, kind)
    table, key = manifest.table, manifest.names.index("model.w")
    (row,) = [row for row in range(len(table)) if table.key[row] == key]
    place = int(table.offset[row] + table.payload[row])
    flip(data_file(tmp_path), place + 50_000)
    (problem,) = verify(tmp_path).problems
    block = (place + 50_000) // 4096
    assert problem.file == data_file(tmp_path).name
    assert problem.keys == ("model.w", "model.tied")
    assert problem.rank == 0
    assert problem.found.startswith(f"block {block} (bytes {block * 4096} to")


def test_runs_of_changed_blocks_are_joined_and_limited(tmp_path: Path) -> None:
    save(tmp_path)
    file = data_file(tmp_path)
    for block in (2, 3, 7):
        flip(file, block * 4096)
    assert [problem.found.split(" (")[0] for problem in verify(tmp_path).problems] == [
        "2 of the blocks 2 to 3 are not what was written",
        "block 7",
    ]
    dcp_pipeline.save({"w": torch.zeros(200_000)}, checkpoint_id=tmp_path / "many",
                      config={"layout": {"block_bytes": "4KiB"}})  # fmt: skip
    file = data_file(tmp_path / "many")
    for block in range(0, 100, 2):
        flip(file, block * 4096 + 9)
    problems = verify(tmp_path / "many").problems
    assert len(problems) == 20
    assert all(problem.keys == ("w",) for problem in problems)


@pytest.mark.parametrize("kind", KINDS)
def test_missing_cut_off_and_appended_files(tmp_path: Path, kind: str) -> None:
    save(tmp_path / "good", kind)
    for name in sorted(os.listdir(tmp_path / "good")):
        size = (tmp_path / "good" / name).stat().st_size
        for what in ("missing", "cut off", "appended", "empty"):
            path = tmp_path / "copy"
            shutil.copytree(tmp_path / "good", path)
            if what == "missing":
                (path / name).unlink()
            elif what == "appended":
                with open(path / name, "ab") as file:
                    file.write(b"x")
            else:
                os.truncate(path / name, 0 if what == "empty" else size - 1)
            if name == "manifest.json" and what == "missing":
                if kind == "safetensors":
                    with pytest.raises(IncompleteCheckpointError):
                        verify(path)
            else:
                report = verify(path)
                assert not report.is_well
                assert {problem.file for problem in report.problems} >= {name}, (name, what)
            shutil.rmtree(path)


def test_a_file_of_another_save(tmp_path: Path) -> None:
    save(tmp_path / "a")
    save(tmp_path / "b")
    data_file(tmp_path / "a").write_bytes(data_file(tmp_path / "b").read_bytes()[:-1] + b"!")
    os.truncate(data_file(tmp_path / "a"), data_file(tmp_path / "b").stat().st_size)
    other = {"w": torch.ones(100_000)}
    for name in ("x", "y"):
        dcp_pipeline.save({"w": other["w"] * ord(name)}, checkpoint_id=tmp_path / name)
    shutil.copy(data_file(tmp_path / "x"), data_file(tmp_path / "y"))
    (problem,) = verify(tmp_path / "y").problems
    assert problem.keys == ("w",)
    assert "it is another file of that size" in problem.found


def test_manifest_and_sums_of_another_save(tmp_path: Path) -> None:
    for name in ("a", "b"):
        save(tmp_path / name)
    (sums_a,), (sums_b,) = ((tmp_path / name).glob("*.sums") for name in "ab")
    shutil.copy(sums_b, sums_a)
    report = verify(tmp_path / "a")
    assert {problem.file for problem in report.problems} == {
        sums_a.name,
        data_file(tmp_path / "a").name,
    }
    assert "there are no digests of it" in said(report)
    shutil.copy(tmp_path / "b" / "manifest.json", tmp_path / "a" / "manifest.json")
    text = said(verify(tmp_path / "a"))
    assert "it is missing" in text
    assert "plain DCP has saved over the checkpoint" in text


def test_metadata_that_disagrees(tmp_path: Path) -> None:
    """Its digest in the manifest is right, so that only the content tells."""
    manifest = save(tmp_path)
    metadata = read_metadata((tmp_path / ".metadata").read_bytes())
    stored = metadata.storage_data
    for index in stored:
        if index.fqn == "half":
            stored[index] = type(stored[index])(stored[index].relative_path, 0, 10)
    del metadata.state_dict_metadata["step"]
    data = write_metadata(metadata)
    (tmp_path / ".metadata").write_bytes(data)
    entry = MetadataEntry(len(data), digest_of("xxh3_64", data).hex())
    (tmp_path / "manifest.json").write_bytes(replace(manifest, metadata=entry).encode())
    (problem,) = verify(tmp_path).problems
    assert (problem.file, problem.keys) == (".metadata", ("half", "step"))
    (tmp_path / ".metadata").write_bytes(data[:-1] + b"x")
    assert "it was changed, or plain DCP has saved" in said(verify(tmp_path))


def test_metadata_that_was_superseded_is_a_note(tmp_path: Path) -> None:
    save(tmp_path)
    old = (tmp_path / ".metadata").read_bytes()
    save(tmp_path)
    (tmp_path / ".metadata").write_bytes(old)
    report = verify(tmp_path)
    assert report.is_well
    assert "killed between two steps" in report.notes[0]


def test_files_that_are_no_part_of_it(tmp_path: Path) -> None:
    manifest = save(tmp_path)
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "folder").mkdir()
    (tmp_path / "__3_0.0badcafe.distcp").write_bytes(b"x")
    live = "1" * 32
    (tmp_path / f".saving-{live}.json").write_bytes(ProcessIdentity.current().encode())
    (tmp_path / f"__0_0.{live[:8]}.distcp").write_bytes(b"x")
    report = verify(tmp_path)
    assert report.is_well
    assert [note.split(" ", 1)[1] for note in report.notes] == [
        "belongs to a save that is under way",
        "belongs to a save that is under way",
        "was left by a save that never finished: prune removes it",
        "is no part of the checkpoint",
    ]
    (tmp_path / f"__9_0.{manifest.save_id[:8]}.distcp").write_bytes(b"x")
    assert "it carries the id of this save" in said(verify(tmp_path))


def test_plain_dcp(tmp_path: Path) -> None:
    dcp.save({"a": torch.randn(5000), "b": {"c": torch.randn(30, 7).T}, "n": [1]},
             checkpoint_id=tmp_path)  # fmt: skip
    good = (tmp_path / "__0_0.distcp").read_bytes()
    assert verify(tmp_path).is_well
    stored = read_metadata((tmp_path / ".metadata").read_bytes()).storage_data
    (place,) = [info for index, info in stored.items() if index.fqn == "a"]
    flip(tmp_path / "__0_0.distcp", place.offset + 5000)
    (problem,) = verify(tmp_path).problems
    assert (problem.file, problem.keys) == ("__0_0.distcp", ("a",))
    assert "CRC of archive/data/0" in problem.found
    (tmp_path / "__0_0.distcp").write_bytes(good[:-10])
    assert "it was cut off" in said(verify(tmp_path))
    (tmp_path / "__0_0.distcp").write_bytes(good + b"more")
    report = verify(tmp_path)
    assert report.is_well and "4 bytes that belong to no item" in report.notes[0]
    (tmp_path / "__0_0.distcp").unlink()
    (problem,) = verify(tmp_path).problems
    assert problem.found == "it is missing" and set(problem.keys) == {"a", "b.c", "n"}
    (tmp_path / "__0_0.distcp").write_bytes(good)
    (tmp_path / ".metadata").write_bytes((tmp_path / ".metadata").read_bytes()[:-40])
    (problem,) = verify(tmp_path).problems
    assert problem.file == ".metadata"


def test_plain_dcp_that_was_told_to_write_no_crcs(tmp_path: Path) -> None:
    torch.serialization.set_crc32_options(False)
    try:
        dcp.save({"a": torch.randn(500)}, checkpoint_id=tmp_path)
    finally:
        torch.serialization.set_crc32_options(True)
    report = verify(tmp_path)
    assert report.is_well
    assert "were written without" in report.not_verified[0]


def test_plain_dcp_over_ours(tmp_path: Path) -> None:
    save(tmp_path)
    dcp.save({"other": torch.ones(3)}, checkpoint_id=tmp_path)
    report = verify(tmp_path)
    assert not report.is_well
    assert "plain DCP has saved over the checkpoint" in said(report)


def test_what_cannot_be_verified_at_all(tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFoundError):
        verify(tmp_path / "nope")
    with pytest.raises(CheckpointNotFoundError, match="no checkpoint in it"):
        verify(tmp_path)
    with pytest.raises(ConfigError):
        verify("s3://bucket/x")
    (tmp_path / "__0_0.0badcafe.distcp").write_bytes(b"x")
    with pytest.raises(IncompleteCheckpointError):
        verify(tmp_path)


def test_a_checkpoint_that_is_replaced_meanwhile(tmp_path: Path) -> None:
    save(tmp_path)
    replaced: list[Manifest] = []

    def replace_once(done: int, total: int) -> None:
        if not replaced:
            replaced.append(save(tmp_path))

    report = verify(tmp_path, progress=replace_once)
    assert report.is_well
    assert report.save_id == replaced[0].save_id


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as exit:
        main(arguments)
    assert isinstance(exit.value.code, int)
    return exit.value.code


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for step in (1, 2):
        save(tmp_path / f"step-{step}")
    (tmp_path / "step-3").mkdir()
    (tmp_path / "step-3" / "__0_0.0badcafe.distcp").write_bytes(b"x")
    (tmp_path / "link").symlink_to(tmp_path / "step-1")
    assert run("verify", str(tmp_path)) == 0
    shown = capsys.readouterr().out
    assert shown.count("nothing is wrong") == 3
    assert "its save never finished" in " ".join(shown.split())
    flip(data_file(tmp_path / "step-2"), 5000)
    assert run("verify", str(tmp_path)) == 1
    assert "1 problems" in capsys.readouterr().out
    assert run("verify", str(tmp_path / "step-1"), "--threads", "1") == 0
    capsys.readouterr()
    assert run("verify", str(tmp_path), "--json") == 1
    reports = json.loads(capsys.readouterr().out)["checkpoints"]
    assert [report["is_well"] for report in reports] == [True, False, True]
    assert sorted(reports[1]) == [
        "chunks", "files", "fingerprint", "is_well", "keys", "kind", "nbytes", "not_verified",
        "notes", "path", "problems", "save_id",
    ]  # fmt: skip
    assert sorted(reports[1]["problems"][0]) == ["expected", "file", "found", "keys", "rank"]
    assert run("verify", str(tmp_path / "nope")) == 1
    assert run("verify", "s3://bucket/x") == 2
    assert run("verify") == 2


def test_verify_all_of_one(tmp_path: Path) -> None:
    save(tmp_path)
    (report,) = verify_all(tmp_path)
    assert report.path == str(tmp_path)


def test_safetensors_are_verified_without_torch(tmp_path: Path) -> None:
    save(tmp_path, "safetensors")
    program = (
        "import sys, dcp_pipeline\n"
        f"assert dcp_pipeline.verify({str(tmp_path)!r}).is_well\n"
        "assert 'torch' not in sys.modules, 'torch was imported'"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
