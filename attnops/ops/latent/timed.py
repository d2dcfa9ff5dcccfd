"""The calls of attention over latents that `attnops tune` times."""

from __future__ import annotations

from attnops.core.problem import Problem
from attnops.ops.sweeps import FEW, FEWEST, FINE, SHORTEST, TOY, USUAL, decode, extend
from attnops.ops.typical import DEEPSEEK

MLA = Problem.kind("mla_attention", **DEEPSEEK, causal=True)
VERIFY = (2.0, 8.0, 64.0, 512.0)

TIMED = {
    "mla_attention": (
        *(decode(2, MLA, *FINE, q_heads=n) for n in (128, 16)),
        *(decode(6, MLA, *USUAL, q_heads=n) for n in (32, 64)),
        *(decode(6, MLA, q_heads=n, page_size=16) for n in (128, 16)),
        *(extend(6, MLA, FEW, VERIFY, q_heads=n) for n in (128, 16)),
        decode(
            2,
            MLA,
            FEWEST,
            SHORTEST,
            grid="tiny",
            **TOY | {"kv_heads": 1, "head_dim": 20, "rope_dim": 4, "page_size": 4},
        ),
    )
}
