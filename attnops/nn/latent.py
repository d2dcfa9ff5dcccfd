"""Attention of new tokens over pages of latents (MLA), absorbed or expanded: the part of a layer between its projections.

Absorbed: the query is projected into the space of the latents, and every head reads the latents themselves (`attnops.nn.absorb`).
Expanded: latents are unfolded into the keys and values of each head. The two are the same sums in another order: DeepSeek-V2,
https://arxiv.org/abs/2405.04434, section 2.1.2. `attnops.ops.latent_form` compares their costs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from attnops.cache.batch import PagedBatch, PrefixChunk
from attnops.errors import InvalidInput, fail
from attnops.kernel import deterministic
from attnops.nn import arguments as check
from attnops.nn.absorb import absorbed_weights
from attnops.ops import merge_state, mla_attention, rope_quantize_latent, varlen_attention, write_latent
from attnops.ops.latent import check_stored
from attnops.ops.latent_form import LatentCall, LatentDims as LatentDims, crossover, kernel_for, tell
from attnops.problem import Target
from attnops.select import active_policy, key_for


def attend_absorbed(
    dims: LatentDims,
    q_nope: Tensor,
    q_pe: Tensor,
    w_uk: Tensor,
    w_uv: Tensor,
    latent_pages: Tensor,
    batch: PagedBatch,
    *,
    scale: float,
    kv_scale: Tensor | None = None,
    causal: bool = True,
    window_left: int = -1,
    softcap: float = 0.0,
    kernel: str | None = None,
) -> Tensor:
    """`[T, H, v]`: the new tokens attend to all tokens of their requests in the pages, themselves included. No gradient.

    With `batch.shared`, no window and no deterministic policy, it is a cascade: all tokens attend to the shared pages as one request, so
    that these are read once, then each to the rest of its own, and the two results are merged (https://arxiv.org/abs/2501.01005, 2.2).

    Args:
        dims: the sizes of the heads.
        q_nope: `[T, H, nope]`, of the dtype of q_pe.
        q_pe: `[T, H, Dr]` after its rotation.
        w_uk, w_uv: `[H, nope, Dc]`, `[H, v, Dc]`, from `absorbed_weights`.
        latent_pages: `[P, page, Dc + Dr]`, with the new tokens in them; the query's dtype, or float8_e4m3fn or int8 with kv_scale.
        batch: from the cache. Its plan serves calls without a cascade.
        kv_scale: float32 `[1]`, or None.
        scale, causal, window_left, softcap, kernel: as in `mla_attention`.

    Raises:
        InvalidInput: an argument breaks the contract.
        NoGradient: an input requires grad in grad mode.
        UnknownKernel, NoKernel: `kernel` cannot run.
    """
    _check_query(dims, q_nope, q_pe)
    check_weights(dims, q_nope.shape[1], w_uk, w_uv)
    scores = _Scores(scale, kv_scale, causal, window_left, softcap, kernel)
    return by_head(_attend_pages(by_head(q_nope, w_uk), q_pe, latent_pages, batch, scores), w_uv.transpose(1, 2))


def by_head(x: Tensor, weight: Tensor) -> Tensor:
    """`[T, H, b]`: `x` `[T, H, a]` through each head's `[a, b]` of `weight` `[H, a, b]`."""
    return torch.bmm(x.transpose(0, 1), weight).transpose(0, 1)


@dataclass(frozen=True)
class _Scores:
    """Arguments of `mla_attention` that are the same in both parts of a cascade. dtype: of the result for float8 queries."""

    scale: float
    kv_scale: Tensor | None = None
    causal: bool = True
    window_left: int = -1
    softcap: float = 0.0
    kernel: str | None = None
    q_scale: Tensor | None = None
    dtype: torch.dtype | None = None


def _attend_pages(query: Tensor, q_pe: Tensor, latent_pages: Tensor, batch: PagedBatch, s: _Scores) -> Tensor:
    """`[T, H, Dc]`: the part of `attend_absorbed` between its two products. Queries may be float8_e4m3fn with q_scale."""

    def attend(
        table: Tensor, lengths: Tensor, cu_q: Tensor, longest: int, causal: bool, plan: Tensor | None, lse: Tensor | None = None
    ) -> Tensor:
        output = None if s.dtype is None else torch.empty(query.shape, dtype=s.dtype, device=query.device)
        return mla_attention(
            query, q_pe, latent_pages, table, lengths, cu_q, max_seqlen_q=longest, scale=s.scale, causal=causal, window_left=s.window_left,
            softcap=s.softcap, q_scale=s.q_scale, kv_scale=s.kv_scale, plan=plan, output=output, lse=lse, workspace=batch.workspace,
            holes=batch.holes, kernel=s.kernel,
        )  # fmt: skip

    shared = batch.shared
    # A deterministic result must not depend on the pages that a batch shares.
    if shared is None or s.window_left >= 0 or deterministic(active_policy()):
        return attend(batch.page_table, batch.seq_lens, batch.cu_seqlens_q, batch.max_seqlen_q, s.causal, batch.plan)
    lse, rest_lse = (torch.empty(query.shape[:2], dtype=torch.float32, device=query.device) for _ in range(2))
    # The plan is for the whole tables, not for the parts.
    out = attend(shared.page_table, shared.seq_lens, shared.cu_seqlens_q, query.shape[0], False, None, lse)
    rest = attend(shared.rest_table, shared.rest_lens, batch.cu_seqlens_q, batch.max_seqlen_q, s.causal, None, rest_lse)
    out, _ = merge_state(out, lse, rest, rest_lse, stale=False)
    return out


def attend_expanded(
    dims: LatentDims,
    q_nope: Tensor,
    q_pe: Tensor,
    latent: Tensor,
    k_pe: Tensor,
    kv_b: nn.Module,
    latent_pages: Tensor,
    batch: PagedBatch,
    *,
    scale: float,
    kv_scale: Tensor | None = None,
    kernel: str | None = None,
) -> Tensor:
    """`[T, H, v]`: the new tokens attend to each other directly, and to the cached tokens of their requests through the pages.

    `batch.prefix` lists the cached tokens in chunks. Each chunk is gathered, unfolded, attended to and merged with the result so far, so
    that at most the new tokens and one chunk are unfolded at a time. The pages may hold the new tokens already. Compiled code specialises
    on the number of chunks. Differentiable without chunks.

    Args:
        dims, q_nope, q_pe, latent_pages, kv_scale, scale: as in `attend_absorbed`.
        latent: `[T, Dc]` of the new tokens, after the norm, of the query's dtype.
        k_pe: `[T, Dr]` of the new tokens, after the rotation, likewise.
        kv_b: the projection of a latent to H * (nope + v) numbers.
        batch: from the cache, with its `prefix`.
        kernel: force a kernel of `varlen_attention` by name.

    Raises:
        InvalidInput: an argument breaks the contract, or the batch has no `prefix`.
        UnknownKernel, NoKernel: `kernel` cannot run.
        NoGradient: with chunks, an input requires grad in grad mode.
    """
    _check_query(dims, q_nope, q_pe)
    check.tensor("latent_pages", latent_pages, "[P, page, Dc + Dr]", 3)
    if latent_pages.shape[2] != dims.latent + dims.rope:
        fail(InvalidInput, "latent_pages.shape[2]", latent_pages.shape[2], f"{dims.latent} + {dims.rope}, Dc + Dr")
    check_stored(latent_pages, kv_scale, q_nope.dtype)
    if kv_scale is not None and (kv_scale.shape != (1,) or kv_scale.dtype != torch.float32):
        fail(InvalidInput, "kv_scale", f"{kv_scale.dtype} {tuple(kv_scale.shape)}", "float32 [1]")
    if batch.prefix is None:
        fail(InvalidInput, "batch.prefix", None, "chunks, or (): asked of the cache with prefix_tokens=")
    heads = q_nope.shape[1]
    query = torch.cat([q_nope, q_pe], -1)
    given: dict[str, Any] = {"max_seqlen_q": batch.max_seqlen_q, "scale": scale, "padded": batch.padded, "kernel": kernel}
    own = (*unfold(dims, heads, latent, k_pe, kv_b), batch.cu_seqlens_q, batch.cu_seqlens_q)
    if not batch.prefix:
        alone: Tensor = varlen_attention(query, *own, max_seqlen_k=batch.max_seqlen_q, causal=True, **given)
        return alone
    out, lse = varlen_attention(query, *own, max_seqlen_k=batch.max_seqlen_q, causal=True, return_lse=True, **given)
    for chunk in batch.prefix:
        cached = unfold(dims, heads, *gathered(dims, latent_pages, chunk, kv_scale, q_nope.dtype), kv_b)
        part, part_lse = varlen_attention(
            query, *cached, batch.cu_seqlens_q, chunk.cu_seqlens_k, max_seqlen_k=chunk.max_seqlen_k, return_lse=True, **given
        )
        out, lse = merge_state(out, lse, part, part_lse, stale=False)
    return out


def attend_latents(
    dims: LatentDims,
    q_nope: Tensor,
    q_pe: Tensor,
    latent: Tensor,
    k_pe: Tensor,
    kv_b: nn.Module,
    latent_pages: Tensor,
    batch: PagedBatch,
    *,
    scale: float,
    kv_scale: Tensor | None = None,
    absorb_up_to: int | None = None,
    kernel: str | None = None,
) -> Tensor:
    """`[T, H, v]`: write the new tokens into their pages, then attend, absorbed or expanded as fits the batch.

    Attention is absorbed where the batch does not describe its cached tokens (a decode step), and where no request brings more than
    `absorb_up_to` tokens; else it is expanded. A compiled function holds one, with a guard on that comparison: `dims`, the heads and
    the page size must then be constants, as attributes of a module and shapes of its weights are, or `absorb_up_to` must be given.

    Args:
        dims, q_nope, q_pe, latent, k_pe, kv_b, latent_pages, batch, scale, kv_scale: as in `attend_expanded`; writes the pages.
        absorb_up_to: new tokens of a request. None: as many as `attnops.ops.latent_form` finds cheaper absorbed, and any number under a
            deterministic policy, where the choice must not depend on the other requests of the batch.
        kernel: force a kernel by name, on those of `mla_attention` and `varlen_attention` that have one of that name.

    Raises:
        InvalidInput: an argument breaks the contract.
        NoGradient: an input requires grad in grad mode.
        UnknownKernel, NoKernel: `kernel` cannot run.
    """
    _check_query(dims, q_nope, q_pe)
    if absorb_up_to is not None and (not isinstance(absorb_up_to, int) or isinstance(absorb_up_to, bool) or absorb_up_to < 0):
        fail(InvalidInput, "absorb_up_to", repr(absorb_up_to), "an int >= 0 (tokens), or None")
    absorbing, expanding, policies = _policies(kernel)
    before = None if batch.prefix is None else len(batch.prefix) > 0
    _tell_form(dims, q_nope, latent_pages, batch.max_seqlen_q, policies, before=before, absorb_up_to=absorb_up_to)
    write_latent(latent, k_pe, latent_pages, batch.slots, kv_scale=kv_scale)
    if before is not None:
        heads, page = int(q_nope.shape[1]), int(latent_pages.shape[1])
        if absorb_up_to is None:
            sizes = (dims.nope, dims.rope, dims.latent, dims.v)
            absorb_up_to = crossover(sizes, heads, (q_nope.dtype, latent_pages.dtype), page, q_nope.device, before, policies)
        if batch.max_seqlen_q > absorb_up_to:
            return attend_expanded(
                dims, q_nope, q_pe, latent, k_pe, kv_b, latent_pages, batch, scale=scale, kv_scale=kv_scale, kernel=expanding
            )
    w_uk, w_uv = absorbed_weights(kv_b, dims.nope, dims.v, latent)
    return attend_absorbed(dims, q_nope, q_pe, w_uk, w_uv, latent_pages, batch, scale=scale, kv_scale=kv_scale, kernel=absorbing)


def attend_float8(
    dims: LatentDims,
    q_nope: Tensor,
    q_pe: Tensor,
    latent: Tensor,
    k_pe: Tensor,
    kv_b: nn.Module,
    cos_sin: Tensor,
    positions: Tensor,
    latent_pages: Tensor,
    batch: PagedBatch,
    *,
    scale: float,
    q_scale: float,
    kv_scale: float,
    interleaved: bool = False,
    kernel: str | None = None,
) -> Tensor:
    """`[T, H, v]`: rotate and quantise the new tokens, write them into their pages, attend absorbed. No gradient.

    One op between the product with W_UK and the write rotates, quantises and joins the parts: rotated numbers are never rounded to the
    layer's own dtype, and kernels that take float8 on both sides (FlashMLA, TensorRT-LLM) get a query in one piece.

    Args:
        dims: the sizes of the heads.
        q_nope: `[T, H, nope]`, of the dtype of the three below.
        q_pe: `[T, H, Dr]`, before its rotation.
        latent: `[T, Dc]`.
        k_pe: `[T, Dr]`, before its rotation.
        kv_b: the projection of a latent to H * (nope + v) numbers.
        cos_sin, positions, interleaved, q_scale, kv_scale: as in `rope_quantize_latent`; the scales are host floats.
        latent_pages: `[P, page, Dc + Dr]` float8_e4m3fn, written.
        batch: from the cache; its plan, if any, is for float8 queries.
        scale: factor on the scores; see `mla_attention`.
        kernel: force a kernel of `mla_attention` by name.

    Raises:
        InvalidInput: an argument breaks the contract.
        NoGradient: an input requires grad in grad mode.
        UnknownKernel, NoKernel: `kernel` cannot run.
    """
    _check_query(dims, q_nope, q_pe)
    if check.tensor("latent_pages", latent_pages, "[P, page, Dc + Dr]", 3).dtype != torch.float8_e4m3fn:
        fail(InvalidInput, "latent_pages.dtype", latent_pages.dtype, "float8_e4m3fn")
    absorbing, _, policies = _policies(kernel)
    _tell_form(dims, q_nope, latent_pages, batch.max_seqlen_q, policies, before=None, query_dtype=latent_pages.dtype)
    w_uk, w_uv = absorbed_weights(kv_b, dims.nope, dims.v, latent)
    check_weights(dims, q_nope.shape[1], w_uk, w_uv)
    query, q_pe, row, key = rope_quantize_latent(
        by_head(q_nope, w_uk), q_pe, latent, k_pe, cos_sin, positions, q_scale=q_scale, kv_scale=kv_scale, interleaved=interleaved
    )
    write_latent(row, key, latent_pages, batch.slots)
    scores = _Scores(scale, scale_tensor(kv_scale, latent), kernel=absorbing, q_scale=scale_tensor(q_scale, latent), dtype=q_nope.dtype)
    return by_head(_attend_pages(query, q_pe, latent_pages, batch, scores), w_uv.transpose(1, 2))


def _policies(kernel: str | None) -> tuple[str | None, str | None, tuple[str, str]]:
    """The kernels forced on `mla_attention` and on `varlen_attention`, and the keys of the policies of the two."""
    absorbing, expanding = kernel_for("mla_attention", kernel), kernel_for("varlen_attention", kernel)
    return absorbing, expanding, (key_for("mla_attention", absorbing), key_for("varlen_attention", expanding))


def _tell_form(dims: LatentDims, q_nope: Tensor, latent_pages: Tensor, queries: int, policies: tuple[str, str], **fields: Any) -> None:
    """Report a call to the watchers, as of `attnops.explain`. fields: further ones of its LatentCall."""
    if not torch.compiler.is_compiling():
        heads, page, target = int(q_nope.shape[1]), int(latent_pages.shape[1]), Target.of(q_nope.device)
        tell(lambda: (LatentCall(dims, heads, q_nope.dtype, latent_pages.dtype, page, target, policies=policies, **fields), queries))


def unfold(dims: LatentDims, heads: int, latent: Tensor, k_pe: Tensor, kv_b: nn.Module) -> tuple[Tensor, Tensor]:
    """(key `[..., H, nope + Dr]`, value `[..., H, v]`) of latents `[..., Dc]` and rotated keys `[..., Dr]`. Raises InvalidInput."""
    both = kv_b(latent)
    if both.shape[-1] != heads * (dims.nope + dims.v):
        fail(InvalidInput, "kv_b(latent).shape[-1]", both.shape[-1], f"{heads} * ({dims.nope} + {dims.v}), the heads of the query")
    both = both.view(*both.shape[:-1], heads, dims.nope + dims.v)
    rotated = k_pe[..., None, :].expand(*k_pe.shape[:-1], heads, dims.rope)
    return torch.cat([both[..., : dims.nope], rotated], -1), both[..., dims.nope :]


def gathered(
    dims: LatentDims, latent_pages: Tensor, chunk: PrefixChunk, kv_scale: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """(latents `[N, Dc]`, rotated keys `[N, Dr]`) of a chunk's tokens, multiplied by kv_scale if there is one, in `dtype`."""
    page, stored = latent_pages.shape[1], latent_pages.dtype
    at = (chunk.slots // page, chunk.slots % page)
    # Indexing has no float8 kernel, and pages need not be a view of rows.
    rows = latent_pages.view(torch.uint8)[at].view(stored) if stored == torch.float8_e4m3fn else latent_pages[at]
    if stored != dtype or kv_scale is not None:
        wide = rows.to(torch.float64 if dtype == torch.float64 else torch.float32)
        rows = (wide if kv_scale is None else wide * kv_scale.to(wide.dtype)).to(dtype)
    return rows[:, : dims.latent], rows[:, dims.latent :]


def check_weights(dims: LatentDims, heads: int, w_uk: Tensor, w_uv: Tensor) -> None:
    """w_uk is `[H, nope, Dc]`, w_uv `[H, v, Dc]`, of `heads` heads. Raises InvalidInput."""
    for field, weight, rows, layout in (("w_uk", w_uk, dims.nope, "[H, nope, Dc]"), ("w_uv", w_uv, dims.v, "[H, v, Dc]")):
        check.last(field, check.tensor(field, weight, layout, 3), heads, rows, dims.latent)


def _check_query(dims: LatentDims, q_nope: Tensor, q_pe: Tensor) -> None:
    check.last("q_nope", check.tensor("q_nope", q_nope, "[T, H, nope]", 3), dims.nope)
    check.last("q_pe", check.tensor("q_pe", q_pe, "[T, H, Dr]", 3), dims.rope)


def scale_tensor(value: float, like: Tensor) -> Tensor:
    """float32 `[1]` on the device of `like`, as the attention ops take a scale. A compiled model makes it once for all its layers."""
    return torch.full((1,), value, dtype=torch.float32, device=like.device)
