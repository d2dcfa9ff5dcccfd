"""Builder and problem grid of `rope_quantize_latent`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from attnops.reference.attention import compact
from attnops.testing.inputs import Call, Features, Source, table
from attnops.testing.latent import DEEPSEEK, SMALL


def rope_quantize(
    source: Source,
    positions: Sequence[int],
    f: Features,
    rows: int = 9,
    scales: tuple[float, float] = (0.25, 0.125),
    interleaved: bool = False,
    index: torch.dtype = torch.int64,
    spread: float = 8.0,
    fused: bool = False,
) -> Call:
    """`rope_quantize_latent`. Of `f.head_dim` numbers the first `f.v_dim` are the latent. rows: N of the table.

    fused: the parts are views of projections' results, as a model has them.
    """
    tokens, rope = len(positions), f.head_dim - f.v_dim
    made = {"query": source.normal(tokens, f.q_heads, f.head_dim, dtype=f.dtype, spread=spread)}
    made["row"] = source.normal(tokens, f.head_dim, dtype=f.dtype, spread=spread)
    q_nope, q_pe = made["query"].split([f.v_dim, rope], -1)
    latent, k_pe = made["row"].split([f.v_dim, rope], -1)
    if not fused:
        q_nope, q_pe, latent, k_pe = map(compact, (q_nope, q_pe, latent, k_pe))
    angles = torch.arange(rows, dtype=torch.float64)[:, None] * 10000.0 ** (-2.0 / rope * torch.arange(rope // 2, dtype=torch.float64))
    table = torch.cat([angles.cos(), angles.sin()], -1).float().to(source.device)
    arguments: dict[str, Any] = {"q_nope": q_nope, "q_pe": q_pe, "latent": latent, "k_pe": k_pe, "cos_sin": table}
    arguments |= {"positions": source.ints(positions, index), "q_scale": scales[0], "kv_scale": scales[1]}
    return Call("rope_quantize_latent", arguments | ({"interleaved": True} if interleaved else {}))


SOME = (3, 0, 8, 5, 5)
ROWS: dict[str, tuple[Any, ...]] = {
    "plain": (SOME, {"f": SMALL}),
    "interleaved": (SOME, {"f": SMALL, "interleaved": True}),
    "one_head": (SOME, {"f": replace(SMALL, q_heads=1), "index": torch.int32}),
    "rope_2": (SOME, {"f": replace(SMALL, head_dim=18)}),
    "rope_2_interleaved": (SOME, {"f": replace(SMALL, head_dim=18), "interleaved": True}),
    "rope_wider": (SOME, {"f": replace(SMALL, v_head_dim=4)}),
    "latent_1": (SOME, {"f": replace(SMALL, head_dim=9, v_head_dim=1), "interleaved": True}),
    "float16": (SOME, {"f": replace(SMALL, dtype=torch.float16), "interleaved": True}),
    "float64": (SOME, {"f": replace(SMALL, dtype=torch.float64)}),
    "saturated": (SOME, {"f": SMALL, "scales": (0.01, 0.02)}),
    "small": (SOME, {"f": SMALL, "scales": (500.0, 3000.0), "interleaved": True}),
    "fused": (SOME, {"f": replace(SMALL, dtype=torch.bfloat16), "fused": True}),
    "one_token": ((0,), {"f": SMALL, "rows": 1}),
    "no_tokens": ((), {"f": SMALL}),
    # The shape that GPU kernels support.
    "deepseek": (SOME, {"f": DEEPSEEK, "interleaved": True}),
    "deepseek_half_split": (SOME, {"f": DEEPSEEK, "index": torch.int32}),
    "deepseek_fused": (SOME, {"f": DEEPSEEK, "interleaved": True, "fused": True}),
    "deepseek_float16": ((7,), {"f": replace(DEEPSEEK, dtype=torch.float16)}),
    "deepseek_heads_128": ((8, 1, 4), {"f": replace(DEEPSEEK, q_heads=128), "interleaved": True, "fused": True}),
    "deepseek_saturated": (SOME, {"f": DEEPSEEK, "scales": (0.02, 0.01), "interleaved": True}),
    "deepseek_many": (tuple(i * 7 % 400 for i in range(300)), {"f": DEEPSEEK, "rows": 400, "interleaved": True}),
    "deepseek_no_tokens": ((), {"f": DEEPSEEK}),
    "rope_32": (SOME, {"f": replace(DEEPSEEK, head_dim=288, v_head_dim=256)}),
    "tail": (SOME, {"f": replace(DEEPSEEK, head_dim=144, v_head_dim=80), "interleaved": True}),
}
ROPE_QUANTIZE_CASES = {"rope_quantize_latent": table("rope_quantize_latent", rope_quantize, ROWS)}
