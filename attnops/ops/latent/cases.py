"""The cases of attention over latents (MLA), of their writes and of their rotation."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from attnops.core.tensors import compact
from attnops.ops.case_data import (
    BF16,
    E4M3,
    EDGES,
    F16,
    F32,
    F64,
    I32,
    INT8,
    Features,
    Given,
    Grid,
    Pages,
    Rows,
    Scene,
    at,
    crossed,
)

I32_SLOTS = {"index": I32}

SMALL = Features(head_dim=20, v_head_dim=16, causal=True)
DEEPSEEK = Features(
    head_dim=576, v_head_dim=512, q_heads=16, dtype=BF16, causal=True, scale=192**-0.5
)
"""The shape that GPU kernels support; the scale is that of the heads before absorption."""
small, deepseek = partial(replace, SMALL), partial(replace, DEEPSEEK)
LSE = deepseek(lse=True)

FEATURES = {
    "plain": SMALL,
    "all_keys": small(causal=False),
    "window": small(window=(3, -1)),
    "window_self": small(window=(0, -1)),
    "softcap": small(softcap=1.5),
    "sinks": small(sinks=F32, lse=True),
    "mask_bool": small(mask="bool"),
    "mask_additive": small(mask="additive", lse=True),
    "mask_biases_bfloat16": small(mask="biases", dtype=BF16),
    "lse": small(lse=True),
    "loud": small(loud=True, lse=True),
    "scale": small(scale=0.7),
    "one_head": small(q_heads=1),
    "rope_wider": small(v_head_dim=4),
    "rope_1": small(head_dim=17),
    "float16": small(dtype=F16, lse=True),
    "bfloat16_sinks": small(dtype=BF16, sinks=BF16),
    "float64": small(dtype=F64, lse=True),
    "float8": small(dtype=BF16, kv_dtype=E4M3, lse=True),
    "float8_float32": small(kv_dtype=E4M3),
    "int8": small(dtype=F16, kv_dtype=INT8),
    "all": small(window=(4, -1), softcap=2.0, sinks=F32, lse=True, mask="additive", q_heads=6),
}
TIGHT, ONE, TWO, THREE = ({"padding": n} for n in range(4))
NO_TABLE, NO_PAGES, SHARED = (
    {"pages": pages} for pages in (Pages(wider=0), Pages(spare=0), Pages(shared=True))
)
NOTHING, SLACK = {"padding": 0, "pages": Pages(0, 0)}, {"slack": 1}
MAIN = ((1, 4, 0, 2), (6, 4, 0, 21), 16)
FLOAT8_QUERY, PAIR = ((1, 3), (6, 3), 4), ((1, 1), (70, 3), 64, TIGHT)
SHAPES: Rows = {
    "page_1": ((1, 3, 2), (5, 3, 9), 1),
    "decode": ((1, 1, 1, 1), (5, 1, 40, 16), 16, TIGHT),
    "decode_padded": ((1, 1, 1), (5, 0, 33), 16, THREE),
    "decode_idle": ((1, 0, 1), (5, 7, 33), 4, ONE),
    "prefill": ((6, 11), (6, 11), 4, {"slack": 2}),
    "shared": ((2, 2), (9, 13), 4, SHARED),
    "no_table": ((1, 1), (0, 0), 4, NO_TABLE),
    "no_pages": ((1, 2), (0, 0), 4, NO_PAGES),
    "no_requests": ((), (), 4),
    "nothing": ((), (), 4, NOTHING),
}

# The head dims of DeepSeek: one decode step on several page sizes, then one thing at a time.
DECODE: Rows = {
    **{f"page_{n}": ((1, 1, 1), (70, 3, 130), n, TIGHT, DEEPSEEK) for n in (1, 16, 32, 64, 128)},
    **at(
        PAIR,
        {
            "float16": deepseek(dtype=F16),
            "one_head": deepseek(q_heads=1),
            "heads_128": deepseek(q_heads=128),
            "heads_64": deepseek(q_heads=64),
            "sinks_heads_128": deepseek(sinks=F32, q_heads=128),
            "loud": deepseek(loud=True, lse=True),
            "all_keys": deepseek(causal=False),
            "float8": deepseek(kv_dtype=E4M3),
            "float8_both_heads_128": deepseek(q_dtype=E4M3, kv_dtype=E4M3, q_heads=128),
        },
    ),
    "lse": ((1, 1, 1), (64, 1, 200), 64, TIGHT, LSE),
    "padded": ((1, 1), (70, 3), 64, TWO, LSE),
    "idle": ((1, 0, 1), (70, 9, 3), 64, ONE, DEEPSEEK),
    "empty": ((1, 1), (0, 3), 64, TIGHT, LSE),
    "no_keys": ((1, 1), (0, 0), 64, TIGHT, DEEPSEEK),
    "no_table": ((1, 1), (0, 0), 64, TIGHT, NO_TABLE, LSE),
    "no_pages": ((1,), (0,), 64, TIGHT, NO_PAGES, DEEPSEEK),
    "no_requests": ((), (), 64, SLACK, DEEPSEEK),
    "nothing": ((), (), 64, NOTHING, SLACK, DEEPSEEK),
    "wide_table": (*PAIR, {"pages": Pages(wider=4)}, DEEPSEEK),
    "shared": ((1, 1), (70, 90), 64, TIGHT, SHARED, DEEPSEEK),
    "heads_128_page_128": ((1, 1), (70, 140), 128, TIGHT, deepseek(q_heads=128)),
    "verify": ((3, 3), (70, 3), 64, TIGHT, LSE),
    **{
        f"verify_page_{n}": ((2, 4, 1, 3), (70, 9, 130, 64), n, TWO, DEEPSEEK) for n in (1, 16, 128)
    },
    "verify_heads_128": ((2, 0, 4), (70, 5, 200), 64, ONE, deepseek(q_heads=128, lse=True)),
    "verify_fewer_keys": ((4, 2), (2, 0), 64, TIGHT, LSE),
    "verify_all_keys": ((4, 2), (9, 70), 64, deepseek(causal=False)),
    "heads_8": ((1, 1), (70, 130), 16, deepseek(q_heads=8)),
    "extend": ((70, 5), (130, 5), 64, THREE, LSE),
    "extend_float16": ((33, 40), (33, 170), 16, deepseek(dtype=F16)),
    "extend_heads_128": ((9, 3), (9, 130), 64, deepseek(q_heads=128)),
    "long": ((1, 1), (1500, 700), 64, TIGHT, DEEPSEEK),
    **at(
        ((1, 3), (70, 130), 64),
        {
            "window": deepseek(window=(20, -1), lse=True),
            "softcap": deepseek(softcap=5.0),
            "sinks": deepseek(sinks=BF16, lse=True),
        },
    ),
    "sinks_fewer_keys": ((1, 3), (70, 2), 64, deepseek(sinks=BF16, lse=True)),
    "float8_both": (
        (1, 1, 1),
        (70, 3, 200),
        64,
        ONE,
        deepseek(q_dtype=E4M3, kv_dtype=E4M3, lse=True),
    ),
}
ATTENTION: Rows = at(MAIN, FEATURES) | crossed(
    SHAPES, {n: FEATURES[n] for n in ("plain", "lse", "all", "float8")}
)
ATTENTION |= {
    f"float8_query-{n}": (*FLOAT8_QUERY, replace(FEATURES[n], q_dtype=E4M3))
    for n in ("float8", "float8_float32")
}
ATTENTION |= {f"deepseek-{n}": row for n, row in DECODE.items()}

MIXED, QUANTISED = (7, -1, 0, 11, -1, 5), {"quantised": True}
SLOTS, FAR = (MIXED, 4, 3), ((70, -1, 3), 2, 64)
WRITES: Rows = (
    at(
        SLOTS,
        {
            "plain": SMALL,
            "float64": small(dtype=F64),
            "rope_1": small(head_dim=17),
            "float8": small(kv_dtype=E4M3),
            "int8": small(dtype=BF16, kv_dtype=INT8),
            "int8_float64": small(dtype=F64, kv_dtype=INT8),
        },
    )
    | crossed(EDGES, {"plain": SMALL, "float8": small(kv_dtype=E4M3)})
    | {
        "deepseek": (*FAR, DEEPSEEK, I32_SLOTS),
        "float16": (*SLOTS, small(dtype=F16), I32_SLOTS),
        "float8_deepseek": (*FAR, deepseek(kv_dtype=E4M3)),
        "quantised": (*SLOTS, small(kv_dtype=E4M3), QUANTISED),
        "quantised_int8": (*SLOTS, small(kv_dtype=INT8), QUANTISED, I32_SLOTS),
        "quantised_deepseek": (*FAR, deepseek(kv_dtype=E4M3), QUANTISED),
        "quantised_rope_1": (*SLOTS, small(head_dim=17, kv_dtype=E4M3), QUANTISED),
        "quantised_skipped": ((-1, -1), 4, 3, small(kv_dtype=E4M3), QUANTISED),
        "quantised_no_tokens": ((), 4, 3, deepseek(kv_dtype=E4M3), QUANTISED),
    }
)
SOME, INTERLEAVED, FUSED = (3, 0, 8, 5, 5), {"interleaved": True}, {"fused": True}
ROTATIONS: Rows = {
    **at(
        (SOME,),
        {
            "plain": SMALL,
            "rope_2": small(head_dim=18),
            "rope_wider": small(v_head_dim=4),
            "float64": small(dtype=F64),
            "rope_32": deepseek(head_dim=288, v_head_dim=256),
        },
    ),
    **at(
        (SOME, INTERLEAVED),
        {
            "interleaved": SMALL,
            "rope_2_interleaved": small(head_dim=18),
            "latent_1": small(head_dim=9, v_head_dim=1),
            "float16": small(dtype=F16),
            "deepseek": DEEPSEEK,
            "tail": deepseek(head_dim=144, v_head_dim=80),
        },
    ),
    "one_head": (SOME, small(q_heads=1), I32_SLOTS),
    "saturated": (SOME, SMALL, {"scales": (0.01, 0.02)}),
    "small": (SOME, SMALL, {"scales": (500.0, 3000.0)}, INTERLEAVED),
    "fused": (SOME, small(dtype=BF16), FUSED),
    "one_token": ((0,), SMALL, {"rows": 1}),
    "no_tokens": ((), SMALL),
    # The shape that GPU kernels support.
    "deepseek_half_split": (SOME, DEEPSEEK, I32_SLOTS),
    "deepseek_fused": (SOME, DEEPSEEK, INTERLEAVED, FUSED),
    "deepseek_float16": ((7,), deepseek(dtype=F16)),
    "deepseek_heads_128": ((8, 1, 4), deepseek(q_heads=128), INTERLEAVED, FUSED),
    "deepseek_saturated": (SOME, DEEPSEEK, {"scales": (0.02, 0.01)}, INTERLEAVED),
    "deepseek_many": (tuple(i * 7 % 400 for i in range(300)), DEEPSEEK, {"rows": 400}, INTERLEAVED),
    "deepseek_no_tokens": ((), DEEPSEEK),
}


def parts(x: Tensor, f: Features, views: bool) -> tuple[Tensor, ...]:
    """The latent part of `[..., head_dim]` and the rotated one; contiguous if they need not be
    views of `x`."""
    both = x.split([f.v_dim, f.rope_dim], -1)
    return both if views else tuple(map(compact, both))


def _written(scene: Scene, quantised: bool = False) -> Given:
    """quantised: the latents are of `f.kv_dtype` already, and views of one tensor."""
    if not quantised:
        return {}
    f = scene.f
    rows = scene.source.stored(scene.sizes["T"], f.head_dim, dtype=f.kv_dtype or f.dtype)
    return dict(zip(("latent", "k_pe"), parts(rows, f, views=True), strict=True)) | {
        "kv_scale": None
    }


def _rotated(
    scene: Scene,
    rows: int = 9,
    scales: tuple[float, float] = (0.25, 0.125),
    spread: float = 8.0,
    fused: bool = False,
) -> Given:
    """rows: N of the table. fused: the parts are views of projections' results, as a model has
    them."""
    source, f, tokens = scene.source, scene.f, scene.sizes["T"]
    query = source.normal(tokens, f.q_heads, f.head_dim, dtype=f.dtype, spread=spread)
    row = source.normal(tokens, f.head_dim, dtype=f.dtype, spread=spread)
    pairs = torch.arange(f.rope_dim // 2, dtype=F64)
    angles = torch.arange(rows, dtype=F64)[:, None] * 10000.0 ** (-2.0 / f.rope_dim * pairs)
    made = zip(
        ("q_nope", "q_pe", "latent", "k_pe"),
        (*parts(query, f, fused), *parts(row, f, fused)),
        strict=True,
    )
    table = torch.cat([angles.cos(), angles.sin()], -1).float().to(source.device)
    return dict(made) | {"cos_sin": table, "q_scale": scales[0], "kv_scale": scales[1]}


BY_PAGES = "q_lens k_lens page padding slack pages"
CASES = {
    "mla_attention": Grid(BY_PAGES, ATTENTION),
    "write_latent": Grid("slots P page index", WRITES, _written),
    "rope_quantize_latent": Grid("positions", ROTATIONS, _rotated),
}
