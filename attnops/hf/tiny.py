"""Small models with random weights, by name: one for each family the tests cover, and three larger
ones. No downloads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from attnops.core.record import need

VOCAB = 128

_TOKENS: dict[str, Any] = {
    "vocab_size": VOCAB,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
_SIZES = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
# Ten times the usual spread: the logits of random weights would otherwise hardly depend on
# attention.
_WIDE = {"intermediate_size": 96, "max_position_embeddings": 256, "initializer_range": 0.2}
_BASE: dict[str, Any] = {**_TOKENS, **_SIZES, **_WIDE, "num_key_value_heads": 2}

_H16 = {"head_dim": 16}
_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_LOCAL = {"num_local_experts": 4, "num_experts_per_tok": 2}
_SHARED = {"shared_expert_intermediate_size": 32}
_ROUTED = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_group": 1,
    "topk_group": 1,
}
_LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
}
_DEEPSEEK = {
    **_LATENT,
    **_ROUTED,
    "n_routed_experts": 8,
    "n_group": 2,
    "first_k_dense_replace": 1,
    "n_shared_experts": 1,
}
_DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
_WINDOW = {"sliding_window": 8}
_GPT2 = {
    **_TOKENS,
    "n_embd": 64,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 256,
    "initializer_range": 0.2,
}
_SMALL = {
    "vocab_size": 1024,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "max_position_embeddings": 1024,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}


def _layers(*kinds: str) -> dict[str, Any]:
    return {"num_hidden_layers": len(kinds), "layer_types": list(kinds)}


_SLIDING, _FULL = "sliding_attention", "full_attention"

# Differences from _BASE. model_type: of transformers, where the name is another.
_DECODERS: dict[str, dict[str, Any]] = {
    **{
        name: {}
        for name in (
            "llama",
            "qwen2",
            "phi",
            "phi3",
            "olmo2",
            "granite",
            "smollm3",
            "stablelm",
            "nemotron",
        )
    },
    **dict.fromkeys(("qwen3", "gemma", "glm4"), _H16),
    **dict.fromkeys(("mistral", "olmo3", "cohere2", "starcoder2"), _WINDOW),
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "axk1"), _DEEPSEEK),
    **dict.fromkeys(("minicpm3", "youtu"), _LATENT),
    "gemma2": {**_H16, **_WINDOW, "query_pre_attn_scalar": 16, "attn_logit_softcapping": 5.0},
    "gemma3": {
        **_H16,
        **_WINDOW,
        **_layers(_SLIDING, _SLIDING, _FULL),
        "model_type": "gemma3_text",
        "query_pre_attn_scalar": 16,
    },
    "gemma4": {
        **_H16,
        **_WINDOW,
        **_layers(*(_SLIDING, _FULL) * 2),
        "model_type": "gemma4_text",
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": VOCAB,
    },
    "gpt_oss": {**_H16, **_WINDOW, **_LOCAL},
    "deepseek_v32": {**_DEEPSEEK, "index_n_heads": 2, "index_head_dim": 16, "index_topk": 4},
    "kimi_linear": {
        **_LATENT,
        **_LOCAL,
        **_layers(*("linear_attention", _FULL) * 2),
        "moe_intermediate_size": 32,
        "linear_head_dim": 16,
        "linear_num_heads": 2,
    },
    "longcat_flash": {
        **_LATENT,
        "head_dim": 8,
        "num_layers": 2,
        "num_hidden_layers": 4,
        "ffn_hidden_size": 96,
        "expert_ffn_hidden_size": 32,
        "moe_topk": 2,
        "n_routed_experts": 4,
        "zero_expert_num": 2,
    },
    "mixtral": _LOCAL,
    "qwen2_moe": {
        **_MOE,
        **_SHARED,
        **_WINDOW,
        **_layers(_SLIDING, _FULL),
        "use_sliding_window": True,
    },
    "qwen3_moe": {**_H16, **_MOE},
    "qwen3_next": {
        **_H16,
        **_MOE,
        **_SHARED,
        **_DELTA,
        "num_hidden_layers": 4,
        "decoder_sparse_step": 1,
    },
    "qwen3_5": {**_H16, **_DELTA, "model_type": "qwen3_5_text", "num_hidden_layers": 4},
    "phimoe": {**_LOCAL, **_WINDOW},
    "glm4_moe": {**_H16, **_ROUTED},
    "minimax_m2": {**_H16, **_LOCAL},
    "exaone4": {**_WINDOW, "sliding_window_pattern": 2},
    "mimo_v2_flash": {**_H16, **_WINDOW, **_ROUTED, "v_head_dim": 8},
    "doge": {"keep_window_size": 12},
    "lfm2": _layers(*("conv", _FULL) * 2),
    "llama4": {
        **_H16,
        "model_type": "llama4_text",
        "num_local_experts": 2,
        "attention_chunk_size": 8,
        "num_hidden_layers": 4,
        "intermediate_size_mlp": 96,
    },
    "llama-small": {**_SMALL, "model_type": "llama"},
    "mistral-small": {**_SMALL, "model_type": "mistral", "sliding_window": 32},
    "gpt-oss-small": {
        **_SMALL,
        **_LOCAL,
        "model_type": "gpt_oss",
        "head_dim": 32,
        "sliding_window": 32,
    },
}

_SEQ2SEQ = {
    **_TOKENS,
    "d_model": 64,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 96,
    "decoder_ffn_dim": 96,
    "decoder_start_token_id": 3,
    "init_std": 0.2,
}

# Complete arguments of other configs.
_OTHERS: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("gpt2", "gpt_bigcode"), _GPT2),
    "gptj": {**_GPT2, "rotary_dim": 8},
    "opt": {
        **_TOKENS,
        **_SIZES,
        "ffn_dim": 96,
        "max_position_embeddings": 256,
        "word_embed_proj_dim": 64,
        "init_std": 0.2,
    },
    "gpt_neox": {"vocab_size": VOCAB, **_SIZES, **_WIDE, "bos_token_id": 1, "eos_token_id": None},
    "falcon": {**_TOKENS, **_SIZES, "alibi": False},
    "bloom": {**_TOKENS, "hidden_size": 64, "n_layer": 2, "n_head": 4},
    "mpt": {"vocab_size": VOCAB, "d_model": 64, "n_heads": 4, "n_layers": 2, "max_seq_len": 256},
    "mistral4": {**_BASE, **_DEEPSEEK},
    "t5": {
        "vocab_size": VOCAB,
        "d_model": 64,
        "d_kv": 16,
        "d_ff": 96,
        "num_layers": 2,
        "num_heads": 4,
        "pad_token_id": 0,
        "decoder_start_token_id": 0,
        "eos_token_id": None,
    },
    "bart": {**_SEQ2SEQ, "max_position_embeddings": 64, "forced_eos_token_id": None},
    "whisper": {
        **_SEQ2SEQ,
        "eos_token_id": 2,
        "num_mel_bins": 8,
        "max_source_positions": 20,
        "max_target_positions": 40,
        "begin_suppress_tokens": None,
        "suppress_tokens": None,
    },
    "bert": {"vocab_size": VOCAB, **_SIZES, **_WIDE, "max_position_embeddings": 64},
    "llava": {
        "image_token_index": 120,
        "image_token_id": 120,
        "vision_feature_layer": -1,
        "text_config": {"model_type": "llama", **_BASE},
        "vision_config": {
            "model_type": "clip_vision_model",
            **_SIZES,
            "intermediate_size": 96,
            "image_size": 32,
            "patch_size": 16,
            "projection_dim": 64,
        },
    },
}

# Models that AutoModelForCausalLM does not make.
_CLASSES = {
    "mistral4": "Mistral4ForCausalLM",
    "t5": "T5ForConditionalGeneration",
    "bart": "BartForConditionalGeneration",
    "whisper": "WhisperForConditionalGeneration",
    "bert": "BertForMaskedLM",
    "llava": "LlavaForConditionalGeneration",
}

NAMES: tuple[str, ...] = (*_DECODERS, *_OTHERS)
"""Every name `config` and `model` know. Decoders first, in the spelling of transformers' model
types."""


def config(name: str, **overrides: Any) -> Any:
    """The transformers config of `name`, with `overrides` on top. Raises InvalidInput for an
    unknown name or transformers without it."""
    import transformers

    need(name in NAMES, "name", repr(name), f"one of {', '.join(NAMES)}")
    values = {
        "model_type": name,
        **(_OTHERS[name] if name in _OTHERS else {**_BASE, **_DECODERS[name]}),
        **overrides,
    }
    kind = values.pop("model_type")
    known = kind in transformers.CONFIG_MAPPING
    need(
        known,
        "name",
        repr(name),
        f"a transformers that has {kind} (this one is {transformers.__version__})",
    )
    return transformers.CONFIG_MAPPING[kind](**values)


def model(name: str, seed: int = 0, attn_implementation: str = "eager", **overrides: Any) -> Any:
    """A float32 model in eval mode with the weights of `seed`. The global random state is left as
    it was.

    attn_implementation: as transformers takes it. overrides: on top of the config. Raises
    InvalidInput as `config` does.
    """
    import transformers

    own, auto = _CLASSES.get(name), transformers.AutoModelForCausalLM
    make: Callable[..., Any] = (
        auto.from_config if own is None else getattr(transformers, own)._from_config
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        built = make(
            config(name, **overrides), attn_implementation=attn_implementation, dtype=torch.float32
        )
        for parameter_name, parameter in built.named_parameters():
            # Left at zero they would say little: a zero sink is the same for every head.
            if parameter_name.endswith("sinks"):
                torch.nn.init.normal_(parameter)
    return built.eval()
