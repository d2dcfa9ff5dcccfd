"""`fa3`: FlashAttention-3 as sgl-kernel ships it, for dense, packed, paged and latent calls (https://arxiv.org/abs/2407.08608).

The raw op `sgl_kernel::fwd` is called, in the 35-argument form of wheels 0.4.2 to 0.4.3 and the 37-argument form of 0.4.4 and later.
Sinks are rounded to bfloat16, the only dtype the kernel reads; a call that asks for lse must bring them in it.
Data pointers must be 16-byte aligned, as torch allocates them: a view that starts elsewhere makes the kernel raise.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attnops.kernel import Kernel, Need, arch, at_most, dtypes, multiple_of, one_of, register, without
from attnops.kernels import _fa3_mla
from attnops.kernels._fa3 import PACKAGE, bfloat16_sinks, call, deterministic, missing, packed_lse, past, value_dim, with_sinks
from attnops.problem import Problem
from attnops.reference.attention import compact, no_lse


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
    policy: str = "",
) -> tuple[Tensor, Tensor]:
    """See `attnops.attention`. With `kv_end` the value is copied once."""
    if query.numel() == 0 or key.numel() == 0:
        output = query.new_zeros((*query.shape[:3], value.shape[3]))
        lse = query.new_full((query.shape[0], query.shape[2], query.shape[1]), float("-inf"), dtype=torch.float32)
    else:
        if kv_end is not None:
            # Whole tiles are loaded and a weight of 0 does not silence NaN. Those of the key are masked after the product.
            past = torch.arange(key.shape[1], device=key.device) >= kv_end[:, None]
            value = value.masked_fill(past[..., None, None], 0.0)
            kv_start = kv_start if kv_start is None else torch.minimum(kv_start, kv_end)
        starts, ends = (x if x is None else x.to(torch.int32).contiguous() for x in (kv_start, kv_end))
        rules = (causal, window_left, window_right, softcap)
        output, lse = call(query, key, value, sinks, policy, scale, rules, ends=ends, starts=starts)
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
    policy: str = "",
) -> tuple[Tensor, Tensor]:
    """See `attnops.varlen_attention`. The value is copied once."""
    # Rows of no request are not written by the kernel, and how many there are only the device knows: one memset of the output
    # costs less than finding them. Nor may what stands in the value's be read; see `attention`.
    output = query.new_zeros((*query.shape[:2], value.shape[2]))
    if query.numel() and key.numel() and max_seqlen_q and max_seqlen_k and cu_seqlens_q.shape[0] > 1:
        value = value.masked_fill(past(cu_seqlens_k, value.shape[0]), 0.0)
        rules = (causal, window_left, window_right, softcap)
        cu, longest = (cu_seqlens_q, cu_seqlens_k), (max_seqlen_q, max_seqlen_k)
        lse = call(query, key, value, sinks, policy, scale, rules, output, cu, longest)[1]
    else:
        lse = query.new_full((query.shape[1], query.shape[0]), float("-inf"), dtype=torch.float32)
    return output, packed_lse(lse, sinks, cu_seqlens_q) if return_lse else no_lse(query)


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
    policy: str = "",
    output: Tensor,
    lse: Tensor | None = None,
    workspace: Tensor | None = None,
) -> None:
    """See `attnops.paged_attention`. The kernel writes into `output` itself."""
    output.zero_()  # as in varlen_attention
    raw = None
    if query.numel() and k_pages.numel() and page_table.numel() and max_seqlen_q:
        page_size, rows = k_pages.shape[1], max_seqlen_q * (query.shape[1] // k_pages.shape[2])
        # Pages of whole tiles are loaded by TMA when the queries fill a tile, stale NaN with them; the other path, which a left
        # padding selects, zeroes what lies past the end. It also has one tile size, hence one order of summation.
        whole = page_size >= 64 and page_size % 16 == 0 and rows > 64
        starts = torch.zeros_like(seq_lens, memory_format=torch.contiguous_format) if whole or deterministic(policy) else None
        table = page_table if page_table.stride(1) == 1 else page_table.contiguous()
        rules = (causal, window_left, window_right, softcap)
        out = output if output.stride(2) == 1 else None
        found, raw = call(
            query, k_pages, v_pages, sinks, policy, scale, rules, out, (cu_seqlens_q, None), (max_seqlen_q, None),
            seq_lens.contiguous(), starts, table,
        )  # fmt: skip
        if out is None:
            output.copy_(found.masked_fill(past(cu_seqlens_q, found.shape[0]), 0.0))
    if lse is not None:
        if raw is None:
            raw = query.new_full((query.shape[1], query.shape[0]), float("-inf"), dtype=torch.float32)
        lse.copy_(packed_lse(raw, sinks, cu_seqlens_q))


def _cost_us(p: Problem) -> float:
    """A roofline of SM90: a launch, one more where the keys are split and the parts combined, then bytes or products."""
    tokens, batch, queries = (max(x.hint, 1) for x in (p.tokens, p.batch, p.queries))
    context = max(p.context.hint, 1)
    if p.window[0] >= 0:
        context = min(context, p.window[0] + queries)
    width = p.head_dim + p.v_head_dim
    size = 2.0 * (tokens * p.q_heads + batch * context * p.kv_heads) * width
    flops = 2.0 * tokens * context * p.q_heads * width * (0.5 if p.causal and queries > 1 else 1.0)
    split = batch * p.kv_heads * -(-queries * p.group_size // 128) < 132
    copy = 0.0 if p.op == "paged_attention" else 4.0 * batch * context * p.kv_heads * p.v_head_dim
    return 8.0 + 9.0 * split + max(size / 4.2e6, flops / 6e8) + copy * (p.op != "attention" or p.kv_range) / 4.2e6


HALF = (torch.float16, torch.bfloat16)
NEEDS: tuple[Need, ...] = (
    arch(80, 86, 87, 89, 90),
    dtypes(*HALF),
    multiple_of("head_dim", 8),
    at_most("head_dim", 256),
    multiple_of("v_head_dim", 8),
    value_dim,
    bfloat16_sinks,
    one_of("last_dim_contiguous", True),
    *without("mask", "kv_scales"),
)
ABOUT = "FlashAttention-3 of sgl-kernel"
for _op, _run in (("attention", attention), ("varlen_attention", varlen_attention), ("paged_attention", paged_attention)):
    register(
        Kernel(
            "fa3",
            _op,
            _run,
            needs=NEEDS,
            packages=(PACKAGE,),
            probe=missing,
            cost_us=_cost_us,
            # The tile size of a packed call follows from the longest request, and bits with it.
            batch_invariant=_op != "varlen_attention",
            about=ABOUT,
        )
    )
register(_fa3_mla.KERNEL)
