"""Helpers of kernels over tokens: the batch by token, a query in one piece, values of padding rows,
and results without keys."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attnops.core.errors import InvalidInput
from attnops.core.kernel import Need, extent_at_most, one_of
from attnops.core.needs import _installed
from attnops.core.tensors import result_dtype
from attnops.ops.metadata.reference import rows_schedule_words

LATENT, ROPE = 512, 64
LATENTS: tuple[Need, ...] = (
    one_of("v_head_dim", LATENT),
    one_of("rope_dim", ROPE),
    one_of("last_dim_contiguous", True),
)
"""The needs of kernels that are compiled for latents of 512 + 64."""
BY_TOKEN: tuple[Need, ...] = (*LATENTS, extent_at_most("queries", 8))
"""The needs of those that take every query token as a row of its own, which reads all keys of its
request."""


def batch_by_token(
    call: Any, schedules: tuple[bool, ...] = (False, True)
) -> tuple[Tensor, Tensor, Tensor | None]:
    """(page table `[T, M]`, keys seen `[T]`, schedule), int32: from the plan that `decode_rows`
    made, else made here without schedule.

    A plan may hold a schedule for the heads of the call, of each kind in `schedules`: float8 or
    not. B and M are at least 1. Raises InvalidInput on a plan of another length.
    """
    plan, page_table, (tokens, q_heads) = call.plan, call.page_table, call[0].shape[:2]
    width = page_table.shape[1]
    rows = tokens * (1 + width)
    if plan is None or plan.dtype != torch.int32:
        made = torch.ops.attnops.decode_rows.default(
            page_table, call.seq_lens, call.cu_seqlens_q, num_tokens=tokens, causal=call.causal
        )
        return made[tokens:].view(tokens, width), made[:tokens], None
    lengths = (0, *(rows_schedule_words(tokens, q_heads, float8) for float8 in schedules))
    start = next(
        (length for length in lengths if plan.dim() == 1 and plan.shape[0] == rows + length), None
    )
    if start is None:
        want = " or ".join(f"[{rows + length}]" for length in lengths)
        what = (
            "the result of decode_rows for this batch, without a schedule or with one for "
            f"{q_heads} heads"
        )
        raise InvalidInput("plan", f"int32 {tuple(plan.shape)}", f"{want}: {what}")
    return (
        plan[start + tokens :].view(tokens, width),
        plan[start : start + tokens],
        plan[:start] if start else None,
    )


def rows(
    *,
    q_nope: Tensor,
    page_table: Tensor,
    seq_lens: Tensor,
    cu_seqlens_q: Tensor,
    causal: bool = True,
    schedule: bool = False,
    **_: object,
) -> Tensor:
    """The device plan of a call with these arguments, with a schedule for its heads or without."""
    heads, float8 = (
        (q_nope.shape[1], q_nope.dtype == torch.float8_e4m3fn) if schedule else (0, False)
    )
    return torch.ops.attnops.decode_rows.default(  # type: ignore[no-any-return]
        page_table,
        seq_lens,
        cu_seqlens_q,
        num_tokens=q_nope.shape[0],
        causal=causal,
        q_heads=heads,
        float8=float8,
    )


# Queries of latents -------------------------------------------------------------------------------


def side_by_side(q_nope: Tensor, q_pe: Tensor) -> bool:
    """Are both parts of the query views of one `[T, H, Dc + Dr]`? Known of fake tensors too, whose
    storages are those of their views."""
    return (
        q_nope.untyped_storage()._cdata == q_pe.untyped_storage()._cdata
        and q_nope.stride() == q_pe.stride()
        and q_nope.stride(2) == 1
        and q_pe.storage_offset() - q_nope.storage_offset() == q_nope.shape[2]
        and q_nope.stride(1) >= q_nope.shape[2] + q_pe.shape[2]
    )


def adjoin(q_nope: Tensor, q_pe: Tensor) -> tuple[Tensor, Tensor | None]:
    """The parts as they are if they are side by side, else `[T, H, Dc + Dr]` and None: a torch op
    the compiler sees.

    Views of the joined query would be two copies: on a GPU, Inductor makes of a `cat` one
    expression and of each view of it a kernel.
    """
    return (q_nope, q_pe) if side_by_side(q_nope, q_pe) else (whole(q_nope, q_pe), None)


def whole(q_nope: Tensor, q_pe: Tensor | None) -> Tensor:
    """`[T, H, Dc + Dr]` of the results of `adjoin`, or of two parts: a view where they are side by
    side."""
    if q_pe is None:
        return q_nope
    if side_by_side(q_nope, q_pe):
        return q_nope.as_strided(
            (*q_nope.shape[:2], q_nope.shape[2] + q_pe.shape[2]),
            q_nope.stride(),
            q_nope.storage_offset(),
        )
    if q_nope.dtype.itemsize > 1:
        return torch.cat([q_nope, q_pe], -1)
    return torch.cat([q_nope.view(torch.uint8), q_pe.view(torch.uint8)], -1).view(
        q_nope.dtype
    )  # bytes, where float8 has no cat


# Padding rows, and queries without keys -----------------------------------------------------------


def past(cu_seqlens: Tensor, tokens: int) -> Tensor:
    """bool `[T]`: the tokens of no request."""
    return torch.arange(tokens, device=cu_seqlens.device) >= cu_seqlens[-1]


def zeroed(value: Tensor, where: Tensor) -> Tensor:
    """A copy of the value, 0 where `where`, a bool of its first dims: whole tiles are loaded, and a
    weight of 0 does not silence NaN."""
    where = where[..., None, None]
    # float8 has no masked_fill; a byte of 0 is its 0.
    return (
        value.view(torch.uint8).masked_fill(where, 0).view(value.dtype)
        if value.dtype.itemsize == 1
        else value.masked_fill(where, 0.0)
    )


def clear(*parts: tuple[Tensor, Tensor, float]) -> None:
    """Set the rows of no request in place, of up to three (cu_seqlens, rows, fill): those from
    `cu_seqlens[B]` on. rows: contiguous."""
    if parts[0][1].is_cuda and _installed("triton"):
        from attnops.kernels.shared.launch.rows import clear_rows

        clear_rows(parts)
        return
    for cu_seqlens, x, fill in parts:
        x.masked_fill_(past(cu_seqlens, x.shape[0]).view(-1, *[1] * (x.dim() - 1)), fill)


def fresh(call: Any) -> tuple[Tensor, Tensor | None]:
    """Memory for the results that a call returns: output `[..., Hq, Dv]`, and lse `[..., Hq]` where
    it is asked for."""
    query, rows = call.query, call.query.shape[:-1]
    output = query.new_empty((*rows, call.value.shape[-1]), dtype=result_dtype(query, call.q_scale))
    return output, query.new_empty(rows, dtype=torch.float32) if call.return_lse else None


def runs(call: Any) -> bool:
    """Has a packed call a query and a key?"""
    longest = call.max_seqlen_q and call.max_seqlen_k and call.cu_seqlens_q.shape[0] > 1
    return bool(call.query.numel() and call.key.numel() and longest)


def blank(call: Any) -> bool:
    """Has a call over pages no query or no key? Its results are then written: 0, and for lse the
    sinks, or -inf."""
    pages = call.k_pages if hasattr(call, "k_pages") else call.latent_pages
    if call.output.numel() and call.page_table.numel() and pages.numel() and call.max_seqlen_q:
        return False
    see_nothing(call.output, call.lse)
    if call.lse is not None and call.sinks is not None:
        call.lse.copy_(packed_lse(call.lse.transpose(0, 1), call.sinks, call.cu_seqlens_q))
    return True


def see_nothing(output: Tensor, lse: Tensor | None) -> None:
    """Write the results of queries that see no key: 0, and -inf for lse."""
    output.zero_()
    if lse is not None:
        lse.fill_(float("-inf"))


def with_sinks(lse: Tensor, sinks: Tensor | None) -> Tensor:
    """lse `[..., Hq]`: the kernels give -inf to a query that sees no key, where the contract wants
    the sink."""
    return lse if sinks is None else torch.where(lse == float("-inf"), sinks.float(), lse)


def packed_lse(
    lse: Tensor, sinks: Tensor | None, cu_seqlens_q: Tensor, padded: bool = True
) -> Tensor:
    """`[Hq, T]` of the kernel -> `[T, Hq]`, -inf for tokens of no request."""
    lse = with_sinks(lse.transpose(0, 1), sinks)
    return (
        lse.masked_fill(past(cu_seqlens_q, lse.shape[0])[:, None], float("-inf")) if padded else lse
    )
