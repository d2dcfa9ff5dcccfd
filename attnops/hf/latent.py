"""Attention of a patched MLA layer over the pages of a `PagedLatentCache`.

A layer of an MLA model (DeepSeek-V2 and its kin in transformers, from 5.15) compresses keys and values into a latent, hands that to the
cache, and unfolds what the cache gives back in its method `expand_kv`. While a model is patched with `cache="paged"` that method is
replaced on the instance by one that lets latents bound for pages through, and everything else on to the class's own; and a hook tells
the attention function which cache the layer was called with.

The batch `[B, H, S, D]` becomes B requests of S tokens each, one after the other. A request of n new tokens and L in all lets its token i
see the first L - n + i + 1, so padding on the left, which is not stored, sees nothing and gives 0: there is nothing to pack.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from attnops.errors import InvalidInput, PatchError
from attnops.hf import descriptor
from attnops.hf.latent_cache import PagedLatentCache
from attnops.hf.on_pages import check_call, where
from attnops.hf.paged_cache import Step
from attnops.nn.absorb import absorbed_weights
from attnops.nn.latent import LatentDims, attend_absorbed
from attnops.ops import write_latent

ABSORB_UP_TO = 1
"""New tokens of a request, above which the first ones of an empty cache are attended to in expanded form."""

ROUNDING = 0.05
"""Of the largest number: how far two ways to unfold a latent may be apart. Rounding of quantised weights is less, a mistake is more."""

EXPANDED = "expanded in prefill and decode"
"""Form of an MLA layer over a cache of transformers' own."""

_PARTS = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "layer_idx")


def is_latent(module: nn.Module) -> bool:
    """Does this attention module hand latents to its cache?"""
    return hasattr(type(module), "expand_kv")


def form(paged: bool) -> str:
    """How an MLA layer attends, in words for the report."""
    if not paged:
        return EXPANDED
    return f"prefill into an empty cache (more than {ABSORB_UP_TO} new token) expanded, decode and every later token absorbed"


def dims_of(module: Any) -> LatentDims:
    """The sizes of an MLA module."""
    return LatentDims(module.qk_nope_head_dim, module.qk_rope_head_dim, module.kv_lora_rank, module.v_head_dim)


# While a model is patched ---------------------------------------------------------------------------------------------


def let_through(module: Any, kv_nope: Tensor, k_rot: Tensor) -> tuple[Tensor, Tensor]:
    """What `expand_kv` of a module is while it is patched: what comes from a PagedLatentCache stays as it is."""
    if kv_nope.dim() == 5:
        return kv_nope, k_rot
    expanded: tuple[Tensor, Tensor] = type(module).expand_kv(module, kv_nope, k_rot)
    return expanded


def check_module(path: str, module: Any) -> None:
    """Raise PatchError unless this MLA module unfolds latents as attnops does.

    Tried on numbers, because there are many such classes: keys are W_UK c and the rotated key as it is, values are W_UV c.
    """
    name = f"{path} ({type(module).__name__})"
    missing = [part for part in (*_PARTS, "kv_b_proj") if not hasattr(module, part)]
    if missing:
        raise PatchError(f'patch: cache="paged" got {name} without {", ".join(missing)}, want a module as DeepSeek-V3\'s')
    dims = dims_of(module)
    device, dtype = where(module)
    if device.type == "meta" or any(isinstance(p, FakeTensor) for p in module.parameters()):
        return
    some = torch.Generator().manual_seed(0)
    latent, rotated = (torch.randn(1, 1, 3, n, generator=some).to(device, dtype) for n in (dims.latent, dims.rope))
    try:
        with torch.no_grad():
            key, value = type(module).expand_kv(module, latent, rotated)
            w_uk, w_uv = absorbed_weights(module.kv_b_proj, dims.nope, dims.v, latent)
            c = latent[0].to(w_uk.dtype)
            ours = torch.cat([c @ w_uk.mT, rotated[0].to(c.dtype).expand(w_uk.shape[0], -1, -1), c @ w_uv.mT], -1).double()
            want = torch.cat([key, value], -1)[0].double()
            same = bool((ours - want).abs().max() <= ROUNDING * want.abs().max())
    except (InvalidInput, RuntimeError, TypeError, ValueError) as error:
        raise PatchError(f'patch: cache="paged" cannot absorb the projection of {name}: {error}') from error
    if not same:
        raise PatchError(f'patch: cache="paged" got {name}, whose expand_kv does more than unfold latents by its kv_b_proj')


# The attention function's part ----------------------------------------------------------------------------------------


def begin(
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
    """Write a layer's new latents into its pages, and say what the step is.

    Args:
        query: `[B, H, S, nope + Dr]`. latent, rotated: `[B, 1, S, Dc]`, `[B, 1, S, Dr]`.
        mask: a descriptor (see `attnops.hf.paged_mask`). cache: what `hand_over` passed on.
        others: arguments that attention over latents does not take here, with their names; None is well.

    Raises:
        InvalidInput: a mask that pages cannot follow, dropout, or one of `others`. NoGradient: a gradient is asked for.
    """
    if not isinstance(cache, PagedLatentCache):
        raise InvalidInput("attnops_cache", type(cache).__name__, "a PagedLatentCache, which the hook of a patched module passes on")
    found = check_call(module, query.shape[0], mask, dropout, is_causal, others)
    step = cache.step_of(module.layer_idx, found.start, query.shape[2], query.shape[1])
    pages = cache.pages_of(module.layer_idx)
    slots = step.views[0].batch.slots
    write_latent(latent.flatten(0, 2).to(pages.dtype), rotated.flatten(0, 2).to(pages.dtype), pages, slots)
    cache.wrote(module.layer_idx)
    return step


def expands(step: Step) -> bool:
    """Does this step attend in expanded form? Only its own tokens are there, so that nothing need be gathered."""
    return step.fresh and step.views[0].batch.max_seqlen_q > ABSORB_UP_TO


def absorbed(
    module: Any,
    query: Tensor,
    latent: Tensor,
    mask: Any,
    cache: Any,
    step: Step,
    scale: float,
    softcap: float,
    kernel: str | None,
) -> Tensor:
    """`[B, S, H, v]`: attention of the step's tokens to the pages. query: `[B, H, S, nope + Dr]`, latent: `[B, 1, S, Dc]`."""
    batch, heads, queries, _ = query.shape
    dims, pages = dims_of(module), cache.pages_of(module.layer_idx)
    kind = query.device.type
    tokens = query.transpose(1, 2).reshape(batch * queries, heads, -1).to(pages.dtype)
    q_nope, q_pe = tokens.split([dims.nope, dims.rope], -1)
    # Autocast would take the products to another dtype than the pages have.
    off = torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else contextlib.nullcontext()
    with off:
        w_uk, w_uv = absorbed_weights(module.kv_b_proj, dims.nope, dims.v, latent)
        out = attend_absorbed(
            dims, q_nope, q_pe, w_uk.to(pages.dtype), w_uv.to(pages.dtype), pages, step.views[0].batch, scale=scale,
            window_left=descriptor.read(mask, batch).window_left, softcap=softcap, kernel=kernel,
        )  # fmt: skip
    return out.to(query.dtype).reshape(batch, queries, heads, dims.v)
