"""The batch of a decode by token, for kernels that take one query a row: made once a step, whatever the layers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attnops.call import INT32, KW_ONLY, Call, Result, Sizes, arg, need, record
from attnops.ops.op import Op, define
from attnops.ops.rules import key_for
from attnops.reference import data


def _words(call: Any) -> tuple[Any, ...]:
    schedule = data.rows_schedule_words(call.num_tokens, call.q_heads, call.float8)
    return (schedule + call.num_tokens * (1 + call.page_table.shape[1]),)


def _rules(call: Any, sizes: Sizes) -> None:
    need(call.q_heads > 0 or not call.float8, "float8", call.float8, "False without q_heads")


def _facts(call: Any, sizes: Sizes) -> dict[str, Any]:
    dtype = torch.float8_e4m3fn if call.float8 else call.page_table.dtype
    return {"dtype": dtype, "kv_dtype": dtype}


@record("decode_rows", Result("", _words, torch.int32), rules=_rules, facts=_facts, problem={"tokens": "num_tokens"})
class DecodeRows(Call):
    """The batch of a decode by token, and FlashMLA's schedule of it."""

    page_table: Tensor = arg("B, max_pages", INT32)
    seq_lens: Tensor = arg("B", INT32)
    cu_seqlens_q: Tensor = arg("B + 1", INT32)
    _: KW_ONLY
    num_tokens: int = arg(least=0, symbolic=True)
    causal: bool = arg(default=True, always=True)
    q_heads: int = arg(default=0, least=0, always=True)
    float8: bool = arg(default=False, always=True)


DECODE_ROWS = define(Op(DecodeRows, data.decode_rows, about="the batch by token, and FlashMLA's schedule of it"))


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
        cannot run either the schedule is zeros, which no kernel reads.
    """
    out: Tensor = DECODE_ROWS(DecodeRows(
        page_table, seq_lens, cu_seqlens_q, num_tokens=num_tokens, causal=causal, q_heads=q_heads, float8=float8,
        policy=key_for("decode_rows", kernel),
    ))  # fmt: skip
    return out
