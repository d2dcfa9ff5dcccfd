"""`sgl_sparse`: vertical-slash attention inside the sgl_kernel wheel, and the kernel that makes its
index; up to 0.4.6.post1.

FlashAttention-2 over blocks and columns of keys, for head dim 128 alone. Rows of no request are
left as they were, and the lse of a query that sees no key is +inf. Its schemas are wrong: they call
the query written and give two arguments of the index one name, so that all is given by position.
Its lse is wrong too: allocated as `[Hq, T]`, it is written as `[B, Hq, max_seqlen_q]` (the host
code never says that requests are packed), past its end where B * max_seqlen_q > T. So a call holds
no more requests than there is room for.
"""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from attnops.core.kernel import Invariant, Kernel, arch, one_of, register
from attnops.core.problem import Problem, Target
from attnops.core.tensors import unpad
from attnops.kernels.sgl import wheel
from attnops.kernels.shared.memory import aligned
from attnops.kernels.shared.tokens import see_nothing
from attnops.ops.sparse.vertical_slash_reference import BLOCK

if TYPE_CHECKING:
    from attnops.ops.sparse import vertical_slash


def vertical_slash_indexes(
    call: vertical_slash.VerticalSlashIndexes,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """With counts it is the op `..._mergehead`."""
    vertical, slash = call.vertical, call.slash
    shape = (*vertical.shape[:2], -(-call.max_seqlen_q // BLOCK))
    # The kernel writes counted entries only, and skips rows without queries.
    sizes = (shape, (*shape, slash.shape[2]), shape, (*shape, vertical.shape[2]))
    out = tuple(torch.zeros(size, dtype=torch.int32, device=vertical.device) for size in sizes)
    if out[0].numel():
        name = "convert_vertical_slash_indexes" + (
            "" if call.vertical_counts is None else "_mergehead"
        )
        given = (call.q_lens, call.k_lens, vertical, slash, call.vertical_counts, call.slash_counts)
        tensors = (x.contiguous() for x in given if x is not None)
        wheel.op(name, wheel.common_ops(Target.of(vertical.device)))(
            *out, *tensors, call.max_seqlen_q, BLOCK, BLOCK, True
        )
    return out[0], out[1], out[2], out[3]


def vertical_slash_attention(call: vertical_slash.VerticalSlashAttention) -> None:
    """The kernel writes into `output` itself.

    One launch where all requests are of one length, else about as many as the longest request is
    longer than the mean.
    """
    output, lse = call.output, call.lse
    sizes = call.query.numel(), call.key.numel(), call.block_count.numel(), call.max_seqlen_k
    if 0 in sizes:
        see_nothing(output, lse)
        return
    if call.padded:
        see_nothing(output, None)  # how many rows are of no request only the device knows
    out = output if output.stride(2) == 1 else output.contiguous()
    parts = _written(call, out)
    if out is not output:
        output.copy_(out)
    if lse is not None:
        tokens = call.query.shape[0]
        packed = unpad(torch.cat(parts).transpose(1, 2), call.cu_seqlens_q, tokens, float("-inf"))
        lse.copy_(packed.masked_fill_(packed == float("inf"), float("-inf")))


def _written(call: vertical_slash.VerticalSlashAttention, out: Tensor) -> list[Tensor]:
    """Write `out`. Returns the lse of each launch, `[B, Hq, longest]`."""
    query, key, value = call.query, call.key, call.value
    tokens, batch = query.shape[0], call.block_count.shape[0]
    varlen_fwd = wheel.op("varlen_fwd_sparse", wheel.common_ops(Target.of(query.device)))
    # Its lse has room for `tokens` rows a head, and each request takes `longest` of them.
    longest = min(call.max_seqlen_q, tokens)
    fit, rows = tokens // longest, -(-longest // BLOCK)
    index = [
        x[:, :, :rows].contiguous()
        for x in (call.block_count, call.block_offset, call.column_count, call.column_index)
    ]
    starts_q, starts_k = call.cu_seqlens_q.contiguous(), call.cu_seqlens_k.contiguous()
    aligned(query=query, key=key, value=value, output=out)
    parts = []
    for b in range(0, batch, fit):
        some, ends = slice(b, b + fit), slice(b, b + fit + 1)
        _, raw = varlen_fwd(
            query,
            key,
            value,
            *(x[some] for x in index),
            out,
            starts_q[ends],
            starts_k[ends],
            None,
            None,
            longest,
            call.max_seqlen_k,
            0.0,
            call.scale,
            False,
            True,
            0.0,
            False,
            None,
        )
        written = (min(fit, batch - b), query.shape[1], longest)
        parts.append(raw.view(-1)[: math.prod(written)].view(written))
    return parts


def _index_us(p: Problem) -> float:
    """One thread a row of 64 queries walks its slashes and verticals, whose number only the caller
    knows. Not measured."""
    return 20.0 + max(p.sizes.queries.hint, 1) * max(p.sizes.batch.hint, 1) * p.q_heads / 1e5


def _attention_us(p: Problem) -> float:
    """FlashAttention-2's pace over a tenth of the keys; only the index holds their number. Not
    measured."""
    flops = (
        2.0
        * max(p.sizes.tokens.hint, 1)
        * max(p.sizes.context.hint, 1)
        * p.q_heads
        * (p.head_dim + p.v_head_dim)
    )
    return 15.0 + 0.1 * flops / 3e8


# Some of the sources that the wheel may be built from turn other GPUs away.
DENSE = (
    arch(80, 86, 87, 89, 90),
    one_of("head_dim", 128),
    one_of("v_head_dim", 128),
    one_of("last_dim_contiguous", True),
)
# Invariant: one block of threads a row of the index, whatever else is in the batch.
_sparse = functools.partial(
    Kernel,
    "sgl_sparse",
    packages=(wheel.package(below=wheel.DROPPED, holds="vertical-slash attention"),),
    invariant=Invariant(),
    probe=lambda target: wheel.lacks(target, wheel.common_ops(target)),
)
register(
    _sparse(
        "vertical_slash_indexes",
        vertical_slash_indexes,
        takes=frozenset({"vertical_counts", "slash_counts"}),
        dtypes=(torch.int32,),
        needs=(arch(80, 86, 87, 89, 90, 100, 103, 120),),
        cost_us=_index_us,
        about="convert_vertical_slash_indexes (sgl_kernel)",
    )
)
register(
    _sparse(
        "vertical_slash_attention",
        vertical_slash_attention,
        takes=frozenset({"lse"}),
        dtypes=(torch.float16, torch.bfloat16),
        needs=DENSE,
        cost_us=_attention_us,
        about="FlashAttention-2 over vertical-slash indexes (sgl_kernel)",
    )
)
