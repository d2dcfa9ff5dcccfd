"""Builders and problem grid of the ops on latents (MLA)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from attnops.testing.builders import Batch, Pages
from attnops.testing.inputs import Build, Call, Case, Features, Source, points, table

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
E4M3, INT8 = torch.float8_e4m3fn, torch.int8


def mla(
    source: Source,
    q_lens: Sequence[int],
    seq_lens: Sequence[int],
    page_size: int,
    f: Features,
    padding: int = 2,
    slack: int = 0,
    pages: Pages = Pages(),  # noqa: B008, a tuple
    q_dtype: torch.dtype | None = None,
) -> Call:
    """`mla_attention` of a `builders.Batch`. Of `f.head_dim` numbers the first `f.v_dim` are the latent.

    q_dtype: that of a quantised query, which comes with its scale.
    """
    batch = Batch(q_lens, seq_lens, page_size, padding, slack, pages)
    return batch.call(source, "mla_attention", f if q_dtype is None else replace(f, q_dtype=q_dtype))


def write_latent(
    source: Source,
    slots: Sequence[int],
    pages: int,
    page_size: int,
    f: Features,
    slot_dtype: torch.dtype = torch.int64,
    quantised: bool = False,
) -> Call:
    """`write_latent`. slots: one a token, negative to skip it; the latents of a skipped token are free.

    quantised: the latents are of `f.kv_dtype` already, and views of one tensor.
    """
    kv = f.kv_dtype or f.dtype
    # Some values exceed the range of a quantised dtype by far.
    spread = {INT8: 3.0, E4M3: 60.0}.get(kv, 1.0)
    at = source.ints(slots, slot_dtype)
    arguments: dict[str, Any] = {
        "latent": source.normal(len(slots), f.v_dim, dtype=f.dtype, spread=spread),
        "k_pe": source.normal(len(slots), f.head_dim - f.v_dim, dtype=f.dtype, spread=spread),
        "latent_pages": source.stored(pages, page_size, f.head_dim, dtype=kv),
        "slots": at,
    }
    if quantised:
        both = source.stored(len(slots), f.head_dim, dtype=kv)
        arguments |= {"latent": both[:, : f.v_dim], "k_pe": both[:, f.v_dim :]}
    elif f.kv_dtype is not None:
        arguments["kv_scale"] = source.scales(1, kv)
    skipped = (at < 0)[:, None]
    return Call("write_latent", arguments, {"latent": skipped, "k_pe": skipped})


SMALL = Features(head_dim=20, v_head_dim=16, causal=True)
DEEPSEEK = Features(head_dim=576, v_head_dim=512, q_heads=16, dtype=BF16, causal=True, scale=192**-0.5)
"""The shape that GPU kernels support; the scale is that of the heads before absorption."""

FEATURES = {
    "plain": SMALL,
    "all_keys": replace(SMALL, causal=False),
    "window": replace(SMALL, window=(3, -1)),
    "window_self": replace(SMALL, window=(0, -1)),
    "softcap": replace(SMALL, softcap=1.5),
    "sinks": replace(SMALL, sinks=F32, lse=True),
    "mask_bool": replace(SMALL, mask="bool"),
    "mask_additive": replace(SMALL, mask="additive", lse=True),
    "mask_biases_bfloat16": replace(SMALL, mask="biases", dtype=BF16),
    "lse": replace(SMALL, lse=True),
    "loud": replace(SMALL, loud=True, lse=True),
    "scale": replace(SMALL, scale=0.7),
    "one_head": replace(SMALL, q_heads=1),
    "rope_wider": replace(SMALL, v_head_dim=4),
    "rope_1": replace(SMALL, head_dim=17),
    "float16": replace(SMALL, dtype=F16, lse=True),
    "bfloat16_sinks": replace(SMALL, dtype=BF16, sinks=BF16),
    "float64": replace(SMALL, dtype=F64, lse=True),
    "float8": replace(SMALL, dtype=BF16, kv_dtype=E4M3, lse=True),
    "float8_float32": replace(SMALL, kv_dtype=E4M3),
    "int8": replace(SMALL, dtype=F16, kv_dtype=INT8),
    "all": replace(SMALL, window=(4, -1), softcap=2.0, sinks=F32, lse=True, mask="additive", q_heads=6),
}
TELLING = ("plain", "lse", "all", "float8")


def _mla(q_lens: Sequence[int], seq_lens: Sequence[int], page_size: int, **more: Any) -> Build:
    return lambda source, f: mla(source, q_lens, seq_lens, page_size, f, **more)


MAIN = _mla((1, 4, 0, 2), (6, 4, 0, 21), 16)
SHAPES: dict[str, Build] = {
    "page_1": _mla((1, 3, 2), (5, 3, 9), 1),
    "decode": _mla((1, 1, 1, 1), (5, 1, 40, 16), 16, padding=0),
    "decode_padded": _mla((1, 1, 1), (5, 0, 33), 16, padding=3),
    "decode_idle": _mla((1, 0, 1), (5, 7, 33), 4, padding=1),
    "prefill": _mla((6, 11), (6, 11), 4, slack=2),
    "shared": _mla((2, 2), (9, 13), 4, pages=Pages(shared=True)),
    "no_table": _mla((1, 1), (0, 0), 4, pages=Pages(wider=0)),
    "no_pages": _mla((1, 2), (0, 0), 4, pages=Pages(spare=0)),
    "no_requests": _mla((), (), 4),
    "nothing": _mla((), (), 4, padding=0, pages=Pages(spare=0, wider=0)),
    "float8_query": _mla((1, 3), (6, 3), 4, q_dtype=E4M3),
}

# The head dims of DeepSeek: one decode step on several page sizes, then one thing at a time.
DECODE: dict[str, tuple[Build, Features]] = {
    **{f"page_{n}": (_mla((1, 1, 1), (70, 3, 130), n, padding=0), DEEPSEEK) for n in (1, 16, 32, 64, 128)},
    "lse": (_mla((1, 1, 1), (64, 1, 200), 64, padding=0), replace(DEEPSEEK, lse=True)),
    "float16": (_mla((1, 1), (70, 3), 64, padding=0), replace(DEEPSEEK, dtype=F16)),
    "padded": (_mla((1, 1), (70, 3), 64, padding=2), replace(DEEPSEEK, lse=True)),
    "idle": (_mla((1, 0, 1), (70, 9, 3), 64, padding=1), DEEPSEEK),
    "empty": (_mla((1, 1), (0, 3), 64, padding=0), replace(DEEPSEEK, lse=True)),
    "no_keys": (_mla((1, 1), (0, 0), 64, padding=0), DEEPSEEK),
    "no_table": (_mla((1, 1), (0, 0), 64, padding=0, pages=Pages(wider=0)), replace(DEEPSEEK, lse=True)),
    "no_pages": (_mla((1,), (0,), 64, padding=0, pages=Pages(spare=0)), DEEPSEEK),
    "no_requests": (_mla((), (), 64, slack=1), DEEPSEEK),
    "nothing": (_mla((), (), 64, padding=0, pages=Pages(spare=0, wider=0), slack=1), DEEPSEEK),
    "wide_table": (_mla((1, 1), (70, 3), 64, padding=0, pages=Pages(wider=4)), DEEPSEEK),
    "shared": (_mla((1, 1), (70, 90), 64, padding=0, pages=Pages(shared=True)), DEEPSEEK),
    "one_head": (_mla((1, 1), (70, 3), 64, padding=0), replace(DEEPSEEK, q_heads=1)),
    "heads_128": (_mla((1, 1), (70, 3), 64, padding=0), replace(DEEPSEEK, q_heads=128)),
    "heads_128_page_128": (_mla((1, 1), (70, 140), 128, padding=0), replace(DEEPSEEK, q_heads=128)),
    "loud": (_mla((1, 1), (70, 3), 64, padding=0), replace(DEEPSEEK, loud=True, lse=True)),
    "all_keys": (_mla((1, 1), (70, 3), 64, padding=0), replace(DEEPSEEK, causal=False)),
    "verify": (_mla((3, 3), (70, 3), 64, padding=0), replace(DEEPSEEK, lse=True)),
    **{f"verify_page_{n}": (_mla((2, 4, 1, 3), (70, 9, 130, 64), n, padding=2), DEEPSEEK) for n in (1, 16, 128)},
    "verify_heads_128": (_mla((2, 0, 4), (70, 5, 200), 64, padding=1), replace(DEEPSEEK, q_heads=128, lse=True)),
    "verify_fewer_keys": (_mla((4, 2), (2, 0), 64, padding=0), replace(DEEPSEEK, lse=True)),
    "verify_all_keys": (_mla((4, 2), (9, 70), 64), replace(DEEPSEEK, causal=False)),
    "heads_64": (_mla((1, 1), (70, 130), 64), replace(DEEPSEEK, q_heads=64)),
    "heads_8": (_mla((1, 1), (70, 130), 16), replace(DEEPSEEK, q_heads=8)),
    "extend": (_mla((70, 5), (130, 5), 64, padding=3), replace(DEEPSEEK, lse=True)),
    "extend_float16": (_mla((33, 40), (33, 170), 16), replace(DEEPSEEK, dtype=F16)),
    "extend_heads_128": (_mla((9, 3), (9, 130), 64), replace(DEEPSEEK, q_heads=128)),
    "long": (_mla((1, 1), (1500, 700), 64, padding=0), DEEPSEEK),
    "window": (_mla((1, 3), (70, 130), 64), replace(DEEPSEEK, window=(20, -1), lse=True)),
    "softcap": (_mla((1, 3), (70, 130), 64), replace(DEEPSEEK, softcap=5.0)),
    "sinks": (_mla((1, 3), (70, 2), 64), replace(DEEPSEEK, sinks=BF16, lse=True)),
    "sinks_heads_128": (_mla((1, 1), (70, 2), 64), replace(DEEPSEEK, sinks=F32, q_heads=128)),
    "float8_both": (_mla((1, 1, 1), (70, 3, 200), 64, padding=1, q_dtype=E4M3), replace(DEEPSEEK, kv_dtype=E4M3, lse=True)),
    "float8_both_heads_128": (_mla((1, 1), (70, 3), 64, padding=0, q_dtype=E4M3), replace(DEEPSEEK, kv_dtype=E4M3, q_heads=128)),
    "float8": (_mla((1, 1), (70, 3), 64, padding=0), replace(DEEPSEEK, kv_dtype=E4M3)),
}


def _attention() -> tuple[Case, ...]:
    rows = {n: (MAIN, f) for n, f in FEATURES.items()}
    rows |= {f"{shape}-{n}": (build, FEATURES[n]) for shape, build in SHAPES.items() for n in TELLING if shape != "float8_query"}
    rows |= {f"float8_query-{n}": (SHAPES["float8_query"], FEATURES[n]) for n in ("float8", "float8_float32")}
    return points("mla_attention", rows | {f"deepseek-{n}": point for n, point in DECODE.items()})


MIXED = (7, -1, 0, 11, -1, 5)
WRITES: dict[str, tuple[Any, ...]] = {
    "plain": (MIXED, 4, 3, SMALL),
    "page_1": ((3, 8, 1), 9, 1, SMALL),
    "deepseek": ((70, -1, 3), 2, 64, DEEPSEEK, torch.int32),
    "float16": (MIXED, 4, 3, replace(SMALL, dtype=F16), torch.int32),
    "float64": (MIXED, 4, 3, replace(SMALL, dtype=F64)),
    "rope_1": (MIXED, 4, 3, replace(SMALL, head_dim=17)),
    "all_skipped": ((-1, -1, -1), 4, 3, SMALL),
    "first_slot_skipped": ((-1, 5, -2), 4, 3, SMALL),
    "last_slot": ((11,), 4, 3, SMALL),
    "no_tokens": ((), 4, 3, SMALL),
    "no_pages": ((-1, -1), 0, 3, SMALL),
    "float8": (MIXED, 4, 3, replace(SMALL, kv_dtype=E4M3)),
    "float8_deepseek": ((70, -1, 3), 2, 64, replace(DEEPSEEK, kv_dtype=E4M3)),
    "float8_skipped": ((-1, -1), 4, 3, replace(SMALL, kv_dtype=E4M3)),
    "int8": (MIXED, 4, 3, replace(SMALL, dtype=BF16, kv_dtype=INT8)),
    "int8_float64": (MIXED, 4, 3, replace(SMALL, dtype=F64, kv_dtype=INT8)),
    "quantised": (MIXED, 4, 3, replace(SMALL, kv_dtype=E4M3), {"quantised": True}),
    "quantised_int8": (MIXED, 4, 3, replace(SMALL, kv_dtype=INT8), {"quantised": True, "slot_dtype": torch.int32}),
    "quantised_deepseek": ((70, -1, 3), 2, 64, replace(DEEPSEEK, kv_dtype=E4M3), {"quantised": True}),
    "quantised_rope_1": (MIXED, 4, 3, replace(SMALL, head_dim=17, kv_dtype=E4M3), {"quantised": True}),
    "quantised_skipped": ((-1, -1), 4, 3, replace(SMALL, kv_dtype=E4M3), {"quantised": True}),
    "quantised_no_tokens": ((), 4, 3, replace(DEEPSEEK, kv_dtype=E4M3), {"quantised": True}),
}
LATENT_CASES = {"mla_attention": _attention(), "write_latent": table("write_latent", write_latent, WRITES)}
