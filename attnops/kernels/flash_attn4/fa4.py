"""`fa4`: FlashAttention-4 (https://github.com/Dao-AILab/flash-attention, flash_attn/cute), for dense, packed and paged calls.

SM90: no split of the keys, so a decode of few requests leaves most of the GPU idle. SM100 is declared from its source and never ran
here. The first call of each kind compiles for seconds; see `_fa4` for warming before a CUDA graph is captured.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attnops.kernel import Kernel, Need, Tolerance, arch, one_of, register, without
from attnops.kernels.flash_attn4.fa4_op import PACKAGES, call, dtype_rules, head_dims, whole_pages
from attnops.measured import Roofline, copy_us
from attnops.problem import Problem
from attnops.reference.attention import compact, no_lse, result_dtype

INF = float("inf")


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
    policy: str = "",
) -> tuple[Tensor, Tensor]:
    """See `attnops.attention`."""
    batch, queries, heads, _ = query.shape
    output = query.new_empty((batch, queries, heads, value.shape[3]), dtype=result_dtype(query, q_scale))
    lse = query.new_empty((batch, heads, queries), dtype=torch.float32) if return_lse else None
    if query.numel() == 0 or key.numel() == 0:
        _nothing(output, lse)
    else:
        rules, scales = (causal, window_left, window_right, softcap), None if q_scale is None else (q_scale, k_scale, v_scale)
        call(query, key, value, output, lse, sinks, scale, rules, scales)
    return output, no_lse(query) if lse is None else compact(_with_sinks(lse.transpose(1, 2), sinks))


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
    padded: bool = True,
    policy: str = "",
) -> tuple[Tensor, Tensor]:
    """See `attnops.varlen_attention`. The value is copied once and the output cleared, unless nothing is padding."""
    tokens, heads, _ = query.shape
    output = query.new_empty((tokens, heads, value.shape[2]), dtype=result_dtype(query, q_scale))
    lse = query.new_empty((heads, tokens), dtype=torch.float32) if return_lse else None
    runs = query.numel() and key.numel() and max_seqlen_q and max_seqlen_k and cu_seqlens_q.shape[0] > 1
    if padded or not runs:
        _nothing(output, lse)  # the kernel writes no row of no request
    if runs:
        if padded:
            past = _past(cu_seqlens_k, key.shape[0])[:, None, None]
            # float8 has no masked_fill; a byte of 0 is its 0.
            value = value.view(torch.uint8).masked_fill(past, 0).view(value.dtype) if q_scale is not None else value.masked_fill(past, 0.0)
        rules, scales = (causal, window_left, window_right, softcap), None if q_scale is None else (q_scale, k_scale, v_scale)
        call(
            query, key, value, output, lse, sinks, scale, rules, scales, cu_seqlens_q=cu_seqlens_q.contiguous(),
            cu_seqlens_k=cu_seqlens_k.contiguous(), max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k,
        )  # fmt: skip
    return output, no_lse(query) if lse is None else compact(_packed_lse(lse, sinks, cu_seqlens_q))


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
    padded: bool = True,
    policy: str = "",
    output: Tensor,
    lse: Tensor | None = None,
    workspace: Tensor | None = None,
) -> None:
    """See `attnops.paged_attention`. The kernel writes into `output` itself, which is cleared first unless nothing is padding."""
    runs = query.numel() and k_pages.numel() and page_table.numel() and max_seqlen_q
    # It takes strides of whole 16 bytes and no others.
    fits = output.stride(2) == 1 and not any(s * output.element_size() % 16 for s in output.stride()[:2]) and output.data_ptr() % 16 == 0
    out = output if fits else torch.empty(output.shape, dtype=output.dtype, device=output.device)
    raw = None if lse is None else lse.new_empty((lse.shape[1], lse.shape[0]))
    if padded or not runs:
        _nothing(out, raw)
    if runs:
        rules, scales = (causal, window_left, window_right, softcap), None if q_scale is None else (q_scale, k_scale, v_scale)
        call(
            query, k_pages, v_pages, out, raw, sinks, scale, rules, scales, cu_seqlens_q=cu_seqlens_q.contiguous(),
            seqused_k=seq_lens.contiguous(), max_seqlen_q=max_seqlen_q, page_table=page_table.contiguous(),
        )  # fmt: skip
    if out is not output:
        output.copy_(out)
    if lse is not None and raw is not None:
        lse.copy_(_packed_lse(raw, sinks, cu_seqlens_q))


def _nothing(output: Tensor, lse: Tensor | None) -> None:
    output.zero_()
    if lse is not None:
        lse.fill_(-INF)


def _past(cu_seqlens: Tensor, tokens: int) -> Tensor:
    """bool `[T]`: the tokens of no request."""
    return torch.arange(tokens, device=cu_seqlens.device) >= cu_seqlens[-1]


def _with_sinks(lse: Tensor, sinks: Tensor | None) -> Tensor:
    """lse `[..., Hq]`: of a query that sees no key, the sink."""
    return lse if sinks is None else torch.where(lse == -INF, sinks.float(), lse)


def _packed_lse(lse: Tensor, sinks: Tensor | None, cu_seqlens_q: Tensor) -> Tensor:
    """`[Hq, T]` of the kernel -> `[T, Hq]`; tokens of no request have -inf in it, and keep it."""
    lse = lse.transpose(0, 1)
    return lse if sinks is None else torch.where(_past(cu_seqlens_q, lse.shape[0])[:, None], lse, _with_sinks(lse, sinks))


DENSE = Roofline(14.0, 1.0, 0.74, 0.011)
"""By direct calls on an H200, which split no keys."""


def _cost_us(p: Problem) -> float:
    copies = p.op == "varlen_attention" and p.padded
    return DENSE(p) + copies * copy_us(p, p.batch.hint * p.context.hint * p.kv_heads * p.v_head_dim)


TOLERANCE = 4.0
"""The tanh of a softcap is the hardware's approximation; lse, which is exact to float32 otherwise, shows it."""

NEEDS: tuple[Need, ...] = (
    arch(90, 100, 103, 110),
    dtype_rules,
    head_dims,
    one_of("last_dim_contiguous", True),
    *without("mask", "kv_range"),
)
ABOUT = "FlashAttention-4 (CuTe DSL), compiled at first use"
for _op, _run, _more in (
    ("attention", attention, ()), ("varlen_attention", varlen_attention, ()), ("paged_attention", paged_attention, (whole_pages,)),
):  # fmt: skip
    register(
        Kernel(
            "fa4", _op, _run, needs=(*NEEDS, *_more), packages=PACKAGES, cost_us=_cost_us, tolerance=Tolerance(TOLERANCE), about=ABOUT
        )
    )  # fmt: skip
