"""The models that `cache="paged"` serves, and the sizes of their pages.

An MLA model (DeepSeek-V2 and its kin in transformers, from 5.15) compresses keys and values into a
latent, hands that to the cache, and unfolds the latents that the cache returns in its method
`expand_kv`. While a model is patched, a method of the instance lets latents for pages through, and
hands all others on to the method of the class. All other models keep keys and values.
"""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin, DynamicCache

from attnops.adapters.report import evaluating
from attnops.core.errors import InvalidInput, PatchError, fail
from attnops.core.private_torch import FakeTensor
from attnops.core.problem import Problem, pretend
from attnops.core.record import need
from attnops.hf.cache import names as cache_names
from attnops.hf.cache.own_class import own_class, sizes_in, takes_any
from attnops.hf.cache.paged_cache import PagedKeyCache
from attnops.hf.models.attention_modules import Match, Site
from attnops.hf.models.latents import ABSORB_UP_TO, dims_of
from attnops.hf.models.states import StateSizes
from attnops.hf.private import PREPARE, changed
from attnops.nn.latent import absorbed_weights
from attnops.ops.pages.plan import paged_layers

# Of the largest number: how far two ways to unfold a latent may differ. Rounding of quantised
# weights is less, a mistake is more.
ROUNDING = 0.05
_LATENT_SIZES = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "layer_idx")


def phases(module: nn.Module, window: int | None) -> str:
    """The ways in which a layer attends, for the report. window: of its pages, 0: none; None: it
    has no pages."""
    latent = is_latent(module)
    if window is None:
        return "expanded in prefill and decode" if latent else ""
    if latent:
        return (
            f"prefill into an empty cache (more than {ABSORB_UP_TO} new token) expanded, "
            "decode and every later token absorbed"
        )
    again = f"; pages behind the window of {window} are used again" if window else ""
    return (
        "prefill into an empty cache (more than 1 new token) among its own tokens, decode "
        f"and every later token over pages{again}"
    )


def where(module: nn.Module, model: nn.Module | None = None) -> tuple[torch.device, torch.dtype]:
    """(device, dtype) of a module's computation. Weights that accelerate offloads are on meta until
    they are used.

    model: gives the dtype where all weights of the module are quantised, and the device where it
    has none.
    """
    if (found := _by_first_weights(module)) is not None:
        return found
    placed: Tensor | None = None
    dtype: torch.dtype | None = None
    parts = [module] if model is None else [module, model]
    for each in (inner for part in parts for inner in part.modules()):
        if own := _weights_of(each):
            placed = own[0] if placed is None else placed
            dtype = _dtype_of(own)
        if dtype is not None:
            break
    device = torch.device("cpu") if placed is None else placed.device
    if device.type == "meta":
        device = _runs_on(module, device)
    return device, torch.get_default_dtype() if dtype is None else dtype


def _by_first_weights(module: nn.Module) -> tuple[torch.device, torch.dtype] | None:
    """As `where`, of a module whose own weights say it, or its first part's, as those of most
    layers do; else None. It is asked of every layer at each `generate()`."""
    first = next(iter(module._modules.values()), None)
    own = _weights_of(module) or ([] if first is None else _weights_of(first))
    dtype = _dtype_of(own) if own else None
    return None if dtype is None or own[0].is_meta else (own[0].device, dtype)


def _weights_of(module: nn.Module) -> list[Tensor]:
    return [p for p in module._parameters.values() if p is not None]


def _runs_on(module: nn.Module, device: torch.device) -> torch.device:
    """The device that accelerate's hooks name; `device` where they name none."""
    hooks = (getattr(m, "_hf_hook", None) for m in module.modules())
    named = (getattr(hook, "execution_device", None) for hook in hooks)
    found = next((each for each in named if each is not None), device)
    return torch.device("cuda", found) if isinstance(found, int) else torch.device(found)


def _dtype_of(own: Sequence[Tensor]) -> torch.dtype | None:
    """That of the first weight of one module, where none is quantised."""
    dtypes = [p.dtype for p in own]
    # A module with weights of one byte also has their scales, often float32 in any layer.
    if min(dtype.itemsize for dtype in dtypes) <= 1:
        return None
    return next((dtype for dtype in dtypes if dtype.is_floating_point), None)


def refuse_unless(ok: object, why: str) -> None:
    """Raise PatchError, with the reason against pages, unless `ok`."""
    if not ok:
        fail(PatchError, f'patch: cache="paged" {why}')


def check_generate(owner: Any) -> None:
    """Raise PatchError unless `generate()` of the model asks transformers' own method for its
    cache, with the arguments that are known."""
    model, theirs = type(owner).__name__, getattr(GenerationMixin, PREPARE, None)
    why = changed(PREPARE)
    refuse_unless(not why, f"got {model}, for whose generate() it makes no cache: {why}")
    own = getattr(type(owner), PREPARE, None) is not theirs
    refuse_unless(
        not own,
        f"got {model}, whose {PREPARE} is its own; want transformers', in whose place it makes "
        "the cache",
    )


def why_unsupported(
    owner: Any, found: Match, sites: Sequence[Site], latents: bool, graphed: bool
) -> Iterator[str]:
    """Each reason against pages that is known before layers are looked at. Raises PatchError for a
    module of latents that differs.

    sites: those that would have pages, of latents or of keys and values. graphed: may steps be in
    graphs, over states of ours?
    """
    model = type(owner).__name__
    if moving := _first(sites, lambda site: site.usage and site.usage.moves):
        yield (
            f"got {model}, whose {moving} keeps keys in other layers of its cache than its "
            'own, as in a loop; want cache="hf"'
        )
    if not latents:
        yield from _why_no_keys(owner, found, sites, graphed)
        return
    others = [
        f"{site.path} ({type(site.module).__name__})"
        for site in sites
        if not is_latent(site.module)
    ]
    if others:
        names = "\n  ".join(others[:8] + [f"and {len(others) - 8} more"] * (len(others) > 8))
        got = f"{model} has some with expand_kv, and others:\n  {names}"
        yield f"takes models whose every attention caches latents, or none. {got}"
    for site in sites:
        check_module(site.path, site.module)


def _why_no_keys(owner: Any, found: Match, sites: Sequence[Site], graphed: bool) -> Iterator[str]:
    model = type(owner).__name__
    if getattr(owner.config, "is_encoder_decoder", False):
        yield f"got {model}, an encoder-decoder model; want a decoder"
    served = [site for site in found.sites if site.reason is None]
    both = _first(served, lambda site: takes_cache(site.module, causal=False))
    if both and not sites:
        two_ways = (
            f"{both} may see tokens on both sides (is_causal is False), and pages are for "
            "causal attention"
        )
        yield f'got {model}, whose {two_ways}; want cache="hf"'
    if not sites:
        yield f"got {model}, no attention of which is handed a cache"
    if editor := _first(sites, lambda site: site.usage and site.usage.edits_cached):
        edits = (
            f"{editor} computes with all the keys that its cache returns, and pages return "
            "the new ones only"
        )
        yield f'got {model}, whose {edits}; want cache="hf"'
    own = own_class(owner)
    if not (takes_any(owner) or (graphed and own)):
        want = "steps in graphs, over states of attnops, or " if own else ""
        yield f'got {model}, which takes only a cache of its own class; want {want}cache="hf"'
    if found.edits is not None:
        yield f"cannot say its masks to {model}: {found.edits}"


def _first(sites: Iterable[Site], holds: Callable[[Site], object]) -> str:
    """The class of the first module that this holds for; "" if there is none."""
    return next((type(site.module).__name__ for site in sites if holds(site)), "")


# Models of latents --------------------------------------------------------------------------------


def is_latent(module: nn.Module) -> bool:
    """Does this attention module hand latents to its cache?"""
    return hasattr(type(module), "expand_kv")


def let_through(module: Any, kv_nope: Tensor, k_rot: Tensor) -> Any:
    """`expand_kv` of a patched module: latents of a PagedLatentCache stay as they are."""
    return (
        (kv_nope, k_rot) if kv_nope.dim() == 5 else type(module).expand_kv(module, kv_nope, k_rot)
    )


def check_module(path: str, module: Any) -> None:
    """Raise PatchError unless this MLA module unfolds latents as attnops does.

    The check runs the module on random numbers, for there are many such classes: keys must be W_UK
    c and the rotated key, values W_UV c.
    """
    name = f"{path} ({type(module).__name__})"
    missing = [part for part in (*_LATENT_SIZES, "kv_b_proj") if not hasattr(module, part)]
    refuse_unless(
        not missing, f"got {name} without {', '.join(missing)}, want a module as DeepSeek-V3's"
    )
    dims = dims_of(module)
    device, dtype = where(module)
    if device.type == "meta" or any(isinstance(p, FakeTensor) for p in module.parameters()):
        return
    some = torch.Generator().manual_seed(0)
    latent, rotated = (
        torch.randn(1, 1, 3, n, generator=some).to(device, dtype) for n in (dims.latent, dims.rope)
    )
    try:
        with torch.no_grad():
            key, value = type(module).expand_kv(module, latent, rotated)
            w_uk, w_uv = absorbed_weights(module.kv_b_proj, dims.nope, dims.v, latent)
            c = latent[0].to(w_uk.dtype)
            ours = torch.cat(
                [c @ w_uk.mT, rotated[0].to(c.dtype).expand(w_uk.shape[0], -1, -1), c @ w_uv.mT], -1
            ).double()
            want = torch.cat([key, value], -1)[0].double()
            same = bool((ours - want).abs().max() <= ROUNDING * want.abs().max())
    except (InvalidInput, RuntimeError, TypeError, ValueError) as error:
        raise PatchError(
            f'patch: cache="paged" cannot absorb the projection of {name}: {error}'
        ) from error
    refuse_unless(
        same, f"got {name}, whose expand_kv does more than unfold latents by its kv_b_proj"
    )


# The layers of a model ----------------------------------------------------------------------------


def lists_of(owner: nn.Module, modules: Iterable[nn.Module]) -> dict[str, int]:
    """The lists of layers that hold these modules, by their paths: how many layers each has."""
    wanted = {id(module) for module in modules}
    paths = [path for path, module in owner.named_modules() if id(module) in wanted]
    lists = [
        (path, each) for path, each in owner.named_modules() if isinstance(each, nn.ModuleList)
    ]
    return {path: len(each) for path, each in lists if any(p.startswith(f"{path}.") for p in paths)}


def relisted(owner: nn.Module, lists: Mapping[str, int]) -> str:
    """Which of these lists has more or fewer layers now; "" where none has."""
    for path, count in lists.items():
        found: Any = owner.get_submodule(path)
        if len(found) != count:
            return f"{path} has {len(found)} layers, and had {count} at patch()"
    return ""


# Models of keys and values ------------------------------------------------------------------------


def takes_cache(module: Any, causal: bool) -> bool:
    """Does this attention module take a cache and know its layer number, and is it causal?

    Those that see tokens on both sides are encoders, which make no use of their cache, and
    PaliGemma's, at the tokens of a prompt.
    """
    known = isinstance(getattr(module, "layer_idx", None), int) and cache_names.layer_takes_cache(
        type(module)
    )
    sees_ahead = getattr(module, "is_causal", True) is False
    return known and causal != sees_ahead


def has_blocks(inputs: dict[str, Any]) -> bool:
    """Do the inputs of such a model give the kind of each token?"""
    return any(
        name.endswith("token_type_ids") and value is not None for name, value in inputs.items()
    )


def refuse_blocks(model: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
    """A forward pre-hook of such a model. Raises InvalidInput: blocks over a cache of pages."""
    mixed = isinstance(cache_names.cache_in(kwargs), PagedKeyCache) and has_blocks(kwargs)
    want = (
        "none with a cache of pages, whose masks are causal: transformers' own cache for "
        "texts with images"
    )
    need(not mixed, "token_type_ids", f"a kind for each token of {type(model).__name__}", want)


def windows_of(
    owner: Any, config: Any, layers: Sequence[int], states: bool = False
) -> tuple[int, ...]:
    """For each of `layers` the tokens that a query sees, its own included; 0: all. They follow from
    transformers' own cache of the model.

    states: may a layer with keys keep a state, too?

    Raises PatchError for keys that pages cannot hold: shared between layers, chunked, indexed,
    compressed.
    """
    name, shared = type(owner).__name__, getattr(config, "num_kv_shared_layers", None)
    got = f"num_kv_shared_layers={shared} in {name}, whose layers read each other's keys"
    refuse_unless(not shared, f"got {got}; want a layer for each's own")
    made: list[Any] = DynamicCache(config=config).layers
    kinds = getattr(config, "layer_types", None) or ["chunked_attention"]
    chunked = getattr(config, "attention_chunk_size", None) and "chunked_attention" in kinds
    refuse_unless(
        not chunked,
        f"got chunked attention in {name}; pages are read whole or through a sliding window",
    )
    found = []
    for layer in layers:
        own = made[layer] if layer < len(made) else None
        kind = type(own).__name__
        got = f"layer {layer} ({type(own).__name__}) of {name}, which pages here cannot hold"
        kinds_held = {"DynamicLayer", "DynamicSlidingWindowLayer"}
        if states:
            kinds_held.add("LinearAttentionAndFullAttentionLayer")
        held = kind in kinds_held and isinstance(own, CacheLayerMixin)
        refuse_unless(
            held, f"got {got}; want plain keys and values, all or those of a sliding window"
        )
        found.append(
            int(getattr(own, "sliding_window", 0) or 0)
            if kind == "DynamicSlidingWindowLayer"
            else 0
        )
    # Some models use the window for their caches only. The code of others asks for masks with a
    # window, or passes it to attention.
    files = {
        sys.modules[type(module).__module__]
        for module in owner.modules()
        if isinstance(module, PreTrainedModel)
    }
    words = ("create_sliding_window_causal_mask", "create_masks_for_generate", "sliding_window=")
    slide = not any(found) or any(
        word in inspect.getsource(file) for file in files for word in words
    )
    got = f"sliding_window={max(found)} in {name}, which sees every token of its prompt"
    refuse_unless(slide, f"got {got}; want a model whose masks slide as its cache does")
    return tuple(found)


# The compiler's stance belongs to the process: two threads that set and restore it in turns would
# leave it set.
_PROBING = threading.Lock()


@torch.no_grad()
def probe(
    owner: Any,
    config: Any,
    windows: Mapping[Any, int],
    like: torch.dtype,
    states: Sequence[int] = (),
) -> tuple[tuple[Problem, ...], tuple[StateSizes, ...]]:
    """The sizes of the keys and values of each module, given its window, and of the states of these
    layers, from one step of one token over a cache of transformers' own.

    No attribute gives them for all models, nor for a model whose heads are spread over several
    GPUs. Raises InvalidInput when a layer keeps no keys and values.
    """
    own = own_class(owner)
    cache = DynamicCache(config=config) if own is None else own()
    device = owner.get_input_embeddings().weight.device
    token = torch.zeros(
        (1, 1), dtype=torch.int64, device=torch.device("cpu") if device.type == "meta" else device
    )
    # Eager, so that compiled code is not recompiled for this, and on this machine even where
    # another is pretended.
    with evaluating(owner), _PROBING, torch.compiler.set_stance("force_eager"), pretend(None):
        owner(input_ids=token, **cache_names.argument(owner, cache), use_cache=True)
    keys = (_keys_of(cache, module, config, window, like) for module, window in windows.items())
    sizes_of = _states_of if own is None else sizes_in
    return tuple(keys), tuple(sizes_of(cache, layer) for layer in states)


def _keys_of(cache: Any, module: Any, config: Any, window: int, like: torch.dtype) -> Problem:
    kept: Any = cache.layers[module.layer_idx]
    key, value = getattr(kept, "keys", None), getattr(kept, "values", None)
    if key is None or value is None or key.dim() != 4 or value.dim() != 4:
        fail(
            InvalidInput,
            f"cache of layer {module.layer_idx}",
            "no tensors",
            "keys [B, H, S, D] and values [B, H, S, Dv]",
        )
    heads = key.shape[1] * int(
        getattr(module, "num_key_value_groups", 0)
        or max(1, config.num_attention_heads // key.shape[1])
    )
    capped = bool(
        getattr(module, "attn_logit_softcapping", None)
        or getattr(config, "attn_logit_softcapping", None)
    )
    sinks = getattr(module, "sinks", None)
    dtype = sinks.dtype if isinstance(sinks, Tensor) else None
    seen = (window - 1 if window else -1, -1)
    sizes = heads, key.shape[1], key.shape[3], 0, like, value.shape[3]
    return paged_layers(*sizes, window=seen, softcap=capped, sinks=dtype)


def _states_of(cache: DynamicCache, layer: int) -> StateSizes:
    kept: Any = cache.layers[layer]
    conv, state = kept.conv_states[0], kept.recurrent_states[0]
    if state is None:  # of a convolution alone
        state = conv.new_empty(1, 0)
    return StateSizes(conv.shape[1:], conv.dtype, state.shape[1:], state.dtype)
