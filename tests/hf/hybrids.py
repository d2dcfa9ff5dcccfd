"""Small models of the families whose layers have states, some with attention in the same layer."""

from __future__ import annotations

import functools
from typing import Any

import torch
import transformers
from transformers import DynamicCache

from attnops.hf import tiny
from attnops.hf.cache.own_class import own_class

_BASE = {
    "vocab_size": tiny.VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 4,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
_MAMBA = {
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_n_groups": 2,
    "mamba_d_state": 16,
    "mamba_chunk_size": 16,
}
_OTHERS: dict[str, dict[str, Any]] = {
    "bamba": {**_MAMBA, "attn_layer_indices": [1, 3]},
    "granitemoehybrid": {
        **_MAMBA,
        "layer_types": ["mamba", "attention"] * 2,
        "num_local_experts": 0,
        "num_experts_per_tok": 0,
        "shared_intermediate_size": 96,
    },
    "falcon_h1": {**_MAMBA, "mamba_d_ssm": 128, "num_hidden_layers": 2},
    "minimax": {
        # transformers' own cache counts tokens by the first layer, if that attends.
        "layer_types": ["full_attention", "linear_attention", "linear_attention"] * 2,
        "num_hidden_layers": 6,
        "initializer_range": 0.1,
        "block_size": 16,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "linear_attn_alpha_factor": 1.3,
        "mlp_beta_factor": 0.7,
    },
}
_NEMOTRON = {
    "vocab_size": tiny.VOCAB,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 96,
    "mamba_num_heads": 4,
    "mamba_head_dim": 16,
    "ssm_state_size": 16,
    "n_groups": 2,
    "chunk_size": 16,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
    "layers_block_type": ["mamba", "attention", "mlp", "mamba", "attention"],
}
NAMES = ("qwen3_next", "qwen3_5", "lfm2", *_OTHERS, "nemotron_h")


def cache(model: Any) -> Any:
    """A new cache of transformers' own."""
    own = own_class(model)
    return DynamicCache(config=model.config) if own is None else own()


def states(cache: Any, number: int) -> list[torch.Tensor]:
    """What a cache keeps for a layer with states, in the form of transformers' own."""
    if held := getattr(cache, "linear_cache", ()):
        return [held[number]]
    layer = cache.layers[number]
    conv, state = layer.conv_states[0], layer.recurrent_states[0]
    found = [state.mT] if getattr(cache, "own", None) else [conv, state]
    return [x for x in found if x is not None and x.numel()]


@functools.cache
def model(name: str) -> Any:
    """A float32 model in eval mode, always the same."""
    if name in tiny.NAMES:
        return tiny.model(name)
    config: Any
    if name == "nemotron_h":
        config = transformers.NemotronHConfig(**_NEMOTRON)
    else:
        config = transformers.CONFIG_MAPPING[name](**{**_BASE, **_OTHERS[name]})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        made = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    if name == "minimax":
        made.set_experts_implementation("batched_mm")  # others are not recorded on a CPU
    return made.eval()
