"""`triton`, of the ops that move data: attnops' own kernels, for any GPU that Triton compiles for.
docs/triton.md describes them.

One launch each (a copy whose groups have more than 256 slots takes two and a scratch buffer), no
synchronisation, any strides.
"""

from __future__ import annotations

import torch

from attnops.core.kernel import at_most, one_of
from attnops.core.problem import Problem
from attnops.kernels.triton.attention import FLOATS, STORED, launched, own


def _cost_us(p: Problem) -> float:
    """A launch, then bytes over a bandwidth. A table that Inductor makes as fast, fused with the
    ops around it, is left to it."""
    if p.op == "named_pages":
        return 5.0
    numbers = (
        p.head_dim if p.rope_dim else max(p.kv_heads, p.q_heads, 1) * (p.head_dim + p.v_head_dim)
    )
    return (
        3.0
        + max(p.sizes.tokens.hint, 1) * numbers * (p.dtype.itemsize + p.kv_dtype.itemsize) / 3.4e6
    )


LATENTS = (*FLOATS, torch.float8_e4m3fn, torch.int8)
own(
    "write_kv",
    launched("data", "write_kv"),
    _cost_us,
    "one launch, any stored dtype",
    ("k_scale", "v_scale"),
    kv_dtypes=STORED,
)
own(
    "rotate_and_write_kv",
    launched("rotate", "rotate_and_write_kv"),
    _cost_us,
    "norm, rotation and write in one launch",
    ("q_norm", "k_norm"),
    needs=(
        one_of("last_dim_contiguous", True),
        at_most("head_dim", 256),
        at_most("v_head_dim", 256),
    ),
)
own(
    "write_latent",
    launched("data", "write_latent"),
    _cost_us,
    "one launch, both parts",
    ("kv_scale",),
    LATENTS,
    LATENTS,
)
own(
    "write_latent_packed",
    launched("data", "write_latent_packed"),
    _cost_us,
    "one launch, scales included",
    kv_dtypes=(torch.uint8,),
)
COPIED, INDEX = (*STORED, torch.float64, torch.uint8), (torch.int32,)
for _op, _about, _dtypes, _needs in (
    ("copy_kv", "one launch; above 256 slots a group two, through scratch", COPIED, ()),
    ("kv_indices", "one launch", INDEX, ()),
    ("named_pages", "one launch", INDEX, ()),
    ("decode_rows", "one launch, without a schedule", INDEX, (one_of("q_heads", 0),)),
):
    own(_op, launched("data", _op), _cost_us, _about, dtypes=_dtypes, needs=_needs)
