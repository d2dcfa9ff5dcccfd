"""TensorRT-LLM's attention through FlashInfer: `xqa`, built on the host, and the generated `trtllm`
and `trtllm_mla` of SM100 and SM103.

`xqa`: decode, built for the call's dtypes, page size, head dim and group. Of the two kernels in a
module, the general one (csrc/xqa/mha.cu) is called for every dtype and device. For a float8 cache
on SM90 FlashInfer's own `xqa()` takes the other, which rounds the query and the weights to float8,
carries NaN from the unused slots of a page into the output and leaves the rows of requests without
keys unwritten. The general one loads no slot past a request's end.

`trtllm`: paged decode and context, and packed prefill. `trtllm_mla`: decode for latents of 512 +
64, in which every query token is a row of its own: with queries of several lengths the kernels
return no lse. Both are binaries that FlashInfer fetches at first use, or finds in flashinfer-cubin.
They never ran here on such a device. Unknown for that reason: whether NaN in the slots of a page
past its request's end reaches the output, as it does where whole tiles are loaded (a PagedCache
holds none); and the lse where there are sinks, hence the refusal.
"""

from __future__ import annotations

import functools
from math import sqrt
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from attnops.core.errors import InvalidInput
from attnops.core.kernel import (
    Kernel,
    Need,
    Plan,
    Tolerance,
    arch,
    at_most,
    demand,
    extent_at_most,
    one_of,
    register,
    without,
)
from attnops.core.problem import Extent, Problem
from attnops.core.record import changed
from attnops.core.tensors import compact, lengths_of, no_lse, rows_of
from attnops.kernels.flashinfer.devices import (
    trtllm_missing,
    xqa_library,
    xqa_missing,
    xqa_module,
)
from attnops.kernels.flashinfer.libraries import PACKAGE, Library, announce, built_by
from attnops.kernels.flashinfer.modules import HALVES, LN2, gapless
from attnops.kernels.shared import memory
from attnops.kernels.shared.tokens import (
    BY_TOKEN,
    LATENT,
    ROPE,
    batch_by_token,
    blank,
    fresh,
    past,
    rows,
    runs,
    see_nothing,
    whole,
    zeroed,
)
from attnops.measured import Roofline

if TYPE_CHECKING:
    from attnops.ops.attention import varlen
    from attnops.ops.latent import record as mla
    from attnops.ops.pages import record as paged

SMS = 256
"""More streaming multiprocessors than any GPU has, so that buffers sized by their number need no
device to ask."""
FEW = 8
"""Queries a request up to which the decode kernel, which splits the keys, takes a causal call."""
DIMS = ((192, 128), (128, 128), (256, 256))
NOPE, TILE = 128, 128
"""A row of the page table holds a multiple of this many keys. The package checks it for its other
MLA kernels; rows are padded here."""


def xqa(call: paged.PagedAttention) -> None:
    """One query a request, the last, so neither causality nor a window to the right hides a key."""
    if blank(call):
        return
    from flashinfer.utils import device_support_pdl, get_device_sm_count

    query, k_pages, table, seq_lens, output, sinks = (
        call.query,
        call.k_pages,
        call.page_table,
        call.seq_lens,
        call.output,
        call.sinks,
    )
    (tokens, heads, dim), (_, page, kv_heads, _) = query.shape, k_pages.shape
    group = heads // kv_heads
    counters, scratch = memory.split(call.workspace, scratch_bytes(group, dim))
    if call.padded or tokens != table.shape[0]:
        table, seq_lens, _ = batch_by_token(changed(call, plan=None, causal=True))
    # The kernel scales by q_scale * kv_scale / sqrt(D), then its sum of the values by kv_scale.
    q_scale: float | Tensor = call.scale * sqrt(dim)
    kv_scale: float | Tensor = 1.0
    if call.k_scale is not None and call.v_scale is not None:
        q_scale, kv_scale = call.k_scale / call.v_scale * q_scale, call.v_scale
    logits = None if sinks is None else sinks.float().contiguous().view(kv_heads, group)
    out = gapless(output)
    run = xqa_module(
        query.device,
        query.dtype,
        k_pages.dtype,
        page,
        dim,
        group,
        call.window_left >= 0,
        query.dtype,
        1,
    )
    run(
        False,
        get_device_sm_count(query.device),
        kv_heads,
        call.window_left + 1,
        q_scale,
        out[:, None],
        1.0,
        query.contiguous()[:, None],
        logits,
        k_pages,
        call.v_pages,
        None,
        None,
        table.contiguous(),
        table.shape[1] * page,
        seq_lens.contiguous().view(torch.uint32)[:, None],
        tokens,
        kv_scale,
        counters,
        scratch,
        device_support_pdl(query.device),
        1,
        None,
        None,
    )
    # Split among several blocks, a request without keys comes out as 0 / 0.
    out.masked_fill_((seq_lens == 0)[:, None, None], 0.0)
    if out is not output:
        output.copy_(out)


def scratch_bytes(group: int, dim: int) -> int:
    """Bytes for the partial results of all blocks (csrc/xqa/mha.cu): a maximum and a sum a row, in
    rows of 32, and the outputs.

    A request is split only while there are more multiprocessors than requests and heads, so there
    are never more parts than those.
    """
    rows = -(-(-(-group // 16) * 16) // 32) * 32
    return SMS * (2 * 4 * rows + 2 * group * dim + 256)


def paged_attention(call: paged.PagedAttention) -> None:
    """Pages go in as they are: FlashInfer turns `NHD` pages into `HND` views. lse comes in base
    2."""
    if blank(call):
        return
    query, k_pages, output, lse, k_scale, sinks = (
        call.query,
        call.k_pages,
        call.output,
        call.lse,
        call.k_scale,
        call.sinks,
    )
    (batch, pages), queries = call.page_table.shape, call.max_seqlen_q
    counters, scratch = _split(call, batch, queries, "page_table.shape[0]", "requests")
    out = gapless(output)
    # A request without keys is given one, and page ids past a request's end are made pages, so that
    # neither meets an odd path in the kernel; the results of these rows are thrown away.
    lengths, table = call.seq_lens.clamp(min=1).contiguous(), call.page_table.clamp(min=0)
    given: dict[str, Any] = {
        "query": query,
        "kv_cache": (k_pages, call.v_pages),
        "kv_layout": "NHD",
        "block_tables": table.contiguous(),
        "seq_lens": lengths,
        "cum_seq_lens_q": call.cu_seqlens_q.contiguous(),
        "window_left": call.window_left,
        "out": out,
        "lse": lse,
        "max_q_len": queries,
        "sinks": None if sinks is None else sinks.float().contiguous(),
        "bmm1_scale": call.scale,
        "bmm2_scale": 1.0 if call.v_scale is None else call.v_scale,
        "workspace_buffer": scratch,
        "multi_ctas_kv_counter_buffer": counters,
    }
    most = pages * k_pages.shape[1]
    announce(LIBRARY)
    if few(queries, call.causal):
        from flashinfer.decode import trtllm_batch_decode_with_kv_cache

        log2 = None if k_scale is None else k_scale * (call.scale / LN2)
        trtllm_batch_decode_with_kv_cache(
            **given,
            max_seq_len=most,
            q_len_per_req=None,
            backend="trtllm-gen",
            bmm1_scale_log2=log2,
        )
    else:
        from flashinfer.prefill import trtllm_batch_context_with_kv_cache

        starts = pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
        trtllm_batch_context_with_kv_cache(
            **given, max_kv_len=most, batch_size=batch, causal=call.causal, cum_seq_lens_kv=starts
        )
    _natural(out, lse, call, call.seq_lens)
    if out is not output:
        output.copy_(out)


def varlen_attention(call: varlen.VarlenAttention) -> tuple[Tensor, Tensor]:
    """The value is copied once, and with lse a workspace of `stats_bytes` is cleared at every
    call."""
    query, key, value, cu_q, cu_k = (
        call.query,
        call.key,
        call.value,
        call.cu_seqlens_q,
        call.cu_seqlens_k,
    )
    heads, batch, queries = query.shape[1], cu_k.shape[0] - 1, call.max_seqlen_q
    output, lse = fresh(call)
    if not runs(call):
        see_nothing(output, lse)
        return output, no_lse(query) if lse is None else lse
    announce(LIBRARY)
    from flashinfer.prefill import trtllm_ragged_attention_deepseek

    # The op writes its results alone, so that it can have a gradient, and hence takes no workspace
    # from the caller.
    size = memory.PACK if lse is None else stats_bytes(batch, heads, queries)
    lengths = lengths_of(cu_k).int()
    trtllm_ragged_attention_deepseek(
        query.contiguous(),
        key,
        zeroed(value, past(cu_k, key.shape[0])),
        query.new_zeros(size, dtype=torch.uint8),
        lengths.clamp(min=1),
        queries,
        call.max_seqlen_k,
        call.scale,
        1.0,
        -1.0,
        batch,
        call.window_left,
        cu_q.contiguous(),
        cu_k.contiguous(),
        None,
        call.causal,
        call.return_lse,
        out=output,
        lse=lse,
    )
    _natural(output, lse, call, lengths)
    return output, no_lse(query) if lse is None else compact(lse)


def mla_attention(call: mla.MlaAttention) -> None:
    """The result is bfloat16, whatever dtype the output of a float8 query has. lse comes
    natural."""
    if blank(call):
        return
    q_nope, pages, output, lse, sinks = (
        call.q_nope,
        call.latent_pages,
        call.output,
        call.lse,
        call.sinks,
    )
    tokens, heads = q_nope.shape[:2]
    counters, scratch = _split(call, tokens, 1, "q_nope.shape[0]", "tokens")
    announce(LIBRARY)
    from flashinfer.mla import trtllm_batch_decode_with_kv_cache_mla  # pyright: ignore[reportAttributeAccessIssue]

    tables, lengths, _ = batch_by_token(call)
    tables = pad(tables, (0, -tables.shape[1] % (TILE // pages.shape[1])))
    out = (
        output
        if output.is_contiguous() and output.dtype == torch.bfloat16
        else torch.empty_like(q_nope, dtype=torch.bfloat16)
    )
    z = None if lse is None else gapless(lse)
    q_scale, kv_scale = call.q_scale, call.kv_scale
    scales = (
        (call.scale, 1.0)
        if q_scale is None or kv_scale is None
        else (q_scale * kv_scale * call.scale, kv_scale)
    )
    # A row without keys is given one; its result is thrown away.
    trtllm_batch_decode_with_kv_cache_mla(
        whole(q_nope, call.q_pe).contiguous()[:, None],
        pages,
        scratch,
        NOPE,
        LATENT,
        ROPE,
        tables,
        lengths.clamp(min=1),
        tables.shape[1] * pages.shape[1],
        out=out.view(tokens, 1, heads, LATENT),
        backend="trtllm-gen",
        bmm1_scale=scales[0],
        bmm2_scale=scales[1],
        sinks=None if sinks is None else sinks.float().contiguous(),
        lse=z,
        return_lse=z is not None,
        return_lse_base="basee",
        multi_ctas_kv_counter_buffer=counters,
    )
    unseen = (lengths == 0)[:, None]
    out.masked_fill_(unseen[..., None], 0.0)
    if out is not output:
        output.copy_(out)
    if lse is not None and z is not None:
        z.masked_fill_(unseen, float("-inf"))
        if z is not lse:
            lse.copy_(z)


def _load() -> Any:
    from flashinfer.jit.attention.modules import gen_trtllm_gen_fmha_module

    return gen_trtllm_gen_fmha_module().build_and_load()


LIBRARY = Library("trtllm", ("fmha_gen",), _load)
"""The code that launches the generated kernels. Which of their files a call fetches is known to it
alone."""


def xqa_libraries_of(p: Problem) -> tuple[Library, ...]:
    """What a call of this Problem loads."""
    window = p.rules.window[0] >= 0
    sizes = (p.page_size, p.head_dim, p.group_size)
    return (xqa_library(p.dtype, p.kv_dtype, *sizes, window, p.dtype, 1),)


def few(queries: int, causal: bool) -> bool:
    """Does the decode kernel take a call of so many queries a request? It is causal."""
    return queries <= 1 or (causal and queries <= FEW)


def _natural(
    out: Tensor,
    lse: Tensor | None,
    call: paged.PagedAttention | varlen.VarlenAttention,
    keys: Tensor,
) -> None:
    """Give tokens of no request, and those that see no key, 0 and -inf, and lse the base e. keys:
    int `[B]`, each request's."""
    row = rows_of(call.cu_seqlens_q, out.shape[0])
    real, row = row < keys.shape[0], row.clamp(max=keys.shape[0] - 1)
    seen = keys[row]
    if call.causal:
        # The last query of a request is at its last key.
        seen = (
            seen - call.cu_seqlens_q[1:][row] + torch.arange(out.shape[0], device=keys.device) + 1
        )
    unseen = (~real | (keys[row] <= 0) | (seen <= 0))[:, None]
    out.masked_fill_(unseen[..., None], 0.0)
    if lse is not None:
        lse.mul_(LN2).masked_fill_(unseen, float("-inf"))


# The workspace ------------------------------------------------------------------------------------


def _split(call: Any, batch: int, queries: int, field: str, of: str) -> tuple[Tensor, Tensor]:
    """(counters, scratch) of the workspace. Raises InvalidInput when it is too small, or has no
    counter for each row and head."""
    heads, dim = call.output.shape[1:]
    counters, scratch = memory.split(
        call.workspace,
        split_bytes(dim) + (0 if call.lse is None else stats_bytes(batch, heads, queries)),
    )
    if batch * heads * 4 > counters.numel():
        raise InvalidInput(
            field, batch, f"<= {counters.numel() // 4 // heads} {of} of {heads} heads"
        )
    return counters, scratch


def split_bytes(dim: int) -> int:
    """Bytes for partial outputs and sums: FlashInfer splits the keys among at most as many blocks
    as there are multiprocessors, each of at most 256 rows (fmhaKernels.cuh, kernelParams.h). It
    does not check that they fit."""
    return SMS * 256 * (2 * dim + 8)


def stats_bytes(batch: int, heads: int, queries: int) -> int:
    """Bytes for the maxima and sums that lse is made of, and the guard after them
    (trtllm_fmha_kernel_launcher.cu)."""
    return 8 * heads * batch * (-(-queries // 256) * 256) + (1 << 20)


def workspace_bytes(p: Problem) -> int:
    """Of the generated kernels. A size without a known bound counts as its hint; a call that turns
    out larger raises InvalidInput."""

    def most(size: Extent) -> int:
        return max(size.hint if size.hi is None else size.hi, 1)

    batch, queries = (
        (most(p.sizes.tokens), 1) if p.rope_dim else (most(p.sizes.batch), most(p.sizes.queries))
    )
    return memory.total(
        split_bytes(p.v_head_dim) + (stats_bytes(batch, p.q_heads, queries) if p.results.lse else 0)
    )


CACHED = (*HALVES, torch.float8_e4m3fn)
PAGED: tuple[Need, ...] = (
    *without("per_head_scales"),  # scales are numbers, one for all heads
    demand(
        "kv_scales",
        "no (but with a float8 cache)",
        lambda p: not p.pages.kv_scales or p.kv_dtype != p.dtype,
    ),
    demand("v_head_dim", "{p.head_dim}, the key's", lambda p: p.v_head_dim == p.head_dim),
    memory.not_of_a_plan,
    one_of("head_dim", 64, 128, 256),
    one_of("page_size", 16, 32, 64, 128),
    one_of("last_dim_contiguous", True),
    one_of("pages_alike", True),
)
GENERATED: tuple[Need, ...] = (
    arch(100, 103),
    demand("lse", "no (with sinks)", lambda p: not (p.results.lse and p.rules.sinks)),
)
_window = demand(
    "window", "none (but with causal)", lambda p: p.rules.causal or not p.rules.windowed
)
RULED: tuple[Need, ...] = (*GENERATED, _window, at_most("group_size", 64))
FLOAT8 = (
    demand(
        "kv_dtype",
        "the query's, or float8_e4m3fn for a bfloat16 query",
        lambda p: (
            p.kv_dtype == p.dtype or (p.dtype, p.kv_dtype) == (torch.bfloat16, torch.float8_e4m3fn)
        ),
    ),
    demand(
        "queries",
        f"<= {FEW} and causal, or <= 1 (float8 cache)",
        lambda p: (
            p.kv_dtype == p.dtype
            or (p.sizes.queries.hi is not None and few(p.sizes.queries.hi, p.rules.causal))
        ),
    ),
)
RULES = frozenset({"causal", "window_left", "window_right"})
_kernel = functools.partial(
    Kernel, packages=(PACKAGE,), probe=trtllm_missing, built=built_by(lambda p: (LIBRARY,))
)
# In which order blocks of a request add up is not known of binaries.
_generated = functools.partial(
    _kernel,
    "trtllm",
    dtypes=HALVES,
    tolerance=Tolerance(2.0),
    repeats=None,
    about="TensorRT-LLM's generated kernels (flashinfer)",
    cost_us=Roofline(15.0, 0.83, 0.55),  # of the hardware's figures: not measured
)
register(
    _generated(
        "paged_attention",
        paged_attention,
        takes=RULES | {"sinks", "k_scale", "v_scale", "lse"},
        kv_dtypes=CACHED,
        needs=(*RULED, *FLOAT8, *PAGED),
        workspace_bytes=workspace_bytes,
    )
)
_dims = demand(
    "head_dim, v_head_dim", " | ".join(map(str, DIMS)), lambda p: (p.head_dim, p.v_head_dim) in DIMS
)
register(
    _generated(
        "varlen_attention",
        varlen_attention,
        takes=RULES | {"return_lse"},
        needs=(*RULED, _dims, one_of("last_dim_contiguous", True)),
    )
)
register(
    _kernel(
        "trtllm_mla",
        "mla_attention",
        mla_attention,
        takes=frozenset({"sinks", "q_scale", "kv_scale", "causal", "lse"}),
        dtypes=(torch.bfloat16, torch.float8_e4m3fn),
        needs=(
            *GENERATED,
            *BY_TOKEN,
            demand("q_heads", "<= 64, or 128", lambda p: p.q_heads <= 64 or p.q_heads == 128),
            one_of("page_size", 32, 64),
            one_of("pages_packed", True),
            memory.not_of_a_plan,
        ),
        cost_us=Roofline(13.0, 0.83, 0.55),  # of the hardware's figures: not measured
        plan=Plan(device=rows),
        workspace_bytes=workspace_bytes,
        repeats=None,
        about="TensorRT-LLM's generated MLA decode (flashinfer)",
        # of float8, where the weights are rounded to it too; tests hold bfloat16 to an eighth of it
        tolerance=Tolerance(16.0),
    )
)
register(
    _kernel(
        "xqa",
        "paged_attention",
        xqa,
        takes=RULES | {"sinks", "k_scale", "v_scale"},
        dtypes=HALVES,
        kv_dtypes=CACHED,
        probe=xqa_missing,
        built=built_by(xqa_libraries_of),
        needs=(
            arch(90, 100, 103, 120, 121),
            at_most("group_size", 16),
            extent_at_most("queries", 1),
            *PAGED,
        ),
        cost_us=Roofline(20.5, 1.0, 0.59, 0.00087, 27_000),
        about="XQA decode of TensorRT-LLM (flashinfer)",
        workspace_bytes=lambda p: memory.total(scratch_bytes(p.group_size, p.head_dim)),
        # outputs of warp groups, and then of the parts of a request, are rounded to the dtype and
        # added
        tolerance=Tolerance(2.0),
    )
)
