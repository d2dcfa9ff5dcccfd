"""Plain torch ops that are lowered in place, so that the compiler fuses them with whatever makes
their inputs.

`scatter`: the write of keys and values, or of latents, as torch's own index_put; for packed latents
with their quantisation, too. `pointwise`: rotation and quantisation of queries and latents. The
compiler writes each part into its place in float8 and stores no other result of it, in one function
on the CPU.
"""

from __future__ import annotations

from functools import partial

import torch

from attnops.core.kernel import Inline, Invariant, Kernel, demand, register
from attnops.core.problem import Problem
from attnops.measured import token_writes_us
from attnops.ops.latent.reference import write_latent
from attnops.ops.latent.rope_reference import rope_quantize_latent
from attnops.ops.pages.reference import write_kv
from attnops.ops.sparse.reference import write_latent_packed

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
# Triton makes float8_e4m3fn from SM89 on.
FLOAT8 = (demand("target", "cpu | sm89 or later", lambda p: p.target.arch >= 89, on="cuda"),)


def _pointwise_us(p: Problem) -> float:
    """Two launches, and the bytes; not measured."""
    return (
        8.0
        + max(p.sizes.tokens.hint, 1)
        * (p.q_heads + 1)
        * p.head_dim
        * (p.dtype.itemsize + 1)
        / 3.1e6
    )


# Inductor's kernel on an H200: 7 us for 64 tokens of 8 heads, 26 us for 4096.
SCATTER = partial(token_writes_us, 7.0, 4e5)

PAGES = (*FLOATS, torch.int8)
# Float8 pages are left out: a write through a view of another dtype is lost where it is inlined.
for _name, _run, _dtypes, _pages, _takes, _needs, _us, _about in (
    ("scatter", write_kv, FLOATS, PAGES, {"k_scale", "v_scale"}, (), SCATTER, "index_put"),
    ("scatter", write_latent, PAGES, PAGES, {"kv_scale"}, (), SCATTER, "index_put"),
    (
        "scatter",
        write_latent_packed,
        FLOATS,
        (torch.uint8,),
        set[str](),
        FLOAT8,
        SCATTER,
        "index_put",
    ),
    (
        "pointwise",
        rope_quantize_latent,
        FLOATS,
        (torch.float8_e4m3fn,),
        {"interleaved"},
        FLOAT8,
        _pointwise_us,
        "pointwise torch ops",
    ),
):
    register(
        Kernel(
            _name,
            _run.__name__,
            _run,
            takes=frozenset(_takes),
            dtypes=_dtypes,
            kv_dtypes=_pages,
            needs=_needs,
            cost_us=_us,
            invariant=Invariant(),
            inline=Inline(),
            about=f"{_about} fused by the compiler",
        )
    )
