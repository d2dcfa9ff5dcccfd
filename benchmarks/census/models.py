"""A tiny model with random weights for every model type that transformers knows. Nothing is
downloaded."""

from __future__ import annotations

import contextlib
import importlib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from attnops.hf import tiny
from benchmarks.census.inputs import Inputs

Fields = dict[str, Any]
"""Of a config, by name."""

VOCAB = 99
LARGEST = 45_000_000
"""A model that still has more parameters than this after shrinking is not tiny."""

# The head that a type is built with: the first mapping that has the type.
_MAPPINGS = (
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES",
    "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES",
    "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES",
    "MODEL_FOR_CTC_MAPPING_NAMES",
    "MODEL_MAPPING_NAMES",
    "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES",
    "MODEL_FOR_PRETRAINING_MAPPING_NAMES",
)

# Fields that are integers: the first pattern that matches gives the value, unless the default is
# smaller.
_INTS: tuple[tuple[str, int], ...] = (
    (
        r"(.*_)?max_(position|source_position|target_position|seq_len|2d_position)\w*|n_positions|max_seq_len\w*|context_length",
        64,
    ),
    (r"num_position_embeddings|max_text_len|max_pos_emb", 64),
    (r"\w*vocab_size\w*|n_vocab", VOCAB),
    (r"num_feat_extract_layers", 99),
    (
        r"hidden_size_per_layer_input|index_head_dim|qk_head_dim|qk_nope_head_dim|qk_rope_head_dim|v_head_dim|\w*_head_dim|head_dim|d_kv",
        8,
    ),
    (r"d_head|dim_head|mamba_d_head|mamba_headdim|rotary_dim|attention_head_dim|\w*_dim_head", 8),
    (r"moe_intermediate_size|moe_\w*intermediate_size|expert_ffn_hidden_size", 16),
    (
        r"\w*intermediate_size\w*|\w*ffn_dim|d_ff|n_inner|mlp_dim|ffn_hidden_size|\w*feedforward_dim|d_inner|decoder_mlp_dim",
        48,
    ),
    (r"prediction_length", 4),
    (
        r"hidden_size|\w+_hidden_size|d_model|n_embd|embed_dim|emb_dim|hidden_dim|\w+_hidden_dim|dim|model_dim|width|embedding_size",
        32,
    ),
    (
        r"hidden_size_\w+|embedding_dim|projection_dim|\w+_embed_dim|projection_size|output_dim|d_embed|model_in_dim|query_dim|attention_hidden_size",
        32,
    ),
    (
        r"word_embed_proj_dim|pooler_output_size|classifier_proj_size|lru_width|state_size|linear_head_dim|feature_projection_input_dim|encoder_dim",
        32,
    ),
    (r"(\w+_)?num_key_value_heads|num_kv_heads|\w*num_kv_heads|\w*key_value_heads", 2),
    (r"index_n_heads|linear_num_key_heads|mamba_n_groups|n_groups|mamba_ngroups", 2),
    (
        r"num_attention_heads|\w*attention_heads|n_head|num_heads|n_heads|\w+_num_heads|mamba_n_heads|linear_num_value_heads|num_\w*heads",
        4,
    ),
    (
        r"num_hidden_layers|\w*num_hidden_layers|n_layers?|num_layers|(en|de)coder_layers|depth|num_(en|de)coder_layers|\w+_num_layers",
        2,
    ),
    (r"num_\w*_layers|resampler_depth|\w*_depth", 2),
    (r"(moe_)?num_(local_|routed_)?experts|n_routed_experts|moe_num_experts|num_experts", 4),
    (
        r"num_experts_per_tok|moe_topk|top_k|moe_k|num_experts_per_token|moe_top_k|num_selected_experts",
        2,
    ),
    (r"n_group|topk_group|first_k_dense_replace|n_shared_experts|num_shared_experts", 1),
    (
        r"\w*kv_lora_rank|\w*q_lora_rank|\w*lora_rank|laurel_rank|low_rank_dim|time_step_rank|mamba_dt_rank",
        16,
    ),
    (
        r"sliding_window|local_window_size|\w*chunk_size|index_topk|attention_window_size|window_size",
        4,
    ),
    (r"mamba_d_state|ssm_state_size|state_dim", 8),
    (r"image_size|\w*image_size|input_size|img_size", 32),
    (r"\w*patch_size", 8),
    (r"num_mel_bins|num_mel_bands|n_mels", 16),
    (r"feature_size|mask_feature_size", 32),
    (
        r"upsample_groups|context_size|num_filters|ple_embed_dim|vector_quantization_hidden_dimension",
        32,
    ),
    (
        r"num_conv_pos_embeddings|max_length|codebook_dim|codevector_dim|proj_codevector_dim|conv_dim",
        16,
    ),
    (
        r"codebook_size|num_embeddings|num_codevectors_per_group|audio_vocab_size|num_query_tokens|num_queries|num_latents",
        16,
    ),
)

_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_expand": 2}
_TIMES = {
    "prediction_length": 4,
    "context_length": 12,
    "num_parallel_samples": 2,
    "lags_sequence": [1, 2],
    "d_model": 32,
}
_THREE = {
    "num_hidden_layers": 4,
    "num_kv_shared_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}
_ROPE: Fields = {"rope_type": "default", "rope_theta": 10000.0}
# Rotary axes of time, height and width: half of the head's dimensions in all.
_MROPE = {"rope_parameters": {**_ROPE, "mrope_section": [2, 1, 1]}}
_MROPES = (
    "glm4v_text",
    "glm_image_text",
    "glm_ocr_text",
    "hunyuan_vl_text",
    "paddleocr_vl_text",
    "qwen2_vl_text",
    "qwen2_5_vl_text",
)
_MROPES += ("qwen2_5_omni_talker", "qwen2_5_omni_text")
_ROPES = {
    kind: {**_ROPE, "mrope_section": [1, 1, 2]} for kind in ("full_attention", "sliding_attention")
}

_FLOW = {"condition_dim": 32, "latent_dim": 32}
_CODEC = {"num_filters": 2}

# What a type needs besides, or instead. A string in place of a config is the type that stands
# there, and a pair such a type and its fields.
_OWN: dict[str, Fields] = {
    **dict.fromkeys(_MROPES, _MROPE),
    **dict.fromkeys(("PocketTTSFlowHeadConfig", "GradiumPhononTTSFlowHeadConfig"), _FLOW),
    **{
        f"vibevoice_{part}": _CODEC
        for part in (
            "acoustic_tokenizer",
            "acoustic_tokenizer_encoder",
            "acoustic_tokenizer_decoder",
        )
    },
    "FunAsrNanoAdaptorConfig": {"intermediate_size": 8},
    "apertus1p5": {"image_token_offset": 40, "audio_token_offset": 56},
    "apertus1p5_vision_tokenizer": {"base_channels": 32, "embed_dim": 32, "latent_channels": 32},
    "autoformer": {**_TIMES, "label_length": 2, "num_time_features": 1},
    "bailing_hybrid": {
        "num_hidden_layers": 4,
        "layer_group_size": 2,
        "layer_types": None,
        "mlp_layer_types": None,
        "num_expert_group": 1,
        "num_experts_per_token": 2,
    },
    "bamba": {**_MAMBA, "num_hidden_layers": 4, "attn_layer_indices": [1, 3]},
    "bridgetower": {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2},
    "bridgetower_text_model": {"hidden_size": 64},
    "bridgetower_vision_model": {"hidden_size": 64},
    "cohere_compass_text": {
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": _ROPES,
    },
    "chameleon": {
        "vocabulary_map": {f"<image{i}>": i for i in range(60, 90)} | {"<image>": 96},
        "image_token_id": 96,
    },
    "DbrxAttentionConfig": {"rope_theta": 10000.0, "clip_qkv": 8.0},
    "deepseek_ocr2_text": {
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "mlp_layer_types": ["dense", "sparse"],
    },
    "diffusion_gemma": {"vision_config": "gemma4_vision"},
    "diffusion_gemma_text": {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 16},
    "dory": {
        "num_hidden_layers": 4,
        "n_input_layers": 1,
        "n_recurrent_layers": 2,
        "n_output_layers": 1,
    },
    "dots1": {
        "n_shared_experts": 1,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 1,
    },
    "encoder-decoder": {"encoder": "bert", "decoder": "bert"},
    "ernie4_5_vl_moe_text": {
        "rope_parameters": {**_ROPE, "mrope_section": [1, 1, 2]},
        "moe_intermediate_size": [16, 16],
    },
    "esm": {"vocab_size": VOCAB, "mask_token_id": 4, "pad_token_id": 0},
    "falcon_h1": {
        "mamba_d_ssm": 32,
        "mamba_n_heads": 4,
        "mamba_d_head": 8,
        "mamba_n_groups": 1,
        "mamba_d_state": 8,
    },
    "gemma3n_text": {
        **_THREE,
        "intermediate_size": [48] * 4,
        "activation_sparsity_pattern": [0.5, 0.0] * 2,
        "altup_num_inputs": 2,
        "vocab_size_per_layer_input": VOCAB,
    },
    "dots3_note_audio_encoder": {
        "adapter_input_size": 32,
        "adapter_out_dim": 32,
        "downsample_hidden_size": 480,
        "feature_size": 128,
    },
    "dots3_note_vision_encoder": {"adapter_in_dim": 32, "adapter_out_dim": 32},
    "emu3": {"vocabulary_map": {f"<image{i}>": i for i in range(60, 90)} | {"<image>": 96}},
    "glm4v_moe_text": {**_MROPE, "head_dim": 16},
    "glm5_next_text": {"index_kpool": 2},
    "granite4_vision": {"text_config": "granite"},
    "granitemoehybrid": {
        **_MAMBA,
        "num_hidden_layers": 4,
        "layer_types": ["linear_attention", "full_attention"] * 2,
    },
    "informer": {**_TIMES, "num_time_features": 1, "distil": False},
    "jamba": {
        "num_hidden_layers": 4,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "use_mamba_kernels": False,
    },
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "llama4_vision_model": {
        "intermediate_size": 128,
        "vision_output_dim": 32,
        "projector_input_dim": 32,
        "projector_output_dim": 32,
    },
    "luke": {"entity_emb_size": 32},
    "mamba2": {"num_heads": 8, "head_dim": 8, "n_groups": 1, "expand": 2},
    "mllama_text_model": {"num_hidden_layers": 3, "cross_attention_layers": [1]},
    "molmo2_adapter": {"vision_feature_layer": [1, 0]},
    "molmo2_vision": {"image_size": [32, 32], "num_position_embeddings": 16},
    "moonshine_streaming": {"num_key_value_heads": 4},
    "muse_spark_audio": {"num_hidden_layers": 4, "hidden_sizes": [16] * 4, "out_hidden_size": 32},
    "musicgen": {"text_encoder": "t5", "audio_encoder": "encodec", "decoder": "musicgen_decoder"},
    "musicgen_melody": {
        "text_encoder": "t5",
        "audio_encoder": "encodec",
        "decoder": "musicgen_melody_decoder",
    },
    "nemotron_h_omni": {"vision_config": ("radio", {"video_temporal_patch_size": 2})},
    "neomme": {"head_dim": 16},
    "perceiver": {"d_latents": 32, "num_latents": 8, "qk_channels": 32, "v_channels": 32},
    "qwen4_exp_text": {
        "layer_types": ["linear_attention", "qwen_sparse_attention"],
        "num_hidden_layers": 2,
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 4,
        "indexer_compress_ratio": 2,
        "ngram_vocab_size_base": 64,
        "split_ngram_parts": 2,
    },
    "qwen2_5_omni_bigvgan": {"upsample_initial_channel": 128},
    "Qwen3OmniMoeTalkerConfig": {"spatial_merge_size": 2},
    "qwen3_omni_moe_talker_text": {"shared_expert_intermediate_size": 16},
    "reformer": {"axial_pos_embds_dim": [16, 16], "axial_pos_shape": [8, 8]},
    "speech-encoder-decoder": {"encoder": "wav2vec2", "decoder": "bert"},
    "t5gemma2_decoder": {"dropout_rate": 0.0},
    "t5gemma2_text": {"dropout_rate": 0.0},
    "time_series_transformer": {**_TIMES, "num_time_features": 1},
    "vision-encoder-decoder": {"encoder": "vit", "decoder": "bert"},
    "vision-text-dual-encoder": {"vision_config": "vit", "text_config": "bert"},
    "mobilebert": {
        "intra_bottleneck_size": 32,
        "hidden_size": 32,
        "embedding_size": 32,
        "true_hidden_size": 32,
    },
    "step3p5": {"sliding_window": 4},
    "wavtokenizer": {"codebook_dim": 32},
    "wavtokenizer_encoder": {"codebook_dim": 32},
    "wav2vec2-bert": {"vocab_size": VOCAB, "feature_projection_input_dim": 16},
    "xmod": {"default_language": "en_XX"},
    "zamba": {
        "num_hidden_layers": 4,
        "layers_block_type": ["linear_attention", "hybrid"] * 2,
        "use_mamba_kernels": False,
    },
}
# Decoders inside of encoder-decoder models.
_DECODER = {"is_decoder": True, "add_cross_attention": True}

# Fields that some types leave open, and then cannot be built.
_UNSET = {"num_key_value_heads": 4, "head_dim": 8, "vocab_size": VOCAB}

# Types that attnops' own tiny models have.
_TINY = ("deepseek_v2", "kimi_linear", "longcat_flash", "mistral4")

# Types whose first mapping names a part of the model.
_CLASSES = {
    "musicgen": "MusicgenForConditionalGeneration",
    "musicgen_melody": "MusicgenMelodyForConditionalGeneration",
}

_NAMES = [(re.compile(pattern), value) for pattern, value in _INTS]
_TOKEN = re.compile(r"\w*_(token_id|token_index|token|id)$")


@dataclass(frozen=True)
class Kind:
    """A model type of transformers. cls: the class it is built as; None: transformers names
    none."""

    name: str
    config: str
    cls: str | None


_NO_MODEL = ("layoutxlm", "nougat")
"""Types of configs that no model class has: their checkpoints are of other types."""


def kinds() -> dict[str, Kind]:
    """Every type that a model has, by name."""
    from transformers.models.auto import modeling_auto
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    rest = [
        n
        for n in dir(modeling_auto)
        if n.startswith("MODEL_FOR") and n.endswith("_MAPPING_NAMES") and n not in _MAPPINGS
    ]
    tables = [getattr(modeling_auto, name, {}) for name in (*_MAPPINGS, *rest)]
    found = {}
    for name, config in CONFIG_MAPPING_NAMES.items():
        if name in _NO_MODEL:
            continue
        cls = _CLASSES.get(name) or next((table[name] for table in tables if name in table), None)
        found[name] = Kind(name, config, cls[0] if isinstance(cls, (tuple, list)) else cls)
    return dict(sorted(found.items()))


def shrunk(cls: Any, **more: Any) -> Any:
    """A config of this class with small sizes, in its sub-configs too."""
    from transformers import PreTrainedConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    own = dict(_OWN.get(cls.model_type or cls.__name__, {}))
    for name, value in own.items():
        if isinstance(value, str) and value in CONFIG_MAPPING:
            own[name] = shrunk(
                CONFIG_MAPPING[value], **(_DECODER if (name, value) == ("decoder", "bert") else {})
            )
        elif isinstance(value, tuple):
            own[name] = shrunk(CONFIG_MAPPING[value[0]], **value[1])
    whole = {name: value for name, value in own.items() if isinstance(value, PreTrainedConfig)}
    if whole and getattr(cls, "has_no_defaults_at_init", False):
        return cls(**{name: value.to_dict() for name, value in whole.items()}, **more)
    default = cls(**whole)
    values: Fields = {}
    fields = {name: value for name, value in vars(default).items() if not name.startswith("_")}
    special = VOCAB
    for name, value in fields.items():
        if isinstance(value, PreTrainedConfig):
            values[name] = shrunk(type(value)) if name not in own else value
        elif name in _UNSET and value is None:
            values[name] = _UNSET[name]
        elif isinstance(value, bool) or value is None:
            continue
        elif name in ("initializer_range", "init_std"):
            # With random weights of the usual size the output would hardly depend on attention.
            values[name] = 0.2
        elif name == "initializer_factor":
            continue
        elif _TOKEN.fullmatch(name) and isinstance(value, int) and value > 3:
            special -= 1
            values[name] = special
        elif isinstance(value, int) and not (
            name == "embed_dim" and isinstance(fields.get("num_heads"), (list, tuple))
        ):
            values[name] = _int(name, value, fields)
    values |= _lists(fields, values)
    known = default.to_dict().keys() | fields.keys()
    values = {name: value for name, value in values.items() if name in known}
    values |= {**own, **more}
    try:
        return cls(**values)
    except TypeError as error:
        if "must be a mapping" not in str(error):
            raise
        return cls(
            **{
                name: value.to_dict() if isinstance(value, PreTrainedConfig) else value
                for name, value in values.items()
            }
        )


def _int(name: str, value: int, fields: Fields) -> int:
    small = next((small for pattern, small in _NAMES if pattern.fullmatch(name)), None)
    if small is None or value <= small:
        return value
    if "key_value" in name or "kv_heads" in name:
        heads = fields.get(
            name.replace("key_value", "attention"), fields.get("num_attention_heads")
        )
        return 4 if heads == value else min(value, 2)
    return small


def _lists(fields: Fields, values: Fields) -> Fields:
    """As many layers as it takes to have one of each type, and the lists by layer cut to that
    length."""
    found: Fields = {}
    count = fields.get("num_hidden_layers") or fields.get("num_layers") or 0
    lists = {
        name: value
        for name, value in fields.items()
        if isinstance(value, (list, tuple)) and not name.startswith("conv")
    }
    by_layer = {name: value for name, value in lists.items() if len(value) == count and count > 4}
    need = 2
    for value in by_layer.values():
        if all(isinstance(x, (str, bool, int)) for x in value):
            firsts = [list(value).index(x) for x in dict.fromkeys(value)]
            need = max(need, max(firsts) + 1 if max(firsts) < 8 else 2)
    if by_layer:
        for name in ("num_hidden_layers", "num_layers"):
            if isinstance(fields.get(name), int):
                found[name] = need
        found |= {name: list(value)[:need] for name, value in by_layer.items()}
    if isinstance(fields.get("use_sliding_window"), bool) and "layer_types" in fields:
        found |= {
            "use_sliding_window": True,
            "sliding_window": 4,
            "max_window_layers": 1,
            "layer_types": None,
        }
    for name in ("rope_parameters", "rope_scaling"):
        rope = fields.get(name)
        if isinstance(rope, dict) and "mrope_section" in rope:
            found[name] = {**rope, "mrope_section": [2, 1, 1]}
    if isinstance(fields.get("conv_dim"), (list, tuple)):
        found["conv_dim"] = [16] * len(fields["conv_dim"])
    depths = fields.get("depths")
    if isinstance(depths, (list, tuple)):
        found["depths"] = [1] * len(depths)
    for name in ("deepstack_visual_indexes", "fullatt_block_indexes", "global_attn_indexes"):
        if isinstance(fields.get(name), (list, tuple)):
            found[name] = [1]
    return found


def config_of(kind: Kind) -> Any:
    """The small config of a type."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    return tiny.config(kind.name) if kind.name in _TINY else shrunk(CONFIG_MAPPING[kind.name])


def _class_with(kind: Kind) -> Any:
    """The class of a type that is a part of other models: the first one in their file that has this
    config."""
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    config = CONFIG_MAPPING[kind.name]
    module = importlib.import_module(config.__module__.replace("configuration_", "modeling_"))
    stem = config.__name__.removesuffix("Config")
    every = {
        n: cls
        for n, cls in vars(module).items()
        if isinstance(cls, type) and issubclass(cls, transformers.PreTrainedModel)
    }
    named = [
        every.get(name)
        for name in (
            f"{stem}Model",
            stem,
            f"{stem}TextModel",
            f"{stem.removesuffix('Text')}TextModel",
        )
    ]
    # A base class of a family's models has layers of none. Those that have the config by themselves
    # are before those that inherit it.
    whole = [
        cls
        for cls in every.values()
        if not cls.__name__.endswith("PreTrainedModel")
        and getattr(cls, "config_class", None) is config
    ]
    found = next(
        filter(None, (*named, *sorted(whole, key=lambda cls: "config_class" not in vars(cls)))),
        None,
    )
    if found is None:
        raise ValueError("no model class of transformers takes its config")
    return found


def class_of(kind: Kind) -> Any:
    """The class that a type is built as. Raises ValueError when there is none."""
    import transformers

    cls = getattr(transformers, kind.cls, None) if kind.cls is not None else None
    return cls or _class_with(kind)


@dataclass(frozen=True)
class Recipe:
    """How a model is built.

    cls: its class. config: makes its config. inputs: those to try first, or None.
    source: where they come from, "" where the census made them.
    part: the path of the module that is looked at, "" for the whole model. All of it is patched.
    """

    cls: Any
    config: Callable[[], Any]
    inputs: Inputs | None = None
    source: str = ""
    part: str = ""


def own(kind: Kind) -> Recipe:
    """The recipe of the census. Raises ValueError: the type has no class."""
    return Recipe(class_of(kind), partial(config_of, kind))


def config_class(kind: Kind) -> Any:
    """The class of its config."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    return CONFIG_MAPPING[kind.name]


def chosen(recipe: Recipe) -> dict[str, str]:
    """The implementation of attention that transformers itself chooses, for each module that has a
    config, by path."""
    with torch.random.fork_rng(devices=[]):
        model = recipe.cls._from_config(recipe.config(), dtype=torch.float32).get_submodule(
            recipe.part
        )
    found = {
        path: getattr(getattr(module, "config", None), "_attn_implementation_internal", None)
        for path, module in model.named_modules()
    }
    return {path: name for path, name in found.items() if name is not None}


@contextlib.contextmanager
def _marked() -> Iterator[None]:
    """Within the block, memory that is not initialised holds NaN: some classes leave weights so."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def build(recipe: Recipe, seed: int = 0) -> Any:
    """A float32 model on the CPU in eval mode with eager attention. Raises what transformers
    raises, or ValueError when it stays large."""
    cls, config = recipe.cls, recipe.config()
    try:
        with torch.device("meta"):
            size = sum(
                p.numel()
                for p in cls._from_config(config, attn_implementation="eager").parameters()
            )
    except RuntimeError:
        size = 0  # rotary tables that cannot be made there
    if size > LARGEST:
        raise ValueError(f"its smallest build has {size / 1e6:.0f} million parameters")
    torch.manual_seed(seed)
    with _marked():
        model = cls._from_config(recipe.config(), attn_implementation="eager", dtype=torch.float32)
    for parameter in model.parameters():
        # Weights that start at zero, as gates and sinks do, would hide what they gate.
        if parameter.is_floating_point() and (
            not torch.isfinite(parameter).all() or not parameter.any()
        ):
            torch.nn.init.normal_(parameter, std=0.1)
    return model.eval()
