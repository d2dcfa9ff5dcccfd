"""`trtllm`: TensorRT-LLM's generated attention through FlashInfer, on SM100 and SM103: paged decode and context, and packed prefill.

The kernels are binaries that FlashInfer fetches at first use, or finds in flashinfer-cubin. None of this ran here on such a device.
Unknown for that reason: whether NaN in the slots of a page past its request's end reaches the output, as it does where whole tiles are
loaded (a PagedCache holds none); and the lse where there are sinks, hence the refusal. Pages go in as they are: FlashInfer
turns `NHD` pages into `HND` views. lse comes in base 2.
"""

from __future__ import annotations

import functools
from math import log
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from attnops.kernel import Kernel, Need, Tolerance, arch, at_most, demand, one_of, register
from attnops.kernels.flashinfer import package as fi
from attnops.kernels.shared import workspace
from attnops.kernels.shared.flash import past, see_nothing, zeroed
from attnops.measured import Roofline
from attnops.problem import Problem
from attnops.reference.attention import compact, no_lse
from attnops.reference.packed import lengths_of

if TYPE_CHECKING:
    from attnops.ops.paged import PagedAttention
    from attnops.ops.varlen import VarlenAttention

FEW = 8
"""Queries a request up to which the decode kernel, which splits the keys, takes a causal call."""

PREFILL_DIMS = ((192, 128), (128, 128), (256, 256))
LN2 = log(2.0)


def paged_attention(call: PagedAttention) -> None:
    """See `attnops.paged_attention`."""
    query, k_pages, output, lse, k_scale, sinks = call.query, call.k_pages, call.output, call.lse, call.k_scale, call.sinks
    if not (query.numel() and k_pages.numel() and call.page_table.numel() and call.max_seqlen_q):
        see_nothing(output, lse)
        return
    (tokens, heads, dim), (batch, pages), queries = query.shape, call.page_table.shape, call.max_seqlen_q
    stats = 0 if lse is None else fi.stats_bytes(batch, heads, queries)
    counters, scratch = fi.split(call.workspace, fi.split_bytes(dim) + stats, "page_table.shape[0]", batch, heads, "requests")
    out = fi.gapless(output)
    # A request without keys is given one, and page ids past a request's end are made pages, so that neither meets an odd path in the
    # kernel; the results of these rows are thrown away.
    lengths, table = call.seq_lens.clamp(min=1).contiguous(), call.page_table.clamp(min=0)
    given: dict[str, Any] = {
        "query": query, "kv_cache": (k_pages, call.v_pages), "kv_layout": "NHD", "block_tables": table.contiguous(), "seq_lens": lengths,
        "cum_seq_lens_q": call.cu_seqlens_q.contiguous(), "window_left": call.window_left, "out": out, "lse": lse, "max_q_len": queries,
        "sinks": None if sinks is None else sinks.float().contiguous(), "bmm1_scale": call.scale,
        "bmm2_scale": 1.0 if call.v_scale is None else call.v_scale, "workspace_buffer": scratch, "multi_ctas_kv_counter_buffer": counters,
    }  # fmt: skip
    most = pages * k_pages.shape[1]
    if few(queries, call.causal):
        from flashinfer.decode import trtllm_batch_decode_with_kv_cache

        log2 = None if k_scale is None else k_scale * (call.scale / LN2)
        trtllm_batch_decode_with_kv_cache(**given, max_seq_len=most, q_len_per_req=None, backend="trtllm-gen", bmm1_scale_log2=log2)
    else:
        from flashinfer.prefill import trtllm_batch_context_with_kv_cache

        starts = pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
        trtllm_batch_context_with_kv_cache(**given, max_kv_len=most, batch_size=batch, causal=call.causal, cum_seq_lens_kv=starts)
    unseen = fi.blind(call.cu_seqlens_q, call.seq_lens, tokens, call.causal)[:, None]
    out.masked_fill_(unseen[..., None], 0.0)
    if out is not output:
        output.copy_(out)
    if lse is not None:
        lse.mul_(LN2).masked_fill_(unseen, float("-inf"))


def varlen_attention(call: VarlenAttention) -> tuple[Tensor, Tensor]:
    """See `attnops.varlen_attention`. The value is copied once, and with lse a workspace of `stats_bytes` is cleared at every call."""
    query, key, value, cu_q, cu_k = call.query, call.key, call.value, call.cu_seqlens_q, call.cu_seqlens_k
    (tokens, heads, _), batch, queries, keys = query.shape, cu_k.shape[0] - 1, call.max_seqlen_q, call.max_seqlen_k
    output = query.new_empty((tokens, heads, value.shape[2]))
    lse = query.new_empty((tokens, heads), dtype=torch.float32) if call.return_lse else None
    if not (query.numel() and key.numel() and queries and keys and batch):
        see_nothing(output, lse)
        return output, no_lse(query) if lse is None else lse
    from flashinfer.prefill import trtllm_ragged_attention_deepseek

    # The op writes its results alone, so that it can have a gradient, and hence takes no workspace from the caller.
    size = workspace.ALIGNMENT if lse is None else fi.stats_bytes(batch, heads, queries)
    lengths = lengths_of(cu_k).int()
    trtllm_ragged_attention_deepseek(
        query.contiguous(), key, zeroed(value, past(cu_k, key.shape[0])), query.new_zeros(size, dtype=torch.uint8),
        lengths.clamp(min=1), queries, keys, call.scale, 1.0, -1.0, batch, call.window_left, cu_q.contiguous(), cu_k.contiguous(), None,
        call.causal, call.return_lse, out=output, lse=lse,
    )  # fmt: skip
    unseen = fi.blind(cu_q, lengths, tokens, call.causal)[:, None]
    output.masked_fill_(unseen[..., None], 0.0)
    return output, no_lse(query) if lse is None else compact(lse.mul_(LN2).masked_fill_(unseen, float("-inf")))


def few(queries: int, causal: bool) -> bool:
    """Does the decode kernel take a call of so many queries a request? It is causal."""
    return queries <= 1 or (causal and queries <= FEW)


def workspace_bytes(p: Problem) -> int:
    """Of a paged call. A size without a known bound counts as its hint; a call that turns out larger raises InvalidInput."""
    batch, queries = (max(e.hint if e.hi is None else e.hi, 1) for e in (p.batch, p.queries))
    return workspace.total(fi.split_bytes(p.head_dim) + (fi.stats_bytes(batch, p.q_heads, queries) if p.lse else 0))


COMMON: tuple[Need, ...] = (
    arch(100, 103),
    demand("window", "none (but with causal)", lambda p: p.causal or not p.windowed),
    demand("lse", "no (with sinks)", lambda p: not (p.lse and p.sinks)),
    at_most("group_size", 64),
)
FLOAT8 = (
    demand(
        "kv_dtype",
        "the query's, or float8_e4m3fn for a bfloat16 query",
        lambda p: p.kv_dtype == p.dtype or (p.dtype, p.kv_dtype) == (torch.bfloat16, torch.float8_e4m3fn),
    ),
    demand(
        "queries",
        f"<= {FEW} and causal, or <= 1 (float8 cache)",
        lambda p: p.kv_dtype == p.dtype or (p.queries.hi is not None and few(p.queries.hi, p.causal)),
    ),
)
RULES = frozenset({"causal", "window_left", "window_right"})
_trtllm = functools.partial(
    Kernel, "trtllm", dtypes=fi.HALVES, packages=(fi.PACKAGE,), probe=fi.no_compiler, tolerance=Tolerance(2.0),
    cost_us=Roofline(15.0, 0.83, 0.55),  # of the hardware's figures: not measured
    about="TensorRT-LLM's generated kernels (flashinfer)",
)  # fmt: skip
register(
    _trtllm(
        "paged_attention",
        paged_attention,
        takes=RULES | {"sinks", "k_scale", "v_scale", "lse"},
        kv_dtypes=fi.CACHED,
        needs=(*COMMON, *FLOAT8, *fi.PAGED),
        workspace_bytes=workspace_bytes,
    )
)
_dims = demand("head_dim, v_head_dim", " | ".join(map(str, PREFILL_DIMS)), lambda p: (p.head_dim, p.v_head_dim) in PREFILL_DIMS)
_packed_needs = (*COMMON, _dims, one_of("last_dim_contiguous", True))
register(_trtllm("varlen_attention", varlen_attention, takes=RULES | {"return_lse"}, needs=_packed_needs))
