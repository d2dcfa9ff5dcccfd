"""Hugging Face configs by bundled name or file, and models of them on fake tensors."""

from __future__ import annotations

import contextlib
import json
import logging
import re
from collections.abc import Iterator, Mapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from attnops.core.errors import BadTable, InvalidInput, fail, one_line
from attnops.core.needs import require
from attnops.measured.store import read_text

SHAPES: Mapping[str, Mapping[str, Any]] = {
    # meta-llama/Meta-Llama-3-8B
    "llama-3-8b-shape": {
        "model_type": "llama",
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
    },
    # meta-llama/Llama-3.2-1B
    "llama-3.2-1b-shape": {
        "model_type": "llama",
        "vocab_size": 128256,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "tie_word_embeddings": True,
    },
    # Qwen/Qwen3-4B
    "qwen3-4b-shape": {
        "model_type": "qwen3",
        "vocab_size": 151936,
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40960,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": True,
    },
    # Qwen/Qwen3-30B-A3B
    "qwen3-30b-a3b-shape": {
        "model_type": "qwen3_moe",
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "max_position_embeddings": 40960,
        "rope_theta": 1000000.0,
        "rms_norm_eps": 1e-6,
    },
    # google/gemma-3-4b-it, its text model
    "gemma-3-4b-shape": {
        "model_type": "gemma3_text",
        "vocab_size": 262208,
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "num_hidden_layers": 34,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "query_pre_attn_scalar": 256,
        "sliding_window": 1024,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-6,
    },
    # openai/gpt-oss-20b
    "gpt-oss-20b-shape": {
        "model_type": "gpt_oss",
        "vocab_size": 201088,
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_hidden_layers": 24,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "sliding_window": 128,
        "num_local_experts": 32,
        "num_experts_per_tok": 4,
        "max_position_embeddings": 131072,
    },
    # deepseek-ai/DeepSeek-V3, with 4 of its 61 layers: three dense ones and one with experts
    "deepseek-v3-shape": {
        "model_type": "deepseek_v3",
        "vocab_size": 129280,
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "moe_intermediate_size": 2048,
        "num_hidden_layers": 4,
        "first_k_dense_replace": 3,
        "num_attention_heads": 128,
        "num_key_value_heads": 128,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "n_group": 8,
        "topk_group": 4,
        "max_position_embeddings": 4096,
    },
    # Qwen/Qwen3-0.6B
    "qwen3-0.6b-shape": {
        "model_type": "qwen3",
        "vocab_size": 151936,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40960,
        "rope_theta": 1000000.0,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
    },
    # mistralai/Mistral-7B-v0.1
    "mistral-7b-shape": {
        "model_type": "mistral",
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "sliding_window": 4096,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
    },
    # microsoft/Phi-3-mini-4k-instruct
    "phi-3-mini-shape": {
        "model_type": "phi3",
        "vocab_size": 32064,
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "sliding_window": 2047,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
    },
    # allenai/OLMo-2-1124-7B
    "olmo2-7b-shape": {
        "model_type": "olmo2",
        "vocab_size": 100352,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "rope_theta": 500000.0,
    },
    # ibm-granite/granite-3.0-2b-base
    "granite-3-2b-shape": {
        "model_type": "granite",
        "vocab_size": 49152,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 40,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "attention_multiplier": 0.015625,
        "embedding_multiplier": 12.0,
        "logits_scaling": 8.0,
        "residual_multiplier": 0.22,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
    },
    # tiiuae/Falcon-H1-7B-Base, with 8 of its 44 layers
    "falcon-h1-7b-shape": {
        "model_type": "falcon_h1",
        "vocab_size": 130048,
        "hidden_size": 3072,
        "intermediate_size": 12288,
        "num_hidden_layers": 8,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "mamba_d_ssm": 3072,
        "mamba_n_heads": 24,
        "mamba_d_head": 128,
        "mamba_d_state": 256,
        "mamba_n_groups": 1,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
        "max_position_embeddings": 262144,
        "rms_norm_eps": 1e-5,
        "rope_theta": 100000000000.0,
    },
    # nvidia/Nemotron-H-8B-Base-8K, with 8 of its 52 layers: four with states, one of attention
    "nemotron-h-8b-shape": {
        "model_type": "nemotron_h",
        "vocab_size": 131072,
        "hidden_size": 4096,
        "intermediate_size": 21504,
        "layers_block_type": ["mamba", "mlp", "mamba", "mlp", "mamba", "mlp", "mamba", "attention"],
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "mamba_num_heads": 128,
        "mamba_head_dim": 64,
        "ssm_state_size": 128,
        "n_groups": 8,
        "n_routed_experts": 0,
        "max_position_embeddings": 8192,
        "layer_norm_epsilon": 1e-5,
    },
    # Qwen/Qwen3-Next-80B-A3B, with 8 of its 48 layers: two of attention, six with states
    "qwen3-next-shape": {
        "model_type": "qwen3_next",
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 5120,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "num_hidden_layers": 8,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_value_head_dim": 128,
        "max_position_embeddings": 262144,
        "rope_theta": 10000000.0,
        "rms_norm_eps": 1e-6,
    },
}
"""Published model shapes as configs, without weights. Sources: the models' own config.json
files."""

MOST_MODULES = 2048

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def dtype_of(name: str) -> torch.dtype:
    """The torch dtype of a name. Raises InvalidInput."""
    return (
        DTYPES[name]
        if name in DTYPES
        else fail(InvalidInput, "dtype", repr(name), " | ".join(DTYPES))
    )


def names() -> tuple[str, ...]:
    """The bundled models: published shapes, then tiny ones."""
    from attnops.hf import tiny

    return (*SHAPES, *tiny.NAMES)


def config_of(model: str) -> Any:
    """The transformers config of a bundled name, a config.json, or a folder that holds one.

    Raises InvalidInput: no such name or file, no JSON, or a model_type that the installed
    transformers does not know. MissingExtra: transformers is not installed.
    """
    require(("transformers",), "hf")
    from attnops.hf import tiny

    if model in SHAPES:
        return _from_dict(dict(SHAPES[model]), model)
    if model in tiny.NAMES:
        return tiny.config(model)
    path = Path(model)
    try:
        path = path / "config.json" if path.is_dir() else path
        found, local = path.is_file(), model.endswith(".json") or path.parent.is_dir()
    except OSError:  # the name is too long for a file
        found = local = False
    if not found:
        hub = (
            f" (of the Hub: hf download {model} config.json)"
            if not local and re.fullmatch(r"[\w.-]+/[\w.-]+", model)
            else ""
        )
        fail(
            InvalidInput,
            "model",
            repr(model),
            f"a config.json{hub}, a folder with one, or one of {', '.join(names())}",
        )
    try:
        given = json.loads(read_text(path))
    except BadTable as error:
        raise InvalidInput("model", f"{path}: {error.got}", error.want) from None
    except (ValueError, OSError, RecursionError) as error:
        raise InvalidInput("model", f"{path} ({error})", "a JSON file") from None
    return _from_dict(given, str(path))


def _from_dict(given: Any, source: str) -> Any:
    from transformers import CONFIG_MAPPING

    kind = str(given.get("model_type")) if isinstance(given, dict) else "none"
    if kind not in CONFIG_MAPPING:
        fail(
            InvalidInput,
            "model_type",
            f"{kind!r} in {source}",
            "one that the installed transformers knows",
        )
    _check_counts(given)
    # Quantised weights do not change the attention calls, and need packages of their own.
    given.pop("quantization_config", None)
    try:
        return CONFIG_MAPPING[kind].from_dict(given)
    except Exception as error:  # a config class raises any error on an unknown file
        raise InvalidInput(
            "model", f"{source} ({one_line(error)})", f"a valid config of {kind}"
        ) from error


def _check_counts(given: dict[str, Any]) -> None:
    """Reject counts of modules that no model has: transformers builds modules one by one."""
    for name, value in given.items():
        if isinstance(value, dict):
            _check_counts(value)
        elif (
            isinstance(value, (int, float))
            and ("layers" in name or "experts" in name)
            and not value <= MOST_MODULES
        ):
            fail(InvalidInput, name, value, f"<= {MOST_MODULES}")


def build_fake(config: Any, dtype: torch.dtype) -> Any:
    """The decoder of `config` in evaluation mode, without memory if called under a FakeTensorMode.

    A composite config gives its text model. Raises InvalidInput: transformers has no causal
    language model for it.
    """
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM

    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        config = config.get_text_config(decoder=True)
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        fail(
            InvalidInput, "model_type", repr(config.model_type), "a decoder (AutoModelForCausalLM)"
        )
    # The default loop over experts reads the routing, and fake tensors hold no values.
    options = {"attn_implementation": "eager", "experts_implementation": "batched_mm"}
    return AutoModelForCausalLM.from_config(config, dtype=dtype, **options).eval()


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """Set the loggers of transformers and its imports to ERROR: their advice is for models with
    weights."""
    # transformers sets the level of its logger at import, which therefore comes first.
    if find_spec("transformers") is not None:
        import_module("transformers.utils.logging")
    levels = {
        logger: logger.level
        for logger in map(logging.getLogger, ("transformers", "torchao", "torch.utils._pytree"))
    }
    for logger in levels:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in levels.items():
            logger.setLevel(level)
