"""Attention of a patched layer over the pages of a `PagedKeyCache`: models that cache keys and values as they are (MHA, GQA, MQA).

A layer hands its new keys and values to the cache, which hands them on; the attention function writes them into the layer's pages and
attends through its page table. The batch `[B, H, S, D]` becomes B requests of S tokens each, one after the other. A request of n new
tokens and L in all lets its token i see the first L - n + i + 1, so padding on the left, which is not stored, sees nothing and gives 0.

The first tokens of an empty cache attend to each other as they are, which reads no pages. So do the tokens of a long step over a sliding
window, for which the window's tokens are copied out of the pages first: the step's own will take their place.
"""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import CacheLayerMixin

from attnops.errors import InvalidInput, PatchError
from attnops.hf.key_cache import KeyLayer, PagedKeyCache
from attnops.hf.on_pages import check_call
from attnops.hf.other_layers import cache_layers
from attnops.hf.paged_cache import View
from attnops.ops import paged_attention, write_kv
from attnops.ops.dense import attention as dense_attention
from attnops.problem import pretend

_UNKNOWN = "{} of {}, which pages here cannot hold"


# Which models ---------------------------------------------------------------------------------------------------------


def keeps_keys(module: Any) -> bool:
    """Is this an attention module that is handed a cache, and told which layer of it is its own? Encoders have no use for theirs."""
    if not isinstance(getattr(module, "layer_idx", None), int) or getattr(module, "is_causal", True) is False:
        return False
    return any(name in ("past_key_values", "past_key_value", "layer_past") for name in inspect.signature(type(module).forward).parameters)


def sees_blocks(owner: Any) -> bool:
    """Has the model masks that let blocks of tokens (an image's) see each other both ways? transformers' name for them is in its code."""
    return "block_sequence_ids" in inspect.getsource(sys.modules[type(owner).__module__])


def has_blocks(inputs: dict[str, Any]) -> bool:
    """Do the inputs of such a model say which tokens are of which kind?"""
    return any(name.endswith("token_type_ids") and value is not None for name, value in inputs.items())


def refuse_blocks(model: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
    """A forward pre-hook of such a model. Raises InvalidInput: blocks over a cache of pages."""
    if isinstance(kwargs.get("past_key_values"), PagedKeyCache) and has_blocks(kwargs):
        want = "none with a cache of pages, whose masks are causal: transformers' own cache for texts with images"
        raise InvalidInput("token_type_ids", f"a kind for each token of {type(model).__name__}", want)


def windows_of(owner: Any, config: Any, layers: Sequence[int]) -> tuple[int, ...]:
    """Of each of `layers` the tokens that a query sees, its own included; 0: all. From what transformers' own cache would keep.

    Raises PatchError for a model whose keys pages cannot hold: shared between layers, chunked, indexed, compressed.
    """
    name = type(owner).__name__
    if getattr(config, "num_kv_shared_layers", None):
        got = f"num_kv_shared_layers={config.num_kv_shared_layers} in {name}"
        raise PatchError(f"patch: cache=\"paged\" got {got}, whose layers read each other's keys; want a layer for each's own")
    made = cache_layers(config)
    kinds = getattr(config, "layer_types", None) or ["chunked_attention"]
    if getattr(config, "attention_chunk_size", None) and "chunked_attention" in kinds:
        raise PatchError(f'patch: cache="paged" got chunked attention in {name}; pages are read whole or through a sliding window')
    found = []
    for layer in layers:
        kind = made[layer] if layer < len(made) else None
        if type(kind).__name__ not in ("DynamicLayer", "DynamicSlidingWindowLayer") or not isinstance(kind, CacheLayerMixin):
            got = _UNKNOWN.format(f"layer {layer} ({type(kind).__name__})", name)
            raise PatchError(f'patch: cache="paged" got {got}; want plain keys and values, all or those of a sliding window')
        window = getattr(kind, "sliding_window", 0) if type(kind).__name__ == "DynamicSlidingWindowLayer" else 0
        found.append(int(window or 0))
    if any(found) and not _masks_slide(owner):
        got = f"sliding_window={max(found)} in {name}, which sees every token of its prompt"
        raise PatchError(f'patch: cache="paged" got {got}; want a model whose masks slide as its cache does')
    return tuple(found)


def _masks_slide(owner: nn.Module) -> bool:
    """Does the code of the model ask for a mask with a window, or pass the window on to attention? Some have it for their caches alone."""
    files = {sys.modules[type(module).__module__] for module in owner.modules() if isinstance(module, PreTrainedModel)}
    words = ("create_sliding_window_causal_mask", "create_masks_for_generate", "sliding_window=")
    return any(word in inspect.getsource(file) for file in files for word in words)


# A compiler's stance is the process's: two threads that set and restore it in turns would leave it set.
_LOOKING = threading.Lock()


@torch.no_grad()
def look(owner: Any, config: Any, modules: Sequence[Any], windows: Sequence[int]) -> tuple[KeyLayer, ...]:
    """What each module hands to its cache: found by one step of one token over a cache of transformers' own.

    No attribute says it for all models, nor for one whose heads are spread over several GPUs.
    Raises InvalidInput when a layer kept nothing.
    """
    from transformers.cache_utils import DynamicCache

    cache = DynamicCache(config=config)
    device = owner.get_input_embeddings().weight.device
    token = torch.zeros((1, 1), dtype=torch.int64, device=torch.device("cpu") if device.type == "meta" else device)
    modes = [(module, module.training) for module in owner.modules()]
    owner.eval()
    try:
        # What was compiled need not be compiled once more for this, and it runs here whatever machine is pretended.
        with _LOOKING, torch.compiler.set_stance("force_eager"), pretend(None):
            owner(input_ids=token, past_key_values=cache, use_cache=True)
    finally:
        for module, training in modes:
            module.training = training
    found = []
    for module, window in zip(modules, windows, strict=True):
        kept: Any = cache.layers[module.layer_idx]
        key, value = getattr(kept, "keys", None), getattr(kept, "values", None)
        if key is None or value is None or key.dim() != 4 or value.dim() != 4:
            raise InvalidInput(f"cache of layer {module.layer_idx}", "nothing after a step", "keys [B, H, S, D] and values [B, H, S, Dv]")
        heads = key.shape[1] * int(getattr(module, "num_key_value_groups", 0) or max(1, config.num_attention_heads // key.shape[1]))
        capped = bool(getattr(module, "attn_logit_softcapping", None) or getattr(config, "attn_logit_softcapping", None))
        sinks = getattr(module, "sinks", None)
        dtype = sinks.dtype if isinstance(sinks, Tensor) else None
        found.append(KeyLayer(window, heads, key.shape[1], key.shape[3], value.shape[3], capped, dtype))
    return tuple(found)


def form(window: int) -> str:
    """How a layer attends with pages, in words for the report."""
    phases = "prefill into an empty cache (more than 1 new token) among its own tokens, decode and every later token over pages"
    return f"{phases}; pages behind the window of {window} are used again" if window else phases


# The attention function's part ----------------------------------------------------------------------------------------


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    cache: PagedKeyCache,
    dropout: float,
    is_causal: bool | None,
    scale: float | None,
    softcap: float,
    sinks: Tensor | None,
    others: tuple[tuple[str, Any], ...],
    kernels: tuple[str | None, str | None],
) -> Tensor:
    """`[B, S, Hq, Dv]`: write a layer's new keys and values into its pages and attend to what is there.

    Args:
        query: `[B, Hq, S, D]`. key, value: `[B, Hkv, S, D]`, `[B, Hkv, S, Dv]`, the new ones.
        mask: a descriptor (see `attnops.hf.paged_mask`). cache: what `hand_over` passed on.
        others: arguments that attention over pages does not take here, with their names; None is well.
        kernels: forced for `attention` and `paged_attention`, or None.

    Raises:
        InvalidInput: a mask that pages cannot follow, dropout, a window larger than the pages were made for, or one of `others`.
        NoGradient: a gradient is asked for.
    """
    batch, heads, count, _ = query.shape
    asked = check_call(module, batch, mask, dropout, is_causal, others)
    layer: Any = module.layer_idx
    number = cache.number_of(layer)
    kind = cache.state.pages.kind[number]
    window = cache.state.pages.windows[kind]
    if window and not 0 <= asked.window_left < window:
        got = "unbounded" if asked.window_left < 0 else asked.window_left + 1
        raise InvalidInput(f"window of layer {layer}", got, f"at most {window}, what its pages were made for")
    step = cache.step_of(layer, asked.start, count, heads)
    view: View = step.views[kind]
    k_pages, v_pages = cache.pages_of(layer)
    # Autocast makes queries of another dtype than the pages have.
    like = query.dtype
    query, key, value = (x.transpose(1, 2).to(k_pages.dtype) for x in (query, key, value))
    past = None if view.past is None else tuple(_copied(pages, view.past.slots, batch) for pages in (k_pages, v_pages))
    write_kv(key.flatten(0, 1), value.flatten(0, 1), k_pages, v_pages, view.batch.slots)
    cache.wrote(layer)
    left = (asked.window_left, -1)
    dense, paged = kernels
    if step.fresh and count > 1:
        alone: Tensor = dense_attention(
            query, key, value, scale=scale, causal=True, window=left, softcap=softcap, sinks=sinks, kv_start=asked.start,
            kv_end=asked.end, kernel=dense,
        )  # fmt: skip
        return alone.to(like)
    if past is not None and view.past is not None:
        keys, values = torch.cat([past[0], key], 1), torch.cat([past[1], value], 1)
        beside: Tensor = dense_attention(
            query, keys, values, scale=scale, causal=True, window=left, softcap=softcap, sinks=sinks, kv_start=view.past.start,
            kv_end=torch.full_like(view.past.start, keys.shape[1]), kernel=dense,
        )  # fmt: skip
        return beside.to(like)
    now = view.batch
    out: Tensor = paged_attention(
        query.flatten(0, 1), k_pages, v_pages, now.page_table, now.seq_lens, now.cu_seqlens_q, max_seqlen_q=count, scale=scale,
        window=left, softcap=softcap, sinks=sinks, workspace=now.workspace, padded=False, holes=False, kernel=paged,
    )  # fmt: skip
    return out.view(batch, count, heads, out.shape[2]).to(like)


def _copied(pages: Tensor, slots: Tensor, batch: int) -> Tensor:
    """`[B, W, H, D]`: what lies in `slots` `[B * W]`."""
    found = pages.flatten(0, 1)[slots]
    return found.view(batch, -1, *found.shape[1:])
