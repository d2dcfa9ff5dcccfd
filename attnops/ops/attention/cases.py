"""The cases of attention over dense and packed tensors, their gradients, and merges."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from attnops.core.tensors import within
from attnops.ops.case_data import (
    BF16,
    E4M3,
    E5M2,
    F16,
    F32,
    F64,
    I32,
    INT8,
    Features as F,
    Given,
    Grid,
    Rows,
    Scene,
    at,
    crossed,
)

causal = partial(F, causal=True)
half = partial(F, dtype=BF16)
causal_half = partial(F, dtype=BF16, causal=True)
float8 = partial(half, q_dtype=E4M3, kv_dtype=E4M3)
# One feature at a time, then together; the last rows have the head dims and dtypes that GPU kernels
# are built for.
FEATURES: dict[str, F] = {
    "plain": F(),
    "causal": causal(),
    "window_left": F(window=(3, -1)),
    "window_right": F(window=(-1, 1)),
    "window_both": F(window=(2, 1)),
    "window_self": F(window=(0, 0)),
    "causal_window": causal(window=(3, -1)),
    "causal_window_right": causal(window=(3, 2)),
    "softcap": F(softcap=1.5),
    "sinks": F(sinks=F32),
    "sinks_narrow": half(sinks=BF16),
    "mask_bool": F(mask="bool"),
    "mask_additive": F(mask="additive"),
    "mask_biases": F(mask="biases"),
    "mask_biases_bfloat16": causal_half(mask="biases"),
    "mask_causal": causal(mask="bool"),
    "mask_softcap": F(mask="additive", softcap=2.0, window=(4, -1)),
    "lse": F(lse=True),
    "lse_causal": causal(lse=True),
    "lse_sinks": causal(lse=True, sinks=F32),
    "lse_mask": F(lse=True, mask="bool"),
    "lse_softcap": F(lse=True, softcap=1.5),
    "scale": F(scale=0.7),
    "loud": F(loud=True, lse=True),
    "loud_sdpa": F(loud=True),
    "mha": F(kv_heads=4),
    "one_head": F(q_heads=1, kv_heads=1),
    "group_3": causal(q_heads=6, kv_heads=2),
    "group_8": causal(q_heads=8, kv_heads=1, lse=True),
    "v_wider": causal(v_head_dim=24),
    "v_narrower": F(v_head_dim=8, lse=True),
    "head_dim_1": F(head_dim=1),
    "head_dim_odd": causal(head_dim=17),
    "float16": F(dtype=F16),
    "float64": F(dtype=F64),
    "float64_lse": causal(dtype=F64, lse=True),
    "bfloat16_lse": causal_half(lse=True),
    "bfloat16_mask": causal_half(mask="additive"),
    "float16_all": causal(dtype=F16, window=(4, -1), softcap=2.0, sinks=F16, lse=True, q_heads=8),
    "all": causal(window=(4, -1), softcap=2.0, sinks=F32, lse=True, q_heads=8, v_head_dim=24),
    "all_mask": causal(window=(4, -1), softcap=2.0, sinks=F32, lse=True, mask="additive"),
    "float8": causal_half(kv_dtype=E4M3, head_dim=64),
    "float8_one_scale": F(dtype=F32, kv_dtype=E4M3, scale_per_head=False, lse=True),
    "float8_e5m2": causal(dtype=F16, kv_dtype=E5M2),
    "int8": causal_half(kv_dtype=INT8),
    "int8_all": causal(
        dtype=F32, kv_dtype=INT8, window=(4, -1), softcap=2.0, sinks=F32, lse=True, v_head_dim=8
    ),
    "chunk": causal(chunk=3),
    "chunk_both_sides": F(chunk=4, lse=True),
    "chunk_window": causal(chunk=4, window=(2, -1), softcap=1.5, lse=True),
    "bfloat16_d64_chunk": causal_half(head_dim=64, q_heads=8, chunk=5, lse=True),
    "float8_query": float8(causal=True, head_dim=64),
    "float8_query_lse": float8(causal=True, head_dim=128, q_heads=8, lse=True),
    "float8_query_one_scale": float8(head_dim=64, scale_per_head=False, window=(4, -1)),
    "float8_query_int8": half(q_dtype=E4M3, kv_dtype=INT8, softcap=2.0),
    "bfloat16_d64": causal_half(head_dim=64, q_heads=8),
    "float16_d128": causal(dtype=F16, head_dim=128, q_heads=8),
    "bfloat16_d128_lse": causal_half(head_dim=128, q_heads=8, kv_heads=1, lse=True),
    "bfloat16_d64_window_sinks": causal_half(
        head_dim=64, q_heads=8, kv_heads=1, window=(7, -1), sinks=BF16
    ),
    "bfloat16_d128_softcap": causal_half(head_dim=128, softcap=30.0, scale=0.2),
    # What the tests of other projects ask for, and few kernels take.
    "head_dim_2": causal(head_dim=2, lse=True),
    "head_dim_3": F(head_dim=3, mask="additive", lse=True),
    "float16_d111_group_3": causal(
        dtype=F16, head_dim=111, q_heads=6, kv_heads=2, window=(5, -1), softcap=15.0, lse=True
    ),
    "bfloat16_d256_mask_softcap": half(head_dim=256, mask="additive", softcap=30.0, lse=True),
    "bfloat16_d512": causal_half(head_dim=512, softcap=30.0, lse=True),
    "bfloat16_d576": causal_half(head_dim=576, v_head_dim=512, q_heads=6, kv_heads=2, lse=True),
    "float16_d320": F(dtype=F16, head_dim=320, v_head_dim=40, window=(2, 3), sinks=F32),
    "float8_d576": causal_half(kv_dtype=E4M3, head_dim=576, v_head_dim=512, q_heads=8, kv_heads=1),
    "float8_query_d40": float8(head_dim=40, causal=True, lse=True),
    "float8_query_windows": float8(head_dim=64, v_head_dim=32, window=(3, 2), lse=True),
    "float8_query_mask": float8(head_dim=64, mask="bool", softcap=5.0, sinks=F32),
}

# The shapes below are tried with these besides the plain one.
TELLING = {
    n: FEATURES[n]
    for n in ("plain", "lse_causal", "window_both", "all", "mask_additive", "bfloat16_d64")
}

DENSE, VARLEN, I32_RANGE = (2, 5, 11), ((3, 0, 5, 1), (7, 2, 5, 4)), {"index": I32}
DENSE_SHAPES: Rows = {
    "square": (2, 9, 9),
    "tall": (2, 7, 4),
    "decode": (3, 1, 13),
    "one": (1, 1, 1),
    "long": (1, 33, 130),
    "no_keys": (2, 3, 0),
    "no_queries": (2, 0, 5),
    "no_batch": (0, 3, 5),
    "range": (3, 4, 11, {"kv_start": (0, 2, 5), "kv_end": (11, 9, 5), **I32_RANGE}),
    "range_end": (2, 3, 8, {"kv_end": (8, 4)}),
    "range_start": (2, 8, 8, {"kv_start": (3, 0), **I32_RANGE}),
}
VARLEN_SHAPES: Rows = {
    "self": ((5, 1, 8), (5, 1, 8), {"padding": (0, 0)}),
    "self_padded": ((5, 1, 8), (5, 1, 8), {"padding": (4, 4)}),
    "decode": ((1, 1, 1), (6, 1, 12), {"slack": 3}),
    "tight": ((5, 0, 8), (5, 3, 70), {"padding": None}),
    "fewer_keys": ((5, 3), (2, 0)),
    "one": ((1,), (1,), {"padding": (0, 0)}),
    "long": ((40, 3), (70, 130)),
    "all_empty": ((0, 0), (0, 0)),
    "no_keys": ((3, 1), (0, 0), {"padding": (0, 0)}),
    "no_requests": ((), ()),
    "nothing": ((), (), {"padding": (0, 0)}),
}
MASKS = {
    f"mask_{kind}_{shape or 'keys'}": F(mask=kind, mask_shape=shape)
    for kind in ("bool", "additive")
    for shape in ("b", "h", "bq", "q", "")
}


def on_shapes(main: tuple[Any, ...], shapes: Rows) -> Rows:
    """Every feature on the main shape, the important ones on the other shapes."""
    return at(main, FEATURES) | crossed(shapes, TELLING)


def _gradients(main: tuple[Any, ...], shapes: Rows, *shaped: str) -> Rows:
    """Gradients of forward calls of float dtypes. shaped: the features that the shapes other than
    `main` are tried with."""
    rows = at(main, {n: f for n, f in FEATURES.items() if f.kv_dtype is None and not f.lse})
    rows |= crossed(shapes, {n: FEATURES[n] for n in shaped})
    telling = ("plain", "causal", "all", "float16_all", "float64_lse")
    return rows | {f"{n}-lse_grad": (*main, FEATURES[n], {"lse_grad": True}) for n in telling}


def _range(scene: Scene) -> Given:
    """Keys outside of the ranges are free."""
    ranges = [scene.given.get(n) for n in ("kv_start", "kv_end")]
    if ranges != [None, None]:
        scene.free["keys"] = ~within(
            torch.arange(scene.sizes["K"], device=scene.source.device)[None], *ranges
        )
    return {}


def _wide_mask(scene: Scene) -> Given:
    """A mask is wider than it need be."""
    return {"mask": scene.source.mask((scene.sizes["T"], scene.given["max_seqlen_k"] + 2), scene.f)}


def _merged(
    scene: Scene, shape: tuple[int, ...], empty: float = 0.0, empty_b: float = 0.0
) -> Given:
    """Outputs of `shape` `[T, H, D]`, or `[T, N, H, D]` for any number of them.

    empty, empty_b: the share of the entries without a key, empty_b the second output's; they are
    free, or 0 if not stale.
    """
    pairs = (
        [("output_a", "lse_a"), ("output_b", "lse_b")] if len(shape) == 3 else [("outputs", "lses")]
    )
    made: dict[str, Tensor] = {}
    for (output, lse), share in zip(pairs, (empty, empty_b), strict=False):
        hidden = scene.source.chance(*shape[:-1], p=share)
        made[output] = scene.source.normal(*shape, dtype=scene.f.dtype)
        made[lse] = scene.source.normal(*shape[:-1], spread=4.0).masked_fill(hidden, float("-inf"))
        if scene.given.get("stale", True):
            scene.free[output] = hidden
        else:
            made[output].masked_fill_(hidden[..., None], 0.0)
    return made


MERGES: Rows = {
    "plain": ((5, 4, 16), F32),
    "some_empty": ((9, 4, 16), F32, 0.4, 0.4),
    "a_empty": ((3, 2, 8), F32, 1.0),
    "b_empty": ((3, 2, 8), BF16, 0.0, 1.0),
    "both_empty": ((3, 2, 8), F16, 1.0, 1.0),
    "float16": ((5, 4, 64), F16, 0.2, 0.2),
    "bfloat16": ((5, 4, 128), BF16, 0.2, 0.2),
    "float64": ((5, 4, 16), F64, 0.2, 0.2),
    "one": ((1, 1, 1), F32),
    "no_tokens": ((0, 2, 8), F32),
    "float32_128": ((33, 8, 128), F32, 0.1, 0.1),
    "float16_256": ((7, 3, 256), F16, 0.1, 0.1),
    "bfloat16_many": ((300, 32, 128), BF16, 0.1, 0.1),
    "bfloat16_all_empty": ((3, 2, 64), BF16, 1.0, 1.0),
    "bfloat16_no_tokens": ((0, 2, 64), BF16),
    "bfloat16_512": ((5, 16, 512), BF16, 0.2),
    "bfloat16_not_stale": ((40, 8, 128), BF16, 0.4, 0.4, {"stale": False}),
    "float32_not_stale": ((9, 4, 16), F32, 0.4, 0.4, {"stale": False}),
}
MERGES_OF_MANY: Rows = {
    n: ((tokens, 3, *heads), *more) for n, ((tokens, *heads), *more) in MERGES.items()
} | {
    "one_part": ((4, 1, 2, 8), F32, 0.3),
    "two_parts": ((9, 2, 4, 64), F16, 0.2),
    "float64_6_parts": ((5, 6, 4, 16), F64, 0.2),
    "one": ((1, 1, 1, 1), F32),
    "bfloat16_more_parts_than_tokens": ((3, 37, 4, 128), BF16, 0.3),
    "bfloat16_one_part": ((6, 1, 4, 64), BF16, 0.4),
    "bfloat16_many_all_empty": ((2, 9, 2, 64), BF16, 1.0),
    "float16_512": ((20, 5, 8, 512), F16, 0.1),
}


DENSE_ROWS = on_shapes(DENSE, DENSE_SHAPES) | at(DENSE, MASKS)
VARLEN_ROWS = on_shapes(VARLEN, VARLEN_SHAPES)
DENSE_GRADIENTS = _gradients(DENSE, DENSE_SHAPES, "plain", "causal", "mask_additive") | {
    f"{n}-mask_grad": (*DENSE, f, {"mask_grad": True})
    for n, f in (FEATURES | MASKS).items()
    if f.mask == "additive"
}
BY_LENGTHS, MERGED = "q_lens k_lens padding slack", "shape dtype empty empty_b"
CASES = {
    "attention": Grid("B S K", DENSE_ROWS, _range),
    "attention_backward": Grid("B S K", DENSE_GRADIENTS, of="attention"),
    "varlen_attention": Grid(BY_LENGTHS, VARLEN_ROWS, _wide_mask),
    "varlen_attention_backward": Grid(
        BY_LENGTHS, _gradients(VARLEN, VARLEN_SHAPES, "plain", "causal"), of="varlen_attention"
    ),
    "merge_state": Grid(MERGED, MERGES, _merged),
    "merge_states": Grid(MERGED, MERGES_OF_MANY, _merged),
}
