"""Schedules: the tiles and splits that a kernel works out on the device before it starts, made once a step and not at every layer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attnops.call import INT32, KW_ONLY, Call, Result, Sizes, arg, need, record
from attnops.ops import rules
from attnops.ops.op import Op, define
from attnops.ops.rules import key_for
from attnops.reference import data


def _rules(call: Any, sizes: Sizes) -> None:
    need(call.q_heads % call.kv_heads == 0, "q_heads", call.q_heads, f"a multiple of the {call.kv_heads} key heads")


def _facts(call: Any, sizes: Sizes) -> dict[str, Any]:
    dtype = torch.float8_e4m3fn if call.float8 else torch.bfloat16
    return {"dtype": dtype, "kv_dtype": dtype, "kv_scales": call.float8}


def _words(call: Any) -> tuple[Any, ...]:
    return (data.schedule_words(call.seq_lens.shape[0]),)


@record("fa3_schedule", Result("", _words, torch.int32), rules=_rules, facts=_facts, problem={"context": "max_pages * page_size"})
class Fa3Schedule(Call):
    """The schedule of `fa3` for paged calls."""

    seq_lens: Tensor = arg("B", INT32)
    cu_seqlens_q: Tensor = arg("B + 1", INT32)
    _: KW_ONLY
    max_seqlen_q: int = arg(least=0, symbolic=True)
    max_pages: int = arg(least=0, symbolic=True)
    page_size: int = arg(least=1)
    q_heads: int = arg(least=1)
    kv_heads: int = arg(least=1)
    head_dim: int = arg(least=1)
    v_head_dim: int = arg(least=1)
    float8: bool = arg(default=False, always=True)
    causal: bool = arg(default=True, always=True)
    window_left: int = arg(default=-1, least=-1, always=True)
    window_right: int = arg(default=-1, least=-1, always=True)
    softcap: float = arg(default=0.0, least=0, always=True)
    attention_chunk: int = arg(default=0, least=0, always=True)
    policy: str = ""


FA3_SCHEDULE = define(Op(Fa3Schedule, data.fa3_schedule, about="schedule of `fa3` for paged calls"))


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
    left, right = rules.window(window)
    out: Tensor = FA3_SCHEDULE(Fa3Schedule(
        seq_lens, cu_seqlens_q, max_seqlen_q=max_seqlen_q, max_pages=max_pages, page_size=page_size, q_heads=q_heads, kv_heads=kv_heads,
        head_dim=head_dim, v_head_dim=head_dim if v_head_dim is None else v_head_dim, float8=float8, causal=causal, window_left=left,
        window_right=right, softcap=softcap, attention_chunk=attention_chunk, policy=key_for("fa3_schedule", kernel),
    ))  # fmt: skip
    return out
