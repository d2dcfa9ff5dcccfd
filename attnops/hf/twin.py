"""A small model of another model's class, with random weights, and inputs for it: for trials that would be costly with the large model."""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

MOST_WEIGHTS = 100_000_000
"""A model of no more is tried as it is. A twin of more is not built."""

BATCH, LENGTH = 3, 12

_LAYERS = (
    "num_hidden_layers", "num_layers", "n_layer", "n_layers", "encoder_layers", "decoder_layers", "num_decoder_layers",
    "num_spatial_layers", "num_temporal_layers", "num_auxiliary_layers",
)  # fmt: skip
_HEADS = (
    "o_groups", "num_attention_heads", "num_key_value_heads", "encoder_attention_heads", "decoder_attention_heads", "num_heads", "n_head",
)  # fmt: skip
_WIDTHS = ("hidden_size", "d_model", "n_embd", "embed_dim")
_INNER = ("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size", "encoder_ffn_dim", "decoder_ffn_dim", "ffn_dim")
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
_SPREAD = ("initializer_range", "init_std")


def twins(model: Any) -> Iterator[Any]:
    """float32 CPU models in eval mode, of `model`'s class, with eager attention: the smallest first, and none that the class refuses."""
    for config in _configs(model):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            try:
                with torch.device("meta"):
                    weights = sum(p.numel() for p in type(model)(copy.deepcopy(config)).parameters())
                if weights > MOST_WEIGHTS:
                    continue
                with torch.device("cpu"):
                    built = type(model)._from_config(config, attn_implementation="eager", dtype=torch.float32)
            except Exception:  # a class may raise anything at a config that it does not like
                continue
        yield built.eval()


def _configs(model: Any) -> Iterator[Any]:
    """Configs that ask less and less of a class: fewer layers and smaller widths, fewer layers, and unchanged."""
    for narrow, shallow in ((True, True), (False, True), (False, False)):
        config = copy.deepcopy(model.config)
        for part in _parts(config):
            if hasattr(part, "quantization_config"):
                del part.quantization_config
            for name in _SPREAD:
                # With random weights of the usual spread the output hardly depends on attention.
                _set(part, name, 0.2)
            if shallow:
                _fewer_layers(part)
                # Shorter than the inputs, so that it is tried.
                for name, n in _numbers(part, ("sliding_window",)).items():
                    setattr(part, name, min(n, LENGTH // 2))
            if narrow:
                _narrower(part)
        yield config


def _parts(config: Any) -> Iterator[Any]:
    yield config
    for name in getattr(config, "sub_configs", {}):
        part = getattr(config, name, None)
        if part is not None:
            yield from _parts(part)


def _set(config: Any, name: str, value: Any) -> None:
    if getattr(config, name, None) is not None:
        setattr(config, name, value)


def _fewer_layers(config: Any) -> None:
    for name in _LAYERS:
        count = getattr(config, name, None)
        if not isinstance(count, int) or count <= 2:
            continue
        kinds = getattr(config, "layer_types", None)
        own = kinds if isinstance(kinds, (list, tuple)) and len(kinds) == count else [None] * count
        firsts = [i for i, kind in enumerate(own) if kind not in own[:i]]
        kept = sorted({*firsts, *range(2)})
        for each, values in list(vars(config).items()):
            if isinstance(values, (list, tuple)) and len(values) == count:
                setattr(config, each, type(values)(values[i] for i in kept))
        setattr(config, name, len(kept))


def _narrower(config: Any) -> None:
    heads, widths = _numbers(config, _HEADS), _numbers(config, _WIDTHS)
    common = math.gcd(*heads.values(), *widths.values()) if heads and widths else 1
    factor = max(f for f in range(1, common + 1) if common % f == 0 and (f == 1 or min(heads.values()) // f >= 2))
    for name, n in {**heads, **widths}.items():
        setattr(config, name, n // factor)
    for name, n in _numbers(config, _INNER).items():
        setattr(config, name, min(n, 128))
    for name, n in _numbers(config, _EXPERTS).items():
        setattr(config, name, min(n, max(8, int(getattr(config, "num_experts_per_tok", None) or 1))))
    _fewer_words(config)


def _numbers(config: Any, names: tuple[str, ...]) -> dict[str, int]:
    """Those that the config has, each under the one name it is kept by."""
    own = {getattr(config, "attribute_map", {}).get(name, name) for name in names}
    return {name: n for name in sorted(own) if isinstance(n := getattr(config, name, None), int) and n > 1}


def _fewer_words(config: Any) -> None:
    words = getattr(config, "vocab_size", None)
    if not isinstance(words, int) or words <= 1024:
        return
    config.vocab_size = 1024
    for name, value in list(vars(config).items()):
        if name.endswith("_token_id") and isinstance(value, int):
            setattr(config, name, min(value, 1023))


# Something to feed it -------------------------------------------------------------------------------------------------


def feeds(model: Any) -> Iterator[dict[str, Tensor]]:
    """Inputs that the model may take, the fewest first."""
    parameters = inspect.signature(type(model).forward).parameters
    known = {name: make(model.config) for name, make in _INPUTS.items() if name in parameters}
    if not getattr(model.config, "is_encoder_decoder", False):
        known = {name: value for name, value in known.items() if not name.startswith("decoder_")}
    text = ("input_ids", "decoder_input_ids", "future_values", "future_time_features")
    needed = {name for name, p in parameters.items() if p.default is p.empty}
    few = {name: value for name, value in known.items() if name in needed or name in text}
    main = {name: value for name, value in known.items() if name in (*text[1:], model.main_input_name)}
    for feed in (few, main, known):
        if feed:
            yield feed


def _number(config: Any, *names: str, default: int) -> int:
    found = [int(value) for part in _parts(config) for name in names if isinstance(value := getattr(part, name, None), int)]
    return found[0] if found else default


def _random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def _words(config: Any) -> Tensor:
    most = _number(config.get_text_config(), "vocab_size", default=100)
    return torch.randint(3, min(most, 100), (BATCH, LENGTH), generator=torch.Generator().manual_seed(0))


def _pixels(config: Any) -> tuple[int, int, int]:
    side = _number(config, "image_size", default=64)
    return _number(config, "num_channels", default=3), side, side


def _features(config: Any) -> Tensor:
    bands = _number(config, "input_feat_per_channel", "num_mel_bins", default=80)
    images = any(hasattr(part, "spec_size") for part in _parts(config))
    return _random(BATCH, 1, 64, bands) if images else _random(BATCH, 40, bands)


def _past(config: Any) -> int:
    lags = getattr(config, "lags_sequence", None) or [0]
    return _number(config, "context_length", default=LENGTH) + int(max(lags))


def _past_values(config: Any) -> Tensor:
    size = _number(config, "input_size", "num_input_channels", default=1)
    return _random(BATCH, _past(config), size) if size > 1 else _random(BATCH, _past(config))


_INPUTS: dict[str, Callable[[Any], Tensor]] = {
    "input_ids": _words,
    "decoder_input_ids": _words,
    "pixel_values": lambda config: _random(BATCH, *_pixels(config)),
    "pixel_values_videos": lambda config: _random(BATCH, _number(config, "num_frames", default=4), *_pixels(config)),
    "input_features": _features,
    "past_values": _past_values,
    "past_observed_mask": lambda config: torch.ones_like(_past_values(config)),
    "past_time_features": lambda config: _random(BATCH, _past(config), _number(config, "num_time_features", default=0)),
    "future_values": lambda config: _random(BATCH, _number(config, "prediction_length", default=LENGTH)),
    "future_time_features": lambda config: _random(
        BATCH, _number(config, "prediction_length", default=LENGTH), _number(config, "num_time_features", default=0)
    ),
    "static_categorical_features": lambda config: torch.zeros(
        BATCH, _number(config, "num_static_categorical_features", default=0), dtype=torch.int64
    ),
    "static_real_features": lambda config: _random(BATCH, _number(config, "num_static_real_features", default=0)),
    "states": lambda config: _random(BATCH, LENGTH, _number(config, "state_dim", default=1)),
    "actions": lambda config: _random(BATCH, LENGTH, _number(config, "act_dim", default=1)),
    "rewards": lambda config: _random(BATCH, LENGTH, 1),
    "returns_to_go": lambda config: _random(BATCH, LENGTH, 1),
    "timesteps": lambda config: torch.arange(LENGTH).expand(BATCH, LENGTH),
}
"""By the name of a model's argument."""
