"""The package works the same from the tree, from the sdist and from the wheel."""

from __future__ import annotations

import shutil
import zipfile
from pathlib import Path

import pytest

from dcp_pipeline.config.compose import compose
from dcp_pipeline.config.model import PipelineConfig
from dcp_pipeline.config.places import recipe_names
from dcp_pipeline.core.registry import GROUPS, kinds, model_of
from tests.marks import mostly_slow

from .conftest import ROOT, Home

HOMES = ["tree", "sdist", "wheel"]

COMPOSE_ALL = """
import json, sys
import dcp_pipeline
from dcp_pipeline.config.compose import compose
from dcp_pipeline.config.places import recipe_names
from dcp_pipeline.core.registry import GROUPS, kinds, model_of

digests = {name: compose(recipe=name).config.digest() for name in recipe_names()}
for group in GROUPS:
    for kind in kinds(group):
        needed = model_of(group, kind).works_with.get("serialization", ())[:1]
        overrides = [f"{group}={kind}", *(f"serialization={one}" for one in needed)]
        digests[f"{group}={kind}"] = compose(overrides).config.digest()
print(json.dumps({"package": dcp_pipeline.__path__[0], "digests": digests}))
"""


@pytest.mark.parametrize("home", mostly_slow(HOMES, ["wheel"]), indirect=True)
def test_every_yaml_composes(home: Home, tmp_path: Path) -> None:
    expected = {name: compose(recipe=name).config.digest() for name in recipe_names()}
    for group in GROUPS:
        for kind in kinds(group):
            needed = model_of(group, kind).works_with.get("serialization", ())[:1]
            overrides = [f"{group}={kind}", *(f"serialization={one}" for one in needed)]
            expected[f"{group}={kind}"] = compose(overrides).config.digest()
    report = home.report("-c", COMPOSE_ALL, folder=tmp_path)
    assert Path(report["package"]) == home.package
    assert report["digests"] == expected


@pytest.fixture
def program(tmp_path: Path) -> Path:
    folder = tmp_path / "program"
    shutil.copytree(Path(__file__).parent / "program", folder)
    return folder


PROGRAMS: dict[str, tuple[list[str], list[str], str | None]] = {
    "defaults": ([], ["storage.stale_after_seconds=300.0"], None),
    "overrides": (
        ["checkpoint/serialization=safetensors", "checkpoint.storage.thread_count=4"],
        [
            "storage.stale_after_seconds=300.0",
            "serialization=safetensors",
            "storage.thread_count=4",
        ],
        None,
    ),
    "recipe": (["checkpoint=llama3_8b"], ["storage.stale_after_seconds=300.0"], "llama3_8b"),
    "recipe and overrides": (
        ["checkpoint=tiny_decoder", "checkpoint.storage.direct_io=true", "threads=9"],
        ["storage.stale_after_seconds=300.0", "storage.direct_io=true"],
        "tiny_decoder",
    ),
    "map of a recipe": (
        ["checkpoint=llama3_8b", "checkpoint.recipe.map=huggingface_to_torchtitan"],
        ["storage.stale_after_seconds=300.0", "recipe.map=huggingface_to_torchtitan"],
        "llama3_8b",
    ),
    "recipe of their own": (
        ["checkpoint=mine", "checkpoint/layout=dcp", "checkpoint.rollback=copy"],
        ["storage.stale_after_seconds=300.0", "rollback=copy"],
        "program/conf/checkpoint/mine.yaml",
    ),
}
ALWAYS = [("tree", "recipe of their own"), ("sdist", "overrides")]
ALWAYS += [("wheel", "recipe and overrides"), ("wheel", "map of a recipe")]


@pytest.mark.parametrize(
    ("home", "what"),
    mostly_slow([(home, what) for home in HOMES for what in PROGRAMS], ALWAYS),
    indirect=["home"],
)
def test_a_users_hydra_program(home: Home, program: Path, what: str) -> None:
    arguments, overrides, recipe = PROGRAMS[what]
    report = home.report(str(program / "train.py"), *arguments, folder=program)
    if recipe and recipe.endswith(".yaml"):
        recipe = str(program.parent / recipe)
    assert PipelineConfig.model_validate(report["config"]) == compose(overrides, recipe).config
    assert Path(report["package"]) == home.package
    # Composing another config meanwhile leaves the program's Hydra as it was.
    assert report["other"] == "memory"
    assert report["job"] == "train"


@pytest.mark.parametrize("home", mostly_slow(HOMES, ["wheel"]), indirect=True)
def test_a_mistake_in_a_users_hydra_program(home: Home, program: Path) -> None:
    done = home.run(str(program / "train.py"), "checkpoint.storage.thread_count=0", folder=program)
    assert done.returncode == 1
    assert "checkpoint.storage.thread_count: found 0; expected at least 1" in done.stderr


def test_the_command_of_the_wheel(wheel: Home, tmp_path: Path) -> None:
    script = wheel.python.parent / "dcp-pipeline"
    report = wheel.report(str(script), "config", "-r", "llama3_8b", "--json", folder=tmp_path)
    assert report["config"] == compose(recipe="llama3_8b").config.to_dict()
    done = wheel.run(str(script), "config", "storage=tape", folder=tmp_path)
    assert done.returncode == 2
    assert done.stderr == "error: storage: found the kind 'tape'; allowed: filesystem, memory\n"


def test_the_wheel_holds_real_files(archives: Path) -> None:
    with zipfile.ZipFile(next(archives.glob("*.whl"))) as archive:
        names = set(archive.namelist())
        for folder in ("conf", "recipes"):
            for path in sorted((ROOT / folder).rglob("*.*")):
                if "__pycache__" in path.parts or path.is_dir():
                    continue
                name = f"dcp_pipeline/{path.relative_to(ROOT)}"
                assert archive.read(name) == path.read_bytes(), name
    assert "dcp_pipeline/py.typed" in names
    assert "dcp_pipeline-0.1.0.dist-info/licenses/LICENSE" in names
    assert {name.split("/")[0] for name in names} == {
        "dcp_pipeline",
        "dcp_pipeline-0.1.0.dist-info",
    }
