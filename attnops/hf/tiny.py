"""Small models with random weights, by name: one for each family the tests cover, and two for the demo. No downloads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from attnops.errors import InvalidInput, fail

VOCAB = 128


_BASE: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None,
    # Ten times the usual spread: the logits of random weights would otherwise hardly depend on attention.
    "initializer_range": 0.2,
}  # fmt: skip

_H16 = {"head_dim": 16}
_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_LOCAL = {"num_local_experts": 4, "num_experts_per_tok": 2}
_SHARED = {"shared_expert_intermediate_size": 32}
_ROUTED = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_group": 1, "topk_group": 1}
_LATENT = {"num_key_value_heads": 4, "q_lora_rank": 24, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12}
_DEEPSEEK = {**_LATENT, **_ROUTED, "n_routed_experts": 8, "n_group": 2, "first_k_dense_replace": 1, "n_shared_experts": 1}
_INDEXER = {"index_n_heads": 2, "index_head_dim": 16, "index_topk": 4}
_DELTA = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16}
_WINDOW = {"sliding_window": 8}
_TIED = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}
_GPT2 = {"vocab_size": VOCAB, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 256, "initializer_range": 0.2, **_TIED}
_SMALL = {"vocab_size": 1024, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "max_position_embeddings": 1024}


def _alternating(first: str, second: str, layers: int) -> dict[str, Any]:
    return {"num_hidden_layers": layers, "layer_types": [first, second] * (layers // 2)}


# name: (config class, differences from _BASE)
_DECODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "qwen2": ("Qwen2Config", {}),
    "qwen3": ("Qwen3Config", _H16),
    "mistral": ("MistralConfig", _WINDOW),
    "gemma": ("GemmaConfig", _H16),
    "gemma2": ("Gemma2Config", {**_H16, **_WINDOW, "query_pre_attn_scalar": 16, "attn_logit_softcapping": 5.0}),
    "gemma3": ("Gemma3TextConfig", {**_H16, **_WINDOW, "query_pre_attn_scalar": 16, "num_hidden_layers": 3, "layer_types":
        ["sliding_attention", "sliding_attention", "full_attention"]}),
    "gemma4": ("Gemma4TextConfig", {**_H16, **_WINDOW, **_alternating("sliding_attention", "full_attention", 4),
        "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCAB}),
    "gpt_oss": ("GptOssConfig", {**_H16, **_WINDOW, **_LOCAL}),
    "deepseek_v2": ("DeepseekV2Config", _DEEPSEEK),
    "deepseek_v3": ("DeepseekV3Config", _DEEPSEEK),
    "deepseek_v32": ("DeepseekV32Config", {**_DEEPSEEK, **_INDEXER}),
    "glm4_moe_lite": ("Glm4MoeLiteConfig", _DEEPSEEK),
    "axk1": ("AXK1Config", _DEEPSEEK),
    "minicpm3": ("MiniCPM3Config", _LATENT),
    "youtu": ("YoutuConfig", _LATENT),
    "kimi_linear": ("KimiLinearConfig", {**_LATENT, **_LOCAL, **_alternating("linear_attention", "full_attention", 4),
        "moe_intermediate_size": 32, "linear_head_dim": 16, "linear_num_heads": 2}),
    "longcat_flash": ("LongcatFlashConfig", {**_LATENT, "head_dim": 8, "num_layers": 2, "num_hidden_layers": 4, "ffn_hidden_size": 96,
        "expert_ffn_hidden_size": 32, "moe_topk": 2, "n_routed_experts": 4, "zero_expert_num": 2}),
    "mixtral": ("MixtralConfig", _LOCAL),
    "qwen2_moe": ("Qwen2MoeConfig", {**_MOE, **_SHARED, **_WINDOW, "use_sliding_window": True, **_alternating("sliding_attention",
        "full_attention", 2)}),
    "qwen3_moe": ("Qwen3MoeConfig", {**_H16, **_MOE}),
    "qwen3_next": ("Qwen3NextConfig", {**_H16, **_MOE, **_SHARED, **_DELTA, "num_hidden_layers": 4, "decoder_sparse_step": 1}),
    "qwen3_5": ("Qwen3_5TextConfig", {**_H16, **_DELTA, "num_hidden_layers": 4}),
    "phi": ("PhiConfig", {}),
    "phi3": ("Phi3Config", {}),
    "phimoe": ("PhimoeConfig", {**_LOCAL, **_WINDOW}),
    "olmo2": ("Olmo2Config", {}),
    "olmo3": ("Olmo3Config", _WINDOW),
    "glm4": ("Glm4Config", _H16),
    "glm4_moe": ("Glm4MoeConfig", {**_H16, **_ROUTED}),
    "cohere2": ("Cohere2Config", _WINDOW),
    "granite": ("GraniteConfig", {}),
    "minimax_m2": ("MiniMaxM2Config", {**_H16, **_LOCAL}),
    "smollm3": ("SmolLM3Config", {}),
    "starcoder2": ("Starcoder2Config", _WINDOW),
    "stablelm": ("StableLmConfig", {}),
    "nemotron": ("NemotronConfig", {}),
    "exaone4": ("Exaone4Config", {**_WINDOW, "sliding_window_pattern": 2}),
    "mimo_v2_flash": ("MiMoV2FlashConfig", {**_H16, **_WINDOW, **_ROUTED, "v_head_dim": 8}),
    "doge": ("DogeConfig", {"keep_window_size": 12}),
    "lfm2": ("Lfm2Config", _alternating("conv", "full_attention", 4)),
    "llama4": ("Llama4TextConfig", {**_H16, "num_local_experts": 2, "attention_chunk_size": 8, "num_hidden_layers": 4,
        "intermediate_size_mlp": 96}),
    "llama-small": ("LlamaConfig", {**_SMALL, "num_attention_heads": 8, "num_key_value_heads": 4}),
    "gpt-oss-small": ("GptOssConfig", {**_SMALL, **_LOCAL, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 32,
        "sliding_window": 32}),
}  # fmt: skip

_OWN_NAMES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2Config", _GPT2),
    "gpt_bigcode": ("GPTBigCodeConfig", _GPT2),
    "gptj": ("GPTJConfig", {**_GPT2, "rotary_dim": 8}),
    "opt": ("OPTConfig", {"vocab_size": VOCAB, "hidden_size": 64, "ffn_dim": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
        "max_position_embeddings": 256, "word_embed_proj_dim": 64, "init_std": 0.2, **_TIED}),
    "gpt_neox": ("GPTNeoXConfig", {k: v for k, v in _BASE.items() if k not in ("num_key_value_heads", "pad_token_id")}),
    "falcon": ("FalconConfig", {"vocab_size": VOCAB, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "alibi":
        False, **_TIED}),
    "bloom": ("BloomConfig", {"vocab_size": VOCAB, "hidden_size": 64, "n_layer": 2, "n_head": 4, **_TIED}),
    "mpt": ("MptConfig", {"vocab_size": VOCAB, "d_model": 64, "n_heads": 4, "n_layers": 2, "max_seq_len": 256}),
}  # fmt: skip

_SEQ2SEQ = {
    "vocab_size": VOCAB, "d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads":
    4, "encoder_ffn_dim": 96, "decoder_ffn_dim": 96, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None, "decoder_start_token_id":
    3, "init_std": 0.2,
}  # fmt: skip

_VISION: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 32}

_VISION["patch_size"] = 16

# name: (config class, model class, the config's arguments)
_OTHERS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "mistral4": ("Mistral4Config", "Mistral4ForCausalLM", {**_BASE, **_DEEPSEEK}),
    "t5": ("T5Config", "T5ForConditionalGeneration", {"vocab_size": VOCAB, "d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 2,
        "num_heads": 4, "pad_token_id": 0, "decoder_start_token_id": 0, "eos_token_id": None}),
    "bart": ("BartConfig", "BartForConditionalGeneration", {**_SEQ2SEQ, "max_position_embeddings": 64, "forced_eos_token_id": None}),
    "whisper": ("WhisperConfig", "WhisperForConditionalGeneration", {**_SEQ2SEQ, "eos_token_id": 2, "num_mel_bins": 8,
        "max_source_positions": 20, "max_target_positions": 40, "begin_suppress_tokens": None, "suppress_tokens": None}),
    "bert": ("BertConfig", "BertForMaskedLM", {"vocab_size": VOCAB, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "intermediate_size": 96, "max_position_embeddings": 64, "initializer_range": 0.2}),
    "llava": ("LlavaConfig", "LlavaForConditionalGeneration", {"image_token_index": 120, "image_token_id": 120, "vision_feature_layer":
        -1}),
}  # fmt: skip

NAMES: tuple[str, ...] = (*_DECODERS, *_OWN_NAMES, *_OTHERS)
"""Every name `config` and `model` know. Decoders first, in the spelling of transformers' model types."""


def config(name: str, **overrides: Any) -> Any:
    """The transformers config of `name`, with `overrides` on top. Raises InvalidInput for an unknown name or transformers without it."""
    import transformers

    if name in _OTHERS:
        cls, _, values = _OTHERS[name]
    elif name in _OWN_NAMES:
        cls, values = _OWN_NAMES[name]
    elif name in _DECODERS:
        cls, values = _DECODERS[name]
        values = {**_BASE, **values}
    else:
        fail(InvalidInput, "name", repr(name), f"one of {', '.join(NAMES)}")
    if not hasattr(transformers, cls):
        fail(InvalidInput, "name", repr(name), f"a transformers that has {cls} (this one is {transformers.__version__})")
    if name == "llava":
        vision = transformers.CLIPVisionConfig(**_VISION, projection_dim=64)
        text = transformers.LlamaConfig(**_BASE)
        values = {**values, "vision_config": vision, "text_config": text}
    return getattr(transformers, cls)(**{**values, **overrides})


def model(name: str, seed: int = 0, attn_implementation: str = "eager", **overrides: Any) -> Any:
    """A float32 model in eval mode with the weights of `seed`. The global random state is left as it was.

    attn_implementation: as transformers takes it. overrides: on top of the config. Raises InvalidInput as `config` does.
    """
    import transformers

    cfg = config(name, **overrides)
    make: Callable[..., Any]
    if name in _OTHERS:
        make = getattr(transformers, _OTHERS[name][1])._from_config
    else:
        make = transformers.AutoModelForCausalLM.from_config
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        built = make(cfg, attn_implementation=attn_implementation, dtype=torch.float32)
        for parameter_name, parameter in built.named_parameters():
            # Left at zero they would say little: a zero sink is the same for every head.
            if parameter_name.endswith("sinks"):
                torch.nn.init.normal_(parameter)
    return built.eval()
