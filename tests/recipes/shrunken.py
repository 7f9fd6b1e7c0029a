"""Each recipe's model made small: the overrides, and the same for transformers."""

from __future__ import annotations

from functools import cache
from typing import Any

from dcp_pipeline.config.compose import load_recipe
from dcp_pipeline.config.recipe import Recipe

__all__ = ["SHRUNKEN", "full", "overrides", "small", "transformers_model"]

_LLAMA = {"layers": 2, "hidden": 16, "heads": 4, "kv_heads": 2, "head_dim": 8, "vocab": 40}

SHRUNKEN: dict[str, dict[str, int]] = {
    "bert": {"layers": 2, "hidden": 16, "context": 32, "vocab": 40},
    "deepseek_v3": {
        "layers": 3, "dense_layers": 1, "hidden": 16, "heads": 4, "q_rank": 10, "kv_rank": 6,
        "nope_dim": 8, "rope_dim": 4, "v_dim": 6, "ffn": 24, "experts": 4, "expert_ffn": 12,
        "shared_experts": 2, "vocab": 40,
    },
    "gemma2_9b": {**_LLAMA, "ffn": 24},
    "gpt2": {"layers": 2, "hidden": 16, "context": 32, "vocab": 40},
    "llama3_70b": {**_LLAMA, "ffn": 24, "padded_vocab": 48},
    "llama3_8b": {**_LLAMA, "ffn": 24, "padded_vocab": 48},
    "llama4_scout": {**_LLAMA, "ffn": 24, "experts": 4},
    "mixtral_8x7b": {**_LLAMA, "ffn": 24, "experts": 4},
    "qwen3_30b_a3b": {**_LLAMA, "experts": 4, "expert_ffn": 12},
    "qwen3_8b": {**_LLAMA, "ffn": 24},
    "tiny_decoder": {"layers": 2, "hidden": 16, "context": 32, "vocab": 40},
}  # fmt: skip


def overrides(name: str) -> list[str]:
    """As on the command line."""
    return [f"recipe.model.{key}={value}" for key, value in SHRUNKEN[name].items()]


@cache
def small(name: str) -> Recipe:
    """The recipe of the small model, as `overrides` make it."""
    info = full(name).info
    return Recipe(info.model_copy(update={"model": info.model | SHRUNKEN[name]}))


@cache
def full(name: str) -> Recipe:
    """The recipe as it is."""
    return load_recipe(name)


def transformers_model(name: str) -> Any:
    """transformers' model of the same dimensions, with random values."""
    import transformers as tf

    small = SHRUNKEN[name]
    common: dict[str, Any] = {
        "num_hidden_layers": small["layers"],
        "hidden_size": small["hidden"],
        "num_attention_heads": small.get("heads", 4),
        "num_key_value_heads": small.get("kv_heads", 4),
        "intermediate_size": small.get("ffn", 4 * small["hidden"]),
        "vocab_size": small["vocab"],
        "head_dim": small.get("head_dim", 4),
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    gpt2 = {
        "n_layer": small["layers"], "n_embd": small["hidden"], "n_head": 4,
        "n_positions": small.get("context", 0), "vocab_size": small["vocab"],
        "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    experts = small.get("experts", 0)
    match name:
        case "bert":
            return tf.BertForPreTraining(
                tf.BertConfig(**common, max_position_embeddings=small["context"])
            )
        case "deepseek_v3":
            common.pop("head_dim")
            return tf.DeepseekV3ForCausalLM(
                tf.DeepseekV3Config(
                    **{**common, "num_key_value_heads": small["heads"]},
                    first_k_dense_replace=small["dense_layers"],
                    n_routed_experts=experts, n_group=2, topk_group=1, num_experts_per_tok=2,
                    moe_intermediate_size=small["expert_ffn"],
                    n_shared_experts=small["shared_experts"],
                    q_lora_rank=small["q_rank"], kv_lora_rank=small["kv_rank"],
                    qk_rope_head_dim=small["rope_dim"], qk_nope_head_dim=small["nope_dim"],
                    v_head_dim=small["v_dim"],
                )
            )  # fmt: skip
        case "gemma2_9b":
            return tf.Gemma2ForCausalLM(tf.Gemma2Config(**common, pad_token_id=0))
        case "gpt2":
            return tf.GPT2LMHeadModel(tf.GPT2Config(**gpt2))
        case "tiny_decoder":
            return tf.GPT2LMHeadModel(
                tf.GPT2Config(**gpt2, activation_function="gelu", tie_word_embeddings=False)
            )
        case "llama3_8b" | "llama3_70b":
            return tf.LlamaForCausalLM(tf.LlamaConfig(**common))
        case "llama4_scout":
            text = tf.Llama4TextConfig(
                **common, num_local_experts=experts, interleave_moe_layer_step=1, pad_token_id=0
            )
            vision = tf.Llama4VisionConfig(
                hidden_size=16, num_hidden_layers=1, num_attention_heads=4, intermediate_size=64,
                vision_output_dim=16, projector_input_dim=16, projector_output_dim=16,
                image_size=28, patch_size=14,
            )  # fmt: skip
            return tf.Llama4ForConditionalGeneration(
                tf.Llama4Config(text_config=text, vision_config=vision)
            )
        case "mixtral_8x7b":
            return tf.MixtralForCausalLM(tf.MixtralConfig(**common, num_local_experts=experts))
        case "qwen3_8b":
            return tf.Qwen3ForCausalLM(tf.Qwen3Config(**common))
        case "qwen3_30b_a3b":
            return tf.Qwen3MoeForCausalLM(
                tf.Qwen3MoeConfig(
                    **common, num_experts=experts, num_experts_per_tok=2,
                    moe_intermediate_size=small["expert_ffn"],
                )
            )  # fmt: skip
    raise ValueError(name)
