"""The batch of a decode by token, for kernels that take one query a row: made once a step, whatever the layers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attnops.ops import _check as check
from attnops.ops._op import Op, define, target_of
from attnops.problem import Extent, Problem
from attnops.reference import data
from attnops.select import key_for


def _check_rows(
    page_table: Tensor,
    seq_lens: Tensor,
    cu_seqlens_q: Tensor,
    *,
    num_tokens: int,
    causal: bool = True,
    q_heads: int = 0,
    float8: bool = False,
) -> None:
    check.tensor("page_table", page_table, 2, (torch.int32,), "[B, max_pages]")
    check.tensor("seq_lens", seq_lens, 1, (torch.int32,), "[B]")
    check.tensor("cu_seqlens_q", cu_seqlens_q, 1, (torch.int32,), "[B + 1]")
    check.same_device(page_table, seq_lens=seq_lens, cu_seqlens_q=cu_seqlens_q)
    check.equal("seq_lens.shape[0]", seq_lens.shape[0], page_table.shape[0], "one length a row of the page table")
    check.equal("cu_seqlens_q.shape[0]", cu_seqlens_q.shape[0], page_table.shape[0] + 1, "one more than the requests")
    check.need(num_tokens >= 0, "num_tokens", num_tokens, ">= 0")
    check.need(q_heads >= 0, "q_heads", q_heads, ">= 0 (0: no schedule)")
    check.need(q_heads > 0 or not float8, "float8", float8, "False without q_heads")


def _fake_rows(page_table: Tensor, seq_lens: Tensor, *_: Any, num_tokens: int, q_heads: int = 0, float8: bool = False, **__: Any) -> Tensor:
    return seq_lens.new_empty(data.rows_schedule_words(num_tokens, q_heads, float8) + num_tokens * (1 + page_table.shape[1]))


def _problem_rows(
    page_table: Any, seq_lens: Any, cu_seqlens_q: Any, *, num_tokens: Any, causal: bool = True, q_heads: int = 0, float8: bool = False
) -> Problem:
    dtype = torch.float8_e4m3fn if float8 else page_table.dtype
    return Problem(
        op="decode_rows",
        target=target_of(page_table),
        dtype=dtype,
        kv_dtype=dtype,
        q_heads=q_heads,
        causal=causal,
        tokens=Extent.of(num_tokens),
        batch=Extent.of(page_table.shape[0]),
    )


define(
    Op(
        name="decode_rows",
        schema="(Tensor page_table, Tensor seq_lens, Tensor cu_seqlens_q, *, SymInt num_tokens, bool causal=True, "
        'int q_heads=0, bool float8=False, str policy="") -> Tensor',
        check=_check_rows,
        fake=_fake_rows,
        problem=_problem_rows,
        reference=data.decode_rows,
        about="the batch by token, and FlashMLA's schedule of it",
    )
)


def decode_rows(
    page_table: Tensor,
    seq_lens: Tensor,
    cu_seqlens_q: Tensor,
    *,
    num_tokens: int,
    causal: bool = True,
    q_heads: int = 0,
    float8: bool = False,
    kernel: str | None = None,
) -> Tensor:
    """int32 `[S + T * (1 + max_pages)]`: S words of schedule, how many keys each token sees, each token's row of the page table.

    The `plan` of a decode. Kernels that take one query token a row (FlashMLA, CUTLASS MLA) need the batch in this form and make it in
    every layer; given as `plan` to `mla_attention` it is made once a step. It is read by the tensors' shapes alone, so a captured graph
    may replay it. What `flashmla` works out from the lengths before it starts (how the keys are shared out among the
    multiprocessors, 26 us for 64 tokens on an H200) is made here too if `q_heads` says for whom; other kernels pass over it.

    Args:
        page_table, seq_lens, cu_seqlens_q: int32 `[B, max_pages]`, `[B]`, `[B + 1]`, as in `paged_attention`.
        num_tokens: T, the query's tokens; those past `cu_seqlens_q[B]` see 0 keys.
        causal: as in the attention to come: token i of n of a request with L keys sees L - n + i + 1 keys, otherwise L.
        q_heads: the heads of the query to come, for a plan that holds the schedule too; 0: S = 0. Otherwise
            S = 8 * max(144 // ceil(q_heads / 64), 1) + T + 1, for 144 is the most multiprocessors a GPU of SM90 can have, and the length
            of a plan must follow from shapes. (FlashMLA has max(SMs // ceil(q_heads / 64), 1) parts of 8 words:
            https://github.com/deepseek-ai/FlashMLA, csrc/api/dense_decode.h.)
        float8: is the query to come float8? Its schedule is another's, and 8 words longer.
        kernel: force a kernel by name for this call.

    Raises:
        InvalidInput: a shape, dtype or number breaks this contract. UnknownKernel, NoKernel: `kernel` cannot run. Where `flashmla`
        cannot run either the schedule is zeros, which nobody reads.
    """
    out: Tensor = torch.ops.attnops.decode_rows.default(
        page_table, seq_lens, cu_seqlens_q, num_tokens=num_tokens, causal=causal, q_heads=q_heads, float8=float8,
        policy=key_for("decode_rows", kernel),
    )  # fmt: skip
    return out
