"""Attention of a patched layer over the pages of a `PagedModelCache`, of keys and values or of latents.

A hook hands the layer's cache to the attention function (`hand_over`). The layer hands its new keys and values, or
latents, to the cache, which hands them on; the attention function writes them into the layer's pages and attends through its page table.
The batch `[B, H, S, D]` becomes B requests of S tokens each, one after the other. In a request of n new tokens and L in all, new token i
sees the first L - n + i + 1, so padding on the left, which is not stored, sees no token and gives 0.

The first tokens of an empty cache attend to each other directly, without pages. So do the tokens of a long step over a sliding window,
beside copies of the window's tokens, whose pages the step overwrites.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor, nn

from attnops.errors import InvalidInput, fail
from attnops.hf import descriptor
from attnops.hf.cache import PagedKeyCache, PagedLatentCache, PagedModelCache, Step
from attnops.hf.descriptor import Range
from attnops.hf.pages import View
from attnops.nn.absorb import absorbed_weights
from attnops.nn.latent import LatentDims, attend_absorbed
from attnops.ops import paged_attention, write_kv, write_latent
from attnops.ops.dense import attention as dense_attention

ABSORB_UP_TO = 1
"""New tokens of a request, above which the first tokens of an empty cache are attended to in expanded form."""


def hand_over(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A forward pre-hook of an attention module: hands its paged cache, under any argument name, on to the attention function."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, PagedModelCache):
            kwargs["attnops_cache"] = value
            break
    return args, kwargs


def check_call(
    module: Any, batch: int, mask: Tensor | None, dropout: float, is_causal: bool | None, others: tuple[tuple[str, Any], ...]
) -> Range:
    """The range that a mask for pages describes, in a call that pages can serve.

    Args:
        module: the attention module.
        batch: rows of the call.
        mask: a descriptor (see `attnops.hf.mask`).
        dropout, is_causal: as transformers passes them.
        others: arguments that attention over pages does not take, with their names; they must be None.

    Raises:
        InvalidInput: a mask that pages cannot follow, dropout, or one of `others`.
    """
    if dropout > 0.0 and module.training:
        fail(InvalidInput, "dropout", dropout, "0 with a paged cache: no kernel has dropout. Train without a cache, or call .eval()")
    if is_causal is False:
        fail(InvalidInput, "is_causal", False, "True with a paged cache")
    for name, value in others:
        if value is not None:
            fail(InvalidInput, name, type(value).__name__, "None with a paged cache")
    if mask is None or mask.dtype != descriptor.DTYPE:
        got = "None" if mask is None else f"{str(mask.dtype).removeprefix('torch.')} {list(mask.shape)}"
        want = 'a 2-D mask [B, tokens so far] of ones, with zeros on the left only: pages hold no other pattern. Use cache="hf" for it'
        fail(InvalidInput, "attention_mask", got, want)
    found = descriptor.read(mask, batch)
    if not found.causal:
        fail(InvalidInput, "attention_mask", "bidirectional", "causal, with a paged cache")
    return found


# Keys and values ------------------------------------------------------------------------------------------------------


def attend_keys(
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
    """`[B, S, Hq, Dv]`: write a layer's new keys and values into its pages and attend to the tokens there.

    Args:
        module: the attention module.
        query: `[B, Hq, S, D]`.
        key: `[B, Hkv, S, D]`, the new ones.
        value: `[B, Hkv, S, Dv]`, the new ones.
        mask: a descriptor (see `attnops.hf.mask`).
        cache: the module's cache, from `hand_over`.
        dropout, is_causal, others: see `check_call`.
        scale, softcap, sinks: as in `attnops.attention`.
        kernels: forced for `attention` and `paged_attention`, or None.

    Raises:
        InvalidInput: a mask that pages cannot follow, dropout, a window larger than that of the pages, or one of `others`.
        NoGradient: an input requires grad in grad mode.
    """
    batch, heads, count, _ = query.shape
    asked = check_call(module, batch, mask, dropout, is_causal, others)
    layer: Any = module.layer_idx
    number = cache.number_of(layer)
    table = cache.state.pages.table_of[number]
    window = cache.state.pages.windows[table]
    if window and not 0 <= asked.window_left < window:
        got = "unbounded" if asked.window_left < 0 else asked.window_left + 1
        fail(InvalidInput, f"window of layer {layer}", got, f"at most {window}, the window that its pages were made for")
    step = cache.step_of(layer, asked.start, count, heads)
    view: View = step.views[table]
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
    """`[B, W, H, D]`: the tokens in `slots` `[B * W]`."""
    found = pages.flatten(0, 1)[slots]
    return found.view(batch, -1, *found.shape[1:])


# Latents --------------------------------------------------------------------------------------------------------------


def dims_of(module: Any) -> LatentDims:
    """The sizes of an MLA module."""
    return LatentDims(module.qk_nope_head_dim, module.qk_rope_head_dim, module.kv_lora_rank, module.v_head_dim)


def write_latents(
    module: Any,
    query: Tensor,
    latent: Tensor,
    rotated: Tensor,
    mask: Tensor | None,
    cache: Any,
    dropout: float,
    is_causal: bool | None,
    others: tuple[tuple[str, Any], ...],
) -> Step:
    """Write a layer's new latents into its pages, and return the step.

    Args:
        module: the attention module.
        query: `[B, H, S, nope + Dr]`.
        latent: `[B, 1, S, Dc]`.
        rotated: `[B, 1, S, Dr]`.
        mask: a descriptor (see `attnops.hf.mask`).
        cache: the module's cache, from `hand_over`.
        dropout, is_causal, others: see `check_call`.

    Raises:
        InvalidInput: a mask that pages cannot follow, dropout, or one of `others`.
        NoGradient: an input requires grad in grad mode.
    """
    if not isinstance(cache, PagedLatentCache):
        fail(InvalidInput, "attnops_cache", type(cache).__name__, "a PagedLatentCache, which the hook of a patched module passes on")
    found = check_call(module, query.shape[0], mask, dropout, is_causal, others)
    step = cache.step_of(module.layer_idx, found.start, query.shape[2], query.shape[1])
    pages = cache.pages_of(module.layer_idx)
    slots = step.views[0].batch.slots
    write_latent(latent.flatten(0, 2).to(pages.dtype), rotated.flatten(0, 2).to(pages.dtype), pages, slots)
    cache.wrote(module.layer_idx)
    return step


def expands(step: Step) -> bool:
    """Does this step attend in expanded form? It does where the cache has no tokens but its own, which need no gather."""
    return step.fresh and step.views[0].batch.max_seqlen_q > ABSORB_UP_TO


def absorbed(
    module: Any, query: Tensor, latent: Tensor, mask: Any, cache: Any, step: Step, scale: float, softcap: float, kernel: str | None
) -> Tensor:
    """`[B, S, H, v]`: attention of the step's tokens to the pages. query: `[B, H, S, nope + Dr]`, latent: `[B, 1, S, Dc]`."""
    batch, heads, queries, _ = query.shape
    dims, pages = dims_of(module), cache.pages_of(module.layer_idx)
    kind = query.device.type
    tokens = query.transpose(1, 2).reshape(batch * queries, heads, -1).to(pages.dtype)
    q_nope, q_pe = tokens.split([dims.nope, dims.rope], -1)
    # Autocast would compute the products in another dtype than that of the pages.
    off = torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else contextlib.nullcontext()
    with off:
        w_uk, w_uv = absorbed_weights(module.kv_b_proj, dims.nope, dims.v, latent)
        out = attend_absorbed(
            dims, q_nope, q_pe, w_uk.to(pages.dtype), w_uv.to(pages.dtype), pages, step.views[0].batch, scale=scale,
            window_left=descriptor.read(mask, batch).window_left, softcap=softcap, kernel=kernel,
        )  # fmt: skip
    return out.to(query.dtype).reshape(batch, queries, heads, dims.v)
