"""`xqa`: TensorRT-LLM's XQA decode through FlashInfer, built on the host for the call's dtypes, page size, head dim and group.

Of the two kernels in a module, the general one (csrc/xqa/mha.cu) is called for every dtype and device. For a float8 cache on SM90
FlashInfer's own `xqa()` takes the other, which rounds the query and the weights to float8, carries NaN from the unused slots of a page
into the output and leaves the rows of requests without keys unwritten. The general one loads no slot past a request's end.
"""

from __future__ import annotations

from math import sqrt
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from attnops.call import changed
from attnops.kernel import Kernel, Tolerance, arch, at_most, extent_at_most, register
from attnops.kernels.flashinfer import package as fi
from attnops.kernels.shared import workspace
from attnops.kernels.shared.decode import batch_by_token
from attnops.measured import Roofline

if TYPE_CHECKING:
    from attnops.ops.paged import PagedAttention


def paged_attention(call: PagedAttention) -> None:
    """See `attnops.paged_attention`. One query a request, the last, so neither causality nor a window to the right hides a key."""
    query, k_pages, table, seq_lens, output, sinks = call.query, call.k_pages, call.page_table, call.seq_lens, call.output, call.sinks
    if not (query.numel() and k_pages.numel() and table.numel()):
        output.zero_()
        return
    from flashinfer.utils import device_support_pdl, get_device_sm_count
    from flashinfer.xqa import get_xqa_module  # pyright: ignore[reportAttributeAccessIssue]

    (tokens, heads, dim), (_, page, kv_heads, _) = query.shape, k_pages.shape
    group = heads // kv_heads
    counters, scratch = workspace.split(call.workspace, scratch_bytes(group, dim))
    if call.padded or tokens != table.shape[0]:
        table, seq_lens, _ = batch_by_token(changed(call, plan=None, causal=True))
    # The kernel scales by q_scale * kv_scale / sqrt(D), then its sum of the values by kv_scale.
    q_scale: float | Tensor = call.scale * sqrt(dim)
    kv_scale: float | Tensor = 1.0
    if call.k_scale is not None and call.v_scale is not None:
        q_scale, kv_scale = call.k_scale / call.v_scale * q_scale, call.v_scale
    logits = None if sinks is None else sinks.float().contiguous().view(kv_heads, group)
    out = fi.gapless(output)
    module = get_xqa_module(query.dtype, k_pages.dtype, page, dim, group, call.window_left >= 0, query.dtype, 1)
    module.xqa(
        False, get_device_sm_count(query.device), kv_heads, call.window_left + 1, q_scale, out[:, None], 1.0, query.contiguous()[:, None],
        logits, k_pages, call.v_pages, None, None, table.contiguous(), table.shape[1] * page,
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
    return fi.SMS * (2 * 4 * rows + 2 * group * dim + 256)


register(
    Kernel(
        "xqa",
        "paged_attention",
        paged_attention,
        takes=frozenset({"sinks", "k_scale", "v_scale", "causal", "window_left", "window_right"}),
        dtypes=fi.HALVES,
        kv_dtypes=fi.CACHED,
        needs=(arch(90, 100, 103, 120, 121), at_most("group_size", 16), extent_at_most("queries", 1), *fi.PAGED),
        packages=(fi.PACKAGE,),
        probe=fi.no_compiler,
        cost_us=Roofline(20.5, 1.0, 0.59, 0.00087, 27_000),
        workspace_bytes=lambda p: workspace.total(scratch_bytes(p.group_size, p.head_dim)),
        # Outputs of warp groups, and then of the parts of a request, are rounded to the dtype and added.
        tolerance=Tolerance(2.0),
        about="XQA decode of TensorRT-LLM (flashinfer)",
    )
)
