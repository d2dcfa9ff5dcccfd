"""`flashmla` of `sparse_mla_attention`: FlashMLA's sparse attention (see sources.py), for latents
of 512 + 64.

Which of two raw ops answers follows from the layout of the latents, not from decode or prefill:
`sparse_decode_fwd` reads the pages of 656 bytes a token and splits a token's keys among SMs,
`sparse_prefill_fwd` reads bfloat16 and gives a token to one SM for every 64 heads. Neither takes an
output, so that there is always one copy; queries in one piece of 64 or 128 heads, and lists of
whole tiles, cost no other. It never ran here on an SM100 device.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import pad

from attnops.core.errors import InvalidInput
from attnops.core.kernel import Invariant, Kernel, arch, at_most, demand, one_of, register
from attnops.core.problem import Problem
from attnops.kernels.sgl import sources
from attnops.kernels.shared.memory import PACK
from attnops.kernels.shared.tokens import LATENT, LATENTS, ROPE, see_nothing, whole

if TYPE_CHECKING:
    from attnops.ops.sparse import record as sparse

HEADS = (64, 128)
PACKED_TILE, PLAIN_TILE = 64, 128
"""Lists are whole tiles: an assertion in the kernels."""
LARGEST = 2**31 - 1
MOST_TOKENS = 512
"""Tokens of one `sparse_decode_fwd`. It makes a float32 output a token and head for splits that
there may be, used or not."""


def sparse_mla_attention(call: sparse.SparseMlaAttention) -> None:
    """Raises InvalidInput when `latent_pages` does not start at a multiple of 16 bytes.

    `sparse_decode_fwd` takes slots of pages that lie apart. `sparse_prefill_fwd` knows no pages: it
    counts the rows between them, too.
    """
    pages, scale, tokens = call.latent_pages, call.scale, call.q_nope.shape[0]
    if not (call.output.numel() and call.indices.numel() and pages.numel()):
        _see_nothing(call)
        return
    if pages.data_ptr() % PACK:
        raise InvalidInput(
            "latent_pages.data_ptr()",
            pages.data_ptr(),
            "a multiple of 16: rows are loaded 16 bytes at a time",
        )
    heads = next(h for h in HEADS if h >= call.q_nope.shape[1])
    query = _query(call.q_nope, call.q_pe, heads)
    if scale <= 0:
        # The logits of unseen latents are -inf before the kernels multiply by the scale.
        query, scale = query * (-1.0 if scale < 0 else 0.0), -scale or 1.0
    logits, sinks = _sinks(call.sinks, heads)
    run, step = (_packed, MOST_TOKENS) if pages.dtype == torch.uint8 else (_plain, tokens)
    for start in range(0, tokens, step):
        rows = slice(start, start + step)
        _write(call, rows, run(call, rows, query[rows], sinks, scale), logits)


def _see_nothing(call: sparse.SparseMlaAttention) -> None:
    see_nothing(call.output, call.lse)
    if call.lse is not None and call.sinks is not None:
        call.lse.copy_(call.sinks)


def _sinks(sinks: Tensor | None, heads: int) -> tuple[Tensor | None, Tensor | None]:
    """In float32: as they are, and contiguous for all heads of the kernel."""
    if sinks is None:
        return None, None
    logits, more = sinks.float(), heads - sinks.shape[0]
    return logits, pad(logits, (0, more)) if more else logits.contiguous()


Results = tuple[Tensor, Tensor, float]
"""Output and lse with all heads of the kernel, and the base of lse. Every token is a request of one
query. The lse of no key is +inf, and sinks are not in it."""


def _packed(
    call: sparse.SparseMlaAttention, rows: slice, query: Tensor, sinks: Tensor | None, scale: float
) -> Results:
    """Of pages of bytes, for some tokens."""
    pages = call.latent_pages
    length = None if call.topk_length is None else call.topk_length[rows]
    # The kernel asserts that it is given no lengths for these pages: entries past them become -1.
    lists = _lists(call.indices[rows], length, pages, PACKED_TILE, call.holes, pages.shape[1])
    out, z, _, _ = sources.op("sparse_decode_fwd")(
        query[:, None],
        pages[:, :, None],
        lists[:, None],
        None,
        sinks,
        None,
        None,
        None,
        None,
        None,
        LATENT,
        scale,
    )
    return out[:, 0], z[:, :, 0], math.e


def _plain(
    call: sparse.SparseMlaAttention, rows: slice, query: Tensor, sinks: Tensor | None, scale: float
) -> Results:
    """Of pages in bfloat16."""
    pages = call.latent_pages
    every, apart = _every_row(pages)
    lists = _lists(call.indices[rows], None, pages, PLAIN_TILE, call.holes, apart)
    length = None if call.topk_length is None else call.topk_length[rows].contiguous()
    given = (query, every[:, None], lists[:, None], scale, LATENT, sinks, length)
    out, _, z = sources.op("sparse_prefill_fwd")(*given)
    return out, z, sources.source().lse_base


def _write(
    call: sparse.SparseMlaAttention, rows: slice, found: Results, sinks: Tensor | None
) -> None:
    out, z, base = found
    have = call.output.shape[1]
    call.output[rows].copy_(out[:, :have])
    if call.lse is None:
        return
    z = z[:, :have] if base == math.e else z[:, :have] * math.log(base)
    lse, least = call.lse[rows], float("-inf")
    if sinks is None:
        torch.nan_to_num(z, nan=float("nan"), posinf=least, neginf=least, out=lse)
    else:
        torch.logaddexp(z.masked_fill(z == float("inf"), least), sinks, out=lse)


def _query(q_nope: Tensor, q_pe: Tensor, heads: int) -> Tensor:
    """`[T, heads, Dc + Dr]`, aligned as TMA wants it. The contents of added heads do not matter."""
    tokens, have = q_nope.shape[:2]
    if have == heads:
        query = whole(q_nope, q_pe)
        aligned = not (query.data_ptr() % 16 or query.stride(0) % 8 or query.stride(1) % 8)
        return query if aligned else query.clone(memory_format=torch.contiguous_format)
    query = q_nope.new_empty((tokens, heads, LATENT + ROPE))
    query[:, :have, :LATENT] = q_nope
    query[:, :have, LATENT:] = q_pe
    return query


def _every_row(pages: Tensor) -> tuple[Tensor, int]:
    """(`[rows, D]` from the first page's first row to the last page's last, the rows from one
    page's start to the next one's)."""
    count, page, width = pages.shape
    apart = page if count == 1 else pages.stride(0) // width
    if apart == page:
        return pages.flatten(0, 1), page
    return pages.as_strided(((count - 1) * apart + page, width), (width, 1)), apart


def _lists(
    indices: Tensor,
    length: Tensor | None,
    pages: Tensor,
    tile: int,
    holes: bool,
    apart: int,
) -> Tensor:
    """The lists in whole tiles, with -1 past their lengths and, if there may be `holes`, for
    entries that are no slot: one launch.

    apart: rows from one page's start to the next one's, by which slots are counted.
    """
    page = pages.shape[1]
    slots = min(pages.shape[0] * page, LARGEST) if holes else LARGEST
    if indices.is_cuda and (holes or length is not None or apart != page):
        from attnops.kernels.shared.launch.rows import make_lists

        out = indices.new_empty((indices.shape[0], -(-indices.shape[1] // tile) * tile))
        make_lists(indices, length, slots, out, page, apart)
        return out
    if holes or length is not None:
        indices = torch.where(_real(indices, length, slots), indices, -1)
    if apart != page:
        between = torch.div(indices, page, rounding_mode="floor") * (apart - page)
        indices = torch.where(indices < 0, -1, indices + between)
    if indices.shape[1] % tile:
        return pad(indices, (0, -indices.shape[1] % tile), value=-1)
    # They are loaded up to 32 bytes at a time.
    return (
        indices
        if indices.is_contiguous() and indices.data_ptr() % 32 == 0
        else indices.clone(memory_format=torch.contiguous_format)
    )


def _real(indices: Tensor, length: Tensor | None, slots: int) -> Tensor:
    """bool, as `indices`: the entries that are slots, within their list's length."""
    real = (indices >= 0) & (indices < slots)
    if length is not None:
        real &= torch.arange(indices.shape[1], device=indices.device) < length[:, None]
    return real


def _cost_us(p: Problem) -> float:
    """The larger of the latents' bytes over the bandwidth and the products over the throughput it
    may reach on SM90.

    bfloat16 latents: a wave of as many tokens as there are SMs costs the same whether it is full or
    not.
    """
    blocks = max(p.sizes.tokens.hint, 1) * (1 if p.q_heads <= HEADS[0] else 2)
    quantised = p.kv_dtype == torch.uint8
    filled = blocks if quantised else -(-blocks // 132) * 132
    products = 2 * HEADS[0] * (p.head_dim + p.v_head_dim) / (4.1e8 if quantised else 6e8)
    return (15.0 if quantised else 10.0) + max(p.sizes.context.hint, 1) * max(
        filled * products, p.sizes.tokens.hint * (656 if quantised else 1152) / 3.5e6
    )


# A token of bfloat16 latents has blocks of its own. How the keys of byte pages are split follows
# from the whole batch.
UNSPLIT = demand("kv_dtype", "bfloat16 (policy.deterministic)", lambda p: p.kv_dtype != torch.uint8)
register(
    Kernel(
        "flashmla",
        "sparse_mla_attention",
        sparse_mla_attention,
        takes=frozenset({"topk_length", "sinks", "lse", "holes"}),
        dtypes=(torch.bfloat16,),
        kv_dtypes=(torch.bfloat16, torch.uint8),
        needs=(
            arch(90, 100),
            *LATENTS,
            at_most("q_heads", HEADS[-1]),
            one_of("pages_in_rows", True),
        ),
        packages=(sources.PACKAGE,),
        cost_us=_cost_us,
        invariant=Invariant((UNSPLIT,)),
        about="FlashMLA sparse attention: packed or bfloat16 latents",
    )
)
