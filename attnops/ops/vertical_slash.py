"""Vertical-slash attention: an index of the blocks and columns of keys that each block of queries sees, and attention over it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attnops.errors import InvalidInput, fail
from attnops.ops import _check as check
from attnops.ops._op import Op, define, target_of
from attnops.ops.dense import _packed_last, default_scale
from attnops.problem import Extent, Problem
from attnops.reference import vertical_slash
from attnops.reference.vertical_slash import BLOCK
from attnops.select import key_for

INT32 = (torch.int32,)


def _check_indexes(
    q_lens: Tensor,
    k_lens: Tensor,
    vertical: Tensor,
    slash: Tensor,
    vertical_counts: Tensor | None = None,
    slash_counts: Tensor | None = None,
    *,
    max_seqlen_q: int,
) -> None:
    check.tensor("q_lens", q_lens, 1, INT32, "[B]")
    check.tensor("k_lens", k_lens, 1, INT32, "[B]")
    check.tensor("vertical", vertical, 3, INT32, "[B, H, V]")
    check.tensor("slash", slash, 3, INT32, "[B, H, S]")
    check.same_device(q_lens, k_lens=k_lens, vertical=vertical, slash=slash, vertical_counts=vertical_counts, slash_counts=slash_counts)
    check.equal("k_lens.shape[0]", k_lens.shape[0], q_lens.shape[0], "as many requests as q_lens")
    for field, given in (("vertical", vertical), ("slash", slash)):
        check.equal(f"{field}.shape[0]", given.shape[0], q_lens.shape[0], "as many requests as q_lens")
        check.equal(f"{field}.shape[1]", given.shape[1], vertical.shape[1], "the heads of vertical")
        check.need(given.shape[2] >= 1, f"{field}.shape[2]", given.shape[2], ">= 1")
    if (vertical_counts is None) != (slash_counts is None):
        fail(InvalidInput, "vertical_counts, slash_counts", "one of them", "both or neither")
    for field, counts in (("vertical_counts", vertical_counts), ("slash_counts", slash_counts)):
        if counts is not None:
            check.tensor(field, counts, 1, INT32, "[H]")
            check.equal(f"{field}.shape[0]", counts.shape[0], vertical.shape[1], "one a head")
    check.need(max_seqlen_q >= 0, "max_seqlen_q", max_seqlen_q, ">= 0")


def rows_of(max_seqlen_q: Any) -> Any:
    """Rows of the index: blocks of 64 queries."""
    return (max_seqlen_q + BLOCK - 1) // BLOCK


def _fake_indexes(
    q_lens: Tensor, k_lens: Tensor, vertical: Tensor, slash: Tensor, *_: Any, max_seqlen_q: int, **__: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    shape = (*vertical.shape[:2], rows_of(max_seqlen_q))
    return (
        q_lens.new_empty(shape),
        q_lens.new_empty((*shape, slash.shape[2])),
        q_lens.new_empty(shape),
        q_lens.new_empty((*shape, vertical.shape[2])),
    )


def _problem_indexes(q_lens: Any, k_lens: Any, vertical: Any, *_: Any, max_seqlen_q: Any, **__: Any) -> Problem:
    return Problem(
        op="vertical_slash_indexes",
        target=target_of(q_lens),
        dtype=q_lens.dtype,
        kv_dtype=q_lens.dtype,
        q_heads=int(vertical.shape[1]),
        causal=True,
        batch=Extent.of(q_lens.shape[0]),
        queries=Extent.of(max_seqlen_q),
    )


INDEXES = define(
    Op(
        name="vertical_slash_indexes",
        schema="(Tensor q_lens, Tensor k_lens, Tensor vertical, Tensor slash, Tensor? vertical_counts=None, "
        'Tensor? slash_counts=None, *, SymInt max_seqlen_q, str policy="") '
        "-> (Tensor block_count, Tensor block_offset, Tensor column_count, Tensor column_index)",
        check=_check_indexes,
        fake=_fake_indexes,
        problem=_problem_indexes,
        reference=vertical_slash.vertical_slash_indexes,
        about="which blocks and columns of keys each block of queries sees",
    )
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
    """The index that `vertical_slash_attention` reads, from the columns and diagonals that each head is to see.

    Query i of a request stands at key position k_len - q_len + i. Row r is of the queries [64 r, 64 r + 64); let e be the position
    that follows its last. A slash s < e stands for the 64 keys before max(e - s, 64): all that the row sees of the diagonal
    s keys back. Taken in order, a slash whose keys begin past the end of the last block opens a block of its own, one that only
    reaches past it adds the 64 keys that follow, and any other adds nothing. Columns are the verticals that lie in no block, up
    to where the last run of joined blocks begins. MInference, https://arxiv.org/abs/2407.02490, appendix C.4.2.

    Args:
        q_lens, k_lens: int32 `[B]`, in tokens; k_lens >= q_lens.
        vertical: int32 `[B, H, V]`, key positions, strictly ascending. slash: int32 `[B, H, S]`, distances in keys, descending;
            the last is 0, the query's own key: without it no row is sure to see a key.
        vertical_counts, slash_counts: int32 `[H]`, how many entries of each head are meant, at least 1; None: all.
        max_seqlen_q: upper bound in tokens on q_lens, a host int.
        kernel: force a kernel by name for this call.

    Returns:
        (block_count `[B, H, R]`, block_offset `[B, H, R, S]`, column_count `[B, H, R]`, column_index `[B, H, R, V]`), int32, with
        R = ceil(max_seqlen_q / 64). block_offset: the first key of each block of 64, ascending; column_index: ascending. Entries
        past the counts are 0, and so are the counts of rows without queries. Blocks that begin at or past k_len are left out.

    Raises:
        InvalidInput: a shape, dtype, device or number breaks this contract. UnknownKernel, NoKernel: `kernel` cannot run.
    """
    out: tuple[Tensor, Tensor, Tensor, Tensor] = torch.ops.attnops.vertical_slash_indexes.default(
        q_lens, k_lens, vertical, slash, vertical_counts, slash_counts, max_seqlen_q=max_seqlen_q,
        policy=key_for("vertical_slash_indexes", kernel),
    )  # fmt: skip
    return out


def _check_attention(
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
    output: Tensor,
    lse: Tensor | None = None,
) -> None:
    check.tensor("query", query, 3, check.FLOATS, "[T, Hq, D]")
    check.tensor("key", key, 3, (query.dtype,), "[N, Hkv, D]")
    check.tensor("value", value, 3, (query.dtype,), "[N, Hkv, Dv]")
    check.tensor("cu_seqlens_q", cu_seqlens_q, 1, INT32, "[B + 1]")
    check.tensor("cu_seqlens_k", cu_seqlens_k, 1, INT32, "[B + 1]")
    check.tensor("block_count", block_count, 3, INT32, "[B, Hq, R]")
    check.tensor("block_offset", block_offset, 4, INT32, "[B, Hq, R, S]")
    check.tensor("column_count", column_count, 3, INT32, "[B, Hq, R]")
    check.tensor("column_index", column_index, 4, INT32, "[B, Hq, R, V]")
    check.tensor("output", output, 3, (query.dtype,), "[T, Hq, Dv]")
    check.same_device(
        query, key=key, value=value, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, block_count=block_count,
        block_offset=block_offset, column_count=column_count, column_index=column_index, output=output, lse=lse,
    )  # fmt: skip
    check.equal("value.shape[0]", value.shape[0], key.shape[0], "as many values as keys")
    check.heads(query, key, value)
    check.equal("cu_seqlens_k.shape[0]", cu_seqlens_k.shape[0], cu_seqlens_q.shape[0], "as many requests as the queries")
    check.equal("cu_seqlens_q.shape[0]", cu_seqlens_q.shape[0], block_count.shape[0] + 1, "one more than the requests of the index")
    check.equal("block_count.shape[1]", block_count.shape[1], query.shape[1], "the query's heads")
    check.equal("block_count.shape[2]", block_count.shape[2], rows_of(max_seqlen_q), "ceil(max_seqlen_q / 64)")
    for field, given in (("block_offset", block_offset), ("column_count", column_count), ("column_index", column_index)):
        for dim in range(3):
            check.equal(f"{field}.shape[{dim}]", given.shape[dim], block_count.shape[dim], "as block_count")
    check.numbers(scale, -1, -1, 0.0)
    for field, longest in (("max_seqlen_q", max_seqlen_q), ("max_seqlen_k", max_seqlen_k)):
        check.need(longest >= 0, field, longest, ">= 0")
    for dim, size in enumerate((query.shape[0], query.shape[1], value.shape[2])):
        check.equal(f"output.shape[{dim}]", output.shape[dim], size, "[T, Hq, Dv]")
    if lse is not None:
        check.tensor("lse", lse, 2, (torch.float32,), "[T, Hq]")
        for dim in range(2):
            check.equal(f"lse.shape[{dim}]", lse.shape[dim], query.shape[dim], "[T, Hq]")


def _problem_attention(
    query: Any,
    key: Any,
    value: Any,
    cu_seqlens_q: Any,
    *_: Any,
    max_seqlen_q: Any,
    max_seqlen_k: Any,
    scale: float,
    padded: bool = True,
    output: Any = None,
    lse: Any = None,
) -> Problem:
    return Problem(
        op="vertical_slash_attention",
        target=target_of(query),
        dtype=query.dtype,
        kv_dtype=key.dtype,
        q_heads=int(query.shape[1]),
        kv_heads=int(key.shape[1]),
        head_dim=int(query.shape[2]),
        v_head_dim=int(value.shape[2]),
        causal=True,
        lse=lse is not None,
        last_dim_contiguous=_packed_last(query) and _packed_last(key) and _packed_last(value),
        tokens=Extent.of(query.shape[0]),
        batch=Extent.of(cu_seqlens_q.shape[0] - 1),
        queries=Extent.of(max_seqlen_q),
        context=Extent.of(max_seqlen_k),
    )


ATTENTION = define(
    Op(
        name="vertical_slash_attention",
        schema="(Tensor query, Tensor key, Tensor value, Tensor cu_seqlens_q, Tensor cu_seqlens_k, Tensor block_count, "
        "Tensor block_offset, Tensor column_count, Tensor column_index, *, SymInt max_seqlen_q, SymInt max_seqlen_k, float scale, "
        'bool padded=True, str policy="", Tensor(a!) output, Tensor(b!)? lse=None) -> ()',
        check=_check_attention,
        fake=lambda *_, **__: None,
        problem=_problem_attention,
        reference=vertical_slash.vertical_slash_attention,
        about="packed causal attention over an index of blocks and columns",
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
    """Causal attention of packed requests in which each block of 64 queries sees some blocks and columns of keys only. No gradient.

    A query sees the keys of its row's blocks, `[offset, offset + 64)`, and its row's columns, as far as they are of its request and
    not after it. MInference, https://arxiv.org/abs/2407.02490, section 3.2.

    Args:
        query, key, value, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, scale: as in `attnops.varlen_attention`;
            no request has more queries than keys.
        indexes: what `vertical_slash_indexes` returns for these lengths: block_count, block_offset, column_count, column_index.
            Within a row, offsets ascend by at least 64, columns are distinct, begin before k_len and lie in none of its blocks.
        padded: False promises that every token belongs to a request, `cu_seqlens_q[B] == T`, so that nothing need be spent on others.
            What is written is undefined where the promise is not kept.
        output: `[T, Hq, Dv]` to write into; allocated when None. lse: float32 `[T, Hq]`, natural log, to write into, or None.
        kernel: force a kernel by name for this call.

    Returns:
        `output`. A query that sees no key, and tokens past `cu_seqlens_q[B]`, give 0 and lse -inf.

    Raises:
        InvalidInput: a shape, dtype, device or number breaks this contract. NoGradient: an input requires grad in grad mode.
        UnknownKernel, NoKernel: `kernel` cannot run.
    """
    if output is None:
        output = torch.empty((*query.shape[:-1], value.shape[-1]), dtype=query.dtype, device=query.device)
    if not isinstance(indexes, (tuple, list)) or len(indexes) != 4:
        fail(InvalidInput, "indexes", type(indexes).__name__, "the four tensors that vertical_slash_indexes returns")
    torch.ops.attnops.vertical_slash_attention.default(
        query, key, value, cu_seqlens_q, cu_seqlens_k, *indexes, max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k,
        scale=default_scale(query, scale), padded=padded, policy=key_for("vertical_slash_attention", kernel), output=output, lse=lse,
    )  # fmt: skip
    return output
