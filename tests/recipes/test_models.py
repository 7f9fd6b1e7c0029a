"""What each recipe says of its model, against what transformers and the publishers say."""

import json
from math import prod
from pathlib import Path

import pytest

import dcp_pipeline
from dcp_pipeline.config.compose import load_recipe
from dcp_pipeline.config.places import recipe_names
from dcp_pipeline.core.errors import ConfigError
from dcp_pipeline.tools.estimate import estimate
from tests.recipes.shrunken import SHRUNKEN, full, overrides, small

PACKAGE = Path(dcp_pipeline.__file__).parent
NAMES = Path(__file__).parent / "names"

PUBLISHED = {
    # Sizes of the files on huggingface.co, as their indices or safetensors' headers count them:
    # google-bert/bert-base-uncased, google/gemma-2-9b, meta-llama/Meta-Llama-3-8B and -70B,
    # mistralai/Mixtral-8x7B-v0.1, Qwen/Qwen3-8B, Qwen/Qwen3-30B-A3B.
    "bert": 110_106_428,
    "gemma2_9b": 9_241_705_984,
    "llama3_70b": 70_553_706_496,
    "llama3_8b": 8_030_261_248,
    "mixtral_8x7b": 46_702_792_704,
    "qwen3_30b_a3b": 30_532_122_624,
    "qwen3_8b": 8_190_735_360,
    # nanoGPT's and transformers' count of GPT-2, the head counted with the embedding.
    "gpt2": 124_439_808,
    # "671B" of the technical report (arXiv 2412.19437), which leaves out the second token's layer.
    "deepseek_v3": 671_026_419_200,
    # 108,641,793,536 of meta-llama/Llama-4-Scout-17B-16E, without the images' 871,932,416.
    "llama4_scout": 107_769_861_120,
    # examples/model.py with width 192, depth 4, context 64.
    "tiny_decoder": 1_890_432,
}


def test_every_recipe_is_tested() -> None:
    assert {*PUBLISHED} == {*SHRUNKEN} == {*recipe_names()}


@pytest.mark.parametrize("name", recipe_names())
def test_names_and_shapes_are_those_of_transformers(name: str) -> None:
    recipe = small(name)
    found = {key: list(shape) for key, (_, shape) in recipe.tensors("huggingface").items()}
    assert found == json.loads((NAMES / f"{name}.json").read_text())


@pytest.mark.parametrize("name", recipe_names())
def test_parameters_are_as_published(name: str) -> None:
    recipe = full(name)
    assert estimate(recipe).parameters == PUBLISHED[name]
    sizes = list(recipe.sizes())
    assert sum(count for _, _, count, _ in sizes) == estimate(recipe).tensors


def test_the_sizes_are_those_of_the_tensors() -> None:
    for name in ("deepseek_v3", "qwen3_30b_a3b"):
        recipe = small(name)
        tensors = recipe.tensors()
        found = estimate(recipe)
        assert found.tensors == len(tensors)
        assert found.parameters == sum(prod(shape) for _, shape in tensors.values())


@pytest.mark.parametrize("name", recipe_names())
def test_a_recipe_is_short(name: str) -> None:
    assert len((PACKAGE / "recipes" / f"{name}.yaml").read_text().splitlines()) <= 40


def test_shared_parts_are_used() -> None:
    """Each file of conf/checkpoint/recipe is in the defaults list of some recipe."""
    folder = PACKAGE / "conf" / "checkpoint" / "recipe"
    text = "\n".join(path.read_text() for path in (PACKAGE / "recipes").glob("*.yaml"))
    for path in folder.rglob("*.yaml"):
        assert len(path.read_text().splitlines()) <= 45, path
        group = path.parent.relative_to(folder.parent).as_posix()
        lines = [line for line in text.splitlines() if f"{group}@" in line or f"{group}: " in line]
        assert any(path.stem in line.partition(": ")[2] for line in lines), path


def test_an_estimate() -> None:
    found = estimate(full("llama3_8b"))
    assert found.tensors == 291
    assert found.model_bytes == {"bfloat16": 2 * 8_030_261_248}
    assert found.published_bytes is None
    assert found.training_bytes == {
        "weights": 4 * 8_030_261_248,
        "moments": 8 * 8_030_261_248,
        "buffers": 0,
    }
    assert found.checkpoint_bytes == 12 * 8_030_261_248
    assert (found.ranks, found.bytes_per_rank) == (8, 12 * 8_030_261_248 // 8)
    assert estimate(full("llama3_8b"), 7).bytes_per_rank == -(-12 * 8_030_261_248 // 7)
    with pytest.raises(ConfigError, match="ranks: found 0; expected at least 1"):
        estimate(full("llama3_8b"), 0)


def test_what_is_not_trained_has_no_moments() -> None:
    found = estimate(full("deepseek_v3"))
    bias = 58 * 256
    assert found.trained == found.parameters - bias
    assert found.training_bytes == {
        "weights": 4 * found.trained,
        "moments": 4 * found.trained,
        "buffers": 4 * bias,
    }
    assert found.model_bytes["float32"] == 4 * bias


def test_codes_and_scales() -> None:
    """By hand: 64 x 40 numbers in blocks of 16 have 4 x 3 scales."""
    recipe = load_recipe(
        "deepseek_v3",
        [*overrides("deepseek_v3"), "recipe.quantized.block=16", "recipe.model.hidden=40",
         "recipe.model.ffn=64"],
    )  # fmt: skip
    plain, stored = recipe.tensors(), recipe.tensors("huggingface_quantized")
    gate = "model.layers.0.mlp.gate_proj.weight"
    assert plain[gate] == ("bfloat16", (64, 40))
    assert stored[gate] == ("float8_e4m3fn", (64, 40))
    assert stored[f"{gate}_scale_inv"] == ("float32", (4, 3))
    for key in ("lm_head.weight", "model.layers.1.mlp.gate.weight", "model.norm.weight",
                "model.layers.0.self_attn.q_a_layernorm.weight"):  # fmt: skip
        assert stored[key] == plain[key] and f"{key}_scale_inv" not in stored
    sizes = {"bfloat16": 2, "float32": 4, "float8_e4m3fn": 1}
    total = sum(sizes[dtype] * prod(shape) for dtype, shape in stored.values())
    assert sum((estimate(recipe).published_bytes or {}).values()) == total


def test_what_is_wrong_in_a_recipe_is_named(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"

    def problem(text: str) -> str:
        path.write_text(f"defaults: [pipeline, _self_]\nrecipe:\n  name: mine\n{text}")
        with pytest.raises(ConfigError) as caught:
            recipe = load_recipe(path)
            recipe.tensors("a")
            recipe.rules("a_to_b")
        return str(caught.value)

    assert "has no tensors of 'a'; it has: none" in problem("")
    assert "recipe: model.layers: no formula uses it" in problem("  model: {layers: 2}\n")
    assert "recipe.model.a: found 1.5; expected an integer" in problem("  model: {a: 1.5}\n")
    assert "recipe.model.a: found true; expected an integer" in problem("  model: {a: true}\n")
    assert "no pattern of tensors fits 'v.*'" in problem(
        "  tensors: {a: {w: [2]}}\n  dtypes: {v.*: float32}\n"
    )
    assert "ffn: found the name 'hidden'; known: none" in problem("  model: {ffn: 4 * hidden}\n")
    tensors = "  tensors: {a: {'w.{i}': [x]}}\n"
    assert "'w.{i}' has the place {i}, of which counts says nothing" in problem(tensors)
    assert "recipe.tensors: w.{i}: found the name 'x'" in problem(tensors + "  counts: {i: 2}\n")
    assert "recipe.counts.i: found [0, 3, 0]" in problem(tensors + "  counts: {i: [0, 3, 0]}\n")
    assert "the shape is [-1]" in problem("  tensors: {a: {w: [1 - 2]}}\n")
    fine = "  tensors: {a: {w: [2]}}\n"
    assert "has no map 'a_to_b'; it has: none" in problem(fine)
    assert "the map 'ab' must be called SIDE_to_SIDE" in problem(fine + "  maps: {ab: {}}\n")
    rule = "  maps: {a_to_b: {turn: {kind: rotary, keys: [w], head_dim: size}}}\n"
    assert "recipe.maps.a_to_b.turn.head_dim: found the name 'size'" in problem(fine + rule)
    rule = "  maps: {a_to_b: {turn: {kind: rotary, keys: [w], head_dim: 3}}}\n"
    assert "recipe.maps.a_to_b.turn.head_dim: found 3" in problem(fine + rule)
    rule = "  maps: {a_to_b: {turn: {kind: turn}}}\n"
    assert "recipe.maps.a_to_b.turn.kind: found the kind 'turn'" in problem(fine + rule)
    assert "expert=3 does not divide data * tensor = 8" in problem(
        "  parallel: {data: 8, expert: 3}\n"
    )
