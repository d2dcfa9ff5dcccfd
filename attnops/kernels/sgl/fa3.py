"""`fa3`: FlashAttention-3 as sgl-kernel ships it, for dense, packed, paged and latent calls (https://arxiv.org/abs/2407.08608).

The raw op `sgl_kernel::fwd` is called, in the 35-argument form of wheels 0.4.2 to 0.4.3 and the 37-argument form of 0.4.4 and later.
Sinks are rounded to bfloat16, the only dtype the kernel reads; a call that asks for lse must bring them in it.
A float8 query's weights are rounded to float8 before they meet the value. With `fa3_schedule`'s plan a paged call starts no kernel
but its own: it counts tiles in the plan's last word and leaves 0 there, as it found it.
Data pointers must be 16-byte aligned, as torch allocates them: a view that starts elsewhere makes the kernel raise.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attnops.kernel import Invariant, Kernel, Need, arch, at_most, deterministic, multiple_of, one_of, register, without
from attnops.kernels.sgl import fa3_mla as _fa3_mla
from attnops.kernels.sgl.fa3_op import (
    PACKAGE,
    bfloat16_sinks,
    call,
    chunk_rules,
    dtype_rules,
    left_padding,
    longest_keys,
    longest_query,
    missing,
    packed_lse,
    part_of_plan,
    past,
    plan_rules,
    steady_tiles,
    value_dim,
    with_sinks,
)
from attnops.measured import Roofline, copy_us, phases
from attnops.problem import Problem
from attnops.reference.attention import compact, no_lse, result_dtype


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    sinks: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    kv_start: Tensor | None = None,
    kv_end: Tensor | None = None,
    *,
    scale: float,
    causal: bool = False,
    window_left: int = -1,
    window_right: int = -1,
    softcap: float = 0.0,
    return_lse: bool = False,
    q_scale: Tensor | None = None,
    attention_chunk: int = 0,
    policy: str = "",
) -> tuple[Tensor, Tensor]:
    """See `attnops.attention`. With `kv_end` and more than a few queries the value is copied once."""
    if query.numel() == 0 or key.numel() == 0:
        output = query.new_zeros((*query.shape[:3], value.shape[3]), dtype=result_dtype(query, q_scale))
        lse = query.new_full((query.shape[0], query.shape[2], query.shape[1]), float("-inf"), dtype=torch.float32)
    else:
        table = None
        few = query.shape[1] * (query.shape[2] // key.shape[2]) <= FEW
        if few and kv_end is None and deterministic(policy) and not attention_chunk:
            # The other way has other tiles, and whether a call says where keys end is its most padded row's doing.
            kv_end = torch.full((query.shape[0],), key.shape[1], dtype=torch.int32, device=query.device)
        if kv_end is not None:
            kv_start = kv_start if kv_start is None else torch.minimum(kv_start, kv_end)
            if few:
                # Each row is a page: the way pages are read for few queries zeroes what lies past the end.
                table = torch.arange(query.shape[0], dtype=torch.int32, device=query.device)[:, None]
            else:
                # Whole tiles are loaded and a weight of 0 does not silence NaN. Those of the key are masked after the product.
                value = _silent(value, torch.arange(key.shape[1], device=key.device) >= kv_end[:, None])
        starts, ends = (x if x is None else x.to(torch.int32).contiguous() for x in (kv_start, kv_end))
        rules = (causal, window_left, window_right, softcap, attention_chunk)
        scales = None if q_scale is None else (q_scale, k_scale, v_scale)
        output, lse = call(query, key, value, sinks, policy, scale, rules, scales, ends=ends, starts=starts, table=table)
    return output, compact(with_sinks(lse.transpose(1, 2), sinks)) if return_lse else no_lse(query)


def varlen_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    mask: Tensor | None = None,
    sinks: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    *,
    max_seqlen_q: int,
    max_seqlen_k: int,
    scale: float,
    causal: bool = False,
    window_left: int = -1,
    window_right: int = -1,
    softcap: float = 0.0,
    return_lse: bool = False,
    q_scale: Tensor | None = None,
    attention_chunk: int = 0,
    padded: bool = True,
    policy: str = "",
) -> tuple[Tensor, Tensor]:
    """See `attnops.varlen_attention`. The value is copied once and the output cleared, unless nothing is padding."""
    shape, dtype = (*query.shape[:2], value.shape[2]), result_dtype(query, q_scale)
    runs = query.numel() and key.numel() and max_seqlen_q and max_seqlen_k and cu_seqlens_q.shape[0] > 1
    # Rows of no request are not written by the kernel, and how many there are only the device knows: one memset of the output
    # costs less than finding them. Nor may what stands in the value's be read; see `attention`.
    output = query.new_zeros(shape, dtype=dtype) if padded or not runs else query.new_empty(shape, dtype=dtype)
    if runs:
        value = _silent(value, past(cu_seqlens_k, value.shape[0])[:, 0, 0]) if padded else value
        rules = (causal, window_left, window_right, softcap, attention_chunk)
        scales = None if q_scale is None else (q_scale, k_scale, v_scale)
        cu = (cu_seqlens_q, cu_seqlens_k)
        longest = (longest_query(policy, max_seqlen_q, window_right), longest_keys(policy, max_seqlen_k, window_left))
        lse = call(query, key, value, sinks, policy, scale, rules, scales, output, cu, longest)[1]
    else:
        lse = query.new_full((query.shape[1], query.shape[0]), float("-inf"), dtype=torch.float32)
    return output, compact(packed_lse(lse, sinks, cu_seqlens_q, padded)) if return_lse else no_lse(query)


def paged_attention(
    query: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    page_table: Tensor,
    seq_lens: Tensor,
    cu_seqlens_q: Tensor,
    mask: Tensor | None = None,
    sinks: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    plan: Tensor | None = None,
    *,
    max_seqlen_q: int,
    scale: float,
    causal: bool = True,
    window_left: int = -1,
    window_right: int = -1,
    softcap: float = 0.0,
    q_scale: Tensor | None = None,
    attention_chunk: int = 0,
    padded: bool = True,
    policy: str = "",
    output: Tensor,
    lse: Tensor | None = None,
    workspace: Tensor | None = None,
) -> None:
    """See `attnops.paged_attention`. The kernel writes into `output` itself, which is cleared first unless nothing is padding."""
    if not (query.numel() and k_pages.numel() and page_table.numel() and max_seqlen_q):
        output.zero_()
        if lse is not None:
            lse.copy_(packed_lse(lse.new_full((lse.shape[1], lse.shape[0]), float("-inf")), sinks, cu_seqlens_q, padded))
        return
    if padded:
        output.zero_()  # as in varlen_attention
    max_seqlen_q = longest_query(policy, max_seqlen_q, window_right)
    _, page_size, kv_heads, head_dim = k_pages.shape
    starts = left_padding(page_size, max_seqlen_q * (query.size(1) // kv_heads), policy, seq_lens)
    rules = (causal, window_left, window_right, softcap, attention_chunk)
    if v_pages.shape[3] != head_dim:
        plan = None  # a schedule is made for one head dim; with two the tiles differ
    if plan is not None:
        (batch, width), static = page_table.shape, (causal, window_left, window_right, attention_chunk)
        plan = part_of_plan(plan, batch, max_seqlen_q, width * page_size, head_dim, static)
    out = output if output.stride(2) == 1 else None
    found, raw = call(
        query, k_pages, v_pages, sinks, policy, scale, rules, None if q_scale is None else (q_scale, k_scale, v_scale), out,
        (cu_seqlens_q, None), (max_seqlen_q, None), seq_lens.contiguous(), starts,
        page_table if page_table.stride(1) == 1 else page_table.contiguous(), plan,
    )  # fmt: skip
    if out is None:
        output.copy_(found.masked_fill(past(cu_seqlens_q, found.shape[0]), 0.0) if padded else found)
    if lse is not None:
        lse.copy_(packed_lse(raw, sinks, cu_seqlens_q, padded))


FEW = 64
"""Query rows of a key head and request up to which the kernel reads pages without TMA: no tile of its is smaller."""


def _silent(value: Tensor, past: Tensor) -> Tensor:
    """A copy of the value, 0 where `past`, a bool of its first dims."""
    past = past[..., None, None]
    # float8 has no masked_fill; a byte of 0 is its 0.
    return value.view(torch.uint8).masked_fill(past, 0).view(value.dtype) if value.dtype.itemsize == 1 else value.masked_fill(past, 0.0)


DENSE = phases(Roofline(12.3, 0.98, 0.5, 0.00097, 14_000), Roofline(12.6, 0.6, 0.86, 0.0092, 510))
PACKED = Roofline(14.0, 0.97, 0.68, 0.0052, 2100)
PAGED = phases(Roofline(14.6, 1.0, 0.6, 0.00096, 11_000), Roofline(14.0, 0.78, 0.76, 0.0041, 2200))


def _dense_us(p: Problem) -> float:
    """What lies outside of a request's keys is cleared in a copy of the values first."""
    copies = p.kv_range and p.queries.hint * p.group_size > FEW
    return DENSE(p) + copies * copy_us(p, p.batch.hint * p.context.hint * p.kv_heads * p.v_head_dim)


def _packed_us(p: Problem) -> float:
    return PACKED(p) + p.padded * copy_us(p, p.batch.hint * p.context.hint * p.kv_heads * p.v_head_dim)


def _unsplit_us(p: Problem) -> float:
    """Under a deterministic policy one block reads all keys of a request and head, at 47 GB/s."""
    context = max(p.context.hint, 1) if p.window[0] < 0 else min(max(p.context.hint, 1), p.window[0] + 1)
    return max(PAGED(p), 8.0 + context * (p.head_dim + p.v_head_dim) * p.kv_dtype.itemsize / 4.7e4)


NEEDS: tuple[Need, ...] = (
    arch(80, 86, 87, 89, 90),
    dtype_rules,
    multiple_of("head_dim", 8),
    at_most("head_dim", 256),
    multiple_of("v_head_dim", 8),
    value_dim,
    bfloat16_sinks,
    chunk_rules,
    plan_rules,
    one_of("last_dim_contiguous", True),
    *without("mask"),
)
ABOUT = "FlashAttention-3 of sgl-kernel"
for _op, _run, _us in (
    ("attention", attention, _dense_us), ("varlen_attention", varlen_attention, _packed_us), ("paged_attention", paged_attention, PAGED)
):  # fmt: skip
    register(
        Kernel(
            "fa3",
            _op,
            _run,
            needs=NEEDS,
            packages=(PACKAGE,),
            probe=missing,
            cost_us=_us,
            invariant=Invariant((steady_tiles,), _unsplit_us if _op == "paged_attention" else None),
            about=ABOUT,
        )
    )
register(_fa3_mla.KERNEL)
