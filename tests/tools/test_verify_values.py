"""What the fingerprint finds where every digest of every block is right."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import dcp_pipeline
from dcp_pipeline import Manifest
from dcp_pipeline.cli.main import main
from dcp_pipeline.core.fingerprint import Fingerprint
from dcp_pipeline.core.table import ChunkTable
from dcp_pipeline.tools.inspect import inspect
from dcp_pipeline.tools.verify import VerifyReport, verify
from tests.distributed.pool import Pool

KINDS = ["torch_save", "safetensors"]
GOLDEN = Path(__file__).parents[1] / "golden"


def state() -> dict[str, Any]:
    tied = torch.arange(3000.0).view(60, 50)
    return {
        "a": torch.randn(40, 30),
        "b": torch.randn(40, 30),
        "tied": {"one": tied, "two": tied},
        "empty": torch.zeros(0, 2),
        "p": 11,
        "q": 22,
    }


def save(path: Path, kind: str) -> Manifest:
    config = {"serialization": kind, "layout": {"metadata": False}}
    return dcp_pipeline.save(state(), checkpoint_id=path, config=config).manifest


def put(path: Path, manifest: Manifest) -> None:
    (path / "manifest.json").write_bytes(manifest.encode())


def with_fingerprint(manifest: Manifest, tensors: dict[str, str], **values: str) -> Manifest:
    known = manifest.fingerprint
    assert known is not None
    changed = Fingerprint(known.value, {**known.tensors, **tensors}, {**known.values, **values})
    return replace(manifest, fingerprint=changed)


def exchanged(manifest: Manifest, one: str, other: str) -> Manifest:
    """Two keys whose chunks have changed places."""
    table, order = manifest.table, np.arange(len(manifest.table))
    first, second = (
        int(np.flatnonzero(table.key == manifest.names.index(name))[0]) for name in (one, other)
    )
    order[[first, second]] = second, first
    places = {name: getattr(table, name)[order] for name in ("file", "offset", "length", "payload")}
    columns = table.columns("key", "owner") | places
    return replace(manifest, table=ChunkTable.from_columns(table.keys, columns))


def found_in(report: VerifyReport) -> set[tuple[str, ...]]:
    return {problem.keys for problem in report.problems if "fingerprint" in problem.found}


@pytest.mark.parametrize("kind", KINDS)
def test_chunks_that_changed_places(tmp_path: Path, kind: str) -> None:
    """Plain manifests and blocks see nothing wrong with it, in torch's own format."""
    put(tmp_path, exchanged(save(tmp_path, kind), "a", "b"))
    report = verify(tmp_path)
    assert found_in(report) == {("a",), ("b",)}
    problem = next(p for p in report.problems if p.keys == ("a",) and "fingerprint" in p.found)
    assert problem.file.startswith("__0_0.") and problem.rank == 0
    assert problem.expected.endswith("as the manifest says")
    if kind == "torch_save":
        assert len(report.problems) == 2


def test_values_that_changed_places(tmp_path: Path) -> None:
    put(tmp_path, exchanged(save(tmp_path, "torch_save"), "p", "q"))
    report = verify(tmp_path)
    assert found_in(report) == {("p",), ("q",)} and len(report.problems) == 2


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("tensors", "values", "keys"),
    [
        ({"a": "0" * 16}, {}, {("a",)}),
        ({"empty": "0" * 15 + "1"}, {}, {("empty",)}),
        ({"tied.two": "1" * 16}, {}, {("tied.one", "tied.two")}),
        ({}, {"p": "1" * 16}, {("p",)}),
    ],
)
def test_a_fingerprint_that_was_altered(
    tmp_path: Path, kind: str, tensors: dict[str, str], values: dict[str, str], keys: Any
) -> None:
    put(tmp_path, with_fingerprint(save(tmp_path, kind), tensors, **values))
    report = verify(tmp_path)
    # The whole does not fit either.
    assert found_in(report) == keys | {()}


def test_a_whole_that_was_altered(tmp_path: Path) -> None:
    manifest = save(tmp_path, "safetensors")
    assert manifest.fingerprint is not None
    put(tmp_path, replace(manifest, fingerprint=replace(manifest.fingerprint, value="0" * 64)))
    (problem,) = verify(tmp_path).problems
    assert problem.file == "manifest.json" and manifest.fingerprint.value in problem.found


def changed_key(manifest: Manifest, name: str, **change: Any) -> Manifest:
    at, table = manifest.names.index(name), manifest.table
    keys = list(table.keys)
    keys[at] = replace(keys[at], **change)
    return replace(manifest, table=replace(table, keys=tuple(keys)))


@pytest.mark.parametrize("change", [{"dtype": "int32"}, {"path": ("other",)}])
def test_keys_that_were_altered(tmp_path: Path, change: dict[str, Any]) -> None:
    """The bytes are the same, the state is not."""
    put(tmp_path, changed_key(save(tmp_path, "torch_save"), "a", **change))
    problems = [p for p in verify(tmp_path).problems if p.file == "manifest.json"]
    assert any("make the fingerprint" in problem.found for problem in problems)


def test_damaged_bytes_are_reported_once(tmp_path: Path) -> None:
    manifest = save(tmp_path, "safetensors")
    (file,) = tmp_path.glob("*.safetensors")
    row = int(np.flatnonzero(manifest.table.key == manifest.names.index("b"))[0])
    data = bytearray(file.read_bytes())
    data[int(manifest.table.offset[row]) + 5] ^= 4
    file.write_bytes(data)
    (problem,) = verify(tmp_path).problems
    assert "block" in problem.found
    file.unlink()
    (problem,) = verify(tmp_path).problems
    assert problem.found == "it is missing"


def write_shards(path: Path) -> None:
    from tests.cases.test_fingerprint import sharded_state

    dcp_pipeline.save(sharded_state("columns"), checkpoint_id=path)


def test_shards_that_changed_places(ranks: Pool, tmp_path: Path) -> None:
    ranks(2).run(write_shards, tmp_path)
    manifest = Manifest.decode((tmp_path / "manifest.json").read_bytes())
    assert verify(tmp_path, threads=1).is_well
    rows = np.flatnonzero(manifest.table.key == manifest.names.index("sharded.large"))
    order = np.arange(len(manifest.table))
    order[rows] = rows[::-1]
    table = manifest.table
    places = {n: getattr(table, n)[order] for n in ("owner", "file", "offset", "length", "payload")}
    moved = ChunkTable.from_columns(table.keys, table.columns("key") | places)
    put(tmp_path, replace(manifest, table=moved))
    assert found_in(verify(tmp_path)) == {("sharded.large",)}
    # A chunk that is not where a tensor has one leaves nothing to compare.
    sizes = table.sizes.copy()
    sizes[rows[0], 1] -= 1
    put(tmp_path, replace(manifest, table=replace(table, sizes=sizes)))
    report = verify(tmp_path)
    assert any("a gap" in problem.found for problem in report.problems)
    assert not found_in(report)


@pytest.mark.parametrize("name", ["ours-1.0-torch_save", "ours-1.0-safetensors"])
def test_checkpoints_from_before_there_was_one(tmp_path: Path, name: str) -> None:
    shutil.copytree(GOLDEN / name, tmp_path / "it")
    report = verify(tmp_path / "it")
    assert report.is_well and report.fingerprint is None
    assert any("no fingerprint of the values was recorded" in note for note in report.notes)
    found = inspect(tmp_path / "it")
    assert found.fingerprint is None and {key.fingerprint for key in found.keys} == {None}


def test_commands_show_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    manifest = save(tmp_path, "safetensors")
    wanted = manifest.fingerprint
    assert wanted is not None

    def run(*arguments: str) -> str:
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        assert ended.value.code == 0
        return capsys.readouterr().out

    report = json.loads(run("inspect", str(tmp_path), "--json"))
    assert report["fingerprint"] == wanted.value
    assert {key["name"]: key["fingerprint"] for key in report["keys"]} == {
        name: wanted.of(name) for name in manifest.names
    }
    shown = "".join(run("inspect", str(tmp_path)).split())
    assert wanted.value in shown and wanted.tensors["tied.two"] not in shown
    monkeypatch.setenv("COLUMNS", "140")
    shown = run("inspect", str(tmp_path))
    assert wanted.value in shown and shown.count(wanted.tensors["tied.two"]) == 2
    assert wanted.value in "".join(run("verify", str(tmp_path)).split())
    (checkpoint,) = json.loads(run("verify", str(tmp_path), "--json"))["checkpoints"]
    assert checkpoint["fingerprint"] == wanted.value


def test_bytes_are_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from dcp_pipeline.storage.file_source import FileSource

    manifest = save(tmp_path, "safetensors")
    seen: list[int] = []
    read: Callable[..., None] = FileSource.read_into

    def counted(self: FileSource, offset: int, target: memoryview) -> None:
        if self.name != "manifest.json":
            seen.append(len(target))
        read(self, offset, target)

    monkeypatch.setattr(FileSource, "read_into", counted)
    verify(tmp_path)
    with_it = sum(seen)
    seen.clear()
    put(tmp_path, replace(manifest, fingerprint=None))
    verify(tmp_path)
    assert sum(seen) == with_it
