"""`fa3` of `fa3_schedule`: the work that FlashAttention-3 does on a batch's lengths before it starts, done once a step.

The raw op is sgl-kernel's `get_scheduler_metadata` (hopper/flash_api.cpp), by position.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from attnops.errors import InvalidInput
from attnops.kernel import Invariant, Kernel, arch, deterministic, device, register
from attnops.kernels.sgl import wheel
from attnops.kernels.sgl.fa3_needs import FLOAT8, HALF, UNITS
from attnops.kernels.sgl.fa3_op import LIBRARY, PACKAGE, left_padding, longest_query, missing
from attnops.reference import data

if TYPE_CHECKING:
    from attnops.ops.paged import PagedAttention
    from attnops.ops.schedule import Fa3Schedule


def fa3_schedule(call: Fa3Schedule) -> Tensor:
    """The words past those that the kernel wants of these flags are 0."""
    lens, batch, steady = call.seq_lens, call.seq_lens.shape[0], deterministic(call.policy)
    plan = lens.new_zeros(data.schedule_words(batch))
    if batch and call.max_seqlen_q and call.max_pages:
        wheel.load("get_scheduler_metadata", LIBRARY)
        queries = longest_query(steady, call.max_seqlen_q, call.window_right)
        starts = left_padding(call.page_size, queries * (call.q_heads // call.kv_heads), steady, lens)
        found = torch.ops.sgl_kernel.get_scheduler_metadata(
            batch, queries, call.max_pages * call.page_size, call.q_heads, call.kv_heads, call.head_dim, call.v_head_dim,
            FLOAT8 if call.float8 else torch.bfloat16, lens.contiguous(), call.cu_seqlens_q.contiguous(), None, None, None, starts,
            call.page_size, 0, call.causal, call.window_left, call.window_right, call.attention_chunk, call.softcap > 0,
            int(steady), None, 0,
        )  # fmt: skip
        plan[: found.shape[0]].copy_(found)
    return plan


def schedule_size(batch: int, queries: int, keys: int, head_dim: int, rules: tuple[bool, int, int, int]) -> int:
    """int32 words that a paged call of these sizes on SM90 takes for its schedule. rules: causal, left, right, chunk.

    Two words a request, one more where the requests are sorted (no window), one more where heads are swizzled (causal or window);
    requests are rounded up to 4, and the last word of all is the counter of tiles.
    """
    causal, left, right, chunk = rules
    left, right = (-1 if left >= keys - 1 else left), (-1 if right >= queries - 1 else right)
    if queries == 1 and left == right == -1 and not chunk and not 64 < head_dim <= 128:
        causal = False
    right = 0 if causal else right
    plain = left < 0 and right == 0 and not chunk
    local = (left >= 0 or right >= 0 or chunk > 0) and not plain
    return -(-batch // 4) * 4 * (2 + (not local) + (plain or local)) + 1


def part_of_plan(plan: Tensor, call: PagedAttention, queries: int) -> Tensor | None:
    """The words of `fa3_schedule`'s plan that `fwd` takes; None of a plan of the host's. Raises InvalidInput for another batch's plan."""
    head_dim, (batch, width) = call.k_pages.shape[3], call.page_table.shape
    # A schedule is made for one head dim; with two the tiles differ.
    if plan.dtype != torch.int32 or call.v_pages.shape[3] != head_dim:
        return None
    want = data.schedule_words(batch)
    if plan.dim() != 1 or plan.shape[0] != want or not plan.is_contiguous():
        raise InvalidInput("plan", f"shape {tuple(plan.shape)}", f"[{want}] contiguous, what fa3_schedule makes of {batch} requests")
    rules = (call.causal, call.window_left, call.window_right, call.attention_chunk)
    return plan[: schedule_size(batch, queries, width * call.k_pages.shape[1], head_dim, rules)]


register(
    Kernel(
        "fa3",
        "fa3_schedule",
        fa3_schedule,
        dtypes=(*HALF, FLOAT8),
        needs=(arch(90), *UNITS),
        packages=(PACKAGE,),
        probe=missing,
        invariant=Invariant(),
        about="FlashAttention-3's scheduler metadata (sgl-kernel)",
    )
)
# With zeros fa3 would compute no tile, so where fa3 may run it alone makes its schedule.
ABOUT = "zeros: no kernel on a CPU reads it"
register(
    Kernel(
        "reference", "fa3_schedule", data.fa3_schedule, dtypes=(*HALF, FLOAT8), needs=(device("cpu"),), invariant=Invariant(), about=ABOUT
    )
)
