from pathlib import Path
from typing import Any

import pytest
from hydra import compose as hydra_compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.singleton import Singleton
from hydra.core.utils import JobRuntime
from hydra.version import getbase
from omegaconf import OmegaConf

from dcp_pipeline.builder import PipelineBuilder
from dcp_pipeline.config.compose import compose, from_user, load_mapping
from dcp_pipeline.config.model import PipelineConfig
from dcp_pipeline.config.places import recipe_names
from dcp_pipeline.config.recipe_info import RecipeInfo
from dcp_pipeline.core.errors import ConfigError
from dcp_pipeline.storage.config import MemoryConfig

RECIPE = """\
defaults:
  - pipeline
  - override serialization: safetensors
  - _self_
recipe: {name: mine, description: My own model}
storage: {thread_count: 4, buffer_bytes: 1MiB}
strict: {model: false}
casts: ["optimizer.*"]
transforms: [{kind: exclude, keys: ["rng.*"], "on": load}]
rollback: none
overwrite: error
"""

OVERRIDES = [
    "serialization=safetensors",
    "storage.thread_count=4",
    "storage.buffer_bytes=1MiB",
    "strict={model: false}",
    "casts=[optimizer.*]",
    "transforms=[{kind: exclude, keys: [rng.*], on: load}]",
    "rollback=none",
    "overwrite=error",
]


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "mine.yaml"
    path.write_text(RECIPE)
    return path


def problem(*overrides: str, recipe: Any = None) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        compose(overrides, recipe)
    # What a user sees says everything; Hydra's own error would only lengthen the traceback.
    assert caught.value.__suppress_context__ or caught.value.__context__ is None
    return caught.value


def test_three_ways_give_one_config(recipe: Path) -> None:
    built = (
        PipelineBuilder()
        .serialization("safetensors")
        .storage("filesystem", thread_count=4, buffer_bytes="1MiB")
        .strict({"model": False})
        .cast("optimizer.*")
        .transform("exclude", keys=["rng.*"], on="load")
        .rollback("none")
        .overwrite("error")
        .config()
    )
    assert compose(OVERRIDES).config == built
    assert compose(recipe=recipe).config == built
    assert load_mapping(recipe) == built
    assert compose(OVERRIDES).config.digest() == built.digest()


def test_the_header_of_a_recipe_is_taken_off(recipe: Path) -> None:
    assert compose(recipe=recipe).recipe == RecipeInfo(name="mine", description="My own model")
    assert "recipe" not in compose(recipe=str(recipe)).config.to_dict()


def test_overrides_win_over_a_recipe_and_a_recipe_over_the_defaults(recipe: Path) -> None:
    config = compose(["storage.thread_count=9", "serialization=torch_save"], recipe).config
    assert config.to_dict()["storage"]["thread_count"] == 9
    assert config.to_dict()["storage"]["buffer_bytes"] == 1048576
    assert config.serialization.kind == "torch_save"


def test_a_recipe_extends_one_of_ours(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(
        "defaults: [llama3_8b, _self_]\nrecipe: {name: mine}\nstorage: {thread_count: 8}\n"
    )
    ours, mine = compose(recipe="llama3_8b").config, compose(recipe=path)
    assert mine.config.to_dict()["storage"] == {**ours.to_dict()["storage"], "thread_count": 8}
    assert mine.config.rollback == ours.rollback
    assert mine.recipe is not None and mine.recipe.name == "mine"


def test_a_plain_file_without_defaults_list(tmp_path: Path) -> None:
    path = tmp_path / "plain.yaml"
    path.write_text("storage: memory\nrollback: none\n")
    assert load_mapping(path) == PipelineConfig(storage=MemoryConfig(), rollback="none")
    error = problem("storage=filesystem", recipe=path)
    assert error.path == "storage"
    assert "write 'defaults: [pipeline, _self_]' in it" in str(error)


def test_a_group_folder_beside_a_recipe_is_searched(tmp_path: Path) -> None:
    (tmp_path / "storage").mkdir()
    (tmp_path / "storage" / "fast.yaml").write_text("kind: filesystem\nthread_count: 16\n")
    (tmp_path / "mine.yaml").write_text("defaults: [pipeline, {override storage: fast}, _self_]\n")
    storage = compose(recipe=tmp_path / "mine.yaml").config.to_dict()["storage"]
    assert storage["thread_count"] == 16
    assert "allowed: fast, filesystem, memory" in str(
        problem("storage=slow", recipe=tmp_path / "mine.yaml")
    )


def test_interpolations_are_resolved() -> None:
    config = compose(["storage.thread_count=8", "coordination.timeout_seconds=60.0"]).config
    assert config.to_dict()["storage"]["thread_count"] == 8
    same = compose(["storage.thread_count=3", "strict={a: ${storage.sync_files}}"]).config
    assert same.strict == {"a": True}


MESSAGES = [
    (["storage.thread_count=${nope}"], "storage.thread_count", "cannot resolve the interpolation"),
    (["storage.thread_count=${oc.env:DCP_NOPE}"], "storage.thread_count", "DCP_NOPE"),
    (["storage.thread_count=???"], "storage.thread_count", "found ???; it has to be given"),
    (["storage=memory", "storage.thread_count=4"], "storage.thread_count", "is not chosen"),
    (["storag=memory"], "storag", "did you mean 'storage'?"),
    (["storage=mem"], "storage", "found the kind 'mem'; allowed: filesystem, memory"),
    (["storage=null"], "storage", "found 'null'; allowed: filesystem, memory"),
    (["storage=[memory]"], "storage", "found '[memory]'; allowed: filesystem, memory"),
    (["storages/fast=1"], "storages/fast", "unknown group; allowed: stager, planner"),
    (["~storage.nope"], "storage.nope", "does not exist"),
    (["storage.thread_count=1,2"], "storage.thread_count", "found several values, '1,2'"),
    (["storage=filesystem,memory"], "storage", "found several values"),
    (["storage.thread_count"], "storage.thread_count", "cannot read the override"),
    (["rollback=[1"], "rollback", "cannot read the override 'rollback=[1'"),
    (["rollback=off"], "rollback", "found 'off'; allowed: copy, verify_first, none"),
    (["+recipe.nme=x"], "recipe.name", "missing; it has to be given"),
    (["+recipe={name: x, modle: 1}"], "recipe.modle", "it takes: name, description, map, model"),
    (["+recipe={name: x, modle: 1}"], "recipe.modle", "did you mean 'model'?"),
    (
        ["+recipe={name: x, quantized: {keys: [a], blok: 1}}"],
        "recipe.quantized.blok",
        "unknown key; it takes: keys, dtype, block; did you mean 'block'?",
    ),
    (["+recipe={name: x, parallel: {data: 0}}"], "recipe.parallel.data", "expected at least 1"),
    (["+recipe={name: x, model: {a: a b}}"], "recipe.model.a", "'a b' is no formula"),
]


@pytest.mark.parametrize(("overrides", "path", "part"), MESSAGES, ids=[str(m[0]) for m in MESSAGES])
def test_message(overrides: list[str], path: str, part: str) -> None:
    error = problem(*overrides)
    assert error.path == path
    assert part in str(error)
    assert path in str(error)


def test_rollback_off_in_a_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("defaults: [pipeline, _self_]\nrollback: off\n")
    assert str(problem(recipe=path)) == (
        "rollback: found false; allowed: copy, verify_first, none "
        "(YAML reads a bare off, no and false as the boolean false)"
    )


def test_a_kind_that_a_recipes_keys_do_not_fit() -> None:
    error = problem("storage=memory", recipe="llama3_8b")
    assert "~storage.thread_count takes it out" in str(error)
    config = compose(
        ["storage=memory", "~storage.thread_count", "~storage.buffer_bytes"], "llama3_8b"
    ).config
    assert config.storage == MemoryConfig()


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("storage: {thread_count: 4", "cannot read the YAML (composing /"),
        ("defaults: [pipelin]", "found no config 'pipelin' that a defaults list names"),
        ("defaults: [pipeline, {override storage: tape}]", "found the kind 'tape'; allowed:"),
        ("defaults: [pipeline, {tape: x}]", "tape: found the kind 'x'; there is no such group"),
        ("defaults: [mine]", "a config names itself in its defaults list (composing /"),
        ("- a\n- b\n", "must be a DictConfig, got ListConfig (composing /"),
        ("defaults: 3", "defaults must be a list (got int) (composing /"),
        ("a: 1\na: 2\n", "duplicate key"),
    ],
)
def test_a_recipe_that_cannot_be_read(tmp_path: Path, text: str, part: str) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    assert part in str(problem(recipe=path))


def test_a_recipe_that_is_not_there(tmp_path: Path) -> None:
    assert str(problem(recipe="lama3_8b")) == (
        f"found the recipe 'lama3_8b'; allowed: {', '.join(recipe_names())}, or the path of a YAML "
        "file; did you mean 'llama3_8b'?"
    )
    assert "there is no recipe file" in str(problem(recipe=tmp_path / "nope.yaml"))
    assert "must be a file named *.yaml" in str(problem(recipe="settings.yml"))


def test_a_hydra_program_that_is_running_notices_nothing(tmp_path: Path) -> None:
    (tmp_path / "app.yaml").write_text("x: 1\n")
    with initialize_config_dir(str(tmp_path), job_name="theirs", version_base="1.2"):
        before = dict(Singleton._instances)
        assert compose(["storage=memory"]).config.storage == MemoryConfig()
        with pytest.raises(ConfigError):
            compose(["storage=nope"])
        assert dict(Singleton._instances) == before
        assert GlobalHydra.instance().is_initialized()
        assert JobRuntime.instance().get("name") == "theirs"
        assert str(getbase()) == "1.2"
        assert hydra_compose("app") == {"x": 1}
    assert not GlobalHydra.instance().is_initialized()
    assert "storage" not in ConfigStore.instance().repo


def test_the_node_of_a_users_program() -> None:
    program = OmegaConf.create(
        {
            "threads": 6,
            "checkpoint": {"storage": {"thread_count": "${threads}"}, "recipe": {"name": "x"}},
        }
    )
    assert from_user(program.checkpoint) == PipelineConfig(storage={"thread_count": 6})
    assert load_mapping(program.checkpoint) == from_user(program.checkpoint)
    program.checkpoint.storage.thread_count = 0
    with pytest.raises(ConfigError) as caught:
        from_user(program.checkpoint)
    assert str(caught.value) == "checkpoint.storage.thread_count: found 0; expected at least 1"
    assert caught.value.path == "checkpoint.storage.thread_count"
    program.checkpoint.storage.thread_count = "${nope}"
    with pytest.raises(ConfigError, match=r"checkpoint\.storage\.thread_count: cannot resolve"):
        from_user(program.checkpoint)
