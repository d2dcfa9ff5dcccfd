"""The problem grid, `CASES[op]`: every feature on one shape, the important ones on many."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from attnops.core.kernel import kernels_of
from attnops.testing import builders
from attnops.testing.builders import Pages
from attnops.testing.calls import plan_call
from attnops.testing.case import Call, Case, Features as F, Rows, Source, crossed, table
from attnops.testing.data_cases import DATA_CASES
from attnops.testing.decode import DECODE_CASES
from attnops.testing.experts import EXPERTS_CASES
from attnops.testing.latent import DEEPSEEK, LATENT_CASES
from attnops.testing.linear import LINEAR_CASES
from attnops.testing.route import ROUTE_CASES

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
E4M3, E5M2, INT8 = torch.float8_e4m3fn, torch.float8_e5m2, torch.int8

# One feature at a time, then together; the last rows have the head dims and dtypes that GPU kernels are built for.
FEATURES: dict[str, F] = {
    "plain": F(), "causal": F(causal=True), "window_left": F(window=(3, -1)), "window_right": F(window=(-1, 1)),
    "window_both": F(window=(2, 1)), "window_self": F(window=(0, 0)), "causal_window": F(causal=True, window=(3, -1)),
    "causal_window_right": F(causal=True, window=(3, 2)), "softcap": F(softcap=1.5), "sinks": F(sinks=F32),
    "sinks_narrow": F(sinks=BF16, dtype=BF16), "mask_bool": F(mask="bool"), "mask_additive": F(mask="additive"),
    "mask_biases": F(mask="biases"), "mask_biases_bfloat16": F(mask="biases", dtype=BF16, causal=True),
    "mask_causal": F(mask="bool", causal=True), "mask_softcap": F(mask="additive", softcap=2.0, window=(4, -1)), "lse": F(lse=True),
    "lse_causal": F(lse=True, causal=True), "lse_sinks": F(lse=True, sinks=F32, causal=True), "lse_mask": F(lse=True, mask="bool"),
    "lse_softcap": F(lse=True, softcap=1.5), "scale": F(scale=0.7), "loud": F(loud=True, lse=True), "loud_sdpa": F(loud=True),
    "mha": F(kv_heads=4), "one_head": F(q_heads=1, kv_heads=1), "group_3": F(q_heads=6, kv_heads=2, causal=True),
    "group_8": F(q_heads=8, kv_heads=1, causal=True, lse=True), "v_wider": F(v_head_dim=24, causal=True),
    "v_narrower": F(v_head_dim=8, lse=True), "head_dim_1": F(head_dim=1), "head_dim_odd": F(head_dim=17, causal=True),
    "float16": F(dtype=F16), "float64": F(dtype=F64), "float64_lse": F(dtype=F64, causal=True, lse=True),
    "bfloat16_lse": F(dtype=BF16, lse=True, causal=True), "bfloat16_mask": F(dtype=BF16, mask="additive", causal=True),
    "float16_all": F(dtype=F16, causal=True, window=(4, -1), softcap=2.0, sinks=F16, lse=True, q_heads=8),
    "all": F(causal=True, window=(4, -1), softcap=2.0, sinks=F32, lse=True, q_heads=8, v_head_dim=24),
    "all_mask": F(causal=True, window=(4, -1), softcap=2.0, sinks=F32, lse=True, mask="additive"),
    "float8": F(dtype=BF16, kv_dtype=E4M3, causal=True, head_dim=64),
    "float8_one_scale": F(dtype=F32, kv_dtype=E4M3, scale_per_head=False, lse=True),
    "float8_e5m2": F(dtype=F16, kv_dtype=E5M2, causal=True), "int8": F(dtype=BF16, kv_dtype=INT8, causal=True),
    "int8_all": F(dtype=F32, kv_dtype=INT8, causal=True, window=(4, -1), softcap=2.0, sinks=F32, lse=True, v_head_dim=8),
    "chunk": F(causal=True, chunk=3), "chunk_both_sides": F(chunk=4, lse=True),
    "chunk_window": F(causal=True, chunk=4, window=(2, -1), softcap=1.5, lse=True),
    "bfloat16_d64_chunk": F(dtype=BF16, head_dim=64, q_heads=8, causal=True, chunk=5, lse=True),
    "float8_query": F(dtype=BF16, q_dtype=E4M3, kv_dtype=E4M3, causal=True, head_dim=64),
    "float8_query_lse": F(dtype=BF16, q_dtype=E4M3, kv_dtype=E4M3, causal=True, head_dim=128, q_heads=8, lse=True),
    "float8_query_one_scale": F(dtype=BF16, q_dtype=E4M3, kv_dtype=E4M3, head_dim=64, scale_per_head=False, window=(4, -1)),
    "float8_query_int8": F(dtype=BF16, q_dtype=E4M3, kv_dtype=INT8, softcap=2.0),
    "bfloat16_d64": F(dtype=BF16, head_dim=64, q_heads=8, causal=True), "float16_d128": F(dtype=F16, head_dim=128, q_heads=8, causal=True),
    "bfloat16_d128_lse": F(dtype=BF16, head_dim=128, q_heads=8, kv_heads=1, causal=True, lse=True),
    "bfloat16_d64_window_sinks": F(dtype=BF16, head_dim=64, q_heads=8, kv_heads=1, causal=True, window=(7, -1), sinks=BF16),
    "bfloat16_d128_softcap": F(dtype=BF16, head_dim=128, softcap=30.0, causal=True, scale=0.2),
    # What the tests of other projects ask for, and few kernels take.
    "head_dim_2": F(head_dim=2, causal=True, lse=True), "head_dim_3": F(head_dim=3, mask="additive", lse=True),
    "float16_d111_group_3": F(dtype=F16, head_dim=111, q_heads=6, kv_heads=2, causal=True, window=(5, -1), softcap=15.0, lse=True),
    "bfloat16_d256_mask_softcap": F(dtype=BF16, head_dim=256, mask="additive", softcap=30.0, lse=True),
    "bfloat16_d512": F(dtype=BF16, head_dim=512, causal=True, softcap=30.0, lse=True),
    "bfloat16_d576": F(dtype=BF16, head_dim=576, v_head_dim=512, q_heads=6, kv_heads=2, causal=True, lse=True),
    "float16_d320": F(dtype=F16, head_dim=320, v_head_dim=40, window=(2, 3), sinks=F32),
    "float8_d576": F(dtype=BF16, kv_dtype=E4M3, head_dim=576, v_head_dim=512, q_heads=8, kv_heads=1, causal=True),
    "float8_query_d40": F(dtype=BF16, q_dtype=E4M3, kv_dtype=E4M3, head_dim=40, causal=True, lse=True),
    "float8_query_windows": F(dtype=BF16, q_dtype=E4M3, kv_dtype=E4M3, head_dim=64, v_head_dim=32, window=(3, 2), lse=True),
    "float8_query_mask": F(dtype=BF16, q_dtype=E4M3, kv_dtype=E4M3, head_dim=64, mask="bool", softcap=5.0, sinks=F32),
}  # fmt: skip

# The shapes below are tried with these besides the plain one.
TELLING = {n: FEATURES[n] for n in ("plain", "lse_causal", "window_both", "all", "mask_additive", "bfloat16_d64")}

DENSE, VARLEN, PAGED = (2, 5, 11), ((3, 0, 5, 1), (7, 2, 5, 4)), ((1, 4, 0, 2), (6, 4, 0, 21), 16)
NO_TABLE, NO_PAGES = {"pages": Pages(wider=0)}, {"pages": Pages(spare=0)}
DENSE_SHAPES: Rows = {
    "square": (2, 9, 9), "tall": (2, 7, 4), "decode": (3, 1, 13), "one": (1, 1, 1), "long": (1, 33, 130), "no_keys": (2, 3, 0),
    "no_queries": (2, 0, 5), "no_batch": (0, 3, 5), "range": (3, 4, 11, {"start": (0, 2, 5), "end": (11, 9, 5)}),
    "range_end": (2, 3, 8, {"end": (8, 4), "range_dtype": torch.int64}), "range_start": (2, 8, 8, {"start": (3, 0)}),
}  # fmt: skip
VARLEN_SHAPES: Rows = {
    "self": ((5, 1, 8), (5, 1, 8), {"padding": (0, 0)}), "self_padded": ((5, 1, 8), (5, 1, 8), {"padding": (4, 4)}),
    "decode": ((1, 1, 1), (6, 1, 12), {"slack": 3}), "tight": ((5, 0, 8), (5, 3, 70), {"padding": None}), "fewer_keys": ((5, 3), (2, 0)),
    "one": ((1,), (1,), {"padding": (0, 0)}), "long": ((40, 3), (70, 130)), "all_empty": ((0, 0), (0, 0)),
    "no_keys": ((3, 1), (0, 0), {"padding": (0, 0)}), "no_requests": ((), ()), "nothing": ((), (), {"padding": (0, 0)}),
}  # fmt: skip
PAGED_SHAPES: Rows = {
    "page_1": ((1, 3, 2), (5, 3, 9), 1), "page_3": ((1, 3, 0, 2), (5, 3, 0, 7), 3, {"pages": Pages(interleaved=True)}),
    "page_64": ((2, 1), (3, 70), 64), "decode": ((1, 1, 1, 1), (5, 1, 40, 16), 16, {"padding": 0}),
    "tight": ((1, 0, 3), (5, 2, 70), 64, {"padding": None}), "decode_promised": ((1, 1, 1), (5, 0, 33), 16, {"padding": None}),
    "decode_padded": ((1, 1, 1), (5, 0, 33), 16, {"padding": 3}), "prefill": ((6, 11), (6, 11), 4, {"slack": 2}),
    "shared": ((2, 2), (9, 13), 4, {"pages": Pages(shared=True)}), "no_table": ((1, 1), (0, 0), 4, NO_TABLE),
    "no_pages": ((1, 2), (0, 0), 4, NO_PAGES), "no_requests": ((), (), 4),
    "nothing": ((), (), 4, {"padding": 0, "pages": Pages(spare=0, wider=0)}),
}  # fmt: skip
_MASKS = {
    f"mask_{kind}_{shape or 'keys'}": F(mask=kind, mask_shape=shape) for kind in ("bool", "additive") for shape in ("b", "h", "bq", "q", "")
}
TEMPERED: Rows = {
    f"{shape}temperature{name}": (*row, replace(f, temperature=True))
    for shape, row in (("", PAGED), ("decode_padded-", PAGED_SHAPES["decode_padded"]))
    for name, f in (("", F(causal=True)), ("_all", replace(FEATURES["all_mask"], softcap=30.0, scale=4.0)))
}


def _grid(main: tuple[Any, ...], shapes: Rows) -> Rows:
    """Every feature on the main shape, the important ones on the other shapes."""
    return {name: (*main, f) for name, f in FEATURES.items()} | crossed(shapes, TELLING)


def _backward(forward: Callable[..., Call], op: str, main: tuple[Any, ...], shapes: Rows, *shaped: str) -> tuple[Case, ...]:
    """Gradients of forward calls of float dtypes. shaped: the features that the shapes other than `main` are tried with."""
    rows = {n: (*main, f) for n, f in FEATURES.items() if f.kv_dtype is None and not f.lse}
    rows |= crossed(shapes, {n: FEATURES[n] for n in shaped})
    telling = ("plain", "causal", "all", "float16_all", "float64_lse")
    rows |= {f"{n}-lse_grad": (*main, FEATURES[n], {"lse_grad": True}) for n in telling}
    if op == "attention":
        rows |= {f"{n}-mask_grad": (*main, f, {"mask_grad": True}) for n, f in (FEATURES | _MASKS).items() if f.mask == "additive"}

    def build(source: Source, *lengths: Any, mask_grad: bool = False, lse_grad: bool = False, **more: Any) -> Call:
        return builders.backward(source, forward(source, *lengths, **more), mask_grad, lse_grad)

    return table(f"{op}_backward", build, rows)


def _plan(attention: Callable[..., Call], words: int, gpu_bytes: int) -> Callable[..., Call]:
    def build(source: Source, *lengths: Any, **more: Any) -> Call:
        call = attention(source, *lengths, **more)
        # Enough for any kernel: on a GPU, some bytes for each multiprocessor.
        size = gpu_bytes if source.device.type == "cuda" else 1 << 21
        buffers = torch.zeros(words, dtype=torch.int64), torch.zeros(size, dtype=torch.uint8, device=source.device)
        return plan_call(call, kernels_of(f"plan_{call.op}")["reference"], buffers)

    return build


_LLAMA = F(dtype=BF16, head_dim=128, q_heads=8, causal=True)
_NOTHING = {"padding": 0, "pages": Pages(0, 0)}
PLANS: Rows = {
    "decode": ((1, 1, 1), (5, 40, 16), 16, _LLAMA), "decode_padded": ((1, 0, 1), (5, 3, 33), 16, _LLAMA),
    "extend": ((1, 4, 0, 2), (6, 4, 0, 21), 16, _LLAMA), "window": ((1, 4), (6, 40), 16, replace(_LLAMA, window=(7, -1))),
    "sinks": ((1, 4), (6, 40), 16, replace(_LLAMA, sinks=BF16)),
    "softcap": ((1, 4), (6, 40), 16, replace(_LLAMA, softcap=30.0, dtype=F16, head_dim=64)),
    "not_causal": ((1, 4), (6, 40), 1, replace(_LLAMA, causal=False, head_dim=256)),
    "unlike_dims": ((3, 4), (6, 40), 64, replace(_LLAMA, head_dim=192, v_head_dim=128)), "no_requests": ((), (), 4, _LLAMA),
    "no_table": ((1, 1), (0, 0), 4, _LLAMA, NO_TABLE), "nothing": ((), (), 4, _LLAMA, _NOTHING),
}  # fmt: skip
LATENT_PLANS: Rows = {
    "decode": ((1, 1, 1), (5, 40, 16), 16, DEEPSEEK), "decode_padded": ((1, 0, 1), (5, 3, 33), 64, DEEPSEEK),
    "decode_heads_128": ((1, 1), (5, 300), 64, replace(DEEPSEEK, q_heads=128)), "extend": ((1, 4, 0, 2), (6, 4, 0, 21), 1, DEEPSEEK),
    "not_causal": ((1, 4), (6, 40), 64, replace(DEEPSEEK, causal=False, dtype=F16)), "no_requests": ((), (), 64, DEEPSEEK),
    "no_table": ((1, 1), (0, 0), 64, DEEPSEEK, NO_TABLE), "nothing": ((), (), 64, DEEPSEEK, _NOTHING),
}  # fmt: skip

CASES: dict[str, tuple[Case, ...]] = {
    "attention": table("attention", builders.dense, _grid(DENSE, DENSE_SHAPES) | {n: (*DENSE, f) for n, f in _MASKS.items()}),
    "attention_backward": _backward(builders.dense, "attention", DENSE, DENSE_SHAPES, "plain", "causal", "mask_additive"),
    "varlen_attention": table("varlen_attention", builders.varlen, _grid(VARLEN, VARLEN_SHAPES)),
    "varlen_attention_backward": _backward(builders.varlen, "varlen_attention", VARLEN, VARLEN_SHAPES, "plain", "causal"),
    "paged_attention": table("paged_attention", builders.paged, _grid(PAGED, PAGED_SHAPES) | TEMPERED),
    "plan_paged_attention": table("plan_paged_attention", _plan(builders.paged, 1 << 15, 1 << 26), PLANS),
    "plan_mla_attention": table("plan_mla_attention", _plan(builders.mla, 1 << 17, 1 << 25), LATENT_PLANS),
    "decode_attention": DECODE_CASES,
    **LATENT_CASES,
    **DATA_CASES,
    **LINEAR_CASES,
    **EXPERTS_CASES,
    **ROUTE_CASES,
}
"""The grid of every op by name."""
