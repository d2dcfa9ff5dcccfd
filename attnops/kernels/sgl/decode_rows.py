"""`flashmla` and `reference` of `decode_rows`: the batch by token, with FlashMLA's schedule if the call asks for one."""

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
DTYPES = (torch.int32, torch.float8_e4m3fn)
"""That of the page table, or of the float8 query that the schedule is for."""


def decode_rows(call: DecodeRows) -> Tensor:
    """See `attnops.ops.decode_rows`. Only the vendor's op is opaque: the compiler fuses the torch ops around it."""
    tokens = call.num_tokens
    if not (call.q_heads and tokens and call.page_table.shape[0]):
        return data.decode_rows(call)
    rows = torch.ops.attnops.decode_rows.default(call.page_table, call.seq_lens, call.cu_seqlens_q, num_tokens=tokens, causal=call.causal)
    lengths = rows[:tokens]
    # The float8 kernel would read before the page table of a row without keys, so that it is given one key.
    seen = lengths.clamp(min=1) if call.float8 else lengths
    return torch.cat([torch.ops.attnops.decode_rows__flashmla(seen, call.q_heads, call.float8), rows])


def _fake_core(lengths: Tensor, q_heads: int, float8: bool) -> Tensor:
    return lengths.new_empty(data.rows_schedule_words(lengths.shape[0], q_heads, float8))


def _missing(target: Target) -> Refusal | None:
    return wheel.lacks(target, LIBRARY)


def _unread(p: Problem) -> Refusal | None:
    """With zeros for a schedule flashmla would compute nothing, so that the reference is refused where flashmla may run."""
    if few_tokens(p) is not None:
        return None  # flashmla_fp8 has the same need and cannot run
    if not p.q_heads or p.target.device != "cuda" or p.target.arch != 90 or PACKAGE.missing(p.target) or _missing(p.target):
        return None
    return Refusal("q_heads", p.q_heads, "0 where flashmla is: its schedule is made by flashmla")


register(
    Kernel(
        "flashmla",
        "decode_rows",
        decode_rows,
        dtypes=DTYPES,
        needs=(arch(90), few_tokens),
        packages=(PACKAGE,),
        probe=_missing,
        cost_us=lambda p: 5.0,  # more than the reference, whose body serves a call without a schedule
        # Rows are: they depend on their own request alone. The schedule depends on all requests, and so do the results of flashmla.
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
        dtypes=DTYPES,
        needs=(_unread,),
        cost_us=lambda p: 4.0,
        invariant=Invariant(),
        inline=Inline(),
        about="plain torch; a schedule is zeros, which no kernel reads",
    )
)
