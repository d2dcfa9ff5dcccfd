"""Attention of new tokens over pages of latents (MLA), absorbed or expanded: the part of a layer
between its projections.

Absorbed: the query is projected into the space of the latents, and every head reads the latents
themselves (`absorbed_weights`). Expanded: latents are unfolded into the keys and values of each
head. The two are the same sums in another order: DeepSeek-V2, https://arxiv.org/abs/2405.04434,
section 2.1.2. `attnops.ops.latent.absorb_or_expand` compares their costs.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from attnops.cache.batch import PagedBatch, PrefixChunk
from attnops.core import eager_cache
from attnops.core.errors import InvalidInput, fail
from attnops.core.private_torch import FakeTensor
from attnops.core.problem import Target
from attnops.core.record import need
from attnops.core.select import _ACTIVE, key_for
from attnops.nn import arguments as check
from attnops.nn.absorb import PLAIN, make_anew, weight_of
from attnops.nn.rotary import RotaryEmbedding, rope_of
from attnops.nn.steady import is_linear, product
from attnops.ops import (
    merge_state,
    mla_attention,
    rope_quantize_latent,
    varlen_attention,
    write_latent,
)
from attnops.ops.latent.absorb_or_expand import (
    FORM_WATCHERS,
    LatentDims as LatentDims,
    LatentForms,
    crossover,
    kernel_for,
    tell,
)
from attnops.ops.latent.record import check_stored


class NewTokens(NamedTuple):
    """The new tokens of a step between the projections of a layer, of one dtype.

    q_nope, q_pe: `[T, H, nope]`, `[T, H, Dr]`, the query without and with position.
    latent: `[T, Dc]`, after its norm.
    k_pe: `[T, Dr]`, the key with position.
    """

    q_nope: Tensor
    q_pe: Tensor
    latent: Tensor
    k_pe: Tensor


def absorbed_weights(kv_b: nn.Module, nope: int, v: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """(W_UK `[H, nope, Dc]`, W_UV `[H, v, Dc]`) of the projection `kv_b` as it is now. H follows
    from its rows.

    Of a plain torch.nn.Linear they are views of the weight, without a copy, and follow every later
    change of the weight. Of any other module (an adapter around the Linear, a quantised or
    parametrised weight, one that a hook brings from elsewhere) they are the module's outputs for
    the unit vectors. Compiled code computes them at every call, at the price of unfolding Dc
    tokens. Eager calls without gradients keep them on the module, outside its state_dict, while its
    parameters and buffers have the same versions and the plain attributes of all submodules and of
    their classes are as they were; a module with hooks, a forward of its own instance or other
    attributes is asked anew each time. A write through `.data` or numpy changes no version: `renew`
    brings it in. What was kept is overwritten by what follows it, so a CUDA graph captured from
    eager code reads what the last eager call or `renew` made.

    Args:
        kv_b: Dc numbers in, H * (nope + v) out, linear and without bias.
        nope, v: numbers of a head's key without its rotated part, and of its value.
        like: `[..., Dc]`, a latent: of the dtype and on the device that kv_b computes in.

    Raises:
        InvalidInput: kv_b has a bias, or its rows are not whole heads.
    """
    linear = is_viewed(kv_b)
    # A tensor: wrappers keep flags and words of this name.
    biased = (
        isinstance(getattr(kv_b, "bias", None), Tensor)
        if linear
        else any(isinstance(getattr(part, "bias", None), Tensor) for part in kv_b.modules())
    )
    if biased:
        fail(InvalidInput, "kv_b.bias", "a bias", "None, for it cannot be absorbed")
    weight: Any = kv_b.weight if linear else weight_of(kv_b, like)
    rows, latent = weight.shape
    whole = rows % (nope + v) == 0
    if whole is not True:
        want = f"a multiple of {nope} + {v}, the key and value of one head"
        need(whole, "kv_b.weight.shape[0]", rows, want)
    heads = weight.view(rows // (nope + v), nope + v, latent)
    return heads[:, :nope], heads[:, nope:]


def renew(kv_b: nn.Module, like: Tensor) -> None:
    """Make what eager calls of `absorbed_weights` keep of `kv_b` anew, for writes that change no
    version (`.data`, numpy).

    To be called at every prompt, and with the autocast of the steps that follow. The new weights
    take the place of the old ones in memory, so CUDA graphs read them. No effect where nothing is
    kept: for a plain Linear, in compiled code, and for a module that is asked at every call. It
    costs as much as unfolding Dc tokens.

    Args:
        kv_b, like: as in `absorbed_weights`.
    """
    if torch.compiler.is_compiling() or is_viewed(kv_b):
        return
    make_anew(kv_b, like)


_VIEWED = (*PLAIN, FakeTensor)


def is_viewed(kv_b: nn.Module) -> bool:
    """Are the absorbed weights views of its weight?"""
    # A parametrisation or a wrapper is another type, a quantised weight another type of tensor, an
    # offloaded one is on meta.
    if type(kv_b) is not nn.Linear and not is_linear(kv_b):
        return False
    weight = kv_b.weight
    own = "forward" in vars(kv_b) or kv_b._forward_hooks or kv_b._forward_pre_hooks
    return type(weight) in _VIEWED and not weight.is_meta and not own


def attend_absorbed(
    dims: LatentDims,
    q_nope: Tensor,
    q_pe: Tensor,
    weights: tuple[Tensor, Tensor],
    latent_pages: Tensor,
    batch: PagedBatch,
    *,
    scale: float,
    kv_scale: Tensor | None = None,
    window_left: int = -1,
    softcap: float = 0.0,
    mask: Tensor | None = None,
    kernel: str | None = None,
) -> Tensor:
    """`[T, H, v]`: the new tokens attend causally to all tokens of their requests in the pages,
    themselves included. No gradient.

    With `batch.shared`, no window, no mask and no deterministic policy, it is a cascade: all tokens
    attend to the shared pages as one request, so that these are read once, then each to the rest of
    its own, and the two results are merged (https://arxiv.org/abs/2501.01005, 2.2).

    Args:
        dims: the sizes of the heads.
        q_nope, q_pe: as in `NewTokens`, rotated.
        weights: `[H, nope, Dc]`, `[H, v, Dc]`, from `absorbed_weights`.
        latent_pages: `[P, page, Dc + Dr]`, with the new tokens in them; the query's dtype, or
            float8_e4m3fn or int8 with kv_scale.
        batch: from the cache. Its plan serves calls without a cascade.
        kv_scale: float32 `[1]`, or None.
        scale, window_left, softcap, mask, kernel: as in `mla_attention`.

    Raises InvalidInput, NoGradient, UnknownKernel, NoKernel.
    """
    w_uk, w_uv = _checked(dims, q_nope, q_pe, weights)
    query, window_left = by_head(q_nope, w_uk), eager_cache.side(window_left)
    out = _attend_pages(
        query,
        q_pe,
        latent_pages,
        batch,
        query.dtype,
        window_left < 0 and mask is None,
        scale=scale,
        kv_scale=kv_scale,
        window_left=window_left,
        softcap=softcap,
        mask=mask,
        kernel=kernel,
    )
    return by_head(out, w_uv.transpose(1, 2))


def by_head(x: Tensor, weight: Tensor) -> Tensor:
    """`[T, H, b]`: `x` `[T, H, a]` through each head's `[a, b]` of `weight` `[H, a, b]`."""
    if _ACTIVE.deterministic:
        # A product of all heads at once follows from the number of tokens.
        return torch.stack([product(x[:, h], weight[h].t()) for h in range(weight.shape[0])], 1)
    return torch.bmm(x.transpose(0, 1), weight).transpose(0, 1)


def _attend_pages(
    query: Tensor,
    q_pe: Tensor,
    latent_pages: Tensor,
    batch: PagedBatch,
    dtype: torch.dtype,
    cascades: bool,
    **more: Any,
) -> Tensor:
    """`[T, H, Dc]` in `dtype`: `mla_attention` of the query and the pages, over the tables of the
    batch."""
    attend: Callable[..., Tensor] = partial(
        mla_attention,
        query,
        q_pe,
        latent_pages,
        workspace=batch.workspace,
        holes=batch.holes,
        **more,
    )
    shared = batch.shared
    cu = batch.cu_seqlens_q
    most = batch.max_seqlen_q
    empty = partial(torch.empty, device=query.device)
    # A deterministic result must not depend on the pages that a batch shares.
    if shared is None or not cascades or _ACTIVE.deterministic:
        output = empty(query.shape, dtype=dtype)
        return attend(
            batch.page_table, batch.seq_lens, cu, max_seqlen_q=most, plan=batch.plan, output=output
        )
    out, rest = (empty(query.shape, dtype=dtype) for _ in range(2))
    lse, rest_lse = (empty(query.shape[:2], dtype=torch.float32) for _ in range(2))
    # The plan is for the whole tables, not for the parts.
    tables, every = (shared.page_table, shared.seq_lens, shared.cu_seqlens_q), query.shape[0]
    attend(*tables, max_seqlen_q=every, causal=False, output=out, lse=lse)
    attend(shared.rest_table, shared.rest_lens, cu, max_seqlen_q=most, output=rest, lse=rest_lse)
    out, _ = merge_state(out, lse, rest, rest_lse, stale=False)
    return out


def attend_expanded(
    dims: LatentDims,
    new: NewTokens,
    kv_b: nn.Module,
    latent_pages: Tensor,
    batch: PagedBatch,
    *,
    scale: float,
    kv_scale: Tensor | None = None,
    kernel: str | None = None,
) -> Tensor:
    """`[T, H, v]`: the new tokens attend to each other directly, and to the cached tokens of their
    requests through the pages.

    Each chunk of `batch.prefix` is gathered, unfolded, attended to and merged with the result so
    far, so that at most the new tokens and one chunk are unfolded at a time. Compiled code
    specialises on the number of chunks. Differentiable without chunks.

    Args:
        dims, latent_pages, kv_scale, scale: as in `attend_absorbed`.
        new: the new tokens, rotated.
        kv_b: the projection of a latent to H * (nope + v) numbers.
        batch: from the cache, with its `prefix`.
        kernel: force a kernel of `varlen_attention` by name.

    Raises InvalidInput, UnknownKernel, NoKernel, and NoGradient: with chunks, an input requires
    grad in grad mode.
    """
    q_nope, q_pe, latent, k_pe = new
    _checked(dims, q_nope, q_pe)
    check.tensor("latent_pages", latent_pages, "[P, page, Dc + Dr]", 3)
    width = latent_pages.shape[2]
    need(
        width == dims.latent + dims.rope,
        "latent_pages.shape[2]",
        width,
        f"{dims.latent} + {dims.rope}, Dc + Dr",
    )
    check_stored(latent_pages, kv_scale, q_nope.dtype)
    if kv_scale is not None and (kv_scale.shape != (1,) or kv_scale.dtype != torch.float32):
        fail(InvalidInput, "kv_scale", f"{kv_scale.dtype} {tuple(kv_scale.shape)}", "float32 [1]")
    if batch.prefix is None:
        fail(
            InvalidInput,
            "batch.prefix",
            None,
            "chunks, or (): asked of the cache with prefix_tokens=",
        )
    heads, cu = q_nope.shape[1], batch.cu_seqlens_q
    attend: Callable[..., Any] = partial(
        varlen_attention,
        torch.cat([q_nope, q_pe], -1),
        max_seqlen_q=batch.max_seqlen_q,
        scale=scale,
        padded=batch.padded,
        kernel=kernel,
    )
    own = (*unfold(dims, heads, latent, k_pe, kv_b), cu, cu)
    if not batch.prefix:
        out: Tensor = attend(*own, max_seqlen_k=batch.max_seqlen_q, causal=True)
        return out
    out, lse = attend(*own, max_seqlen_k=batch.max_seqlen_q, causal=True, return_lse=True)
    for chunk in batch.prefix:
        cached = unfold(
            dims, heads, *gathered(dims, latent_pages, chunk, kv_scale, q_nope.dtype), kv_b
        )
        part, part_lse = attend(
            *cached, cu, chunk.cu_seqlens_k, max_seqlen_k=chunk.max_seqlen_k, return_lse=True
        )
        out, lse = merge_state(out, lse, part, part_lse, stale=False)
    return out


def attend_latents(
    dims: LatentDims,
    new: NewTokens,
    kv_b: nn.Module,
    latent_pages: Tensor,
    batch: PagedBatch,
    *,
    scale: float,
    kv_scale: Tensor | None = None,
    absorb_up_to: int | None = None,
    mask: Tensor | None = None,
    kernel: str | None = None,
) -> Tensor:
    """`[T, H, v]`: write the new tokens into their pages, then attend, absorbed or expanded as fits
    the batch.

    Attention is absorbed where the batch does not describe its cached tokens (a decode step), and
    where no request brings more than `absorb_up_to` tokens; else it is expanded. A compiled
    function holds one of the two, with a guard on that comparison: `dims`, heads and page size must
    then be constants, as attributes of a module are, or `absorb_up_to` must be given.

    Args:
        dims, new, kv_b, latent_pages, batch, scale, kv_scale: as in `attend_expanded`; writes the
            pages.
        absorb_up_to: new tokens of a request. None: as many as
            `attnops.ops.latent.absorb_or_expand` finds cheaper absorbed, and any number under a
            deterministic policy, where the choice must not depend on the other requests of the
            batch.
        mask: as in `mla_attention`, of a step that is then absorbed, or None.
        kernel: force a kernel by name, on those of `mla_attention` and `varlen_attention` that have
            one of that name.

    Raises InvalidInput, NoGradient, UnknownKernel, NoKernel.
    """
    q_nope, q_pe, latent, k_pe = new
    _checked(dims, q_nope, q_pe)
    if absorb_up_to is not None and not (type(absorb_up_to) is int and absorb_up_to >= 0):
        fail(InvalidInput, "absorb_up_to", repr(absorb_up_to), "an int >= 0 (tokens), or None")
    before = None if batch.prefix is None else len(batch.prefix) > 0
    absorbing, expanding, policies = _told(
        dims, q_nope, latent_pages, batch, kernel, before=before, absorb_up_to=absorb_up_to
    )
    write_latent(latent, k_pe, latent_pages, batch.slots, kv_scale=kv_scale)
    if before is not None and mask is None:
        if absorb_up_to is None:
            sizes = (dims.nope, dims.rope, dims.latent, dims.v)
            heads = int(q_nope.shape[1])
            page = int(latent_pages.shape[1])
            absorb_up_to = crossover(
                sizes,
                heads,
                (q_nope.dtype, latent_pages.dtype),
                page,
                q_nope.device,
                before,
                policies,
            )
        if batch.max_seqlen_q > absorb_up_to:
            renew(kv_b, latent)
            return attend_expanded(
                dims,
                new,
                kv_b,
                latent_pages,
                batch,
                scale=scale,
                kv_scale=kv_scale,
                kernel=expanding,
            )
    weights = absorbed_weights(kv_b, dims.nope, dims.v, latent)
    return attend_absorbed(
        dims,
        q_nope,
        q_pe,
        weights,
        latent_pages,
        batch,
        scale=scale,
        kv_scale=kv_scale,
        mask=mask,
        kernel=absorbing,
    )


def attend_float8(
    dims: LatentDims,
    new: NewTokens,
    kv_b: nn.Module,
    rope: RotaryEmbedding,
    positions: Tensor,
    latent_pages: Tensor,
    batch: PagedBatch,
    *,
    scale: float,
    scales: tuple[float, float],
    kernel: str | None = None,
) -> Tensor:
    """`[T, H, v]`: rotate and quantise the new tokens, write them into their pages, attend
    absorbed. No gradient.

    One op between the product with W_UK and the write rotates, quantises and joins the parts, for
    kernels that take float8 on both sides (FlashMLA, TensorRT-LLM): rotated numbers are never
    rounded to the layer's own dtype.

    Args:
        dims, kv_b, scale: as in `attend_expanded`.
        new: the new tokens, before their rotation.
        rope, positions: of Dr numbers; int `[T]`.
        latent_pages: `[P, page, Dc + Dr]` float8_e4m3fn, written.
        batch: from the cache; its plan, if any, is for float8 queries.
        scales: (q_scale, kv_scale) of `rope_quantize_latent`, host floats.
        kernel: force a kernel of `mla_attention` by name.

    Raises InvalidInput, NoGradient, UnknownKernel, NoKernel.
    """
    q_nope, q_pe, latent, k_pe = new
    _checked(dims, q_nope, q_pe)
    need(
        rope_of(rope, "dims.rope", dims.rope) is not None,
        "rope",
        None,
        "a RotaryEmbedding, to fuse with",
    )
    check_scales("scales", scales, "(q_scale, kv_scale), finite host floats > 0")
    stored = check.tensor("latent_pages", latent_pages, "[P, page, Dc + Dr]", 3).dtype
    need(stored == torch.float8_e4m3fn, "latent_pages.dtype", stored, "float8_e4m3fn")
    absorbing, _, _ = _told(
        dims, q_nope, latent_pages, batch, kernel, before=None, query_dtype=latent_pages.dtype
    )
    w_uk, w_uv = _checked(dims, q_nope, q_pe, absorbed_weights(kv_b, dims.nope, dims.v, latent))
    # A table of the positions of this step only, the same in all layers.
    table = torch.cat(rope.cos_sin(positions, q_nope), -1).float()
    query, q_pe, row, key = rope_quantize_latent(
        by_head(q_nope, w_uk),
        q_pe,
        latent,
        k_pe,
        table,
        torch.arange(table.shape[0], device=table.device),
        q_scale=scales[0],
        kv_scale=scales[1],
        interleaved=rope.interleaved,
    )
    write_latent(row, key, latent_pages, batch.slots)
    q_scale, kv_scale = (scale_tensor(each, latent) for each in scales)
    dtype = q_nope.dtype
    out = _attend_pages(
        query,
        q_pe,
        latent_pages,
        batch,
        dtype,
        True,
        scale=scale,
        q_scale=q_scale,
        kv_scale=kv_scale,
        kernel=absorbing,
    )
    return by_head(out, w_uv.transpose(1, 2))


def check_scales(field: str, scales: Any, want: str) -> None:
    """Raise InvalidInput unless these are two host floats > 0: a tensor would become a number in
    the op, which waits for the device."""
    pair = isinstance(scales, tuple) and len(scales) == 2
    right = pair and all(
        isinstance(x, (int, float)) and not isinstance(x, bool) and 0 < x < float("inf")
        for x in scales
    )
    need(right, field, repr(scales), want)


def _told(
    dims: LatentDims,
    q_nope: Tensor,
    latent_pages: Tensor,
    batch: PagedBatch,
    kernel: str | None,
    **fields: Any,
) -> tuple[str | None, str | None, tuple[str, str]]:
    """The kernels forced on `mla_attention` and `varlen_attention`, and the policy keys of the two.
    Tells the layer to the watchers."""
    absorbing = expanding = None
    policies = _ACTIVE.key, _ACTIVE.key
    if kernel is not None:
        absorbing = kernel_for("mla_attention", kernel)
        expanding = kernel_for("varlen_attention", kernel)
        policies = key_for("mla_attention", absorbing), key_for("varlen_attention", expanding)
    if FORM_WATCHERS and not torch.compiler.is_compiling():
        heads = int(q_nope.shape[1])
        page = int(latent_pages.shape[1])
        target = Target.of(q_nope.device)
        queries = batch.max_seqlen_q
        dtypes = q_nope.dtype, latent_pages.dtype
        tell(
            lambda: (
                LatentForms.of(dims, heads, dtypes, page, target, policies=policies, **fields),
                queries,
            )
        )
    return absorbing, expanding, policies


def unfold(
    dims: LatentDims, heads: int, latent: Tensor, k_pe: Tensor, kv_b: nn.Module
) -> tuple[Tensor, Tensor]:
    """(key `[..., H, nope + Dr]`, value `[..., H, v]`) of latents `[..., Dc]` and rotated keys
    `[..., Dr]`. Raises InvalidInput."""
    both = kv_b(latent)
    if both.shape[-1] != heads * (dims.nope + dims.v):
        fail(
            InvalidInput,
            "kv_b(latent).shape[-1]",
            both.shape[-1],
            f"{heads} * ({dims.nope} + {dims.v}), the heads of the query",
        )
    both = both.view(*both.shape[:-1], heads, dims.nope + dims.v)
    rotated = k_pe[..., None, :].expand(*k_pe.shape[:-1], heads, dims.rope)
    return torch.cat([both[..., : dims.nope], rotated], -1), both[..., dims.nope :]


def gathered(
    dims: LatentDims,
    latent_pages: Tensor,
    chunk: PrefixChunk,
    kv_scale: Tensor | None,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """(latents `[N, Dc]`, rotated keys `[N, Dr]`) of a chunk's tokens, multiplied by kv_scale if
    there is one, in `dtype`."""
    page, stored = latent_pages.shape[1], latent_pages.dtype
    at = (chunk.slots // page, chunk.slots % page)
    # Indexing has no float8 kernel, and pages need not be a view of rows.
    rows = (
        latent_pages.view(torch.uint8)[at].view(stored)
        if stored == torch.float8_e4m3fn
        else latent_pages[at]
    )
    if stored != dtype or kv_scale is not None:
        wide = rows.to(torch.float64 if dtype == torch.float64 else torch.float32)
        rows = (wide if kv_scale is None else wide * kv_scale.to(wide.dtype)).to(dtype)
    return rows[:, : dims.latent], rows[:, dims.latent :]


def _checked(
    dims: LatentDims, q_nope: Tensor, q_pe: Tensor, weights: tuple[Tensor, ...] = ()
) -> tuple[Tensor, ...]:
    """`weights`: none, or w_uk `[H, nope, Dc]` and w_uv `[H, v, Dc]` of as many heads as the query.
    Raises InvalidInput."""
    if not _fits(q_nope, dims.nope):
        check.last("q_nope", check.tensor("q_nope", q_nope, "[T, H, nope]", 3), dims.nope)
    if not _fits(q_pe, dims.rope):
        check.last("q_pe", check.tensor("q_pe", q_pe, "[T, H, Dr]", 3), dims.rope)
    for weight, (field, rows, name) in zip(
        weights, (("w_uk", dims.nope, "nope"), ("w_uv", dims.v, "v")), strict=False
    ):
        if not _fits(weight, q_nope.shape[1], rows, dims.latent):
            check.last(
                field,
                check.tensor(field, weight, f"[H, {name}, Dc]", 3),
                q_nope.shape[1],
                rows,
                dims.latent,
            )
    return weights


def _fits(x: Any, *sizes: int) -> bool:
    """Are the last of the three sizes of a tensor these? A compiler is not asked: it shall know
    them as constants."""
    plain = isinstance(x, Tensor) and not torch.compiler.is_compiling()
    return plain and x.dim() == 3 and x.shape[3 - len(sizes) :] == sizes


def scale_tensor(value: float, like: Tensor) -> Tensor:
    """float32 `[1]` on the device of `like`, as the attention ops take a scale. A compiled model
    makes it once for all its layers."""
    return torch.full((1,), value, dtype=torch.float32, device=like.device)
