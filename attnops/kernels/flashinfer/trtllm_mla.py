"""`trtllm_mla`: TensorRT-LLM's generated decode for latents of 512 + 64 through FlashInfer, on SM100 and SM103.

`flashinfer.mla.trtllm_batch_decode_with_kv_cache_mla` with its `trtllm-gen` kernels, binaries that it fetches at first use. Every query
token is a row of its own: with queries of several lengths the kernels return no lse. The result is bfloat16, whatever dtype the output
of a float8 query has. None of this ran here on such a device. Unknown for that reason: whether NaN in the slots of a page past its
request's end reaches the output; and the lse where there are sinks, hence the refusal.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn.functional import pad

from attnops.kernel import Kernel, Plan, Tolerance, arch, demand, extent_at_most, one_of, register
from attnops.kernels.flashinfer import package as fi
from attnops.kernels.shared import workspace
from attnops.kernels.shared.decode import batch_by_token, blank, rows, whole
from attnops.measured import Roofline
from attnops.problem import Problem

if TYPE_CHECKING:
    from attnops.ops.mla import MlaAttention

LATENT, ROPE, NOPE = 512, 64, 128
TILE = 128
"""Keys a row of the page table must hold a multiple of: the package checks it for all its kernels but these; padded all the same."""
MOST_QUERIES = 8
"""Of one request. Every token reads all keys of its request."""


def mla_attention(call: MlaAttention) -> None:
    """See `attnops.ops.mla_attention`. plan: from `decode_rows`, or None to make it here. workspace: as `workspace_bytes` says."""
    q_nope, pages, output, lse, sinks = call.q_nope, call.latent_pages, call.output, call.lse, call.sinks
    if blank(call):
        return
    tokens, heads = q_nope.shape[:2]
    stats = 0 if lse is None else fi.stats_bytes(tokens, heads, 1)
    counters, scratch = fi.split(call.workspace, fi.split_bytes(LATENT) + stats, "q_nope.shape[0]", tokens, heads, "tokens")
    from flashinfer.mla import trtllm_batch_decode_with_kv_cache_mla  # pyright: ignore[reportAttributeAccessIssue]

    tables, lengths, _ = batch_by_token(call)
    tables = pad(tables, (0, -tables.shape[1] % (TILE // pages.shape[1])))
    out = output if output.is_contiguous() and output.dtype == torch.bfloat16 else torch.empty_like(q_nope, dtype=torch.bfloat16)
    z = None if lse is None else fi.gapless(lse)
    q_scale, kv_scale = call.q_scale, call.kv_scale
    scales = (call.scale, 1.0) if q_scale is None or kv_scale is None else (q_scale * kv_scale * call.scale, kv_scale)
    # A row without keys is given one; its result is thrown away.
    trtllm_batch_decode_with_kv_cache_mla(
        whole(q_nope, call.q_pe).contiguous()[:, None], pages, scratch, NOPE, LATENT, ROPE, tables, lengths.clamp(min=1),
        tables.shape[1] * pages.shape[1], out=out.view(tokens, 1, heads, LATENT), backend="trtllm-gen", bmm1_scale=scales[0],
        bmm2_scale=scales[1], sinks=None if sinks is None else sinks.float().contiguous(), lse=z, return_lse=z is not None,
        return_lse_base="basee", multi_ctas_kv_counter_buffer=counters,
    )  # fmt: skip
    blind = (lengths == 0)[:, None]
    out.masked_fill_(blind[..., None], 0.0)
    if out is not output:
        output.copy_(out)
    if lse is not None and z is not None:
        z.masked_fill_(blind, float("-inf"))
        if z is not lse:
            lse.copy_(z)


def workspace_bytes(p: Problem) -> int:
    """Of a call. A number of tokens without a known bound counts as its hint; a call that turns out larger raises InvalidInput."""
    tokens = max(p.tokens.hint if p.tokens.hi is None else p.tokens.hi, 1)
    return workspace.total(fi.split_bytes(LATENT) + (fi.stats_bytes(tokens, p.q_heads, 1) if p.lse else 0))


register(
    Kernel(
        "trtllm_mla",
        "mla_attention",
        mla_attention,
        takes=frozenset({"sinks", "q_scale", "kv_scale", "causal", "lse"}),
        dtypes=(torch.bfloat16, torch.float8_e4m3fn),
        needs=(
            arch(100, 103),
            demand("q_heads", "<= 64, or 128", lambda p: p.q_heads <= 64 or p.q_heads == 128),
            one_of("v_head_dim", LATENT),
            one_of("rope_dim", ROPE),
            one_of("page_size", 32, 64),
            extent_at_most("queries", MOST_QUERIES),
            one_of("last_dim_contiguous", True),
            one_of("pages_packed", True),
            demand("lse", "no (with sinks)", lambda p: not (p.lse and p.sinks)),
            workspace.not_of_a_plan,
        ),
        packages=(fi.PACKAGE,),
        probe=fi.no_compiler,
        cost_us=Roofline(13.0, 0.83, 0.55),  # of the hardware's figures: not measured
        plan=Plan(device=rows),
        tolerance=Tolerance(16.0),  # of float8, where the weights are rounded to it too; tests hold bfloat16 to an eighth of it
        workspace_bytes=workspace_bytes,
        about="TensorRT-LLM's generated MLA decode (flashinfer)",
    )
)
