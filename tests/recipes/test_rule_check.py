"""Which rule took which key, and what does not fit: of a recipe's own tensors, and of files."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import dcp_pipeline as dcp
from dcp_pipeline.cli.main import main
from dcp_pipeline.core.errors import CheckpointNotFoundError, ConfigError
from dcp_pipeline.tools.rule_check import Fate, check_rules, keys_at
from tests.recipes.shrunken import SHRUNKEN, full, overrides, small

Captured = pytest.CaptureFixture[str]


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as exit:
        main(arguments)
    assert isinstance(exit.value.code, int)
    return exit.value.code


@pytest.mark.parametrize("name", SHRUNKEN)
def test_every_map_fits_its_recipe(name: str) -> None:
    for map_ in small(name).maps:
        for reverse in (False, True):
            found = check_rules(small(name), map_, reverse)
            assert found.is_well, found
            assert all(fate.rules for fate in found.fates)


def test_real_shapes_fit_too() -> None:
    found = check_rules(full("llama3_8b"), "megatron_to_huggingface")
    assert found.is_well
    assert len(found.fates) == 3 + 6 * 32
    assert check_rules(full("llama3_8b"), "megatron_to_huggingface", reverse=True).is_well


def test_what_became_of_a_key() -> None:
    found = check_rules(small("llama3_8b"), "megatron_to_huggingface")
    fates = {fate.key: fate for fate in found.fates}
    fused = "decoder.layers.1.self_attention.linear_qkv.weight"
    assert fates[fused] == Fate(
        fused,
        tuple(f"model.layers.1.self_attn.{name}_proj.weight" for name in "qkv"),
        ("query_key_value (split)",),
    )
    head = fates["output_layer.weight"]
    assert head.became == ("lm_head.weight",)
    assert head.rules == ("names (rename)", "vocabulary (pad)")
    assert (found.source, found.target) == ("megatron", "huggingface")
    backward = check_rules(small("llama3_8b"), "huggingface_to_megatron")
    assert (backward.map, backward.source) == ("megatron_to_huggingface", "huggingface")
    assert {fate.key: fate.became for fate in backward.fates}[
        "model.layers.1.self_attn.k_proj.weight"
    ] == (fused,)


def test_a_tied_head_is_dropped() -> None:
    found = check_rules(small("gemma2_9b"), "torchtitan_to_huggingface")
    fates = {fate.key: fate for fate in found.fates}
    assert fates["model.lm_head.weight"].became == ()
    assert fates["model.lm_head.weight"].rules == ("names (rename)", "head (tie)")


def test_what_does_not_fit() -> None:
    recipe = small("llama3_8b")
    keys = dict(keys_of_recipe("llama3_8b", "torchtitan"))
    keys["train_state"] = None
    keys["layers.0.attention.qkv_linear.wq.bias"] = keys.pop("layers.0.attention_norm.weight")
    keys["norm.weight"] = keys["layers.0.feed_forward.w1.weight"]
    keys["model.layers.1.mlp.up_proj.weight"] = keys["lm_head.weight"]
    found = check_rules(recipe, "torchtitan_to_huggingface", keys=keys)
    assert not found.is_well
    assert found.untaken == (
        "train_state",
        "layers.0.attention.qkv_linear.wq.bias",
        "model.layers.1.mlp.up_proj.weight",
    )
    assert found.missing == (
        "model.layers.0.input_layernorm.weight",
        "model.layers.1.mlp.up_proj.weight",
    )
    assert found.misshapen == ("model.norm.weight: [24, 16], the recipe says [16]",)
    assert found.problems == (
        "names (rename) renames 'layers.1.feed_forward.w3.weight' to"
        " 'model.layers.1.mlp.up_proj.weight', which is there already, from"
        " 'model.layers.1.mlp.up_proj.weight'",
    )


def keys_of_recipe(name: str, side: str) -> dict[str, object]:
    from dcp_pipeline.core.affine import whole

    tensors = small(name).tensors(side)
    return {key: whole(key, dtype, shape) for key, (dtype, shape) in tensors.items()}


def test_a_checkpoint_of_ours_below_a_prefix(tmp_path: Path, capsys: Captured) -> None:
    tensors = small("qwen3_8b").tensors("torchtitan")
    model = {key: torch.zeros(shape) for key, (_, shape) in tensors.items()}
    dcp.save({"app": {"model": model, "step": 3}}, checkpoint_id=tmp_path / "whole")
    del model["norm.weight"]
    dcp.save({"app": {"model": model}}, checkpoint_id=tmp_path / "lacks")
    check = ["rules", "check", "-r", "qwen3_8b", "--prefix", "app.model.", *overrides("qwen3_8b")]
    assert run(*check, str(tmp_path / "whole")) == 0
    shown = capsys.readouterr()
    assert shown.err == "" and "names (rename)" in shown.out
    assert run(*check, str(tmp_path / "lacks")) == 1
    assert capsys.readouterr().err == "nothing becomes: model.norm.weight\n"
    assert run(*check, str(tmp_path / "lacks"), "--json") == 1
    (report,) = json.loads(capsys.readouterr().out)
    assert report["missing"] == ["model.norm.weight"] and not report["is_well"]
    assert len(report["fates"]) == len(model)
    with pytest.raises(CheckpointNotFoundError, match="no key that begins with 'model'; its first"):
        keys_at(tmp_path / "lacks", "model")


def test_a_repository(tmp_path: Path, capsys: Captured) -> None:
    """Codes and scales are read as what they stand for; the second token's layer is dropped."""
    recipe = small("deepseek_v3")
    made = {
        key: torch.zeros(shape, dtype=getattr(torch, dtype))
        for key, (dtype, shape) in recipe.tensors("huggingface_quantized").items()
    }
    made["model.layers.61.enorm.weight"] = torch.zeros(16)
    save_file(made, tmp_path / "model.safetensors")
    check = ["rules", "check", "-r", "deepseek_v3", *overrides("deepseek_v3"), str(tmp_path)]
    assert run(*check, "--reverse") == 0
    out = capsys.readouterr().out
    assert "gate (unstack)" in out and "second_token" in out and "dropped" in out
    made["model.layers.2.mlp.extra.weight"] = torch.zeros(16)
    save_file(made, tmp_path / "model.safetensors")
    assert run(*check, "--map", "huggingface_to_torchtitan") == 1
    assert capsys.readouterr().err == "no rule takes: model.layers.2.mlp.extra.weight\n"


def test_numbers_in_names_are_not_told_apart(capsys: Captured) -> None:
    assert run("rules", "check", "-r", "mixtral_8x7b", "-m", "megatron_to_huggingface") == 0
    lines = [line.split("│") for line in capsys.readouterr().out.splitlines() if "│" in line]
    counts = [line[2].strip() for line in lines if len(line) > 2 and line[2].strip()]
    assert "256" in counts  # 8 experts in 32 layers


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-r", "llama3_8b", "/nowhere"], "name one of the maps of 'llama3_8b' with --map: torch"),
        (["-r", "gpt2", "/a", "/b"], "expected one checkpoint, found /a, /b"),
        (["-r", "gpt2", "-m", "x"], "the recipe 'gpt2' has no map 'x'; it has: nanogpt_to_hugg"),
        (["-r", "gpt3"], "found the recipe 'gpt3'"),
    ],
)
def test_a_usage_error(capsys: Captured, arguments: list[str], message: str) -> None:
    assert run("rules", "check", *arguments) == 2
    assert message in capsys.readouterr().err


def test_a_checkpoint_that_is_not_there(capsys: Captured, tmp_path: Path) -> None:
    assert run("rules", "check", "-r", "gpt2", str(tmp_path / "none")) == 1
    assert "none" in capsys.readouterr().err


def test_a_map_of_unknown_sides(tmp_path: Path) -> None:
    from dcp_pipeline.config.compose import load_recipe

    path = tmp_path / "mine.yaml"
    path.write_text(
        "defaults: [pipeline, _self_]\n"
        "recipe: {name: mine, maps: {a_to_b: {n: {kind: rename, keys: {x: y}}}}}\n"
    )
    with pytest.raises(ConfigError, match="the recipe 'mine' has no tensors of 'b'"):
        check_rules(load_recipe(path), "a_to_b")


def test_estimates_on_the_command_line(capsys: Captured) -> None:
    assert run("estimate", "-r", "llama3_70b", "--ranks", "512", "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert report["parameters"] == 70_553_706_496
    assert report["checkpoint_bytes"] == 12 * 70_553_706_496
    assert report["bytes_per_rank"] == -(-12 * 70_553_706_496 // 512)
    assert run("estimate", "-r", "deepseek_v3", "recipe.model.layers=4") == 0
    out = capsys.readouterr().out
    assert "float8_e4m3fn" in out and "of 2048" in out
    assert run("estimate", "-r", "llama3_8b", "--ranks", "0") == 2
    assert capsys.readouterr().err == "error: ranks: found 0; expected at least 1\n"


def test_one_recipe_on_the_command_line(capsys: Captured, tmp_path: Path) -> None:
    assert run("recipes", "mixtral_8x7b") == 0
    out = capsys.readouterr().out
    assert "46,702,792,704" in out and "kv_heads 8" in out and "[experts, hidden]" in out
    assert run("recipes", "llama3_8b", "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert report["model"]["padded_vocab"] == 128256
    assert report["estimate"]["tensors"] == 291
    assert report["tensors"]["huggingface"]["model.norm.weight"] == ["hidden"]
    kinds = [rule["kind"] for rule in report["maps"]["torchtitan_to_huggingface"]]
    assert kinds == ["rename", "rotary"]
    (tmp_path / "mine.yaml").write_text("defaults: [pipeline, _self_]\nrecipe: {name: mine}\n")
    assert run("recipes", str(tmp_path / "mine.yaml"), "--json") == 0
    assert json.loads(capsys.readouterr().out)["estimate"] is None
    assert run("recipes", str(tmp_path / "mine.yaml")) == 0
