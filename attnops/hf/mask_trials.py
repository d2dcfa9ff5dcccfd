"""Tries a model before it is patched, on a small twin of it, where transformers does not route it
through sdpa.

A class with `_supports_sdpa = False` may rely on the arguments of eager attention: additive masks
in every call, and an `is_causal` that is never read. Such a model is served with ordinary masks
only if its class supports flash or flex attention, and a small twin with random weights gives
eager's numbers with them. Else it is given additive masks, once that was tried, too.
"""

from __future__ import annotations

import copy
import inspect
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from attnops.adapters.report import TOLERANCES, compare, evaluating, outputs_of
from attnops.core.errors import PatchError, fail
from attnops.core.private_torch import FakeTensor, unset_fake_temporarily
from attnops.core.problem import pretend
from attnops.hf.attention.mask import Mode
from attnops.hf.cache import names as cache_names
from attnops.hf.interface import Options, implementation
from attnops.hf.models.attention_modules import Match, match, routed
from attnops.hf.models.trial import Trial, answer
from attnops.hf.report import attending

_TOLERANCE = {**TOLERANCES, torch.float32: 1e-4}

MOST_WEIGHTS = 100_000_000  # a twin of more is not built
BATCH, LENGTH = 3, 12

_LAYERS = (
    "num_hidden_layers",
    "num_layers",
    "n_layer",
    "n_layers",
    "encoder_layers",
    "decoder_layers",
    "num_decoder_layers",
    "num_spatial_layers",
    "num_temporal_layers",
    "num_auxiliary_layers",
)
_HEADS = (
    "o_groups",
    "num_attention_heads",
    "num_key_value_heads",
    "encoder_attention_heads",
    "decoder_attention_heads",
    "num_heads",
    "n_head",
)
_WIDTHS = ("hidden_size", "d_model", "n_embd", "embed_dim")
_INNER = (
    "intermediate_size",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
    "encoder_ffn_dim",
    "decoder_ffn_dim",
    "ffn_dim",
)
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


class Subject(NamedTuple):
    """A model to try on. configs: those to switch. feed: inputs it takes."""

    model: Any
    configs: list[Any]
    feed: dict[str, Tensor]


def served(owner: nn.Module, found: Match, asked: Options) -> tuple[Options, str]:
    """The options that the model is served with, and how they were tried. Raises PatchError: none
    will do."""
    if not found.unrouted:
        return replace(
            asked, mask="explicit"
        ) if found.explicit and asked.mask != "additive" else asked, ""
    mode, how = prove(owner, found, asked)
    if mode is None:
        fail(
            PatchError,
            f"patch: {type(owner).__name__} is not served: transformers does not route it "
            f"through sdpa, and {how}",
        )
    if asked.cache == "paged" and mode == "additive":
        why = "which needs the additive masks of eager attention, and pages take none"
        fail(PatchError, f'patch: cache="paged" got {type(owner).__name__}, {why}; want cache="hf"')
    trusted = all(routed(type(site.module)) for site in found.sites if site.reason is None)
    return replace(asked, mask=mode, proven=mode != "additive" and not trusted), how


def prove(model: Any, found: Match, asked: Options) -> tuple[Mode | None, str]:
    """(the masks that gave eager's numbers or None, how they were tried): on a twin, or on `model`
    itself where none can be built."""
    flexible = all(
        getattr(cls, "_supports_flash_attn", False) or getattr(cls, "_supports_flex_attn", False)
        for cls in found.unrouted
    )
    # A class that computes with masks knows eager's.
    ordinary = flexible and asked.mask != "additive" and not found.explicit
    why: list[str] = []
    with unset_fake_temporarily(), pretend(None), torch.no_grad():
        subject, name = next(_subjects(model), (None, ""))
        if subject is None:
            return (
                None,
                f"no small twin of {type(model).__name__} runs, nor does it with the inputs "
                "known here: it was not tried",
            )
        modes: tuple[Mode, ...] = (asked.mask, "additive") if ordinary else ("additive",)
        for mode in modes:
            failed = _fails(subject, mode)
            if failed is None:
                return (
                    mode,
                    f"{', '.join(cls.__name__ for cls in found.unrouted)}: tried on {name}, with "
                    "and without padding",
                )
            why.append(f"with {mode} masks it {failed}")
    return None, f"{name} of {type(model).__name__} was tried: " + "; ".join(why)


def _subjects(model: Any) -> Iterator[tuple[Subject, str]]:
    """The models that run, a twin or the model itself, with inputs that they take."""
    for one, name in (
        (one, name)
        for ones, name in ((twins(model), "a small twin"), ([model], "a short run"))
        for one in ones
    ):
        if any(p.is_meta or isinstance(p, FakeTensor) for p in one.parameters()):
            continue
        configs = match(one).configs
        for feed in _feeds(one):
            subject = Subject(one, configs, feed)
            with evaluating(one):
                runs = answer(_outputs, subject, "eager", feed, False)
            if runs:
                yield subject, name


@dataclass(frozen=True)
class _Trial(Trial):
    """A run of a model with eager attention. name: of the run. visible: masks of the positions that
    count."""

    name: str
    visible: tuple[Tensor, ...]


def _fails(subject: Subject, mode: Mode) -> str | None:
    tried: tuple[Mode, ...] = ("dense", "compact") if mode == "auto" else (mode,)
    with evaluating(subject.model):
        trials = list(_trials(subject))
        for one, trial in itertools.product(tried, trials):
            name = implementation(Options(mask=one, proven=True))
            if why := _why_failed(subject, name, trial, f"({one}, {trial.name})"):
                return why
    return None


def _trials(subject: Subject) -> Iterator[_Trial]:
    """Of each run that the model takes."""
    for name, inputs, visible in _runs(subject):
        eager = answer(_outputs, subject, "eager", inputs, name == "steps")
        if eager is not None:
            yield _Trial(inputs, eager, name, visible)


def _why_failed(subject: Subject, name: str, trial: _Trial, how: str) -> str:
    """What is wrong with the outputs by the implementation `name`; "" where they are eager's. how:
    for the text."""
    try:
        ours = _outputs(subject, name, trial.inputs, trial.name == "steps")
    except Exception as error:
        return f"raised {type(error).__name__} {how}: {' '.join(str(error).split())[:160]}"
    for key, want in trial.want.items():
        limit = _TOLERANCE.get(want.dtype, 1e-4)
        counts = next((m for m in trial.visible if m.shape == want.shape[:2]), None)
        figures = compare(ours[key], want, counts, key, limit)
        if not figures.max_rel <= limit:
            return f"differs from eager {how}: {key} is off by {figures.max_rel:.1e}"
    return ""


def _runs(subject: Subject) -> Iterator[tuple[str, dict[str, Tensor], tuple[Tensor, ...]]]:
    """(name, inputs, masks of positions that count): without padding, with padding on both sides,
    and in two steps over a cache."""
    parameters, feed = _parameters(subject.model), subject.feed
    yield "no padding", feed, ()
    masks: dict[str, Tensor] = {}
    for name in ("input_ids", "input_features", "decoder_input_ids"):
        mask = "decoder_attention_mask" if name.startswith("decoder") else "attention_mask"
        if mask in parameters and name in feed and mask not in masks:
            masks[mask] = torch.ones(
                feed[name].shape[:2], dtype=torch.int64, device=feed[name].device
            )
            masks[mask][0, :3] = masks[mask][1, -2:] = 0
    if masks:
        yield "padding", {**feed, **masks}, tuple(masks.values())
    if (
        cache_names.model_takes_cache(type(subject.model))
        and "use_cache" in parameters
        and set(feed) == {"input_ids"}
        and masks
    ):
        left = masks["attention_mask"].clone()
        left[1] = 1
        yield "steps", {**feed, "attention_mask": left}, ()


def _parameters(model: Any) -> Any:
    return inspect.signature(type(model).forward).parameters


def _outputs(
    subject: Subject, name: str, inputs: dict[str, Tensor], steps: bool
) -> dict[str, Tensor]:
    model = subject.model
    first = next(model.parameters())
    given = {
        key: x.to(first.device, first.dtype if x.is_floating_point() else x.dtype)
        for key, x in inputs.items()
    }
    # Some models draw at random, in eval mode, too.
    with (
        attending(subject.configs, name),
        torch.random.fork_rng(devices=[first.device] if first.is_cuda else []),
    ):
        torch.manual_seed(0)
        if not steps:
            return outputs_of(model(**given))
        ids, mask = given["input_ids"], given["attention_mask"]
        begun = model(input_ids=ids[:, :-1], attention_mask=mask[:, :-1], use_cache=True)
        if (cache := cache_names.cache_of(begun)) is None:
            return {}
        last = {"input_ids": ids[:, -1:], "attention_mask": mask, "use_cache": True}
        return outputs_of(model(**last, **cache_names.argument(model, cache)))


def twins(model: Any) -> Iterator[Any]:
    """float32 CPU models in eval mode, of `model`'s class, with eager attention: the smallest
    first, and none that the class refuses."""
    for narrow, shallow in ((True, True), (False, True), (False, False)):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            built = answer(_built, type(model), _smaller(model.config, narrow, shallow))
        if built is not None:
            yield built.eval()


def _built(cls: Any, config: Any) -> Any:
    """None: it would have too many weights."""
    with torch.device("meta"):
        weights = sum(p.numel() for p in cls(copy.deepcopy(config)).parameters())
    if weights > MOST_WEIGHTS:
        return None
    with torch.device("cpu"):
        return cls._from_config(config, attn_implementation="eager", dtype=torch.float32)


def _smaller(config: Any, narrow: bool, shallow: bool) -> Any:
    config = copy.deepcopy(config)
    for part in _parts(config):
        if hasattr(part, "quantization_config"):
            del part.quantization_config
        for name in ("initializer_range", "init_std"):
            # With random weights of the usual spread the output hardly depends on attention.
            if getattr(part, name, None) is not None:
                setattr(part, name, 0.2)
        if shallow:
            _fewer_layers(part)
            # Shorter than the inputs, so that it is tried.
            _at_most(part, ("sliding_window",), LENGTH // 2)
        if narrow:
            _narrower(part)
    return config


def _parts(config: Any) -> Iterator[Any]:
    yield config
    for name in getattr(config, "sub_configs", {}):
        if (part := getattr(config, name, None)) is not None:
            yield from _parts(part)


def _fewer_layers(config: Any) -> None:
    for name in _LAYERS:
        count = getattr(config, name, None)
        if not isinstance(count, int) or count <= 2:
            continue
        kinds = getattr(config, "layer_types", None)
        own = kinds if isinstance(kinds, (list, tuple)) and len(kinds) == count else [None] * count
        kept = sorted({0, 1, *(i for i, kind in enumerate(own) if kind not in own[:i])})
        for each, values in list(vars(config).items()):
            if isinstance(values, (list, tuple)) and len(values) == count:
                setattr(config, each, type(values)(values[i] for i in kept))
        setattr(config, name, len(kept))


def _narrower(config: Any) -> None:
    heads, widths = _numbers(config, _HEADS), _numbers(config, _WIDTHS)
    common = math.gcd(*heads.values(), *widths.values()) if heads and widths else 1
    factor = max(
        f
        for f in range(1, common + 1)
        if common % f == 0 and (f == 1 or min(heads.values()) // f >= 2)
    )
    for name, n in {**heads, **widths}.items():
        setattr(config, name, n // factor)
    _at_most(config, _INNER, 128)
    _at_most(config, _EXPERTS, max(8, int(getattr(config, "num_experts_per_tok", None) or 1)))
    words = getattr(config, "vocab_size", None)
    if isinstance(words, int) and words > 1024:
        _at_most(config, tuple(name for name in vars(config) if name.endswith("_token_id")), 1023)
        config.vocab_size = 1024


def _numbers(config: Any, names: tuple[str, ...]) -> dict[str, int]:
    """Those above 1 that the config has, each under the one name it is kept by."""
    own = {getattr(config, "attribute_map", {}).get(name, name) for name in names}
    return {
        name: n
        for name in sorted(own)
        if isinstance(n := getattr(config, name, None), int) and n > 1
    }


def _at_most(config: Any, names: tuple[str, ...], most: int) -> None:
    for name, n in _numbers(config, names).items():
        setattr(config, name, min(n, most))


def _feeds(model: Any) -> Iterator[dict[str, Tensor]]:
    """Inputs that the model may take, the fewest first."""
    parameters, config = _parameters(model), model.config
    decodes = getattr(config, "is_encoder_decoder", False)
    shapes = {
        name: shape
        for name, shape in _shapes(config).items()
        if name in parameters and (decodes or not name.startswith("decoder_"))
    }
    known = {name: _filled(name, (BATCH, *shape), config) for name, shape in shapes.items()}
    text = ("input_ids", "decoder_input_ids", "future_values", "future_time_features")
    few = {
        name: value
        for name, value in known.items()
        if parameters[name].default is inspect.Parameter.empty or name in text
    }
    main = {
        name: value for name, value in known.items() if name in (*text[1:], model.main_input_name)
    }
    yield from filter(None, (few, main, known))


def _shapes(config: Any) -> dict[str, tuple[int, ...]]:
    """By the name of a model's argument, without the batch."""

    def size(default: int, *names: str) -> int:
        found = [
            int(n)
            for part in _parts(config)
            for name in names
            if isinstance(n := getattr(part, name, None), int)
        ]
        return found[0] if found else default

    image = (size(3, "num_channels"), size(64, "image_size"), size(64, "image_size"))
    bands = size(80, "input_feat_per_channel", "num_mel_bins")
    spectra = any(hasattr(part, "spec_size") for part in _parts(config))
    past = size(LENGTH, "context_length") + int(max(getattr(config, "lags_sequence", None) or [0]))
    ahead = size(LENGTH, "prediction_length")
    times = size(0, "num_time_features")
    values = size(1, "input_size", "num_input_channels")
    series = (past, values) if values > 1 else (past,)
    return {
        "input_ids": (LENGTH,),
        "decoder_input_ids": (LENGTH,),
        "timesteps": (LENGTH,),
        "pixel_values": image,
        "pixel_values_videos": (size(4, "num_frames"), *image),
        "input_features": (1, 64, bands) if spectra else (40, bands),
        "past_values": series,
        "past_observed_mask": series,
        "past_time_features": (past, times),
        "future_values": (ahead,),
        "future_time_features": (ahead, times),
        "static_categorical_features": (size(0, "num_static_categorical_features"),),
        "static_real_features": (size(0, "num_static_real_features"),),
        "states": (LENGTH, size(1, "state_dim")),
        "actions": (LENGTH, size(1, "act_dim")),
        "rewards": (LENGTH, 1),
        "returns_to_go": (LENGTH, 1),
    }


def _filled(name: str, shape: tuple[int, ...], config: Any) -> Tensor:
    seed = torch.Generator().manual_seed(0)
    if name.endswith("input_ids"):
        words = (
            n
            for part in _parts(config.get_text_config())
            if isinstance(n := getattr(part, "vocab_size", None), int)
        )
        return torch.randint(3, min(next(words, 100), 100), shape, generator=seed)
    if name == "timesteps":
        return torch.arange(LENGTH).expand(shape)
    if name in ("past_observed_mask", "static_categorical_features"):
        return (
            torch.ones(shape)
            if name == "past_observed_mask"
            else torch.zeros(shape, dtype=torch.int64)
        )
    return torch.randn(shape, generator=seed)
