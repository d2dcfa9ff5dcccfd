"""The problem grid, `CASES[op]`: every feature on one shape, the important ones on many."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from attnops.testing import builders
from attnops.testing.builders import Pages
from attnops.testing.data_cases import DATA_CASES
from attnops.testing.inputs import Build, Call, Case, Features, Source, points, table
from attnops.testing.latent import LATENT_CASES
from attnops.testing.moves import MOVE_CASES
from attnops.testing.plans import PLAN_CASES
from attnops.testing.rope_quantize import ROPE_QUANTIZE_CASES
from attnops.testing.sparse import SPARSE_CASES
from attnops.testing.vertical_slash import VERTICAL_SLASH_CASES

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
E4M3, E5M2, INT8 = torch.float8_e4m3fn, torch.float8_e5m2, torch.int8


# One feature at a time, then together; the last rows have the head dims and dtypes that GPU kernels are built for.
FEATURES: dict[str, Features] = {
    "plain": Features(),
    "causal": Features(causal=True),
    "window_left": Features(window=(3, -1)),
    "window_right": Features(window=(-1, 1)),
    "window_both": Features(window=(2, 1)),
    "window_self": Features(window=(0, 0)),
    "causal_window": Features(causal=True, window=(3, -1)),
    "causal_window_right": Features(causal=True, window=(3, 2)),
    "softcap": Features(softcap=1.5),
    "sinks": Features(sinks=F32),
    "sinks_narrow": Features(sinks=BF16, dtype=BF16),
    "mask_bool": Features(mask="bool"),
    "mask_additive": Features(mask="additive"),
    "mask_biases": Features(mask="biases"),
    "mask_biases_bfloat16": Features(mask="biases", dtype=BF16, causal=True),
    "mask_causal": Features(mask="bool", causal=True),
    "mask_softcap": Features(mask="additive", softcap=2.0, window=(4, -1)),
    "lse": Features(lse=True),
    "lse_causal": Features(lse=True, causal=True),
    "lse_sinks": Features(lse=True, sinks=F32, causal=True),
    "lse_mask": Features(lse=True, mask="bool"),
    "lse_softcap": Features(lse=True, softcap=1.5),
    "scale": Features(scale=0.7),
    "loud": Features(loud=True, lse=True),
    "loud_sdpa": Features(loud=True),
    "mha": Features(kv_heads=4),
    "one_head": Features(q_heads=1, kv_heads=1),
    "group_3": Features(q_heads=6, kv_heads=2, causal=True),
    "group_8": Features(q_heads=8, kv_heads=1, causal=True, lse=True),
    "v_wider": Features(v_head_dim=24, causal=True),
    "v_narrower": Features(v_head_dim=8, lse=True),
    "head_dim_1": Features(head_dim=1),
    "head_dim_odd": Features(head_dim=17, causal=True),
    "float16": Features(dtype=F16),
    "float64": Features(dtype=F64),
    "float64_lse": Features(dtype=F64, causal=True, lse=True),
    "bfloat16_lse": Features(dtype=BF16, lse=True, causal=True),
    "bfloat16_mask": Features(dtype=BF16, mask="additive", causal=True),
    "float16_all": Features(dtype=F16, causal=True, window=(4, -1), softcap=2.0, sinks=F16, lse=True, q_heads=8),
    "all": Features(causal=True, window=(4, -1), softcap=2.0, sinks=F32, lse=True, q_heads=8, v_head_dim=24),
    "all_mask": Features(causal=True, window=(4, -1), softcap=2.0, sinks=F32, lse=True, mask="additive"),
    "float8": Features(dtype=BF16, kv_dtype=E4M3, causal=True, head_dim=64),
    "float8_one_scale": Features(dtype=F32, kv_dtype=E4M3, scale_per_head=False, lse=True),
    "float8_e5m2": Features(dtype=F16, kv_dtype=E5M2, causal=True),
    "int8": Features(dtype=BF16, kv_dtype=INT8, causal=True),
    "int8_all": Features(dtype=F32, kv_dtype=INT8, causal=True, window=(4, -1), softcap=2.0, sinks=F32, lse=True, v_head_dim=8),
    "chunk": Features(causal=True, chunk=3),
    "chunk_both_sides": Features(chunk=4, lse=True),
    "chunk_window": Features(causal=True, chunk=4, window=(2, -1), softcap=1.5, lse=True),
    "bfloat16_d64_chunk": Features(dtype=BF16, head_dim=64, q_heads=8, causal=True, chunk=5, lse=True),
    "float8_query": Features(dtype=BF16, q_dtype=E4M3, kv_dtype=E4M3, causal=True, head_dim=64),
    "float8_query_lse": Features(dtype=BF16, q_dtype=E4M3, kv_dtype=E4M3, causal=True, head_dim=128, q_heads=8, lse=True),
    "float8_query_one_scale": Features(dtype=BF16, q_dtype=E4M3, kv_dtype=E4M3, head_dim=64, scale_per_head=False, window=(4, -1)),
    "float8_query_int8": Features(dtype=BF16, q_dtype=E4M3, kv_dtype=INT8, softcap=2.0),
    "bfloat16_d64": Features(dtype=BF16, head_dim=64, q_heads=8, causal=True),
    "float16_d128": Features(dtype=F16, head_dim=128, q_heads=8, causal=True),
    "bfloat16_d128_lse": Features(dtype=BF16, head_dim=128, q_heads=8, kv_heads=1, causal=True, lse=True),
    "bfloat16_d64_window_sinks": Features(dtype=BF16, head_dim=64, q_heads=8, kv_heads=1, causal=True, window=(7, -1), sinks=BF16),
    "bfloat16_d128_softcap": Features(dtype=BF16, head_dim=128, softcap=30.0, causal=True, scale=0.2),
}

# The shapes below are tried with these besides the plain one.
TELLING = ("plain", "lse_causal", "window_both", "all", "mask_additive", "bfloat16_d64")


def _grid(main: Build, shapes: dict[str, Build]) -> dict[str, tuple[Build, Features]]:
    """Every feature on the main shape, the important ones on the other shapes."""
    rows = {name: (main, f) for name, f in FEATURES.items()}
    return rows | {f"{shape}-{name}": (build, FEATURES[name]) for shape, build in shapes.items() for name in TELLING}


def _dense(batch: int, queries: int, keys: int, **more: Any) -> Build:
    return lambda source, f: builders.dense(source, batch, queries, keys, f, **more)


def _varlen(q_lens: Sequence[int], k_lens: Sequence[int], **more: Any) -> Build:
    return lambda source, f: builders.varlen(source, q_lens, k_lens, f, **more)


def _paged(q_lens: Sequence[int], seq_lens: Sequence[int], page_size: int, **more: Any) -> Build:
    return lambda source, f: builders.paged(source, q_lens, seq_lens, page_size, f, **more)


DENSE_SHAPES: dict[str, Build] = {
    "square": _dense(2, 9, 9),
    "tall": _dense(2, 7, 4),
    "decode": _dense(3, 1, 13),
    "one": _dense(1, 1, 1),
    "long": _dense(1, 33, 130),
    "no_keys": _dense(2, 3, 0),
    "no_queries": _dense(2, 0, 5),
    "no_batch": _dense(0, 3, 5),
    "range": _dense(3, 4, 11, start=(0, 2, 5), end=(11, 9, 5)),
    "range_end": _dense(2, 3, 8, end=(8, 4), range_dtype=torch.int64),
    "range_start": _dense(2, 8, 8, start=(3, 0)),
}
VARLEN_SHAPES: dict[str, Build] = {
    "self": _varlen((5, 1, 8), (5, 1, 8), padding=(0, 0)),
    "self_padded": _varlen((5, 1, 8), (5, 1, 8), padding=(4, 4)),
    "decode": _varlen((1, 1, 1), (6, 1, 12), slack=3),
    "tight": _varlen((5, 0, 8), (5, 3, 70), padding=(0, 0), promise=True),
    "fewer_keys": _varlen((5, 3), (2, 0)),
    "one": _varlen((1,), (1,), padding=(0, 0)),
    "long": _varlen((40, 3), (70, 130)),
    "all_empty": _varlen((0, 0), (0, 0)),
    "no_keys": _varlen((3, 1), (0, 0), padding=(0, 0)),
    "no_requests": _varlen((), ()),
    "nothing": _varlen((), (), padding=(0, 0)),
}
PAGED_SHAPES: dict[str, Build] = {
    "page_1": _paged((1, 3, 2), (5, 3, 9), 1),
    "page_3": _paged((1, 3, 0, 2), (5, 3, 0, 7), 3, pages=Pages(interleaved=True)),
    "page_64": _paged((2, 1), (3, 70), 64),
    "decode": _paged((1, 1, 1, 1), (5, 1, 40, 16), 16, padding=0),
    "tight": _paged((1, 0, 3), (5, 2, 70), 64, padding=0, promise=True),
    "decode_promised": _paged((1, 1, 1), (5, 0, 33), 16, padding=0, promise=True),
    "decode_padded": _paged((1, 1, 1), (5, 0, 33), 16, padding=3),
    "prefill": _paged((6, 11), (6, 11), 4, slack=2),
    "shared": _paged((2, 2), (9, 13), 4, pages=Pages(shared=True)),
    "no_table": _paged((1, 1), (0, 0), 4, pages=Pages(wider=0)),
    "no_pages": _paged((1, 2), (0, 0), 4, pages=Pages(spare=0)),
    "no_requests": _paged((), (), 4),
    "nothing": _paged((), (), 4, padding=0, pages=Pages(spare=0, wider=0)),
}
_MASKS = {
    f"mask_{kind}_{shape or 'keys'}": replace(FEATURES["plain"], mask=kind, mask_shape=shape)
    for kind in ("bool", "additive")
    for shape in ("b", "h", "bq", "q", "")
}


DENSE, VARLEN = _dense(2, 5, 11), _varlen((3, 0, 5, 1), (7, 2, 5, 4))
PAGED = _paged((1, 4, 0, 2), (6, 4, 0, 21), 16)
TEMPERED = {
    f"{shape}temperature{name}": (build, replace(f, temperature=True))
    for shape, build in (("", PAGED), ("decode_padded-", PAGED_SHAPES["decode_padded"]))
    for name, f in (("", Features(causal=True)), ("_all", replace(FEATURES["all_mask"], softcap=30.0, scale=4.0)))
}


def _backward(op: str, main: Build, shapes: dict[str, Build], *shaped: str) -> tuple[Case, ...]:
    """Gradients of forward calls of float dtypes. shaped: the features that the shapes other than `main` are tried with."""
    rows = {n: (main, f) for n, f in FEATURES.items() if f.kv_dtype is None and not f.lse}
    rows |= {f"{s}-{n}": (b, FEATURES[n]) for s, b in shapes.items() for n in shaped}
    found: dict[str, tuple[Any, ...]] = {n: (*row, {}) for n, row in rows.items()}
    for name in ("plain", "causal", "all", "float16_all", "float64_lse"):
        found[f"{name}-lse_grad"] = (main, FEATURES[name], {"lse_grad": True})
    additive = {n: f for n, f in (FEATURES | _MASKS).items() if f.mask == "additive" and op == "attention"}
    found |= {f"{n}-mask_grad": (main, f, {"mask_grad": True}) for n, f in additive.items()}

    def build(source: Source, forward: Build, f: Features, **flags: bool) -> Call:
        return builders.backward(source, forward(source, f), **flags)

    return table(f"{op}_backward", build, found)


CASES: dict[str, tuple[Case, ...]] = {
    "attention": points("attention", _grid(DENSE, DENSE_SHAPES) | {n: (DENSE, f) for n, f in _MASKS.items()}),
    "attention_backward": _backward("attention", DENSE, DENSE_SHAPES, "plain", "causal", "mask_additive"),
    "varlen_attention": points("varlen_attention", _grid(VARLEN, VARLEN_SHAPES)),
    "varlen_attention_backward": _backward("varlen_attention", VARLEN, VARLEN_SHAPES, "plain", "causal"),
    "paged_attention": points("paged_attention", _grid(PAGED, PAGED_SHAPES) | TEMPERED),
    **LATENT_CASES,
    **SPARSE_CASES,
    **ROPE_QUANTIZE_CASES,
    **PLAN_CASES,
    **DATA_CASES,
    **MOVE_CASES,
    **VERTICAL_SLASH_CASES,
}
"""The grid of every op by name."""
