"""`xqa`: TensorRT-LLM's XQA decode through FlashInfer, built on the host for the call's dtypes, page size, head dim and group.

Of the two kernels in a module, the general one (csrc/xqa/mha.cu) is called for every dtype and device. For a float8 cache on SM90
FlashInfer's own `xqa()` takes the other, which rounds the query and the weights to float8, carries NaN from the unused slots of a page
into the output and leaves the rows of requests without keys unwritten. The general one loads no slot past a request's end.
"""

from __future__ import annotations

from math import sqrt

import torch
from torch import Tensor

from attnops.kernel import Kernel, Tolerance, arch, at_most, extent_at_most, one_of, register, without
from attnops.kernels.flashinfer.trtllm_package import PACKAGE, SMS, no_compiler, one_head_dim, scales
from attnops.kernels.shared import workspace as _workspace
from attnops.kernels.shared.decode import batch_by_token
from attnops.measured import Roofline
from attnops.problem import Problem, Refusal

HALVES = (torch.float16, torch.bfloat16)


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
    padded: bool = True,
    policy: str = "",
    output: Tensor,
    lse: Tensor | None = None,
    workspace: Tensor | None = None,
) -> None:
    """See `attnops.paged_attention`. One query a request, the last, so neither causality nor a window to the right hides a key."""
    if not (query.numel() and k_pages.numel() and page_table.numel()):
        output.zero_()
        return
    from flashinfer.utils import device_support_pdl, get_device_sm_count
    from flashinfer.xqa import get_xqa_module  # pyright: ignore[reportAttributeAccessIssue]

    (tokens, heads, dim), (_, page, kv_heads, _) = query.shape, k_pages.shape
    group = heads // kv_heads
    counters, scratch = _workspace.split(workspace, scratch_bytes(group, dim))
    if padded or tokens != page_table.shape[0]:
        page_table, seq_lens, _ = batch_by_token(None, page_table, seq_lens, cu_seqlens_q, tokens, True, heads)
    # The kernel scales by q_scale * kv_scale / sqrt(D), then what it sums of the values by kv_scale.
    q_scale: float | Tensor = scale * sqrt(dim)
    kv_scale: float | Tensor = 1.0
    if k_scale is not None and v_scale is not None:
        q_scale, kv_scale = k_scale / v_scale * q_scale, v_scale
    logits = None if sinks is None else sinks.float().contiguous().view(kv_heads, group)
    out = output if output.is_contiguous() else torch.empty_like(output, memory_format=torch.contiguous_format)
    module = get_xqa_module(query.dtype, k_pages.dtype, page, dim, group, window_left >= 0, query.dtype, 1)
    module.xqa(
        False, get_device_sm_count(query.device), kv_heads, window_left + 1, q_scale, out[:, None], 1.0, query.contiguous()[:, None],
        logits, k_pages, v_pages, None, None, page_table.contiguous(), page_table.shape[1] * page,
        seq_lens.contiguous().view(torch.uint32)[:, None], tokens, kv_scale, counters, scratch, device_support_pdl(query.device), 1,
        None, None,
    )  # fmt: skip
    # Split among several blocks, a request without keys comes out as 0 / 0.
    out.masked_fill_((seq_lens == 0)[:, None, None], 0.0)
    if out is not output:
        output.copy_(out)


def scratch_bytes(group: int, dim: int) -> int:
    """Bytes for the partial results of all blocks (csrc/xqa/mha.cu): a maximum and a sum a row, in rows of 32, and the outputs.

    A request is split only while there are more multiprocessors than requests and heads, so there are never more parts than those.
    """
    rows = -(-(-(-group // 16) * 16) // 32) * 32
    return SMS * (2 * 4 * rows + 2 * group * dim + 256)


def _dtypes(p: Problem) -> Refusal | None:
    if p.dtype not in HALVES:
        return one_of("dtype", *HALVES)(p)
    return None if p.kv_dtype == p.dtype else one_of("kv_dtype", torch.float8_e4m3fn)(p)


register(
    Kernel(
        "xqa",
        "paged_attention",
        paged_attention,
        needs=(
            arch(90, 100, 103, 120, 121),
            _dtypes,
            scales,
            _workspace.not_of_a_plan,
            one_of("head_dim", 64, 128, 256),
            one_head_dim,
            at_most("group_size", 16),
            one_of("page_size", 16, 32, 64, 128),
            extent_at_most("queries", 1),
            one_of("last_dim_contiguous", True),
            one_of("pages_alike", True),
            *without("mask", "softcap", "lse"),
        ),
        packages=(PACKAGE,),
        probe=no_compiler,
        cost_us=Roofline(20.5, 1.0, 0.59, 0.00087, 27_000),
        workspace_bytes=lambda p: _workspace.total(scratch_bytes(p.group_size, p.head_dim)),
        # Outputs of warp groups, and then of the parts of a request, are rounded to the dtype and added.
        tolerance=Tolerance(2.0),
        about="XQA decode of TensorRT-LLM (flashinfer)",
    )
)
