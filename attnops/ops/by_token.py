"""The batch of a decode by token, for kernels that take one query a row: made once a step, whatever the layers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attnops.ops import _check as check
from attnops.ops._op import Op, define, target_of
from attnops.problem import Extent, Problem
from attnops.reference import data
from attnops.select import active_policy


def _check_rows(page_table: Tensor, seq_lens: Tensor, cu_seqlens_q: Tensor, *, num_tokens: int, causal: bool = True) -> None:
    check.tensor("page_table", page_table, 2, (torch.int32,), "[B, max_pages]")
    check.tensor("seq_lens", seq_lens, 1, (torch.int32,), "[B]")
    check.tensor("cu_seqlens_q", cu_seqlens_q, 1, (torch.int32,), "[B + 1]")
    check.same_device(page_table, seq_lens=seq_lens, cu_seqlens_q=cu_seqlens_q)
    check.equal("seq_lens.shape[0]", seq_lens.shape[0], page_table.shape[0], "one length a row of the page table")
    check.equal("cu_seqlens_q.shape[0]", cu_seqlens_q.shape[0], page_table.shape[0] + 1, "one more than the requests")
    check.need(num_tokens >= 0, "num_tokens", num_tokens, ">= 0")


def _problem_rows(page_table: Any, seq_lens: Any, cu_seqlens_q: Any, *, num_tokens: Any, causal: bool = True) -> Problem:
    tokens, batch = Extent.of(num_tokens), Extent.of(page_table.shape[0])
    dtype = page_table.dtype
    return Problem(op="decode_rows", target=target_of(page_table), dtype=dtype, kv_dtype=dtype, causal=causal, tokens=tokens, batch=batch)


define(
    Op(
        name="decode_rows",
        schema="(Tensor page_table, Tensor seq_lens, Tensor cu_seqlens_q, *, SymInt num_tokens, bool causal=True, "
        'str policy="") -> Tensor',
        check=_check_rows,
        fake=lambda page_table, seq_lens, cu_seqlens_q, *, num_tokens, causal=True: seq_lens.new_empty(
            num_tokens * (1 + page_table.shape[1])
        ),
        problem=_problem_rows,
        reference=data.decode_rows,
        about="the batch by token: keys seen and page table row of each",
    )
)


def decode_rows(page_table: Tensor, seq_lens: Tensor, cu_seqlens_q: Tensor, *, num_tokens: int, causal: bool = True) -> Tensor:
    """int32 `[T * (1 + max_pages)]`: how many keys each token sees, then each token's row of the page table; the `plan` of a decode.

    Kernels that take one query token a row (FlashMLA, CUTLASS MLA) need the batch in this form and make it in every layer; given as
    `plan` to `mla_attention` it is made once a step. It is read by the tensors' shapes alone, so a captured graph may replay it.

    Args:
        page_table, seq_lens, cu_seqlens_q: int32 `[B, max_pages]`, `[B]`, `[B + 1]`, as in `paged_attention`.
        num_tokens: T, the query's tokens; those past `cu_seqlens_q[B]` see 0 keys.
        causal: as in the attention to come: token i of n of a request with L keys sees L - n + i + 1 keys, otherwise L.

    Raises:
        InvalidInput: a shape or dtype breaks this contract.
    """
    out: Tensor = torch.ops.attnops.decode_rows.default(
        page_table, seq_lens, cu_seqlens_q, num_tokens=num_tokens, causal=causal, policy=active_policy()
    )
    return out
