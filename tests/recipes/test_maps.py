"""The maps of the recipes: values there and back, and against numpy."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import dcp_pipeline as dcp
from dcp_pipeline.config.compose import compose, load_recipe
from dcp_pipeline.config.recipe import Recipe, Tensors
from dcp_pipeline.core.errors import ConfigError
from dcp_pipeline.core.kind import KindConfig
from tests.recipes.shrunken import SHRUNKEN, full, overrides, small

_LLAMA_3 = ["torchtitan", "megatron", "megatron_dist"]
SIDES = {
    "bert": ["torch"],
    "deepseek_v3": ["torchtitan"],
    "gemma2_9b": ["torchtitan", "gemma"],
    "gpt2": ["nanogpt"],
    "llama3_70b": _LLAMA_3,
    "llama3_8b": _LLAMA_3,
    "llama4_scout": ["torchtitan"],
    "mixtral_8x7b": ["torchtitan", "megatron"],
    "qwen3_30b_a3b": ["torchtitan"],
    "qwen3_8b": ["torchtitan"],
    "tiny_decoder": ["demo"],
}
MAPS = [(name, f"{side}_to_huggingface") for name, sides in SIDES.items() for side in sides]
TIED = {"gemma2_9b": "model.embed_tokens.weight", "gpt2": "transformer.wte.weight"}


def values(tensors: Tensors, seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, (_, shape) in tensors.items()}


def state_of(recipe: Recipe, side: str) -> dict[str, torch.Tensor]:
    """Random values; a head that is the embedding shares its memory."""
    state = values(recipe.tensors(side))
    tied = TIED.get(recipe.name)
    for key in state:
        if tied is not None and key.endswith("lm_head.weight"):
            state[key] = state[next(one for one in state if one.endswith(tied))]
    return state


def zeros(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    made: dict[int, torch.Tensor] = {}
    return {
        name: made.setdefault(id(tensor), torch.zeros_like(tensor))
        for name, tensor in state.items()
    }


def mapped(
    state: Mapping[str, Any], rules: list[KindConfig], path: Path, **config: Any
) -> dict[str, Any]:
    """What a save with these rules stores."""
    dcp.save(dict(state), checkpoint_id=path, config={"transforms": rules, **config})
    return dcp.load_keys(path)


def assert_equal(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(found[name], tensor), name


def test_the_maps() -> None:
    assert [(name, map_) for name in SHRUNKEN for map_ in full(name).maps] == MAPS
    with_overrides = load_recipe("deepseek_v3", overrides("deepseek_v3"))
    assert with_overrides.info == small("deepseek_v3").info


@pytest.mark.parametrize(("name", "map_"), MAPS)
def test_there_and_back(tmp_path: Path, name: str, map_: str) -> None:
    recipe = small(name)
    side = map_.removesuffix("_to_huggingface")
    state, rules = state_of(recipe, side), recipe.rules(map_)
    stored = mapped(state, rules, tmp_path)
    shapes = {key: shape for key, (_, shape) in recipe.tensors("huggingface").items()}
    assert {key: tuple(tensor.shape) for key, tensor in stored.items()} == shapes
    found = zeros(state)
    dcp.load(found, checkpoint_id=tmp_path, config={"transforms": rules})
    if "padded_vocab" in recipe.model:
        # What pads the vocabulary is not stored, and is 0 when it comes back.
        for key in found:
            if key in ("embedding.word_embeddings.weight", "output_layer.weight"):
                assert not found[key][40:].any()
                found[key][40:] = state[key][40:]
    assert_equal(found, state)


@pytest.mark.parametrize(("name", "map_"), [MAPS[1], ("llama3_8b", "megatron_to_huggingface")])
def test_the_other_way_round(tmp_path: Path, name: str, map_: str) -> None:
    """A state with Hugging Face's names, and a checkpoint with the others'."""
    recipe = small(name)
    side = map_.removesuffix("_to_huggingface")
    state, rules = values(recipe.tensors("huggingface")), recipe.rules(map_, reverse=True)
    assert [rule.kind for rule in rules] == ["reverse"]
    assert rules == recipe.rules(f"huggingface_to_{side}")
    assert recipe.rules(f"huggingface_to_{side}", reverse=True) == recipe.rules(map_)
    stored = mapped(state, rules, tmp_path / "theirs")
    assert {key: tuple(tensor.shape) for key, tensor in stored.items()} == {
        key: shape for key, (_, shape) in recipe.tensors(side).items()
    }
    assert_equal(mapped(stored, recipe.rules(map_), tmp_path / "ours"), state)
    found = zeros(state)
    dcp.load(found, checkpoint_id=tmp_path / "theirs", config={"transforms": rules})
    assert_equal(found, state)


@pytest.mark.parametrize("name", ["llama3_8b", "llama3_70b"])
def test_rotary_pairs(tmp_path: Path, name: str) -> None:
    """Element ``2k + p`` of a head (torchtitan) is element ``k + p * d / 2`` (Hugging Face)."""
    recipe = small(name)
    state = state_of(recipe, "torchtitan")
    stored = mapped(state, recipe.rules("torchtitan_to_huggingface"), tmp_path)
    half = recipe.model["head_dim"] // 2
    for theirs, ours in (("wq", "q_proj"), ("wk", "k_proj")):
        given = state[f"layers.1.attention.qkv_linear.{theirs}.weight"].numpy()
        found = stored[f"model.layers.1.self_attn.{ours}.weight"].numpy()
        for row in range(len(given)):
            head, place = divmod(row, 2 * half)
            target = head * 2 * half + place // 2 + (place % 2) * half
            assert np.array_equal(found[target], given[row])
    given = state["layers.1.attention.qkv_linear.wv.weight"]
    assert torch.equal(stored["model.layers.1.self_attn.v_proj.weight"], given)


@pytest.mark.parametrize("is_stacked", [False, True])
def test_megatrons_query_groups(tmp_path: Path, is_stacked: bool) -> None:
    """Each key and value lies behind the queries that share them; gate before up."""
    recipe = small("llama3_8b")
    side = "megatron_dist" if is_stacked else "megatron"
    state = state_of(recipe, side)
    stored = mapped(state, recipe.rules(f"{side}_to_huggingface"), tmp_path)

    def given(name: str) -> np.ndarray:
        if is_stacked:
            return state[f"decoder.layers.{name}"][1].numpy()
        return state[f"decoder.layers.1.{name}"].numpy()

    size, kv_heads = recipe.model["head_dim"], recipe.model["kv_heads"]
    shared = recipe.model["heads"] // kv_heads
    heads = given("self_attention.linear_qkv.weight").reshape(kv_heads, shared + 2, size, -1)
    query = np.concatenate([heads[group, :shared].reshape(shared * size, -1) for group in range(2)])
    key = np.concatenate([heads[group, shared] for group in range(2)])
    value = np.concatenate([heads[group, shared + 1] for group in range(2)])
    for name, wanted in (("q", query), ("k", key), ("v", value)):
        found = stored[f"model.layers.1.self_attn.{name}_proj.weight"].numpy()
        assert np.array_equal(found, wanted), name
    gate_up = given("mlp.linear_fc1.weight")
    assert np.array_equal(stored["model.layers.1.mlp.gate_proj.weight"].numpy(), gate_up[:24])
    assert np.array_equal(stored["model.layers.1.mlp.up_proj.weight"].numpy(), gate_up[24:])
    embedding = state["embedding.word_embeddings.weight"].numpy()
    assert embedding.shape == (48, 16)
    assert np.array_equal(stored["model.embed_tokens.weight"].numpy(), embedding[:40])


def test_megatrons_extra_state_is_dropped(tmp_path: Path) -> None:
    recipe = small("llama3_8b")
    state: dict[str, Any] = {
        **state_of(recipe, "megatron"),
        "decoder.layers.0.self_attention.linear_qkv._extra_state": b"fp8",
    }
    stored = mapped(state, recipe.rules("megatron_to_huggingface"), tmp_path)
    assert stored.keys() == recipe.tensors("huggingface").keys()


def test_llama_4s_experts(tmp_path: Path) -> None:
    """Gate and up side by side, and all axes of an expert the other way round."""
    recipe = small("llama4_scout")
    state = state_of(recipe, "torchtitan")
    stored = mapped(state, recipe.rules("torchtitan_to_huggingface"), tmp_path)
    w1, w2, w3 = (state[f"layers.1.moe.experts.w{n}"].numpy() for n in (1, 2, 3))
    experts = "language_model.model.layers.1.feed_forward.experts"
    both = np.concatenate([w1.transpose(0, 2, 1), w3.transpose(0, 2, 1)], axis=2)
    assert np.array_equal(stored[f"{experts}.gate_up_proj"].numpy(), both)
    assert np.array_equal(stored[f"{experts}.down_proj"].numpy(), w2.transpose(0, 2, 1))


def test_fused_heads_of_gemma_and_torch(tmp_path: Path) -> None:
    gemma = small("gemma2_9b")
    state = state_of(gemma, "gemma")
    stored = mapped(state, gemma.rules("gemma_to_huggingface"), tmp_path / "gemma")
    fused = state["model.layers.1.self_attn.qkv_proj.weight"].numpy()
    for name, rows in (("q", fused[:32]), ("k", fused[32:48]), ("v", fused[48:])):
        assert np.array_equal(stored[f"model.layers.1.self_attn.{name}_proj.weight"].numpy(), rows)
    bert = small("bert")
    state = state_of(bert, "torch")
    stored = mapped(state, bert.rules("torch_to_huggingface"), tmp_path / "bert")
    for n, name in enumerate(("query", "key", "value")):
        for part in ("weight", "bias"):
            fused = state[f"encoder.layers.1.self_attn.in_proj_{part}"].numpy()
            found = stored[f"bert.encoder.layer.1.attention.self.{name}.{part}"].numpy()
            assert np.array_equal(found, fused[16 * n : 16 * (n + 1)])


def test_grouped_experts_are_imported_with_a_cast(tmp_path: Path) -> None:
    """Hugging Face's bfloat16 into torchtitan's float32, expert by expert."""
    recipe = small("qwen3_30b_a3b")
    repository = {
        name: tensor.bfloat16() for name, tensor in values(recipe.tensors("huggingface")).items()
    }
    dcp.save(repository, checkpoint_id=tmp_path)
    rules = recipe.rules("torchtitan_to_huggingface")
    found = {name: torch.zeros(shape) for name, (_, shape) in recipe.tensors("torchtitan").items()}
    found["layers.0.moe.expert_bias_E"] = torch.full((4,), 7.0)  # which the repository lacks
    report = dcp.load(
        found,
        checkpoint_id=tmp_path,
        config={
            "transforms": rules,
            "casts": ["*"],
            "strict": {"layers.*.moe.expert_bias_E": False},
        },
    )
    assert report is not None
    assert torch.equal(found["layers.0.moe.expert_bias_E"], torch.full((4,), 7.0))
    experts = [repository[f"model.layers.1.mlp.experts.{e}.up_proj.weight"] for e in range(4)]
    stacked = found["layers.1.moe.routed_experts.inner_experts.w3_EFD"]
    assert torch.equal(stacked, torch.stack(experts).float())


THREE_WAYS = ["storage.thread_count=3", "recipe.map=megatron_to_huggingface"]


def test_three_ways_to_a_map(tmp_path: Path) -> None:
    """By an override, in a recipe file of one's own, and in a program."""
    rules = full("llama3_8b").rules("megatron_to_huggingface")
    by_override = compose(THREE_WAYS, "llama3_8b").config
    (tmp_path / "mine.yaml").write_text(
        "defaults: [llama3_8b, _self_]\n"
        "recipe: {name: mine, map: megatron_to_huggingface}\n"
        "storage: {thread_count: 3}\n"
    )
    by_file = compose(recipe=tmp_path / "mine.yaml").config
    by_builder = (
        dcp.Pipeline.builder()
        .layout("dcp", block_bytes="256KiB")
        .storage("filesystem", thread_count=3, buffer_bytes="16MiB")
        .rollback("verify_first")
        .transforms(rules)
        .config()
    )
    assert by_override == by_file == by_builder
    assert by_override.digest() == by_file.digest() == by_builder.digest()
    assert by_override.transforms == tuple(rules)
    with dcp.Pipeline.from_recipe("llama3_8b", THREE_WAYS) as pipeline:
        assert pipeline.config == by_override
    assert compose(recipe="llama3_8b").config.transforms == ()


def test_a_map_comes_behind_other_rules() -> None:
    config = compose(
        ["recipe.map=huggingface_to_torchtitan", "transforms=[{kind: exclude, keys: [rng]}]"],
        "qwen3_8b",
    ).config
    assert [rule.kind for rule in config.transforms] == ["exclude", "reverse"]
    again = dcp.PipelineConfig.model_validate(config.to_dict())
    assert again == config and again.digest() == config.digest()


def test_a_map_of_a_shrunken_model() -> None:
    config = compose(
        [*overrides("llama3_8b"), "recipe.map=megatron_to_huggingface"], "llama3_8b"
    ).config.to_dict()
    pad, split = (
        next(rule for rule in config["transforms"] if rule["kind"] == kind)
        for kind in ("pad", "split")
    )
    assert (pad["here"], pad["there"]) == (48, 40)
    assert (split["parts"], split["groups"]) == ([2, 1, 1], 2)


def test_a_map_that_is_not_there() -> None:
    with pytest.raises(ConfigError) as caught:
        compose(["recipe.map=torchtitan_to_hugging_face"], "llama3_8b")
    assert caught.value.path == "recipe.map"
    assert str(caught.value) == (
        "the recipe 'llama3_8b' has no map 'torchtitan_to_hugging_face'; it has: "
        "torchtitan_to_huggingface, megatron_to_huggingface, megatron_dist_to_huggingface; "
        "did you mean 'torchtitan_to_huggingface'?"
    )
    with pytest.raises(ConfigError, match="the recipe 'gpt2' has no tensors of 'torchtitan'"):
        full("gpt2").tensors("torchtitan")


def test_a_rule_inside_a_reversed_one_is_explained() -> None:
    rule = "{kind: reverse, rules: [{kind: rotary, keys: [q], head_dim: 3}]}"
    with pytest.raises(ConfigError, match=r"transforms\[0\]\.rules\[0\]\.head_dim: found 3"):
        compose([f"transforms=[{rule}]"])
    rule = "{kind: reverse, rules: [{kind: rotary, keys: [q], head_dm: 4, head_dim: 4}]}"
    with pytest.raises(ConfigError, match=r"rules\[0\]\.head_dm: unknown key; the rule rotary"):
        compose([f"transforms=[{rule}]"])
    with pytest.raises(ConfigError, match=r"transforms\[0\]\.rules\[0\]: found the kind 'turn'"):
        compose(["transforms=[{kind: reverse, rules: [{kind: turn}]}]"])
