"""Schedules: what a kernel works out on the device from a batch's lengths before it starts, made once a step and not at every layer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attnops.ops import _check as check
from attnops.ops._op import Op, define, target_of
from attnops.problem import Extent, Problem
from attnops.reference import data
from attnops.select import key_for


def _check_fa3(
    seq_lens: Tensor,
    cu_seqlens_q: Tensor,
    *,
    max_seqlen_q: int,
    max_pages: int,
    page_size: int,
    q_heads: int,
    kv_heads: int,
    head_dim: int,
    v_head_dim: int,
    float8: bool = False,
    causal: bool = True,
    window_left: int = -1,
    window_right: int = -1,
    softcap: float = 0.0,
    attention_chunk: int = 0,
) -> None:
    check.tensor("seq_lens", seq_lens, 1, (torch.int32,), "[B]")
    check.tensor("cu_seqlens_q", cu_seqlens_q, 1, (torch.int32,), "[B + 1]")
    check.same_device(seq_lens, cu_seqlens_q=cu_seqlens_q)
    check.equal("cu_seqlens_q.shape[0]", cu_seqlens_q.shape[0], seq_lens.shape[0] + 1, "one more than the requests")
    for field, size, least in (
        ("max_seqlen_q", max_seqlen_q, 0), ("max_pages", max_pages, 0), ("page_size", page_size, 1), ("kv_heads", kv_heads, 1),
        ("head_dim", head_dim, 1), ("v_head_dim", v_head_dim, 1),
    ):  # fmt: skip
        check.need(size >= least, field, size, f">= {least}")
    check.need(q_heads >= 1 and q_heads % kv_heads == 0, "q_heads", q_heads, f"a multiple of the {kv_heads} key heads")
    check.numbers(1.0, window_left, window_right, softcap, attention_chunk)


def _fake_fa3(seq_lens: Tensor, *_: Any, **__: Any) -> Tensor:
    return seq_lens.new_empty(data.schedule_words(seq_lens.shape[0]))


def _problem_fa3(
    seq_lens: Any,
    cu_seqlens_q: Any,
    *,
    max_seqlen_q: Any,
    max_pages: Any,
    page_size: int,
    q_heads: int,
    kv_heads: int,
    head_dim: int,
    v_head_dim: int,
    float8: bool = False,
    causal: bool = True,
    window_left: int = -1,
    window_right: int = -1,
    softcap: float = 0.0,
    attention_chunk: int = 0,
) -> Problem:
    dtype = torch.float8_e4m3fn if float8 else torch.bfloat16
    return Problem(
        op="fa3_schedule",
        target=target_of(seq_lens),
        dtype=dtype,
        kv_dtype=dtype,
        q_heads=q_heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        v_head_dim=v_head_dim,
        page_size=page_size,
        causal=causal,
        window=(window_left, window_right),
        softcap=softcap > 0,
        attention_chunk=attention_chunk,
        kv_scales=float8,
        batch=Extent.of(seq_lens.shape[0]),
        queries=Extent.of(max_seqlen_q),
        context=Extent.of(max_pages * page_size),
    )


FA3_SCHEDULE = define(
    Op(
        name="fa3_schedule",
        schema="(Tensor seq_lens, Tensor cu_seqlens_q, *, SymInt max_seqlen_q, SymInt max_pages, int page_size, int q_heads, int kv_heads, "
        "int head_dim, int v_head_dim, bool float8=False, bool causal=True, int window_left=-1, int window_right=-1, float softcap=0.0, "
        'int attention_chunk=0, str policy="") -> Tensor',
        check=_check_fa3,
        fake=_fake_fa3,
        problem=_problem_fa3,
        reference=data.fa3_schedule,
        about="schedule of `fa3` for paged calls",
    )
)


def fa3_schedule(
    seq_lens: Tensor,
    cu_seqlens_q: Tensor,
    *,
    max_seqlen_q: int,
    max_pages: int,
    page_size: int,
    q_heads: int,
    kv_heads: int,
    head_dim: int,
    v_head_dim: int | None = None,
    float8: bool = False,
    causal: bool = True,
    window: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    attention_chunk: int = 0,
    kernel: str | None = None,
) -> Tensor:
    """int32 `[16 * ceil(B / 4) + 1]`: the `plan` of `paged_attention` calls on this batch. Nothing in it is meant to be read.

    With it `fa3` starts one kernel a layer and not two: how many tiles and splits each request has is worked out here. The calls must
    agree with all that is said here, and with the policy; one that does not gives wrong results or an error.

    Args:
        seq_lens: int32 `[B]`. cu_seqlens_q: int32 `[B + 1]`. max_seqlen_q, causal, window, softcap, attention_chunk: as in the calls.
        max_pages: width of the page table. page_size: tokens a page. q_heads, kv_heads, head_dim, v_head_dim: of query and pages;
            v_head_dim defaults to head_dim. float8: is the query float8? kernel: force a kernel by name for this call.

    Raises:
        InvalidInput: a shape, dtype, device or number breaks this contract. UnknownKernel, NoKernel: `kernel` cannot run, or this is a
        CUDA device without it. On the CPU the schedule is all zeros, and no kernel there reads one.
    """
    left, right = check.window(window)
    out: Tensor = torch.ops.attnops.fa3_schedule.default(
        seq_lens, cu_seqlens_q, max_seqlen_q=max_seqlen_q, max_pages=max_pages, page_size=page_size, q_heads=q_heads, kv_heads=kv_heads,
        head_dim=head_dim, v_head_dim=head_dim if v_head_dim is None else v_head_dim, float8=float8, causal=causal, window_left=left,
        window_right=right, softcap=softcap, attention_chunk=attention_chunk, policy=key_for("fa3_schedule", kernel),
    )  # fmt: skip
    return out
