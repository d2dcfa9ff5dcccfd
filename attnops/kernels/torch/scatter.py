"""`scatter`: the write of keys and values, or of latents, as torch's own index_put, lowered in place, so that the compiler fuses
it with whatever makes them; for packed latents with their quantisation, too.
"""

from __future__ import annotations

import torch

from attnops.kernel import Inline, Invariant, Kernel, register
from attnops.problem import Problem, Refusal
from attnops.reference.data import write_kv
from attnops.reference.mla import write_latent
from attnops.reference.sparse import write_latent_packed


def _cost_us(p: Problem) -> float:
    # Inductor's code takes, on an H200, 7 us for 64 tokens of 8 heads, 26 us for 4096.
    numbers = p.head_dim if p.rope_dim else p.kv_heads * (p.head_dim + p.v_head_dim)
    return 7.0 + max(p.tokens.hint, 1) * numbers / 4e5


def float8_in_triton(p: Problem) -> Refusal | None:
    """Triton makes float8_e4m3fn from SM89 on."""
    older = p.target.device == "cuda" and p.target.arch < 89
    return Refusal("target", p.target, "cpu | sm89 or later") if older else None


FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INT8 = (torch.int8,)
# Float8 pages are left out: a write through a view of another dtype is lost where it is inlined.
for _op, _run, _dtypes, _pages, _takes, _needs in (
    ("write_kv", write_kv, FLOATS, FLOATS + INT8, {"k_scale", "v_scale"}, ()),
    ("write_latent", write_latent, FLOATS + INT8, FLOATS + INT8, {"kv_scale"}, ()),
    ("write_latent_packed", write_latent_packed, FLOATS, (torch.uint8,), set(), (float8_in_triton,)),
):
    register(
        Kernel(
            "scatter",
            _op,
            _run,
            takes=frozenset(_takes),
            dtypes=_dtypes,
            kv_dtypes=_pages,
            needs=_needs,
            cost_us=_cost_us,
            invariant=Invariant(),
            inline=Inline(),
            about="index_put fused by the compiler",
        )
    )
