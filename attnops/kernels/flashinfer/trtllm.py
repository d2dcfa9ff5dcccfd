"""`trtllm`: TensorRT-LLM's generated attention through FlashInfer, on SM100 and SM103: paged decode and context, and packed prefill.

The kernels are binaries that FlashInfer fetches at first use, or finds in flashinfer-cubin. None of this ran here on such a device.
Unknown for that reason: whether NaN in the slots of a page past its request's end reaches the output, as it does where whole tiles are
loaded (a PagedCache holds none); and what lse holds where there are sinks, hence the refusal. Pages go in as they are: FlashInfer
turns `NHD` pages into `HND` views. lse comes in base 2.
"""

from __future__ import annotations

from math import log
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from attnops.errors import InvalidInput
from attnops.kernel import Kernel, Need, Tolerance, arch, at_most, dtypes, one_of, register, without
from attnops.kernels.flashinfer.trtllm_package import PACKAGE, SMS, blind, no_compiler, one_head_dim, scales
from attnops.kernels.shared import workspace as _workspace
from attnops.measured import Roofline
from attnops.problem import Problem, Refusal
from attnops.reference.attention import compact, no_lse
from attnops.reference.packed import lengths_of

FEW = 8
"""Queries a request up to which the decode kernel, which splits the keys, takes a causal call."""

PREFILL_DIMS = ((192, 128), (128, 128), (256, 256))
LN2 = log(2.0)


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
    """See `attnops.paged_attention`."""
    if not (query.numel() and k_pages.numel() and page_table.numel() and max_seqlen_q):
        output.zero_()
        if lse is not None:
            lse.fill_(float("-inf"))
        return
    batch, pages = page_table.shape
    stats = 0 if lse is None else stats_bytes(batch, query.shape[1], max_seqlen_q)
    counters, scratch = _workspace.split(workspace, split_bytes(query.shape[2]) + stats)
    if batch * query.shape[1] * 4 > counters.numel():
        raise InvalidInput("page_table.shape[0]", batch, f"<= {counters.numel() // 4 // query.shape[1]} requests of {query.shape[1]} heads")
    out = output if output.is_contiguous() else torch.empty_like(output, memory_format=torch.contiguous_format)
    # A request without keys is given one, and page ids past a request's end are made pages, so that neither meets an odd path in the
    # kernel; what comes of it is thrown away.
    lengths, table = seq_lens.clamp(min=1).contiguous(), page_table.clamp(min=0)
    given: dict[str, Any] = {
        "query": query, "kv_cache": (k_pages, v_pages), "kv_layout": "NHD", "block_tables": table.contiguous(), "seq_lens": lengths,
        "cum_seq_lens_q": cu_seqlens_q.contiguous(), "window_left": window_left, "out": out, "lse": lse,
        "sinks": None if sinks is None else sinks.float().contiguous(), "bmm2_scale": 1.0 if v_scale is None else v_scale,
        "workspace_buffer": scratch, "multi_ctas_kv_counter_buffer": counters,
    }  # fmt: skip
    if few(max_seqlen_q, causal):
        from flashinfer.decode import trtllm_batch_decode_with_kv_cache

        trtllm_batch_decode_with_kv_cache(
            **given, max_seq_len=pages * k_pages.shape[1], q_len_per_req=None, max_q_len=max_seqlen_q, backend="trtllm-gen",
            bmm1_scale=scale, bmm1_scale_log2=None if k_scale is None else k_scale * (scale / LN2),
        )  # fmt: skip
    else:
        from flashinfer.prefill import trtllm_batch_context_with_kv_cache

        trtllm_batch_context_with_kv_cache(
            **given, max_q_len=max_seqlen_q, max_kv_len=pages * k_pages.shape[1], bmm1_scale=scale, batch_size=batch, causal=causal,
            cum_seq_lens_kv=pad(lengths.cumsum(0, dtype=torch.int32), (1, 0)),
        )  # fmt: skip
    unseen = blind(cu_seqlens_q, seq_lens, query.shape[0], causal)[:, None]
    out.masked_fill_(unseen[..., None], 0.0)
    if out is not output:
        output.copy_(out)
    if lse is not None:
        lse.mul_(LN2).masked_fill_(unseen, float("-inf"))


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
    """See `attnops.varlen_attention`. The value is copied once, and with lse a workspace of `stats_bytes` is cleared at every call."""
    tokens, heads = query.shape[:2]
    output = query.new_empty((tokens, heads, value.shape[2]))
    lse = query.new_empty((tokens, heads), dtype=torch.float32) if return_lse else None
    batch = cu_seqlens_k.shape[0] - 1
    if not (query.numel() and key.numel() and max_seqlen_q and max_seqlen_k and batch):
        return output.zero_(), no_lse(query) if lse is None else lse.fill_(float("-inf"))
    from flashinfer.prefill import trtllm_ragged_attention_deepseek

    # The op writes nothing but its results, so that it can have a gradient, and hence takes no workspace from the caller.
    size = stats_bytes(batch, heads, max_seqlen_q) if return_lse else _workspace.ALIGNMENT
    past = torch.arange(key.shape[0], device=key.device) >= cu_seqlens_k[-1]
    lengths = lengths_of(cu_seqlens_k).int()
    trtllm_ragged_attention_deepseek(
        query.contiguous(), key, value.masked_fill(past[:, None, None], 0.0), query.new_zeros(size, dtype=torch.uint8),
        lengths.clamp(min=1), max_seqlen_q, max_seqlen_k, scale, 1.0, -1.0, batch, window_left, cu_seqlens_q.contiguous(),
        cu_seqlens_k.contiguous(), None, causal, return_lse, out=output, lse=lse,
    )  # fmt: skip
    unseen = blind(cu_seqlens_q, lengths, tokens, causal)[:, None]
    output.masked_fill_(unseen[..., None], 0.0)
    return output, no_lse(query) if lse is None else compact(lse.mul_(LN2).masked_fill_(unseen, float("-inf")))


def few(queries: int, causal: bool) -> bool:
    """Does the decode kernel take a call of so many queries a request? It is causal."""
    return queries <= 1 or (causal and queries <= FEW)


def split_bytes(dim: int) -> int:
    """Bytes for partial outputs and sums: FlashInfer splits the keys among at most as many blocks as there are multiprocessors, each of
    at most 256 rows (fmhaKernels.cuh, kernelParams.h). It does not check that they fit."""
    return SMS * 256 * (2 * dim + 8)


def stats_bytes(batch: int, heads: int, queries: int) -> int:
    """Bytes for the maxima and sums that lse is made of, and the guard after them (trtllm_fmha_kernel_launcher.cu)."""
    return 8 * heads * batch * (-(-queries // 256) * 256) + (1 << 20)


def workspace_bytes(p: Problem) -> int:
    """Of a paged call. A size without a known bound counts as its hint; a call that turns out larger raises InvalidInput."""
    batch, queries = (max(e.hint if e.hi is None else e.hi, 1) for e in (p.batch, p.queries))
    return _workspace.total(split_bytes(p.head_dim) + (stats_bytes(batch, p.q_heads, queries) if p.lse else 0))


def _paged(p: Problem) -> Refusal | None:
    if p.kv_dtype != p.dtype:
        if (p.dtype, p.kv_dtype) != (torch.bfloat16, torch.float8_e4m3fn):
            return Refusal("kv_dtype", p.kv_dtype, "the query's, or float8_e4m3fn for a bfloat16 query")
        if p.queries.hi is None or not few(p.queries.hi, p.causal):
            return Refusal("queries", p.queries, f"<= {FEW} and causal, or <= 1 (float8 cache)")
    return one_of("dtype", torch.float16, torch.bfloat16)(p)


def _prefill_dims(p: Problem) -> Refusal | None:
    dims = (p.head_dim, p.v_head_dim)
    return None if dims in PREFILL_DIMS else Refusal("head_dim, v_head_dim", dims, " | ".join(map(str, PREFILL_DIMS)))


def _rules(p: Problem) -> Refusal | None:
    if p.windowed and not p.causal:
        return Refusal("window", p.window, "none (but with causal)")
    return Refusal("lse", True, "no (with sinks)") if p.lse and p.sinks else None


COMMON: tuple[Need, ...] = (arch(100, 103), one_of("last_dim_contiguous", True), _rules, at_most("group_size", 64))
PAGED = (
    _paged, scales, _workspace.not_of_a_plan, one_of("head_dim", 64, 128, 256), one_head_dim, one_of("page_size", 16, 32, 64, 128),
    one_of("pages_alike", True), *without("mask", "softcap"),
)  # fmt: skip
PACKED = (dtypes(torch.float16, torch.bfloat16), _prefill_dims, *without("mask", "softcap", "sinks", "kv_scales"))
ABOUT = "TensorRT-LLM's generated kernels (flashinfer)"
HARDWARE = Roofline(15.0, 0.83, 0.55)
"""Of the hardware's figures, not measured."""
for _op, _run, _needs, _size in (
    ("paged_attention", paged_attention, PAGED, workspace_bytes), ("varlen_attention", varlen_attention, PACKED, None),
):  # fmt: skip
    _what: dict[str, Any] = {"packages": (PACKAGE,), "probe": no_compiler, "cost_us": HARDWARE, "about": ABOUT}
    register(Kernel("trtllm", _op, _run, needs=(*COMMON, *_needs), workspace_bytes=_size, tolerance=Tolerance(2.0), **_what))
