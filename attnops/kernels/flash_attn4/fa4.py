"""`fa4`: FlashAttention-4 (https://github.com/Dao-AILab/flash-attention, flash_attn/cute), for dense, packed and paged calls.

SM90: no split of the keys, so a decode of few requests leaves most of the GPU idle. SM100 is declared from its source and never ran
here. The first call of each kind compiles for seconds; see `fa4_op` for warming before a CUDA graph is captured.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from attnops.kernel import Kernel, Need, Tolerance, arch, one_of, register
from attnops.kernels.flash_attn4.fa4_op import PACKAGES, forward
from attnops.kernels.shared.tokens import packed_lse, past, see_nothing, with_sinks, zeroed
from attnops.measured import Roofline, copy_us
from attnops.problem import Problem, Refusal
from attnops.reference.attention import compact, no_lse, result_dtype

if TYPE_CHECKING:
    from attnops.ops.dense import Attention
    from attnops.ops.paged import PagedAttention
    from attnops.ops.varlen import VarlenAttention

FLOAT8 = torch.float8_e4m3fn
HALF = (torch.float16, torch.bfloat16)


def attention(call: Attention) -> tuple[Tensor, Tensor]:
    """The kernel writes into a new output and, if asked for, a new lse."""
    query, key, value = call.query, call.key, call.value
    batch, queries, heads, _ = query.shape
    output = query.new_empty((batch, queries, heads, value.shape[3]), dtype=result_dtype(query, call.q_scale))
    lse = query.new_empty((batch, heads, queries), dtype=torch.float32) if call.return_lse else None
    if query.numel() == 0 or key.numel() == 0:
        see_nothing(output, lse)
    else:
        forward(call, key, value, output, lse, {})
    return output, no_lse(query) if lse is None else compact(with_sinks(lse.transpose(1, 2), call.sinks))


def varlen_attention(call: VarlenAttention) -> tuple[Tensor, Tensor]:
    """The value is copied once and the output cleared, unless the call promises no padding rows."""
    query, key, value, cu_q, cu_k = call.query, call.key, call.value, call.cu_seqlens_q, call.cu_seqlens_k
    tokens, heads, _ = query.shape
    output = query.new_empty((tokens, heads, value.shape[2]), dtype=result_dtype(query, call.q_scale))
    lse = query.new_empty((heads, tokens), dtype=torch.float32) if call.return_lse else None
    runs = query.numel() and key.numel() and call.max_seqlen_q and call.max_seqlen_k and cu_q.shape[0] > 1
    if call.padded or not runs:
        see_nothing(output, lse)  # the kernel writes no row of no request
    if runs:
        batch = {"cu_seqlens_q": cu_q.contiguous(), "cu_seqlens_k": cu_k.contiguous()}
        longest = {"max_seqlen_q": call.max_seqlen_q, "max_seqlen_k": call.max_seqlen_k}
        forward(call, key, zeroed(value, past(cu_k, key.shape[0])) if call.padded else value, output, lse, batch | longest)
    return output, no_lse(query) if lse is None else compact(_packed_lse(lse, call))


def paged_attention(call: PagedAttention) -> None:
    """The kernel writes into `output` itself, which is cleared first unless the call promises no padding rows."""
    output = call.output
    runs = call.query.numel() and call.k_pages.numel() and call.page_table.numel() and call.max_seqlen_q
    # It takes strides of whole 16 bytes and no others.
    fits = output.stride(2) == 1 and not any(s * output.element_size() % 16 for s in output.stride()[:2]) and output.data_ptr() % 16 == 0
    out = output if fits else torch.empty(output.shape, dtype=output.dtype, device=output.device)
    lse = None if call.lse is None else call.lse.new_empty((call.lse.shape[1], call.lse.shape[0]))
    if call.padded or not runs:
        see_nothing(out, lse)
    if runs:
        lengths = {"cu_seqlens_q": call.cu_seqlens_q.contiguous(), "seqused_k": call.seq_lens.contiguous()}
        rest = {"max_seqlen_q": call.max_seqlen_q, "page_table": call.page_table.contiguous()}
        forward(call, call.k_pages, call.v_pages, out, lse, lengths | rest)
    if out is not output:
        output.copy_(out)
    if call.lse is not None and lse is not None:
        call.lse.copy_(_packed_lse(lse, call))


def _packed_lse(lse: Tensor, call: VarlenAttention | PagedAttention) -> Tensor:
    # Tokens of no request have -inf already, and only sinks would change it.
    return packed_lse(lse, call.sinks, call.cu_seqlens_q, call.padded and call.sinks is not None)


DENSE = Roofline(14.0, 1.0, 0.74, 0.011)
"""By direct calls on an H200, which split no keys."""


def _cost_us(p: Problem) -> float:
    copies = p.op == "varlen_attention" and p.padded
    return DENSE(p) + copies * copy_us(p, p.batch.hint * p.context.hint * p.kv_heads * p.v_head_dim)


def tile(p: Problem) -> int:
    """Keys a tile of SM90's and SM100's forward kernels (`_tile_size_fwd_sm90`, FwdConfig)."""
    d, narrow = p.head_dim, p.windowed
    if p.target.arch != 90 or d <= 64 or 96 < d <= 128:
        return 128
    if d <= 96:
        return 128 if p.causal or narrow else 144
    if d <= 192:
        return 96 if narrow else 128 if p.v_head_dim <= 128 else 112
    return 64 if narrow else 80


def whole_pages(p: Problem) -> Refusal | None:
    """A page that is a tile is loaded by TMA, stale keys past a request's end with it, and a weight of 0 does not silence NaN."""
    return Refusal("page_size", p.page_size, f"not {tile(p)}, a tile") if p.page_size == tile(p) else None


def head_dims(p: Problem) -> Refusal | None:
    """The head dims that `_validate_head_dims` lets through and whose value is no wider than the query, for which tiles are chosen."""
    d, dv = p.head_dim, p.v_head_dim
    unit = 16 // p.dtype.itemsize
    for field, size in (("head_dim", d), ("v_head_dim", dv)):
        if size % unit or size < 8:
            return Refusal(field, size, f"a multiple of {unit}")
    if dv > d:
        return Refusal("v_head_dim", dv, f"<= {d}, the query's")
    if p.target.arch == 90:
        return Refusal("head_dim", d, "<= 256") if d > 256 else None
    return None if d <= 128 or (d, dv) in ((192, 128), (256, 256)) else Refusal("head_dim", d, "<= 128, or 192 with 128, or 256")


def float8_rules(p: Problem) -> Refusal | None:
    """float8_e4m3fn, all through and with scales, on SM100 alone."""
    if p.dtype == FLOAT8 and p.target.arch not in (100, 103):
        return Refusal("dtype", p.dtype, "float16 | bfloat16 (float8_e4m3fn on sm100)")
    return Refusal("kv_scales", True, "no") if p.dtype in HALF and p.kv_scales else None


NEEDS: tuple[Need, ...] = (arch(90, 100, 103, 110), float8_rules, head_dims, one_of("last_dim_contiguous", True))
TAKES = frozenset({"causal", "window_left", "window_right", "softcap", "sinks", "q_scale", "k_scale", "v_scale"})
for _run, _lse, _more in ((attention, "return_lse", ()), (varlen_attention, "return_lse", ()), (paged_attention, "lse", (whole_pages,))):
    register(
        Kernel(
            "fa4",
            _run.__name__,
            _run,
            takes=TAKES | {_lse},
            dtypes=(*HALF, FLOAT8),
            needs=(*NEEDS, *_more),
            packages=PACKAGES,
            cost_us=_cost_us,
            # The tanh of a softcap is the hardware's approximation; lse, which is exact to float32 otherwise, shows it.
            tolerance=Tolerance(4.0),
            about="FlashAttention-4 (CuTe DSL), compiled at first use",
        )
    )
