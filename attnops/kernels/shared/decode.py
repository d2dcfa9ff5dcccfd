"""Helpers of kernels that take every query token as a row of its own: the batch by token, and a query in one piece."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from attnops.errors import InvalidInput
from attnops.kernels.shared.flash import see_nothing
from attnops.reference.data import rows_schedule_words

if TYPE_CHECKING:
    from attnops.ops.mla import MlaAttention


def batch_by_token(call: Any, schedules: tuple[bool, ...] = (False, True)) -> tuple[Tensor, Tensor, Tensor | None]:
    """(page table `[T, M]`, keys seen `[T]`, schedule), int32: from the plan that `decode_rows` made, else made here without schedule.

    A plan may hold a schedule for the heads of the call, of each kind in `schedules`: float8 or not. B and M are at least 1.
    Raises InvalidInput on a plan of another length.
    """
    plan, page_table, (tokens, q_heads) = call.plan, call.page_table, call[0].shape[:2]
    width = page_table.shape[1]
    rows = tokens * (1 + width)
    if plan is None or plan.dtype != torch.int32:
        made = torch.ops.attnops.decode_rows.default(page_table, call.seq_lens, call.cu_seqlens_q, num_tokens=tokens, causal=call.causal)
        return made[tokens:].view(tokens, width), made[:tokens], None
    lengths = (0, *(rows_schedule_words(tokens, q_heads, float8) for float8 in schedules))
    which = next((i for i, length in enumerate(lengths) if plan.dim() == 1 and plan.shape[0] == rows + length), None)
    if which is None:
        want = " or ".join(f"[{rows + length}]" for length in lengths)
        what = f"what decode_rows returned for this batch, without or with a schedule for {q_heads} heads"
        raise InvalidInput("plan", f"int32 {tuple(plan.shape)}", f"{want}: {what}")
    start = lengths[which]
    return plan[start + tokens :].view(tokens, width), plan[start : start + tokens], plan[:start] if which else None


def rows(
    *, q_nope: Tensor, page_table: Tensor, seq_lens: Tensor, cu_seqlens_q: Tensor, causal: bool = True, schedule: bool = False, **_: object
) -> Tensor:
    """The device plan of a call with these arguments, with a schedule for its heads or without."""
    heads, float8 = (q_nope.shape[1], q_nope.dtype == torch.float8_e4m3fn) if schedule else (0, False)
    out: Tensor = torch.ops.attnops.decode_rows.default(
        page_table, seq_lens, cu_seqlens_q, num_tokens=q_nope.shape[0], causal=causal, q_heads=heads, float8=float8
    )
    return out


def blank(call: MlaAttention) -> bool:
    """Has the call no query or no key? Its results are then written: 0, and -inf for lse."""
    if call.output.numel() and call.page_table.numel() and call.latent_pages.numel():
        return False
    see_nothing(call.output, call.lse)
    return True


def side_by_side(q_nope: Tensor, q_pe: Tensor) -> bool:
    """Are both parts of the query views of one `[T, H, Dc + Dr]`? Known of fake tensors too, whose storages are those of their views."""
    return (
        q_nope.untyped_storage()._cdata == q_pe.untyped_storage()._cdata
        and q_nope.stride() == q_pe.stride()
        and q_nope.stride(2) == 1
        and q_pe.storage_offset() - q_nope.storage_offset() == q_nope.shape[2]
        and q_nope.stride(1) >= q_nope.shape[2] + q_pe.shape[2]
    )


def adjoin(q_nope: Tensor, q_pe: Tensor) -> tuple[Tensor, Tensor | None]:
    """The parts as they are if they are side by side, else `[T, H, Dc + Dr]` and None: a torch op the compiler sees.

    Views of the joined query would be two copies: on a GPU, Inductor makes of a `cat` one expression and of each view of it a kernel.
    """
    return (q_nope, q_pe) if side_by_side(q_nope, q_pe) else (whole(q_nope, q_pe), None)


def whole(q_nope: Tensor, q_pe: Tensor | None) -> Tensor:
    """`[T, H, Dc + Dr]` of the results of `adjoin`, or of two parts: a view where they are side by side."""
    if q_pe is None:
        return q_nope
    if side_by_side(q_nope, q_pe):
        return q_nope.as_strided((*q_nope.shape[:2], q_nope.shape[2] + q_pe.shape[2]), q_nope.stride(), q_nope.storage_offset())
    if q_nope.dtype.itemsize > 1:
        return torch.cat([q_nope, q_pe], -1)
    return torch.cat([q_nope.view(torch.uint8), q_pe.view(torch.uint8)], -1).view(q_nope.dtype)  # bytes, where float8 has no cat
