"""`fa3` of `fa3_schedule`: FlashAttention-3's own work on a batch's lengths (sgl-kernel's `get_scheduler_metadata`), done beforehand."""

from __future__ import annotations

import torch
from torch import Tensor

from attnops.kernel import Invariant, Kernel, arch, at_most, deterministic, device, multiple_of, register
from attnops.kernels.sgl import package as _sgl
from attnops.kernels.sgl.fa3_op import FLOAT8, LIBRARY, PACKAGE, dtype_rules, left_padding, longest_query, missing, value_dim
from attnops.reference import data


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
    v_head_dim: int,
    float8: bool = False,
    causal: bool = True,
    window_left: int = -1,
    window_right: int = -1,
    softcap: float = 0.0,
    attention_chunk: int = 0,
    policy: str = "",
) -> Tensor:
    """See `attnops.ops.fa3_schedule`. The words past what the kernel wants of these flags are 0."""
    batch = seq_lens.shape[0]
    plan = seq_lens.new_zeros(data.schedule_words(batch))
    if batch and max_seqlen_q and max_pages:
        _sgl.load("get_scheduler_metadata", LIBRARY)
        max_seqlen_q = longest_query(policy, max_seqlen_q, window_right)
        starts = left_padding(page_size, max_seqlen_q * (q_heads // kv_heads), policy, seq_lens)
        found = torch.ops.sgl_kernel.get_scheduler_metadata(
            batch, max_seqlen_q, max_pages * page_size, q_heads, kv_heads, head_dim, v_head_dim, FLOAT8 if float8 else torch.bfloat16,
            seq_lens.contiguous(), cu_seqlens_q.contiguous(), None, None, None, starts, page_size, 0, causal, window_left, window_right,
            attention_chunk, softcap > 0, 1 if deterministic(policy) else 0, None, 0,
        )  # fmt: skip
        plan[: found.shape[0]].copy_(found)
    return plan


register(
    Kernel(
        "fa3",
        "fa3_schedule",
        fa3_schedule,
        needs=(arch(90), dtype_rules, multiple_of("head_dim", 8), at_most("head_dim", 256), multiple_of("v_head_dim", 8), value_dim),
        packages=(PACKAGE,),
        probe=missing,
        invariant=Invariant(),
        about="FlashAttention-3's scheduler metadata (sgl-kernel)",
    )
)
# Zeros would have fa3 do nothing at all, so where fa3 may run there is no other schedule than its own.
ABOUT = "zeros: nobody on a CPU reads it"
register(Kernel("reference", "fa3_schedule", data.fa3_schedule, needs=(device("cpu"),), invariant=Invariant(), about=ABOUT))
