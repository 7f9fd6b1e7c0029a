"""Every YAML file of the package composes, and says the same as the models."""

from pathlib import Path

import pytest
from omegaconf import OmegaConf

import dcp_pipeline
from dcp_pipeline.config.compose import compose
from dcp_pipeline.config.model import PipelineConfig
from dcp_pipeline.config.places import recipe_names
from dcp_pipeline.core.kind import KindConfig
from dcp_pipeline.core.registry import GROUPS, kinds, model_of

PACKAGE = Path(dcp_pipeline.__file__).parent
CONF = PACKAGE / "conf" / "checkpoint"
OPTIONS = [(group, path.stem) for group in GROUPS for path in sorted((CONF / group).glob("*.yaml"))]


def test_every_kind_has_its_file() -> None:
    assert sorted(OPTIONS) == sorted((group, kind) for group in GROUPS for kind in kinds(group))


def test_every_folder_is_a_group() -> None:
    # `recipe` holds what recipes share.
    folders = {path.name for path in CONF.iterdir() if path.is_dir()} - {"__pycache__"}
    assert folders == {*GROUPS, "recipe"}


@pytest.mark.parametrize(("group", "kind"), OPTIONS)
def test_a_file_holds_every_key_of_its_kind_at_its_default(group: str, kind: str) -> None:
    # A user's own Hydra program refuses an override of a key that no file names.
    data = OmegaConf.to_container(OmegaConf.load(CONF / group / f"{kind}.yaml"))
    model = model_of(group, kind)
    assert isinstance(data, dict)
    assert list(data) == list(model.model_fields)
    assert model.model_validate(data) == model(kind=kind)


@pytest.mark.parametrize(("group", "kind"), OPTIONS)
def test_a_file_composes(group: str, kind: str) -> None:
    # pipeline.yaml names a serialization, so that one that a layout needs has to be chosen too.
    serialization = model_of(group, kind).works_with.get("serialization", ())[:1]
    config = compose([f"{group}={kind}", *(f"serialization={one}" for one in serialization)]).config
    chosen: KindConfig = getattr(config, group)
    assert chosen.kind == kind
    assert config == PipelineConfig.model_validate({group: kind})


def test_pipeline_is_the_default_config() -> None:
    assert compose().config == PipelineConfig()
    assert compose().recipe is None


def test_pipeline_names_every_key() -> None:
    data = OmegaConf.to_container(OmegaConf.load(CONF / "pipeline.yaml"))
    assert isinstance(data, dict)
    *groups, last = data.pop("defaults")
    assert [next(iter(group)) for group in groups] == list(GROUPS)
    assert last == "_self_"
    assert [*GROUPS, *data] == list(PipelineConfig.model_fields)


@pytest.mark.parametrize("name", recipe_names())
def test_a_recipe_composes_and_describes_itself(name: str) -> None:
    recipe = compose(recipe=name).recipe
    assert recipe is not None
    assert recipe.name == name
    assert recipe.description


@pytest.mark.parametrize("name", recipe_names())
def test_a_recipe_is_an_option_of_the_group_checkpoint(name: str) -> None:
    # So that a user's Hydra program takes it with `checkpoint=NAME`.
    assert (CONF / f"{name}.yaml").read_text() == (PACKAGE / "recipes" / f"{name}.yaml").read_text()


def test_the_recipes() -> None:
    assert recipe_names() == (
        "bert",
        "deepseek_v3",
        "gemma2_9b",
        "gpt2",
        "llama3_70b",
        "llama3_8b",
        "llama4_scout",
        "mixtral_8x7b",
        "qwen3_30b_a3b",
        "qwen3_8b",
        "tiny_decoder",
    )
    options = {path.stem for path in CONF.glob("*.yaml")}
    assert options == {"pipeline", *recipe_names()}
