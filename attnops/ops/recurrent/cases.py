"""The cases of layers that carry a state."""

from __future__ import annotations

from typing import Any

import torch

from attnops.ops.case_data import BF16, F16, F32, F64, Given, Grid, Rows, Scene, at

RAGGED, ONES = (3, 1, 0, 5), (1, 1, 1)
MANY = (1, 0, *(1,) * 8)
"""The tokens of each request of a step. One has none."""
HEADS, FULL = (2, 4, 16, 24), (1, 2, 32, 16)
NORM, FRESH = {"normalize": True}, {"fresh": True}
APART = {"apart": True}
KEPT = {"R": 9, "accepted": ((7, 3), (0, 0), (2, 4), (8, 4))}
"""The second request keeps nothing yet. The third has accepted tokens, and no new ones."""
KEEPS: dict[str, Given] = {
    "kept": KEPT,
    "kept_whole_float16": KEPT | {"padding": None, "slack": 3, "dtype": F16},
    "kept_float64": KEPT | {"dtype": F64},
    "accepted_all": {"R": 10, "accepted": ((5, 5),) * 4},
    "accepted_none": {"R": 5, "accepted": ((4, 0),) * 4, "dtype": BF16},
}
"""Calls of four requests that keep tokens."""
COMMITTED: Given = {"R": 6, "accepted": ((4, 3), (1, 6), (5, 0)), "padding": 0}
"""Accepted tokens, and no new ones."""
RULES: Rows = {
    **at(
        (RAGGED, *HEADS),
        {
            "plain": {},
            "normalized": NORM,
            "scale": {"scale": 0.4},
            "whole": {"padding": None},
            "slack": {"slack": 3},
            "float64": {"dtype": F64},
            "bfloat16": {"dtype": BF16} | NORM,
            "narrow_beta": {"dtype": F32, "beta_dtype": BF16},
            **{label: {**NORM, **each} for label, each in KEEPS.items()},
        },
    ),
    "kept_wide": ((8, 4), 1, 2, 128, 128, BF16, NORM, {"R": 16, "accepted": ((3, 5), (9, 8))}),
    "kept_odd": ((5, 2), 3, 3, 20, 9, {"R": 7, "accepted": ((6, 2), (0, 5))}),
    "committed": ((0, 0, 0), *HEADS, NORM, COMMITTED),
    "step": (ONES, *HEADS, NORM),
    "step_bfloat16": (ONES, *HEADS, BF16, NORM),
    "step_float16": (ONES, *HEADS, F16, NORM),
    "steps": (MANY, 1, 2, 128, 80, NORM),
    "apart": (RAGGED, *HEADS, APART),
    "apart_bfloat16": ((70, 3), 2, 4, 32, 16, BF16, NORM, APART),
    "one_request": ((66,), *FULL, NORM),
    "chunks": ((64, 2, 130), *FULL, NORM),
    "chunks_bfloat16": ((64, 2, 130), *FULL, BF16, NORM),
    "chunks_float16": ((70, 17), *FULL, F16, NORM),
    # A token that comes again and again: powers of the chunk's system are huge, its inverse is not.
    "alike": ((150, 40), *FULL, NORM, {"alike": True}),
    "alike_bfloat16": ((150, 40), *FULL, BF16, NORM, {"alike": True}),
    "forgets": ((100,), *FULL, NORM, {"forgets": 30.0}),
    "fresh": (RAGGED, *HEADS, FRESH),
    "fresh_step": (ONES, *HEADS, FRESH),
    "fresh_bfloat16": ((64, 2, 130), *FULL, BF16, NORM | FRESH),
    "wide": ((70, 3), 1, 2, 40, 72, NORM),
    "between_bfloat16": ((70, 3), 1, 2, 40, 72, BF16, NORM),
    "wide_bfloat16": ((3, 130), 1, 2, 128, 128, BF16, NORM),
    "one_number": ((2, 1), 1, 1, 1, 1),
    "odd": ((5, 20), 3, 3, 20, 9, NORM),
    "no_tokens": ((0, 0), *HEADS, {"padding": 0}),
    "no_tokens_slack": ((0, 0), *HEADS, {"padding": 0, "slack": 3}),
    "no_requests": ((), *HEADS),
}


def _tokens(
    scene: Scene,
    alike: bool = False,
    forgets: float = 1.0,
    apart: bool = False,
    beta_dtype: torch.dtype | None = None,
) -> Given:
    """alike: keys are nearly one key, which is written whole and never forgotten. forgets: the
    largest decay. apart: keys have other strides than queries."""
    source, dtype, sizes = scene.source, scene.f.dtype, scene.sizes
    tokens, width = sizes["T"], sizes["Dk"]
    scene.f = scene.f.__class__(dtype=dtype, head_dim=width)
    # A longer key would make the state grow without end.
    key = source.normal(tokens, sizes["Hk"], width, spread=width**-0.5)
    gates = source.normal(tokens, sizes["Hv"])
    if alike:
        key = key * 0.05 + source.normal(1, sizes["Hk"], width, spread=width**-0.5)
        gates = gates + 4.0
    for field in ("query", "key", "value", "decay", "beta"):
        scene.free[field] = scene.free["tokens"]
    made = {
        "key": _strided(key.to(dtype), apart),
        "decay": -forgets * source.normal(tokens, sizes["Hv"]).sigmoid() * (not alike),
        "beta": gates.sigmoid().to(beta_dtype or dtype),
    }
    if "R" not in sizes:
        return made
    shape = sizes["B"], sizes["R"], sizes["Hv"]
    keys = source.normal(*shape[:2], sizes["Hk"], width, spread=width**-0.5)
    return made | {
        "kept_key": keys.to(dtype),
        "kept_decay": -source.normal(*shape).sigmoid(),
        "kept_beta": source.normal(*shape).sigmoid().to(beta_dtype or dtype),
    }


def _strided(x: torch.Tensor, apart: bool) -> torch.Tensor:
    """`x`, with 16 numbers between its heads if they lie `apart`."""
    return torch.nn.functional.pad(x, (0, 16))[..., : x.shape[-1]] if apart else x


STEPS = {"dt_bias": True, "dt_softplus": True, "d": True}
SCANS: Rows = {
    **at(
        (RAGGED, *HEADS),
        {
            "plain": {},
            "steps": STEPS,
            "limits": STEPS | {"dt_min": 0.2, "dt_max": 0.9},
            "whole": {"padding": None} | STEPS,
            "slack": {"slack": 3},
            "float64": {"dtype": F64} | STEPS,
            "bfloat16": {"dtype": BF16} | STEPS,
            "wide_dt": {"dtype": BF16, "dt_dtype": F32, "dt_bias": F32, "dt_softplus": True},
            "fresh": FRESH,
            **{label: {**STEPS, **each} for label, each in KEEPS.items()},
            "kept_wide_dt": KEPT | {"dtype": BF16, "dt_dtype": F32, "dt_min": 0.2, "dt_max": 0.9},
        },
    ),
    "kept_wide": ((8, 4), 1, 2, 128, 64, BF16, STEPS, {"R": 16, "accepted": ((3, 5), (9, 8))}),
    "committed": ((0, 0, 0), *HEADS, STEPS, COMMITTED),
    "apart": (RAGGED, *HEADS, APART),
    "apart_bfloat16": ((70, 3), 2, 4, 32, 16, BF16, STEPS, APART),
    "step": (ONES, *HEADS, STEPS),
    "step_bfloat16": (ONES, *HEADS, BF16, STEPS),
    "step_float16": (ONES, *HEADS, F16, STEPS),
    "steps": (MANY, 1, 2, 128, 40, STEPS),
    "fresh_step": (ONES, *HEADS, FRESH),
    "chunks": ((64, 2, 130), *FULL, STEPS),
    "chunks_bfloat16": ((64, 2, 130), *FULL, BF16, STEPS),
    "chunks_float16": ((70, 17), *FULL, F16, STEPS | {"dt_max": 0.5}),
    "fresh_bfloat16": ((64, 2, 130), *FULL, BF16, STEPS | FRESH),
    **{
        f"constant_steps_{label}": (lengths, 2, 2, 128, 128, BF16, {"constant": True, **more})
        for label, lengths, more in (
            ("of_a_step", ONES, {}),
            ("by_chunks", (3, 70), {}),
            ("kept", (8, 4), {"R": 16, "accepted": ((3, 5), (9, 8))}),
        )
    },
    "short_steps": ((100,), *FULL, BF16, STEPS, {"longer": -20.0}),
    "long_steps": ((100,), *FULL, BF16, STEPS, {"longer": 20.0}),
    "between_bfloat16": ((70, 3), 1, 2, 40, 72, BF16, STEPS),
    "wide_bfloat16": ((3, 130), 1, 2, 128, 64, BF16, STEPS),
    "widest_bfloat16": ((3, 70), 1, 2, 256, 48, BF16, STEPS),
    "widest_few_bfloat16": ((70,), 1, 2, 144, 32, BF16, STEPS),
    "one_number": ((2, 1), 1, 1, 1, 1),
    "odd": ((5, 20), 3, 3, 20, 9, STEPS),
    "no_tokens": ((0, 0), *HEADS, {"padding": 0}),
    "no_tokens_slack": ((0, 0), *HEADS, {"padding": 0, "slack": 3}),
    "no_requests": ((), *HEADS),
}


def _steps(
    scene: Scene,
    longer: float = 0.0,
    apart: bool = False,
    dt_dtype: torch.dtype | None = None,
    constant: bool = False,
) -> Given:
    """longer: what is added to `dt`. apart: `c` has other strides than `b`. constant: as lightning
    attention, whose steps are 1, one number for all tokens."""
    source, dtype, sizes = scene.source, scene.f.dtype, scene.sizes
    # One number stands in the place of all steps, those of padding among them.
    for field in ("x", "b", "c") if constant else ("x", "dt", "b", "c"):
        scene.free[field] = scene.free["tokens"]
    dt = source.normal(sizes["T"], sizes["Hv"]) + longer
    if not scene.given.get("dt_softplus"):
        dt = dt.abs()
    c = source.normal(sizes["T"], sizes["Hk"], sizes["Dk"], dtype=dtype)
    made = {
        "dt": torch.ones(1, 1, dtype=dtype).expand_as(dt) if constant else dt.to(dt_dtype or dtype),
        "a": -source.normal(sizes["Hv"]).exp(),
        "c": _strided(c, apart),
    }
    if "R" not in sizes:
        return made
    kept_dt = source.normal(sizes["B"], sizes["R"], sizes["Hv"])
    return made | {"kept_dt": kept_dt.to(dt_dtype or dtype)}


WIDE, SILU, BIAS = (RAGGED, 36, 4), {"activation": "silu"}, {"bias": True}
CONVS: Rows = {
    **at(
        WIDE,
        {
            "plain": {},
            "bias": BIAS,
            "silu": SILU,
            "all": BIAS | SILU,
            "whole": {"padding": None},
            "slack": {"slack": 3},
            "longer_state": {"kept": 6},
            "by_channel": {"by_channel": True},
            "fresh": FRESH,
            "fresh_longer": {"kept": 6} | FRESH,
            "float64": {"dtype": F64} | SILU,
            "bfloat16": {"dtype": BF16} | SILU | BIAS,
            "float16": {"dtype": F16} | SILU,
            **{label: {**SILU, **each} for label, each in KEEPS.items()},
            "kept_longer_state": {"kept": 6} | KEPT | BIAS,
        },
    ),
    "committed": ((0, 0, 0), 36, 4, COMMITTED),
    "committed_longer": ((0, 0, 0), 100, 4, BF16, COMMITTED, {"kept": 4}),
    "step": (ONES, 36, 4, SILU),
    "step_bfloat16": (ONES, 100, 4, BF16, SILU, {"kept": 4}),
    "long_bfloat16": ((40, 2, 17), 100, 4, BF16, SILU),
    "one_number": ((2, 1), 1, 1),
    "two": ((5,), 3, 2, BIAS),
    "no_tokens": ((0, 0), 8, 3, {"padding": 0}),
    "no_requests": ((), 8, 3),
}


def _inputs(scene: Scene, kept: int = 0, by_channel: bool = False) -> Given:
    """kept: inputs of the state beyond the window. by_channel: the inputs of a channel follow one
    another in memory."""
    source, dtype, sizes = scene.source, scene.f.dtype, scene.sizes
    x = source.normal(sizes["T"], sizes["C"], dtype=dtype)
    scene.free["x"] = scene.free["tokens"]
    kept = kept or sizes["W"] - 1
    return {
        "x": x.t().contiguous().t() if by_channel else x,
        "state": source.normal(sizes["B"], sizes["C"], kept, dtype=dtype),
    }


def _of_conv(scene: Scene, **more: Any) -> Given:
    return _gradient(scene, more.pop("fresh", False), **_inputs(scene, **more))


def _of_tokens(scene: Scene, fresh: bool = False, **more: Any) -> Given:
    sizes = scene.sizes
    shape = (sizes["B"], sizes["Hv"], sizes["Dk"], sizes["Dv"])
    return _gradient(scene, fresh, **_tokens(scene, **more), state=scene.source.normal(*shape))


def _of_steps(scene: Scene, fresh: bool = False, **more: Any) -> Given:
    sizes = scene.sizes
    shape = (sizes["B"], sizes["Hv"], sizes["Dv"], sizes["Dk"])
    return _gradient(scene, fresh, **_steps(scene, **more), state=scene.source.normal(*shape))


def _gradient(scene: Scene, fresh: bool, state: torch.Tensor, **inputs: Any) -> Given:
    """The inputs of a gradient."""
    scene.free["grad_output"] = scene.free["tokens"]
    after = scene.source.normal(*state.shape, dtype=state.dtype)
    return inputs | {"grad_after": after} | ({} if fresh else {"state": state})


def _trained(rows: Rows) -> Rows:
    """Those of calls that have a gradient: they keep no tokens."""
    return {
        label: row
        for label, row in rows.items()
        if not any(isinstance(part, dict) and "R" in part for part in row)
    }


CASES = {
    "gated_delta_rule": Grid("q_lens Hk Hv Dk Dv dtype", RULES, _tokens),
    "gated_delta_rule_backward": Grid("q_lens Hk Hv Dk Dv dtype", _trained(RULES), _of_tokens),
    "mamba2_scan": Grid("q_lens Hk Hv Dk Dv dtype", SCANS, _steps),
    "mamba2_scan_backward": Grid("q_lens Hk Hv Dk Dv dtype", _trained(SCANS), _of_steps),
    "causal_conv1d": Grid("q_lens C W dtype", CONVS, _inputs),
    "causal_conv1d_backward": Grid("q_lens C W dtype", _trained(CONVS), _of_conv),
}
