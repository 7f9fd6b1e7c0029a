import json
import os
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
import torch.distributed.checkpoint as dcp

from dcp_pipeline.cli.main import main
from dcp_pipeline.cli.tables import cell
from dcp_pipeline.graph.drawing import draw
from dcp_pipeline.pipeline import Pipeline

Captured = pytest.CaptureFixture[str]


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as exit:
        main(arguments)
    assert isinstance(exit.value.code, int)
    return exit.value.code


def save(path: Path) -> str:
    weight = torch.ones(30, 4)
    state = {"model": {"w": weight, "tied": weight, "x[red]\x1b[2J": torch.zeros(2)}, "step": 3}
    with Pipeline.from_recipe("tiny_decoder") as pipeline:
        return pipeline.save(state, path).manifest.save_id


def test_inspect(capsys: Captured, tmp_path: Path) -> None:
    save_id = save(tmp_path)
    assert run("inspect", str(tmp_path)) == 0
    shown = capsys.readouterr()
    assert shown.err == ""
    for word in (save_id, "dcp_pipeline", "model.w", "float32", "[30, 4]", "480 B", "value"):
        assert word in shown.out
    assert "distcp" not in shown.out
    assert run("inspect", str(tmp_path), "--files") == 0
    assert f"__0_0.{save_id[:8]}.distcp" in capsys.readouterr().out


def test_names_neither_steer_the_terminal_nor_are_markup(capsys: Captured, tmp_path: Path) -> None:
    save(tmp_path)
    assert run("inspect", str(tmp_path)) == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert r"model.x[red]\x1b[2J" in out
    assert cell("a\x1b[31m\u202e\ud800b").plain == r"a\x1b[31m\u202e\ud800b"


def test_inspect_as_json(capsys: Captured, tmp_path: Path) -> None:
    save_id = save(tmp_path)
    assert run("inspect", str(tmp_path), "--json", "--keys", "model.[wt]*", "--files") == 0
    report = json.loads(capsys.readouterr().out)
    assert list(report) == ["summary", "fingerprint", "keys", "problems", "files"]
    assert len(report["fingerprint"]) == 64
    assert {len(key.pop("fingerprint")) for key in report["keys"]} == {16}
    summary = report["summary"]
    assert list(summary) == [
        "path", "kind", "save_id", "created", "world_size", "versions", "serialization",
        "checksum", "block_bytes", "keys", "chunks", "files", "tensor_bytes", "file_bytes",
        "has_metadata", "config_digest",
    ]  # fmt: skip
    assert (summary["save_id"], summary["keys"], summary["chunks"]) == (save_id, 4, 3)
    assert report["keys"] == [
        {
            "name": "model.w", "kind": "tensor", "dtype": "float32", "shape": [30, 4], "chunks": 1,
            "nbytes": 480, "alias": None,
        },
        {
            "name": "model.tied", "kind": "tensor", "dtype": "float32", "shape": [30, 4],
            "chunks": 0, "nbytes": 480, "alias": "model.w",
        },
    ]  # fmt: skip
    assert report["problems"] == []
    assert [sorted(file) for file in report["files"]] == [
        ["expected", "name", "role", "size"]
    ] * 4  # fmt: skip


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_inspect_and_ls_of_plain_dcp(capsys: Captured, tmp_path: Path) -> None:
    dcp.save({"model": {"w": torch.ones(3, 2)}}, checkpoint_id=tmp_path / "step-5")
    assert run("inspect", str(tmp_path / "step-5"), "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["summary"]["kind"], report["summary"]["save_id"]) == ("plain DCP", None)
    assert [key["name"] for key in report["keys"]] == ["model.w"]
    assert run("inspect", str(tmp_path / "step-5")) == 0
    assert "plain DCP" in capsys.readouterr().out
    assert run("ls", str(tmp_path)) == 0
    assert "foreign" in capsys.readouterr().out


def test_a_missing_file_is_a_problem(capsys: Captured, tmp_path: Path) -> None:
    save(tmp_path)
    (sums,) = tmp_path.glob("*.sums")
    sums.unlink()
    assert run("inspect", str(tmp_path)) == 1
    assert capsys.readouterr().err == f"problem: {sums.name} is missing\n"


@pytest.mark.parametrize("command", ["inspect", "ls"])
def test_what_is_not_there_is_one_line(capsys: Captured, tmp_path: Path, command: str) -> None:
    assert run(command, str(tmp_path / "nope")) == 1
    shown = capsys.readouterr()
    assert (shown.out, shown.err) == ("", f"error: {tmp_path / 'nope'} is not there\n")
    assert run(command, "memory://x") == 2
    assert "in the memory of the process that saved it" in capsys.readouterr().err
    assert run(command, "s3://bucket/x") == 2
    assert "'s3://bucket/x'" in capsys.readouterr().err
    assert run(command) == 2


def test_a_damaged_manifest_is_named(capsys: Captured, tmp_path: Path) -> None:
    save(tmp_path / "step-1")
    manifest = tmp_path / "step-1" / "manifest.json"
    manifest.write_bytes(manifest.read_bytes()[:-20])
    message = f"{tmp_path / 'step-1'}: manifest.json is not JSON: "
    assert run("inspect", str(tmp_path / "step-1")) == 1
    assert capsys.readouterr().err.startswith(f"error: {message}")
    assert run("ls", str(tmp_path)) == 1
    shown = capsys.readouterr()
    assert "damaged" in shown.out
    assert shown.err.startswith(f"problem: {message}")


def test_ls(capsys: Captured, tmp_path: Path) -> None:
    for step in (10, 9):
        save(tmp_path / f"step-{step}")
    assert run("ls", str(tmp_path)) == 0
    out = capsys.readouterr().out
    assert out.index("step-9") < out.index("step-10")
    assert out.count("committed") == 2


def test_ls_as_json(capsys: Captured, tmp_path: Path) -> None:
    save_id = save(tmp_path / "step-9")
    assert run("ls", str(tmp_path), "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert list(report) == ["path", "checkpoints"]
    (entry,) = report["checkpoints"]
    assert 0 <= entry.pop("age_seconds") < 60
    assert entry == {
        "name": "step-9",
        "path": str(tmp_path / "step-9"),
        "state": "committed",
        "is_being_saved": False,
        "step": 9,
        "save_id": save_id,
        "nbytes": sum(file.stat().st_size for file in (tmp_path / "step-9").iterdir()),
        "keys": 4,
        "problem": "",
        "is_pinned": False,
    }


def test_ls_of_one_checkpoint(capsys: Captured, tmp_path: Path) -> None:
    save(tmp_path)
    assert run("ls", str(tmp_path), "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert list(report) == ["path", "checkpoints", "files"]
    assert sorted(file["name"] for file in report["files"]) == sorted(os.listdir(tmp_path))
    assert run("ls", str(tmp_path)) == 0
    assert ".sums" in capsys.readouterr().out


def test_ls_of_nothing(capsys: Captured, tmp_path: Path) -> None:
    assert run("ls", str(tmp_path)) == 0
    assert "no checkpoints in" in capsys.readouterr().out


def test_graph(capsys: Captured, tmp_path: Path) -> None:
    pipeline = Pipeline.from_recipe("tiny_decoder", ["rollback=verify_first"])
    for arguments, graph in (([], pipeline.save_graph), (["load"], pipeline.load_graph)):
        assert run("graph", *arguments, "-r", "tiny_decoder", "rollback=verify_first") == 0
        assert capsys.readouterr().out == draw(graph)
    assert run("graph", "rollback=none", "--format", "mermaid") == 0
    assert capsys.readouterr().out.startswith("flowchart")
    picture = tmp_path / "save.svg"
    assert run("graph", "save", "--format", "svg", "--output", str(picture)) == 0
    assert capsys.readouterr().out == ""
    assert ElementTree.parse(picture).getroot().tag.endswith("svg")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["sav"], "found the graph 'sav'; allowed: save, load"),
        (["storage=tape"], "found the kind 'tape'; allowed: filesystem, memory"),
        (["--format", "png"], "'png' is not one of"),
        (["--output", "/nowhere/at/all"], "/nowhere/at/all: No such file or directory"),
    ],
)
def test_graph_refuses(capsys: Captured, arguments: list[str], message: str) -> None:
    assert run("graph", *arguments) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert " ".join(message.split()) in " ".join(shown.err.replace("│", "").split())
