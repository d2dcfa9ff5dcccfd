"""The cases of linear layers, and of norms that feed none."""

from __future__ import annotations

from attnops.ops.case_data import BF16, F16, F64, Given, Grid, Rows, Scene, at

MAIN = (3, 48, 40)
NORM, GEMMA, BIAS, RES = {"norm": 0.0}, {"norm": 1.0}, {"bias": True}, {"residual": True}
SILU, GELU, TANH = ({"activation": name} for name in ("silu", "gelu", "gelu_tanh"))
ALL = NORM | BIAS | RES | SILU
LINEARS: Rows = {
    **at(
        MAIN,
        {
            "plain": {},
            "norm": NORM,
            "norm_offset": GEMMA,
            "bias": BIAS,
            "residual": RES,
            "silu": SILU,
            "gelu": GELU,
            "gelu_tanh": TANH,
        },
    ),
    "all": (5, 72, 40, ALL),
    "all_offset": (5, 72, 40, ALL | GEMMA | TANH),
    "no_rows": (0, 48, 40, ALL),
    "one_number": (1, 1, 1, ALL),
    "float64": (*MAIN, F64, ALL),
    **{
        f"{name}-{rows}_rows": (rows, 300, 136, *more)
        for rows in (1, 2, 17, 64, 65)
        for name, more in (("bfloat16", (BF16,)), ("bfloat16_all", (BF16, ALL)))
    },
    "bfloat16_one_row-offset": (1, 272, 33, BF16, GEMMA | TANH | BIAS),
    "float16": (2, 272, 33, F16, BIAS | RES | GELU),
    "float16_one_row": (1, 1040, 33, F16, BIAS | SILU),
    "float16_norm": (3, 300, 33, F16, NORM),
    "bfloat16_8_rows": (8, 300, 100, BF16, BIAS | RES),
    "float32_one_row": (1, 700, 50, ALL | GELU),
    "float32_33_rows": (33, 700, 50, ALL),
    "bfloat16_wide": (4, 64, 8000, BF16, NORM),
    "bfloat16_wide_silu": (4, 64, 8000, BF16, NORM | SILU),
    "bfloat16_66_rows_norm": (66, 2100, 72, BF16, NORM | RES),
    "float32_70_rows_offset": (70, 300, 1100, GEMMA | TANH | BIAS),
    "float16_65_rows": (65, 300, 136, F16, NORM | SILU),
    "bfloat16_wide_one_row": (1, 64, 600, BF16, NORM | RES),
}


def _layer(scene: Scene, outs: int, norm: float | None = None) -> Given:
    """outs: how many results. norm: the offset of the gain; None: no norm."""
    source, columns, dtype = scene.source, scene.sizes["In"], scene.f.dtype
    scene.sizes["Out"] = outs * (2 if scene.given.get("activation") else 1)
    if norm is None:
        return {}
    gain = (source.normal(columns, spread=0.2) + 1.0 - norm).to(dtype)
    x = source.normal(scene.sizes["T"], columns, dtype=dtype, spread=3.0)
    return {"x": x, "norm_weight": gain, "norm_eps": 1e-5} | ({"norm_offset": norm} if norm else {})


OFFSET, WIDE, GATE = {"offset": 1.0}, {"wide_gain": True}, {"gate": True}
FEW = (3, 48)
NORMS: Rows = {
    **at(
        FEW,
        {
            "plain": {},
            "offset": OFFSET,
            "wide_gain": WIDE,
            "residual": RES,
            "offset_residual": OFFSET | RES,
            "wide_gain_residual": WIDE | RES,
        },
    ),
    "no_rows": (0, 48, RES),
    "one_number": (1, 1, RES),
    "float64": (*FEW, F64, RES),
    **{
        f"{name}-{rows}_rows": (rows, 300, BF16, *more)
        for rows in (1, 65)
        for name, more in (("bfloat16", ()), ("bfloat16_offset", (OFFSET | RES,)))
    },
    "bfloat16_wide_gain": (5, 2050, BF16, WIDE | RES),
    "bfloat16_of_a_head": (24, 128, BF16),
    "gate": (5, 40, GATE),
    "bfloat16_gate": (24, 128, BF16, GATE),
    "bfloat16_gate_wide_residual": (5, 300, BF16, GATE | WIDE | RES),
    "float16": (5, 300, F16, RES),
    "float16_offset": (5, 2050, F16, OFFSET),
    "float32_wide": (2, 4100, RES),
    "too_wide": (2, 16400, BF16, RES),
}


def _norm(scene: Scene) -> Given:
    source, columns, dtype = scene.source, scene.sizes["In"], scene.f.dtype
    offset = scene.given.get("offset", 0.0)
    gain = (source.normal(columns, spread=0.2) + 1.0 - offset).to(dtype)
    x = source.normal(scene.sizes["T"], columns, dtype=dtype, spread=3.0)
    return {"x": x, "weight": gain, "eps": 1e-5}


CASES = {
    "linear": Grid("T In outs dtype", LINEARS, _layer),
    "rms_norm": Grid("T In dtype", NORMS, _norm),
}
