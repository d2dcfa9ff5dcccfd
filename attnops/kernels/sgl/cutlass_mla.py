"""`cutlass_mla`: the CUTLASS MLA decode inside the sgl_kernel wheel, for latents of 512 + 64 on
exactly SM100.

The kernel works on 128 heads, so the query's are padded; the padding's results are dropped. Its
pages come in tiles of 128 keys, so the page table is padded to whole tiles. It takes pages for
contiguous whatever their strides, and returns no lse. It never ran here on an SM100 device.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import pad

from attnops.core.kernel import Kernel, Plan, arch, at_most, one_of, register
from attnops.core.problem import Problem
from attnops.kernels.sgl import wheel
from attnops.kernels.shared.memory import COUNTERS
from attnops.kernels.shared.tokens import BY_TOKEN, LATENT, batch_by_token, blank, rows
from attnops.measured import Roofline

if TYPE_CHECKING:
    from attnops.ops.latent import record as mla

LIBRARY = "sm100/common_ops.*"
TILE, HEADS = 128, 128

# The persistent scheduler hangs with more splits than one. With -1, where the kernel chooses,
# results were wrong and CUDA graphs broke: NVIDIA/cutlass#2274, sgl-project/sglang#6101 and #7184.
KV_SPLITS = 1


def mla_attention(call: mla.MlaAttention) -> None:
    """plan: from `decode_rows`, or None to make it here.

    workspace: the scratch, where it has `workspace_size` bytes behind the counters that kernels
    share. Otherwise scratch is allocated here, because only the device knows its size. A workspace
    that came with a host plan belongs to that plan.
    """
    if blank(call):
        return
    query, pages, plan, workspace = call.q_nope, call.latent_pages, call.plan, call.workspace
    (tokens, heads, _), page = query.shape, pages.shape[1]
    tables, lengths, _ = batch_by_token(call)
    tables = pad(tables, (0, -tables.shape[1] % (TILE // page)))
    size = workspace_size(tables.shape[1] * page, tokens)
    given = (
        None
        if workspace is None or (plan is not None and plan.dtype == torch.int64)
        else workspace[COUNTERS:]
    )
    scratch = (
        query.new_empty(size, dtype=torch.uint8) if given is None or given.numel() < size else given
    )
    padded = query.new_empty((tokens, HEADS, LATENT))
    # A request without keys is given one, so that the kernel has no empty loop; its results are
    # dropped.
    wheel.op("cutlass_mla_decode", LIBRARY)(
        padded,
        _pad_heads(query),
        _pad_heads(call.q_pe),
        pages,
        lengths.clamp(min=1),
        tables,
        scratch,
        call.scale,
        KV_SPLITS,
    )
    call.output.copy_(padded[:, :heads].masked_fill((lengths == 0)[:, None, None], 0.0))


def workspace_size(keys: int, tokens: int) -> int:
    """Bytes of scratch for `tokens` queries over page tables of `keys` keys on device 0. Its
    function asks the device."""
    return int(wheel.op("cutlass_mla_get_workspace_size", LIBRARY)(keys, tokens, 0, KV_SPLITS))


def _pad_heads(query: Tensor) -> Tensor:
    heads = query.shape[1]
    if heads == HEADS:
        return query.contiguous()
    padded = query.new_empty((query.shape[0], HEADS, query.shape[2]))
    padded[:, :heads] = query
    return padded


def _cost_us(p: Problem) -> float:
    """The cost of 128 heads, however many there are; by the hardware's figures, not measured."""
    return Roofline(12.0, 0.83, 0.55)(replace(p, q_heads=HEADS))


NEEDS = (
    arch(100),
    *BY_TOKEN,
    at_most("q_heads", HEADS),
    one_of("page_size", 1, 2, 4, 8, 16, 32, 64, 128),
    one_of("pages_packed", True),
)
register(
    Kernel(
        "cutlass_mla",
        "mla_attention",
        mla_attention,
        takes=frozenset({"causal"}),
        dtypes=(torch.float16, torch.bfloat16),
        needs=NEEDS,
        packages=(wheel.package(below=wheel.DROPPED, holds="cutlass_mla_decode"),),
        cost_us=_cost_us,
        plan=Plan(device=rows),
        probe=functools.partial(wheel.lacks, pattern=LIBRARY),
        about="CUTLASS MLA decode (sgl_kernel)",
    )
)
