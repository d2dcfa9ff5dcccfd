"""`sgl_sparse`: vertical-slash attention inside the sgl_kernel wheel, and the kernel that makes its index; up to 0.4.6.post1.

FlashAttention-2 over blocks and columns of keys, for head dim 128 alone. Rows of no request are left as they were, and the lse of a
query that sees no key is +inf. Its schemas lie, in that they call the query written and two arguments of the index by one name,
so that all is given by position. Its lse lies too: allocated as `[Hq, T]`, it is written as `[B, Hq, max_seqlen_q]` (the host code
never says that it is packed), past its end where B * max_seqlen_q > T. So no call is given more requests than there is room for.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from attnops.kernel import Invariant, Kernel, arch, dtypes, one_of, register
from attnops.kernels.sgl import wheel
from attnops.kernels.shared.rows import aligned
from attnops.problem import Problem, Target
from attnops.reference.packed import unpad
from attnops.reference.vertical_slash import BLOCK

ARCHS = (80, 86, 87, 89, 90, 100, 103, 120)
ATTENTION_ARCHS = (80, 86, 87, 89, 90)  # some of the sources that the wheel may be built from turn others away
HEAD_DIM = 128


def vertical_slash_indexes(
    q_lens: Tensor,
    k_lens: Tensor,
    vertical: Tensor,
    slash: Tensor,
    vertical_counts: Tensor | None = None,
    slash_counts: Tensor | None = None,
    *,
    max_seqlen_q: int,
    policy: str = "",
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See `attnops.ops.vertical_slash_indexes`. With counts it is the op `..._mergehead`."""
    shape = (*vertical.shape[:2], -(-max_seqlen_q // BLOCK))
    # The kernel writes counted entries only, and none of rows without queries.
    sizes = (shape, (*shape, slash.shape[2]), shape, (*shape, vertical.shape[2]))
    out = tuple(torch.zeros(size, dtype=torch.int32, device=q_lens.device) for size in sizes)
    if out[0].numel():
        name = "convert_vertical_slash_indexes" + ("" if vertical_counts is None else "_mergehead")
        wheel.load(name, wheel.common_ops(Target.of(q_lens.device)))
        given = (x.contiguous() for x in (q_lens, k_lens, vertical, slash, vertical_counts, slash_counts) if x is not None)
        getattr(torch.ops.sgl_kernel, name)(*out, *given, max_seqlen_q, BLOCK, BLOCK, True)
    return out[0], out[1], out[2], out[3]


def vertical_slash_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    block_count: Tensor,
    block_offset: Tensor,
    column_count: Tensor,
    column_index: Tensor,
    *,
    max_seqlen_q: int,
    max_seqlen_k: int,
    scale: float,
    padded: bool = True,
    policy: str = "",
    output: Tensor,
    lse: Tensor | None = None,
) -> None:
    """See `attnops.ops.vertical_slash_attention`. The kernel writes into `output` itself.

    One launch where all requests are of one length, else about as many as the longest request is longer than the mean.
    """
    parts: list[Tensor] = []
    tokens, batch = query.shape[0], block_count.shape[0]
    runs = query.numel() and key.numel() and block_count.numel() and max_seqlen_k
    if padded or not runs:
        output.zero_()  # how many rows are of no request only the device knows
    if runs:
        wheel.load("varlen_fwd_sparse", wheel.common_ops(Target.of(query.device)))
        # Its lse has room for `tokens` rows a head, and each request takes `longest` of them.
        longest = min(max_seqlen_q, tokens)
        fit, rows = tokens // longest, -(-longest // BLOCK)
        index = [x[:, :, :rows].contiguous() for x in (block_count, block_offset, column_count, column_index)]
        starts_q, starts_k = cu_seqlens_q.contiguous(), cu_seqlens_k.contiguous()
        out = output if output.stride(2) == 1 else output.contiguous()
        aligned(query=query, key=key, value=value, output=out)
        for b in range(0, batch, fit):
            some, ends = slice(b, b + fit), slice(b, b + fit + 1)
            _, raw = torch.ops.sgl_kernel.varlen_fwd_sparse(
                query, key, value, *(x[some] for x in index), out, starts_q[ends], starts_k[ends], None, None, longest,
                max_seqlen_k, 0.0, scale, False, True, 0.0, False, None,
            )  # fmt: skip
            written = (min(fit, batch - b), query.shape[1], longest)
            parts.append(raw.view(-1)[: math.prod(written)].view(written))
        if out is not output:
            output.copy_(out)
    if lse is not None and not parts:
        lse.fill_(float("-inf"))
    elif lse is not None:
        packed = unpad(torch.cat(parts).transpose(1, 2), cu_seqlens_q, tokens, float("-inf"))
        lse.copy_(packed.masked_fill_(packed == float("inf"), float("-inf")))


def _index_us(p: Problem) -> float:
    """One thread a row of 64 queries walks its slashes and verticals; how many only the caller knows. Not measured."""
    return 20.0 + max(p.queries.hint, 1) * max(p.batch.hint, 1) * p.q_heads / 1e5


def _attention_us(p: Problem) -> float:
    """FlashAttention-2's pace over a tenth of the keys, which is for the index to say. Not measured."""
    flops = 2.0 * max(p.tokens.hint, 1) * max(p.context.hint, 1) * p.q_heads * (p.head_dim + p.v_head_dim)
    return 15.0 + 0.1 * flops / 3e8


PACKAGES = (wheel.package(below=wheel.DROPPED, holds="vertical-slash attention"),)
register(
    Kernel(
        "sgl_sparse",
        "vertical_slash_indexes",
        vertical_slash_indexes,
        needs=(arch(*ARCHS),),
        packages=PACKAGES,
        probe=wheel.lacks_common_ops,
        cost_us=_index_us,
        invariant=Invariant(),
        about="convert_vertical_slash_indexes (sgl_kernel)",
    )
)
register(
    Kernel(
        "sgl_sparse",
        "vertical_slash_attention",
        vertical_slash_attention,
        needs=(
            arch(*ATTENTION_ARCHS),
            dtypes(torch.float16, torch.bfloat16),
            one_of("head_dim", HEAD_DIM),
            one_of("v_head_dim", HEAD_DIM),
            one_of("last_dim_contiguous", True),
        ),
        packages=PACKAGES,
        probe=wheel.lacks_common_ops,
        cost_us=_attention_us,
        # One block of threads a row of the index, whatever else is in the batch.
        invariant=Invariant(),
        about="FlashAttention-2 over vertical-slash indexes (sgl_kernel)",
    )
)
