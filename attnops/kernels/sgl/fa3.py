"""`fa3`: FlashAttention-3 as sgl-kernel ships it, for dense, packed, paged and latent calls
(https://arxiv.org/abs/2407.08608).

Sinks are rounded to bfloat16, the only dtype the kernel reads; a call that asks for lse must bring
them in it. A float8 query's weights are rounded to float8 before they meet the value. Data pointers
must be 16-byte aligned, as torch allocates them: a view that starts elsewhere makes the kernel
raise.

It is called as the raw op `sgl_kernel::fwd`, by position (hopper/flash_api.cpp), which has 35
arguments in wheels 0.4.2 and 0.4.3, and 37 in 0.4.4 and later. The wheel's Python package is not
imported.

Latents are absorbed: the rotated part is query and key, the latent is value and, through `q_v`, key
as well. Key and value are strided views of the same rows, without a copy. Their tiles are 64 x 64
(hopper/tile_size.h).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from attnops.core.kernel import Invariant, Kernel, arch, deterministic, one_of, register
from attnops.core.problem import Problem
from attnops.core.tensors import compact, no_lse, result_dtype
from attnops.kernels.sgl import wheel
from attnops.kernels.sgl.fa3_needs import (
    FLOAT8,
    HALF,
    UNITS,
    bfloat16_sinks,
    chunk_rules,
    steady_tiles,
)
from attnops.kernels.shared.tokens import (
    LATENTS as LATENT_NEEDS,
    blank,
    packed_lse,
    past,
    runs,
    with_sinks,
    zeroed,
)
from attnops.measured import Roofline, copy_us, phases

if TYPE_CHECKING:
    from attnops.ops.attention import record as dense, varlen
    from attnops.ops.latent import record as mla
    from attnops.ops.pages import record as paged

# No wheel before 0.4.2 fits the torch that attnops asks for.
PACKAGE = wheel.package("0.4.2")
LIBRARY = "flash_ops.abi3.so"
missing = functools.partial(wheel.lacks, pattern=LIBRARY)
FEW = 64
"""Query rows of a key head and request up to which the kernel reads pages without TMA: its smallest
tile."""
TILE = 64


def attention(call: dense.Attention) -> tuple[Tensor, Tensor]:
    """With `kv_end` and more than a few queries the value is copied once."""
    query, key, value = call.query, call.key, call.value
    batch, queries, heads, _ = query.shape
    if query.numel() == 0 or key.numel() == 0:
        output = query.new_zeros(
            (batch, queries, heads, value.shape[3]), dtype=result_dtype(query, call.q_scale)
        )
        lse = query.new_full((batch, heads, queries), float("-inf"), dtype=torch.float32)
    else:
        steady, few = deterministic(call.policy), queries * (heads // key.shape[2]) <= FEW
        value, requests = _ranges(call, steady, few)
        output, lse = forward(call, (query, key, value), requests, steady)
    return output, compact(
        with_sinks(lse.transpose(1, 2), call.sinks)
    ) if call.return_lse else no_lse(query)


def _ranges(call: dense.Attention, steady: bool, few: bool) -> tuple[Tensor, Requests]:
    """(the value, where the keys of each row of the batch are). few: at most FEW query rows."""
    value, starts, ends, table = call.value, call.kv_start, call.kv_end, None
    batch, keys = call.key.shape[:2]
    if steady and few and ends is None and not call.attention_chunk:
        # With `kv_end` few queries read pages, in other tiles. The most padded row decides if a
        # call has it, so every call reads pages.
        ends = torch.full((batch,), keys, dtype=torch.int32, device=value.device)
    if ends is not None:
        starts = starts if starts is None else torch.minimum(starts, ends)
        if few:
            # Each row is a page: the way pages are read for few queries zeroes the keys past the
            # end.
            table = torch.arange(batch, dtype=torch.int32, device=value.device)[:, None]
        else:
            # Keys past the end are masked after the product.
            value = zeroed(value, torch.arange(keys, device=value.device) >= ends[:, None])
    starts, ends = (x if x is None else x.to(torch.int32).contiguous() for x in (starts, ends))
    return value, (None, None, None, None, starts, ends, table)


def varlen_attention(call: varlen.VarlenAttention) -> tuple[Tensor, Tensor]:
    """The value is copied once and the output cleared, unless the call promises no padding rows."""
    query, value, cu_q, cu_k = call.query, call.value, call.cu_seqlens_q, call.cu_seqlens_k
    (tokens, heads, _), some = query.shape, runs(call)
    # The kernel does not write rows of no request, and how many there are only the device knows:
    # one memset of the output costs less than finding them. Nor may it read such rows of the value.
    new = query.new_zeros if call.padded or not some else query.new_empty
    output = new((tokens, heads, value.shape[2]), dtype=result_dtype(query, call.q_scale))
    if some:
        value = zeroed(value, past(cu_k, value.shape[0])) if call.padded else value
        steady = deterministic(call.policy)
        # The kernel drops a window that reaches past all keys, see longest_query.
        longest = max(call.max_seqlen_k, call.window_left + 2) if steady else call.max_seqlen_k
        max_q = longest_query(steady, call.max_seqlen_q, call.window_right)
        requests = (cu_q.contiguous(), max_q, cu_k.contiguous(), longest, None, None, None)
        lse = forward(call, (query, call.key, value), requests, steady, output)[1]
    else:
        lse = query.new_full((heads, tokens), float("-inf"), dtype=torch.float32)
    return output, compact(
        packed_lse(lse, call.sinks, cu_q, call.padded)
    ) if call.return_lse else no_lse(query)


def paged_attention(call: paged.PagedAttention) -> None:
    """The kernel writes into `output` itself, which is cleared first unless the call promises no
    padding rows."""
    if blank(call):
        return
    query, k_pages, padded = call.query, call.k_pages, call.padded
    if padded:
        call.output.zero_()  # as in varlen_attention
    steady, (_, page_size, kv_heads, _) = deterministic(call.policy), k_pages.shape
    queries = longest_query(steady, call.max_seqlen_q, call.window_right)
    starts = left_padding(page_size, queries * (query.shape[1] // kv_heads), steady, call.seq_lens)
    _write(call, (query, k_pages, call.v_pages), queries, starts, steady, padded)


def mla_attention(call: mla.MlaAttention) -> None:
    latents(call)


def latents(call: mla.MlaAttention, used: Tensor | None = None) -> None:
    """As `mla_attention`. used: as in `forward`; rows of requests that are not served become 0."""
    if blank(call):
        return
    q_v, pages = call.q_nope, call.latent_pages[:, :, None]
    call.output.zero_()  # as in varlen_attention
    steady, (_, heads, latent) = deterministic(call.policy), q_v.shape
    queries = longest_query(steady, call.max_seqlen_q)
    starts = left_padding(pages.shape[1], queries * heads, steady, call.seq_lens, TILE)
    _write(
        call,
        (call.q_pe, pages[..., latent:], pages[..., :latent]),
        queries,
        starts,
        steady,
        q_v=q_v,
        used=used,
    )


def _write(
    call: paged.PagedAttention | mla.MlaAttention,
    given: tuple[Tensor, Tensor, Tensor],
    queries: int,
    starts: Tensor | None,
    steady: bool,
    padded: bool = True,
    q_v: Tensor | None = None,
    used: Tensor | None = None,
) -> None:
    """Write output and lse of a call over pages. given: query, keys and values. queries: of the
    longest request."""
    output, lse, table, cu_q = call.output, call.lse, call.page_table, call.cu_seqlens_q
    table = table if table.stride(1) == 1 else table.contiguous()
    out = output if output.stride(2) == 1 else None
    requests = (cu_q.contiguous(), queries, None, None, starts, call.seq_lens.contiguous(), table)
    found, raw = forward(call, given, requests, steady, out, q_v, used)
    if out is None:
        output.copy_(
            found.masked_fill(past(cu_q, found.shape[0])[:, None, None], 0.0) if padded else found
        )
    if lse is not None:
        lse.copy_(packed_lse(raw, call.sinks, cu_q, padded))


# The raw op ---------------------------------------------------------------------------------------


@functools.cache
def raw_op() -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """`sgl_kernel::fwd` and the arguments that its version takes after the 35 we give. Raises
    OSError or RuntimeError."""
    fwd = wheel.op("fwd", LIBRARY).default
    count = len(fwd._schema.arguments)
    if count not in (35, 37):
        raise RuntimeError(
            f"sgl_kernel::fwd: got {count} arguments, want 35 (sglang-kernel 0.4.2, 0.4.3) or 37 "
            "(0.4.4 and later)"
        )
    return fwd, (None, False) if count == 37 else ()


Requests = tuple[
    Tensor | None,
    int | None,
    Tensor | None,
    int | None,
    Tensor | None,
    Tensor | None,
    Tensor | None,
]
"""cu_q `[B + 1]`, max_q, cu_k `[B + 1]`, max_k: of packed queries and keys. starts, ends `[B]`: the
keys of each request. table: the page table. All tensors are int32 and contiguous, the page table
only within a row. A plain tuple, for a call of fa3 makes one each time."""


def forward(
    call: Any,
    given: tuple[Tensor, Tensor, Tensor],
    requests: Requests,
    steady: bool,
    out: Tensor | None = None,
    q_v: Tensor | None = None,
    used: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(output, lse with the heads first).

    call: gives rules, sinks and scales. given: query, key and value. q_v: the query's part against
    the value, of latents.
    steady: under a deterministic policy. used: int32 `[B]`, how many of its tokens each request is
    served for; None for all.
    """
    fwd, tail = raw_op()
    query, key, value = given
    cu_q, max_q, cu_k, max_k, starts, ends, table = requests
    sinks, right, chunk, q_scale, k_scale, v_scale = call.sinks, -1, 0, None, None, None
    if sinks is not None:
        sinks = sinks.to(torch.bfloat16).contiguous()
    if q_v is None:
        right, chunk, q_scale = call.window_right, call.attention_chunk, call.q_scale
    if q_scale is not None:
        # [1] or [Hkv] as [B, Hkv], which the kernel reads through its strides, without a copy.
        shape = (query.shape[0] if cu_q is None else cu_q.shape[0] - 1, key.shape[-2])
        q_scale, k_scale, v_scale = (
            None if s is None else s.expand(shape) for s in (q_scale, call.k_scale, call.v_scale)
        )
    # The number of splits follows from the whole batch's size, and with it the order of summation;
    # 0 leaves it to the kernel.
    found = fwd(
        query,
        key,
        value,
        None,
        None,
        q_v,
        out,
        cu_q,
        cu_k,
        None,
        used,
        ends,
        max_q,
        max_k,
        table,
        None,
        starts,
        None,
        None,
        None,
        q_scale,
        k_scale,
        v_scale,
        call.scale,
        call.causal,
        call.window_left,
        right,
        chunk,
        call.softcap,
        False,
        None,
        int(steady),
        None,
        0,
        sinks,
        *tail,
    )
    return found[0], found[1]


def left_padding(
    page_size: int, rows: int, steady: bool, like: Tensor, unit: int = 16
) -> Tensor | None:
    """int32 zeros `[B]` for a paged call that must keep off TMA, else None.

    rows: query rows of a key head and request, at most. unit: tokens that tiles are multiples of;
    they have 64 or more. Pages of whole tiles are loaded by TMA when the queries fill a tile, stale
    NaN with them; the other path, which a left padding selects, zeroes the keys past the end. It
    also has one tile size, hence one order of summation.
    """
    whole = page_size >= 64 and page_size % unit == 0 and rows > 64
    return (
        torch.zeros_like(like, memory_format=torch.contiguous_format) if whole or steady else None
    )


def longest_query(steady: bool, max_seqlen_q: int, right: int = -1) -> int:
    """The `max_seqlen_q` for the kernel. steady: under a deterministic policy.

    The kernel picks its tile by whether this is 1, and by whether a window's right side reaches
    past it (hopper/flash_api.cpp). Under a deterministic policy this is larger than 1 and than the
    right side.
    """
    return max(max_seqlen_q, 2, right + 2) if steady else max_seqlen_q


DENSE = phases(Roofline(12.3, 0.98, 0.5, 0.00097, 14_000), Roofline(12.6, 0.6, 0.86, 0.0092, 510))
PACKED = Roofline(14.0, 0.97, 0.68, 0.0052, 2100)
PAGED = phases(Roofline(14.6, 1.0, 0.6, 0.00096, 11_000), Roofline(14.0, 0.78, 0.76, 0.0041, 2200))
LATENTS = phases(Roofline(18.3, 1.1, 0.86, 0.0057, 1800), Roofline(14.6, 0.41, 0.87, 0.028, 520))


def _cost_us(p: Problem) -> float:
    """With a copy of the values without those of no request."""
    dense = p.op == "attention"
    copies = (
        p.rules.kv_range and p.sizes.queries.hint * p.group_size > FEW if dense else p.step.padded
    )
    return (DENSE if dense else PACKED)(p) + copies * copy_us(
        p, p.sizes.batch.hint * p.sizes.context.hint * p.kv_heads * p.v_head_dim
    )


def _unsplit_us(p: Problem) -> float:
    """Under a deterministic policy one block reads all keys of a request and head, at 47 GB/s."""
    context = (
        max(p.sizes.context.hint, 1)
        if p.rules.window[0] < 0
        else min(max(p.sizes.context.hint, 1), p.rules.window[0] + 1)
    )
    return max(PAGED(p), 8.0 + context * (p.head_dim + p.v_head_dim) * p.kv_dtype.itemsize / 4.7e4)


def _unsplit_latents_us(p: Problem) -> float:
    """Under a deterministic policy one block works through all keys of a request and 64 rows, full
    or not."""
    return max(
        LATENTS(p),
        10.0
        + 2.0 * TILE * max(p.sizes.context.hint, 1) * (p.head_dim + p.v_head_dim) / (5e8 / 132),
    )


_fa3 = functools.partial(Kernel, "fa3", packages=(PACKAGE,), probe=missing)
ABOUT, RULES = (
    "FlashAttention-3 of sgl-kernel",
    ("causal", "window_left", "window_right", "softcap", "attention_chunk", "sinks"),
)
NEEDS = (
    arch(80, 86, 87, 89, 90),
    *UNITS,
    bfloat16_sinks,
    chunk_rules,
    one_of("last_dim_contiguous", True),
)
for _run, _more, _us, _steady_us in (
    (attention, ("kv_start", "kv_end", "return_lse"), _cost_us, None),
    (varlen_attention, ("return_lse",), _cost_us, None),
    (paged_attention, ("lse",), PAGED, _unsplit_us),
):
    register(
        _fa3(
            _run.__name__,
            _run,
            takes=frozenset({*RULES, "q_scale", "k_scale", "v_scale", *_more}),
            dtypes=(*HALF, FLOAT8),
            needs=NEEDS,
            cost_us=_us,
            invariant=Invariant((steady_tiles,), _steady_us),
            about=ABOUT,
        )
    )
LATENT_KERNEL = register(
    _fa3(
        "mla_attention",
        mla_attention,
        takes=frozenset({"causal", "window_left", "softcap", "sinks", "lse"}),
        dtypes=HALF,
        needs=(arch(90), *LATENT_NEEDS, bfloat16_sinks),
        cost_us=LATENTS,
        invariant=Invariant(cost_us=_unsplit_latents_us),
        about=f"{ABOUT}, absorbed latents",
    )
)
