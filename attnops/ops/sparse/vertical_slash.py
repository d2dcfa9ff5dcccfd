"""Vertical-slash attention: an index of the blocks and columns of keys that each block of queries
sees, and attention over it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attnops.core import eager_cache
from attnops.core.eager_cache import key_for
from attnops.core.errors import InvalidInput, fail
from attnops.core.op import Op, define
from attnops.core.record import FLOATS, INT32, KW_ONLY, Result, Sizes, arg, record
from attnops.ops import rules, typical
from attnops.ops.sparse import vertical_slash_reference
from attnops.ops.sparse.vertical_slash_reference import BLOCK

ROWS = f"(max_seqlen_q + {BLOCK - 1}) // {BLOCK}"  # of the index: blocks of 64 queries


def _index_rules(call: Any, sizes: Sizes) -> None:
    if (call.vertical_counts is None) != (call.slash_counts is None):
        fail(InvalidInput, "vertical_counts, slash_counts", "one of them", "both or neither")


LEAST = {"V": ">= 1", "S": ">= 1"}
DIMS = {"block_count": "", "block_offset": ", S", "column_count": "", "column_index": ", V"}
RESULTS = tuple(Result(name, f"B, H, {ROWS}{last}", torch.int32) for name, last in DIMS.items())


@record(
    "vertical_slash_indexes",
    *RESULTS,
    least=LEAST,
    rules=_index_rules,
    facts={"causal": True},
    problem={"q_heads": "H"},
)
class VerticalSlashIndexes(rules.Queries):
    """The blocks and columns of keys that each block of queries sees."""

    q_lens: Tensor = arg("B", INT32, holds="lengths_of_queries")
    k_lens: Tensor = arg("B", INT32, holds="lengths_of_keys")
    vertical: Tensor = arg("B, H, V", INT32)
    slash: Tensor = arg("B, H, S", INT32)
    vertical_counts: Tensor | None = arg("H", INT32, default=None)
    slash_counts: Tensor | None = arg("H", INT32, default=None)


ABOUT = "which blocks and columns of keys each block of queries sees"
INDEXES = define(
    Op(VerticalSlashIndexes, vertical_slash_reference.vertical_slash_indexes, about=ABOUT)
)


def vertical_slash_indexes(
    q_lens: Tensor,
    k_lens: Tensor,
    vertical: Tensor,
    slash: Tensor,
    *,
    max_seqlen_q: int,
    vertical_counts: Tensor | None = None,
    slash_counts: Tensor | None = None,
    kernel: str | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The index that `vertical_slash_attention` reads, from the columns and diagonals that each
    head is to see.

    Query i of a request is at key position k_len - q_len + i. Row r is of the queries [64 r, 64 r +
    64); let e be the position that follows its last. A slash s < e selects the 64 keys before max(e
    - s, 64). Taken in order, a slash whose keys begin past the end of the last block opens a block
    of its own, one that only reaches past it adds the 64 keys that follow, and any other adds
    nothing. Columns are the verticals in no block, up to where the last run of joined blocks
    begins. MInference, https://arxiv.org/abs/2407.02490, appendix C.4.2.

    Args:
        q_lens, k_lens: int32 `[B]`, in tokens; k_lens >= q_lens.
        vertical: int32 `[B, H, V]`, key positions, strictly ascending.
        slash: int32 `[B, H, S]`, distances in keys, descending; the last is 0, so that every row
            sees a key.
        vertical_counts, slash_counts: int32 `[H]`, how many entries of each head are meant, at
            least 1; None: all.
        max_seqlen_q: upper bound in tokens on q_lens, a host int.
        kernel: force a kernel by name for this call.

    Returns:
        (block_count `[B, H, R]`, block_offset `[B, H, R, S]`, column_count `[B, H, R]`,
        column_index `[B, H, R, V]`), int32, with R = ceil(max_seqlen_q / 64). block_offset: the
        first key of each block of 64; both lists ascend, and are 0 past the counts. Rows without
        queries have counts of 0. Blocks that begin at or past k_len are left out.

    Raises:
        InvalidInput: a shape, dtype, device or number breaks this contract. UnknownKernel,
            NoKernel: `kernel` cannot run.
    """
    out: tuple[Tensor, Tensor, Tensor, Tensor] = INDEXES(
        VerticalSlashIndexes(
            q_lens,
            k_lens,
            vertical,
            slash,
            vertical_counts,
            slash_counts,
            max_seqlen_q=max_seqlen_q,
            policy=key_for("vertical_slash_indexes", kernel),
        )
    )
    return out


@record(
    "vertical_slash_attention",
    least={"Hkv": ">= 1 head"},
    rules=rules.attention,
    facts={"causal": True},
    problem={"kv_dtype": "key"},
    sums=True,
)
class VerticalSlashAttention(rules.Lengths):
    """Packed causal attention over an index of blocks and columns."""

    query: Tensor = arg("T, Hq, D", FLOATS, unit_stride=True, holds="queries")
    key: Tensor = arg("N, Hkv, D", "query", unit_stride=True, holds="keys")
    value: Tensor = arg("N, Hkv, Dv", "query", unit_stride=True, holds="keys")
    cu_seqlens_q: Tensor = arg("B + 1", INT32, holds="starts_of_queries")
    cu_seqlens_k: Tensor = arg("B + 1", INT32, holds="starts_of_keys")
    block_count: Tensor = arg(f"B, Hq, {ROWS}", INT32)
    block_offset: Tensor = arg(f"B, Hq, {ROWS}, S", INT32)
    column_count: Tensor = arg(f"B, Hq, {ROWS}", INT32)
    column_index: Tensor = arg(f"B, Hq, {ROWS}, V", INT32)
    _: KW_ONLY
    scale: float = arg(holds="scale_of_logits")
    padded: bool = rules.PADDED
    output: Tensor = arg("T, Hq, Dv", "query", written=True)
    lse: Tensor | None = rules.WRITTEN_LSE


ABOUT = "packed causal attention over an index of blocks and columns"
FLOPS = f"2 * T * Hq * ({BLOCK} * S + V) * (D + Dv)"

ATTENTION = define(
    Op(
        VerticalSlashAttention,
        vertical_slash_reference.vertical_slash_attention,
        flops=FLOPS,
        about=ABOUT,
        per_layer=True,
        typical=(typical.PREFILL,),
    )
)


def vertical_slash_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    indexes: tuple[Tensor, Tensor, Tensor, Tensor],
    *,
    max_seqlen_q: int,
    max_seqlen_k: int,
    scale: float | None = None,
    padded: bool = True,
    output: Tensor | None = None,
    lse: Tensor | None = None,
    kernel: str | None = None,
) -> Tensor:
    """Causal attention of packed requests in which each block of 64 queries sees some blocks and
    columns of keys only. No gradient.

    A query sees the keys of its row's blocks, `[offset, offset + 64)`, and its row's columns, as
    far as they are of its request and not after it. MInference, https://arxiv.org/abs/2407.02490,
    section 3.2.

    Args:
        query, key, value, cu_seqlens_q, cu_seqlens_k: as in `attnops.varlen_attention`; no request
            has more queries than keys.
        max_seqlen_q, max_seqlen_k, scale, padded, kernel: as in `attnops.varlen_attention`.
        indexes: the result of `vertical_slash_indexes` for these lengths: block_count,
            block_offset, column_count, column_index. Within a row, offsets ascend by at least 64,
            columns are distinct, begin before k_len and are in none of its blocks.
        output: `[T, Hq, Dv]` to write into; allocated when None. lse: float32 `[T, Hq]`, natural
            log, to write into, or None.

    Returns:
        `output`. A query that sees no key, and tokens past `cu_seqlens_q[B]`, give 0 and lse -inf.

    Raises:
        InvalidInput: a shape, dtype, device or number breaks this contract. NoGradient: an input
            requires grad. UnknownKernel, NoKernel.
    """
    if output is None:
        eager_cache.tensors(query=query, value=value)
        output = torch.empty(
            (*query.shape[:-1], *value.shape[-1:]), dtype=query.dtype, device=query.device
        )
    if not isinstance(indexes, (tuple, list)) or len(indexes) != 4:
        fail(
            InvalidInput,
            "indexes",
            type(indexes).__name__,
            "the four tensors that vertical_slash_indexes returns",
        )
    ATTENTION(
        VerticalSlashAttention(
            query,
            key,
            value,
            cu_seqlens_q,
            cu_seqlens_k,
            *indexes,
            max_seqlen_q=max_seqlen_q,
            max_seqlen_k=max_seqlen_k,
            scale=eager_cache.default_scale(query, scale),
            padded=padded,
            policy=key_for("vertical_slash_attention", kernel),
            output=output,
            lse=lse,
        )
    )
    return output
