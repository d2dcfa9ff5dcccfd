"""Stand-ins for the vertical-slash ops of the sgl_kernel wheel (sglang-kernel 0.4.3): not the
kernels.

The wheel's schemas, argument checks and shape rules over plain bodies on the CPU. Kept from the
real ones because the wrappers must cope with it: the index's kernel writes nothing but counted
entries, and reads its arguments as packed whatever their strides; the attention leaves rows of no
request alone, takes head dim 128 only, says +inf of a query that sees no key, applies the causal
mask to the last blocks and columns only, and writes its lse `[Hq, T]` as `[B, Hq, max_seqlen_q]`:
past its end if that is larger, for which this one raises. That a tensor is on CUDA is the one thing
not checked.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch

from tests.standins import schemas
from tests.standins.checks import ALL, LAST, check, laid_out
from tests.standins.libraries import registered

INF = float("inf")
BLOCK, HALVES = 64, (torch.float16, torch.bfloat16)


# convert_vertical_slash_indexes -------------------------------------------------------------------


def convert(*args: Any) -> None:
    outs = args[:4]
    q_lens, k_lens, vertical, slash = args[4:8]
    context, block_m, block_n, causal = args[-4:]
    counts = args[8:-4]
    for x in args[:-4]:
        check(x.dtype == torch.int32, f"expected scalar type Int but found {x.dtype}")
        assert x.is_contiguous(), "read as packed whatever its strides"
    assert (block_m, block_n) == (BLOCK, BLOCK) and causal is True
    batch, heads, slashes = slash.shape
    rows = -(-context // block_m)
    assert [tuple(x.shape) for x in outs] == [
        (batch, heads, rows, *n) for n in ((), (slashes,), (), (vertical.shape[2],))
    ]
    for b in range(batch):
        for h in range(heads):
            nv, ns = (int(c[h]) for c in counts) if counts else (vertical.shape[2], slashes)
            assert nv >= 1 and ns >= 1, "the first entries are read whatever the counts"
            v, s = vertical[b, h, :nv].tolist(), slash[b, h, :ns].tolist()
            for row in range(rows):
                if row * block_m < int(q_lens[b]):
                    past = int(k_lens[b]) - int(q_lens[b]) + (row + 1) * block_m
                    blocks, columns = one_row(v, s, past, int(k_lens[b]))
                    for (count, entries), found in zip(
                        ((outs[0], outs[1]), (outs[2], outs[3])), (blocks, columns), strict=True
                    ):
                        count[b, h, row] = len(found)
                        entries[b, h, row, : len(found)] = torch.tensor(found, dtype=torch.int32)


def one_row(
    vertical: list[int], slash: list[int], past: int, keys: int
) -> tuple[list[int], list[int]]:
    """(blocks, columns) of the queries before key position `past`: both lists are walked at once,
    as the kernel does."""
    near = [s for s in slash if s < past]
    assert near, "no slash reaches this row: the kernel would list keys that do not exist"
    blocks: list[int] = []
    columns: list[int] = []
    ends = iter(max(past - s, BLOCK) for s in near)
    end = next(ends)
    start, waiting = end - BLOCK, list(vertical)
    while True:
        while waiting and waiting[0] < end:
            v = waiting.pop(0)
            if v < start:
                columns.append(v)
        reach = next(ends, None)
        if reach is None or reach > end + BLOCK:
            blocks += [k for k in range(start, end, BLOCK) if k < keys]
            if reach is None:
                return blocks, columns
            start, end = reach - BLOCK, reach
        elif reach > end:
            end += BLOCK


# varlen_fwd_sparse --------------------------------------------------------------------------------


def varlen_fwd_sparse(
    q,
    k,
    v,
    block_count,
    block_offset,
    column_count,
    column_index,
    out,
    cu_q,
    cu_k,
    seqused_k,
    alibi_slopes,
    max_seqlen_q,
    max_seqlen_k,
    p_dropout,
    softmax_scale,
    zero_tensors,
    is_causal,
    softcap,
    return_softmax,
    gen,
):
    assert (
        out is not None
        and seqused_k is None
        and alibi_slopes is None
        and not return_softmax
        and not zero_tensors
        and gen is None
    )
    i32, rows, by_row = torch.int32, math.ceil(max_seqlen_q / BLOCK), "batch_size, num_heads, rows"
    s = laid_out(
        sizes={"batch_size": cu_q.numel() - 1, "rows": rows},
        q=(q, "total_q, num_heads, head_size_og", HALVES, LAST),
        k=(k, "total_k, num_heads_k, head_size_og", q.dtype, LAST),
        v=(v, "total_k, num_heads_k, head_size_og", q.dtype, LAST),
        cu_seqlens_q=(cu_q, "batch_size + 1", i32, ALL),
        cu_seqlens_k=(cu_k, "batch_size + 1", i32, ALL),
        out=(out, "total_q, num_heads, head_size_og", q.dtype, LAST),
        # These are read as packed int32 whatever they are.
        block_count=(block_count, by_row, i32, ALL),
        block_offset=(block_offset, f"{by_row}, slashes", i32, ALL),
        column_count=(column_count, by_row, i32, ALL),
        column_index=(column_index, f"{by_row}, verticals", i32, ALL),
    )
    batch, tokens, heads, dim = s.batch_size, s.total_q, s.num_heads, s.head_size_og
    check(batch > 0, "batch size must be positive")
    check(
        heads % k.shape[1] == 0, "Number of heads in key/value must divide number of heads in query"
    )
    check(dim == 128, "run_mha_fwd_sparse only supports headdim=128 for now to keep binary small.")
    assert p_dropout == 0.0 and softcap == 0.0 and is_causal
    assert all(x.data_ptr() % 16 == 0 for x in (q, k, v, out)), "CUDA error: misaligned address"
    lse = torch.full((heads, tokens), float("nan"))
    steps = 1 if max_seqlen_q == 1 else 2
    for b in range(batch):
        (q0, q1), (k0, k1) = cu_q[b : b + 2].tolist(), cu_k[b : b + 2].tolist()
        for h in range(heads):
            keys, values = (x[k0:k1, h // (heads // k.shape[1])].float() for x in (k, v))
            for i in range(q1 - q0):
                at = (b, h, i // BLOCK)
                blocks = block_offset[at][: int(block_count[at])].tolist()
                columns = column_index[at][: int(column_count[at])].tolist()
                limit = (
                    k1 - k0 if max_seqlen_q == 1 else min(k1 - k0, i + 1 + (k1 - k0) - (q1 - q0))
                )
                # Only the last entries are masked. A key listed twice would count twice, as in the
                # kernel.
                late = len(blocks) - steps
                listed = [
                    j
                    for n, o in enumerate(blocks)
                    for j in range(o, o + BLOCK)
                    if n < late or j < limit
                ]
                late = math.ceil(len(columns) / BLOCK) - steps
                listed += [j for n, j in enumerate(columns) if n // BLOCK < late or j < limit]
                assert all(0 <= j < k1 - k0 for j in listed), (
                    "CUDA error: an illegal memory access was encountered (key)"
                )
                seen = torch.tensor(listed, dtype=torch.long)
                logits = keys[seen] @ q[q0 + i, h].float() * softmax_scale
                out[q0 + i, h] = (torch.softmax(logits, 0) @ values[seen]).to(out.dtype)
                place = (b * heads + h) * max_seqlen_q + i
                check(
                    place < lse.numel(),
                    "CUDA error: an illegal memory access was encountered (lse)",
                )
                lse.view(-1)[place] = torch.logsumexp(logits, 0) if len(seen) else INF
    return [out, lse]


BODIES = {
    schemas.CONVERT: convert,
    schemas.CONVERT_MERGEHEAD: convert,
    schemas.VARLEN_FWD_SPARSE: varlen_fwd_sparse,
}
installed = partial(registered, BODIES)
