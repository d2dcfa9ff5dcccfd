"""`triton`, of the ops that move data: attnops' own kernels, for any GPU that Triton compiles for. docs/triton.md describes them.

One launch each (a copy between more than 256 slots takes two and a scratch buffer), no synchronisation, any strides.
"""

from __future__ import annotations

import torch

from attnops.kernel import Invariant, Kernel, Need, one_of, register
from attnops.kernels.triton.attention import FLOATS, PACKAGE, STORED, gpu, launched
from attnops.problem import Problem

QUANTISED = (torch.float8_e4m3fn, torch.int8)


def _cost_us(p: Problem) -> float:
    """A launch, then bytes over a bandwidth. A table that Inductor makes as fast, fused with the ops around it, is left to it."""
    if p.op == "named_pages":
        return 5.0
    numbers = p.head_dim if p.rope_dim else max(p.kv_heads, p.q_heads, 1) * (p.head_dim + p.v_head_dim)
    return 3.0 + max(p.tokens.hint, 1) * numbers * (p.dtype.itemsize + p.kv_dtype.itemsize) / 3.4e6


def _add(
    op: str, about: str, *takes: str, dtypes: tuple[torch.dtype, ...] = (), kv_dtypes: tuple[torch.dtype, ...] | None = None,
    needs: tuple[Need, ...] = (),
) -> None:  # fmt: skip
    """Register `triton` for an op. dtypes: () for an op that moves any."""
    register(
        Kernel(
            "triton",
            op,
            launched("data", op),
            takes=frozenset(takes),
            dtypes=dtypes,
            kv_dtypes=kv_dtypes,
            needs=(gpu, *needs),
            packages=(PACKAGE,),
            cost_us=_cost_us,
            invariant=Invariant(),
            about=about,
        )
    )


_add("write_kv", "one launch, whatever is stored", "k_scale", "v_scale", dtypes=FLOATS, kv_dtypes=STORED)
_add("write_latent", "one launch, both parts", "kv_scale", dtypes=(*FLOATS, *QUANTISED), kv_dtypes=(*FLOATS, *QUANTISED))
_add("write_latent_packed", "one launch, scales included", dtypes=FLOATS, kv_dtypes=(torch.uint8,))
_add("copy_kv", "one launch up to 256 slots, then two through a scratch buffer")
for _op in ("kv_indices", "named_pages"):
    _add(_op, "one launch")
_add("decode_rows", "one launch, without a schedule", needs=(one_of("q_heads", 0),))
