"""`flashmla` and `reference` of `decode_rows`: the batch by token, with FlashMLA's schedule where one is asked for, or without."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from attnops.kernel import Core, Inline, Invariant, Kernel, arch, register
from attnops.kernels.sgl import wheel
from attnops.kernels.sgl.flashmla_schedule import LIBRARY, few_tokens, written
from attnops.problem import Problem, Refusal, Target
from attnops.reference import data

if TYPE_CHECKING:
    from attnops.ops.by_token import DecodeRows

PACKAGE = wheel.package("0.4.3")


def decode_rows(call: DecodeRows) -> Tensor:
    """See `attnops.ops.decode_rows`. Torch ops around the vendor's, so that the compiler makes few kernels of them."""
    tokens = call.num_tokens
    if not (call.q_heads and tokens and call.page_table.shape[0]):
        return data.decode_rows(call)
    rows = torch.ops.attnops.decode_rows.default(call.page_table, call.seq_lens, call.cu_seqlens_q, num_tokens=tokens, causal=call.causal)
    lengths = rows[:tokens]
    # The float8 kernel gives a row without keys one; see there.
    seen = lengths.clamp(min=1) if call.float8 else lengths
    return torch.cat([torch.ops.attnops.decode_rows__flashmla(seen, call.q_heads, call.float8), rows])


def _fake_core(lengths: Tensor, q_heads: int, float8: bool) -> Tensor:
    return lengths.new_empty(data.rows_schedule_words(lengths.shape[0], q_heads, float8))


def _missing(target: Target) -> Refusal | None:
    return wheel.lacks(target, LIBRARY)


def _unread(p: Problem) -> Refusal | None:
    """Zeros in place of a schedule would have flashmla do nothing at all, so where it may run there is no other than its own."""
    if few_tokens(p) is not None:
        return None  # nor may flashmla_fp8 run, which has the same need
    if not p.q_heads or p.target.device != "cuda" or p.target.arch != 90 or PACKAGE.missing(p.target) or _missing(p.target):
        return None
    return Refusal("q_heads", p.q_heads, "0 where flashmla is: its schedule is made by flashmla")


register(
    Kernel(
        "flashmla",
        "decode_rows",
        decode_rows,
        needs=(arch(90), few_tokens),
        packages=(PACKAGE,),
        probe=_missing,
        cost_us=lambda p: 5.0,  # without a schedule it is the reference, which then goes first
        # Of what is a request's own. The schedule depends on all of them, and so does flashmla, which promises nothing.
        invariant=Invariant(),
        inline=Inline(core=Core("(Tensor lengths, int q_heads, bool float8) -> Tensor", written, _fake_core)),
        about="the batch by token with FlashMLA's schedule (sgl_kernel)",
    )
)
register(
    Kernel(
        "reference",
        "decode_rows",
        data.decode_rows,
        needs=(_unread,),
        cost_us=lambda p: 4.0,
        invariant=Invariant(),
        inline=Inline(),
        about="plain torch; a schedule is zeros, which nobody reads",
    )
)
