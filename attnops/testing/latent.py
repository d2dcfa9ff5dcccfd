"""The problem grid of the ops on latents (MLA)."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch

from attnops.testing import builders
from attnops.testing.builders import Pages
from attnops.testing.case import Case, Features, Rows, crossed, table

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
E4M3, INT8, I32 = torch.float8_e4m3fn, torch.int8, {"slot_dtype": torch.int32}

SMALL = Features(head_dim=20, v_head_dim=16, causal=True)
DEEPSEEK = Features(head_dim=576, v_head_dim=512, q_heads=16, dtype=BF16, causal=True, scale=192**-0.5)
"""The shape that GPU kernels support; the scale is that of the heads before absorption."""
PACKABLE = replace(SMALL, head_dim=136, v_head_dim=128, dtype=BF16)
small, deepseek, packable = partial(replace, SMALL), partial(replace, DEEPSEEK), partial(replace, PACKABLE)

FEATURES = {
    "plain": SMALL, "all_keys": small(causal=False), "window": small(window=(3, -1)), "window_self": small(window=(0, -1)),
    "softcap": small(softcap=1.5), "sinks": small(sinks=F32, lse=True), "mask_bool": small(mask="bool"),
    "mask_additive": small(mask="additive", lse=True), "mask_biases_bfloat16": small(mask="biases", dtype=BF16), "lse": small(lse=True),
    "loud": small(loud=True, lse=True), "scale": small(scale=0.7), "one_head": small(q_heads=1), "rope_wider": small(v_head_dim=4),
    "rope_1": small(head_dim=17), "float16": small(dtype=F16, lse=True), "bfloat16_sinks": small(dtype=BF16, sinks=BF16),
    "float64": small(dtype=F64, lse=True), "float8": small(dtype=BF16, kv_dtype=E4M3, lse=True), "float8_float32": small(kv_dtype=E4M3),
    "int8": small(dtype=F16, kv_dtype=INT8), "all": small(window=(4, -1), softcap=2.0, sinks=F32, lse=True, mask="additive", q_heads=6),
}  # fmt: skip
TIGHT, NO_TABLE, NO_PAGES = {"padding": 0}, {"pages": Pages(wider=0)}, {"pages": Pages(spare=0)}
MAIN = ((1, 4, 0, 2), (6, 4, 0, 21), 16)
FLOAT8_QUERY, PAIR = ((1, 3), (6, 3), 4), ((1, 1), (70, 3), 64, TIGHT)
SHAPES: Rows = {
    "page_1": ((1, 3, 2), (5, 3, 9), 1), "decode": ((1, 1, 1, 1), (5, 1, 40, 16), 16, TIGHT),
    "decode_padded": ((1, 1, 1), (5, 0, 33), 16, {"padding": 3}), "decode_idle": ((1, 0, 1), (5, 7, 33), 4, {"padding": 1}),
    "prefill": ((6, 11), (6, 11), 4, {"slack": 2}), "shared": ((2, 2), (9, 13), 4, {"pages": Pages(shared=True)}),
    "no_table": ((1, 1), (0, 0), 4, NO_TABLE), "no_pages": ((1, 2), (0, 0), 4, NO_PAGES), "no_requests": ((), (), 4),
    "nothing": ((), (), 4, {"padding": 0, "pages": Pages(spare=0, wider=0)}),
}  # fmt: skip

# The head dims of DeepSeek: one decode step on several page sizes, then one thing at a time.
DECODE: Rows = {
    **{f"page_{n}": ((1, 1, 1), (70, 3, 130), n, TIGHT, DEEPSEEK) for n in (1, 16, 32, 64, 128)},
    "lse": ((1, 1, 1), (64, 1, 200), 64, TIGHT, deepseek(lse=True)), "float16": (*PAIR, deepseek(dtype=F16)),
    "padded": ((1, 1), (70, 3), 64, {"padding": 2}, deepseek(lse=True)), "idle": ((1, 0, 1), (70, 9, 3), 64, {"padding": 1}, DEEPSEEK),
    "empty": ((1, 1), (0, 3), 64, TIGHT, deepseek(lse=True)), "no_keys": ((1, 1), (0, 0), 64, TIGHT, DEEPSEEK),
    "no_table": ((1, 1), (0, 0), 64, {"padding": 0, "pages": Pages(wider=0)}, deepseek(lse=True)),
    "no_pages": ((1,), (0,), 64, {"padding": 0, "pages": Pages(spare=0)}, DEEPSEEK), "no_requests": ((), (), 64, {"slack": 1}, DEEPSEEK),
    "nothing": ((), (), 64, {"padding": 0, "pages": Pages(spare=0, wider=0), "slack": 1}, DEEPSEEK),
    "wide_table": ((1, 1), (70, 3), 64, {"padding": 0, "pages": Pages(wider=4)}, DEEPSEEK),
    "shared": ((1, 1), (70, 90), 64, {"padding": 0, "pages": Pages(shared=True)}, DEEPSEEK), "one_head": (*PAIR, deepseek(q_heads=1)),
    "heads_128": (*PAIR, deepseek(q_heads=128)), "heads_128_page_128": ((1, 1), (70, 140), 128, TIGHT, deepseek(q_heads=128)),
    "loud": (*PAIR, deepseek(loud=True, lse=True)), "all_keys": (*PAIR, deepseek(causal=False)),
    "verify": ((3, 3), (70, 3), 64, TIGHT, deepseek(lse=True)),
    **{f"verify_page_{n}": ((2, 4, 1, 3), (70, 9, 130, 64), n, {"padding": 2}, DEEPSEEK) for n in (1, 16, 128)},
    "verify_heads_128": ((2, 0, 4), (70, 5, 200), 64, {"padding": 1}, deepseek(q_heads=128, lse=True)),
    "verify_fewer_keys": ((4, 2), (2, 0), 64, TIGHT, deepseek(lse=True)), "verify_all_keys": ((4, 2), (9, 70), 64, deepseek(causal=False)),
    "heads_64": ((1, 1), (70, 130), 64, deepseek(q_heads=64)), "heads_8": ((1, 1), (70, 130), 16, deepseek(q_heads=8)),
    "extend": ((70, 5), (130, 5), 64, {"padding": 3}, deepseek(lse=True)), "extend_float16": ((33, 40), (33, 170), 16, deepseek(dtype=F16)),
    "extend_heads_128": ((9, 3), (9, 130), 64, deepseek(q_heads=128)), "long": ((1, 1), (1500, 700), 64, TIGHT, DEEPSEEK),
    "window": ((1, 3), (70, 130), 64, deepseek(window=(20, -1), lse=True)), "softcap": ((1, 3), (70, 130), 64, deepseek(softcap=5.0)),
    "sinks": ((1, 3), (70, 2), 64, deepseek(sinks=BF16, lse=True)),
    "sinks_heads_128": ((1, 1), (70, 2), 64, deepseek(sinks=F32, q_heads=128)),
    "float8_both": ((1, 1, 1), (70, 3, 200), 64, {"padding": 1}, deepseek(q_dtype=E4M3, kv_dtype=E4M3, lse=True)),
    "float8_both_heads_128": (*PAIR, deepseek(q_dtype=E4M3, kv_dtype=E4M3, q_heads=128)), "float8": (*PAIR, deepseek(kv_dtype=E4M3)),
}  # fmt: skip


def _attention() -> tuple[Case, ...]:
    rows: Rows = {n: (*MAIN, f) for n, f in FEATURES.items()}
    rows |= crossed(SHAPES, {n: FEATURES[n] for n in ("plain", "lse", "all", "float8")})
    rows |= {f"float8_query-{n}": (*FLOAT8_QUERY, replace(FEATURES[n], q_dtype=E4M3)) for n in ("float8", "float8_float32")}
    return table("mla_attention", builders.mla, rows | {f"deepseek-{n}": row for n, row in DECODE.items()})


MIXED, QUANTISED = (7, -1, 0, 11, -1, 5), {"quantised": True}
WRITES: Rows = {
    "plain": (MIXED, 4, 3, SMALL), "page_1": ((3, 8, 1), 9, 1, SMALL), "deepseek": ((70, -1, 3), 2, 64, DEEPSEEK, I32),
    "float16": (MIXED, 4, 3, small(dtype=F16), I32), "float64": (MIXED, 4, 3, small(dtype=F64)),
    "rope_1": (MIXED, 4, 3, small(head_dim=17)), "all_skipped": ((-1, -1, -1), 4, 3, SMALL),
    "first_slot_skipped": ((-1, 5, -2), 4, 3, SMALL), "last_slot": ((11,), 4, 3, SMALL), "no_tokens": ((), 4, 3, SMALL),
    "no_pages": ((-1, -1), 0, 3, SMALL), "float8": (MIXED, 4, 3, small(kv_dtype=E4M3)),
    "float8_deepseek": ((70, -1, 3), 2, 64, deepseek(kv_dtype=E4M3)), "float8_skipped": ((-1, -1), 4, 3, small(kv_dtype=E4M3)),
    "int8": (MIXED, 4, 3, small(dtype=BF16, kv_dtype=INT8)), "int8_float64": (MIXED, 4, 3, small(dtype=F64, kv_dtype=INT8)),
    "quantised": (MIXED, 4, 3, small(kv_dtype=E4M3), QUANTISED), "quantised_int8": (MIXED, 4, 3, small(kv_dtype=INT8), QUANTISED, I32),
    "quantised_deepseek": ((70, -1, 3), 2, 64, deepseek(kv_dtype=E4M3), QUANTISED),
    "quantised_rope_1": (MIXED, 4, 3, small(head_dim=17, kv_dtype=E4M3), QUANTISED),
    "quantised_skipped": ((-1, -1), 4, 3, small(kv_dtype=E4M3), QUANTISED),
    "quantised_no_tokens": ((), 4, 3, deepseek(kv_dtype=E4M3), QUANTISED),
}  # fmt: skip
PACKED_WRITES: Rows = {
    "plain": (MIXED, 4, 3, PACKABLE), "float32": (MIXED, 4, 3, packable(dtype=F32), I32), "float16": (MIXED, 4, 3, packable(dtype=F16)),
    "float64": (MIXED, 4, 3, packable(dtype=F64)), "edge": (MIXED, 4, 3, packable(loud=True)),
    "groups": (MIXED, 4, 3, packable(head_dim=384 + 6, v_head_dim=384)), "deepseek": ((70, -1, 3), 2, 64, DEEPSEEK, I32),
    "page_1": ((3, 8, 1), 9, 1, DEEPSEEK), "rope_1": (MIXED, 4, 3, packable(head_dim=129)), "all_skipped": ((-1, -1, -1), 4, 3, PACKABLE),
    "first_slot_skipped": ((-1, 5, -2), 4, 3, PACKABLE), "last_slot": ((11,), 4, 3, PACKABLE), "no_tokens": ((), 4, 3, PACKABLE),
    "no_pages": ((-1, -1), 0, 3, PACKABLE),
}  # fmt: skip

PACKED, LISTS = {"packed": True}, ((5, 0, 7, 1), 7, (4, 16))
SPARSE: Rows = {
    "plain": (*LISTS, SMALL), "lse": (*LISTS, small(lse=True)), "sinks": (*LISTS, small(sinks=F32)),
    "sinks_lse": (*LISTS, small(sinks=F32, lse=True)), "sinks_bfloat16": (*LISTS, small(sinks=BF16, dtype=BF16, lse=True)),
    "lengths": (*LISTS, {"lengths": True}, small(lse=True)), "twice": ((6, 3, 7), 8, (4, 16), {"twice": True}, small(lse=True)),
    "whole": ((5, 2), 6, (4, 16), {"whole": True}, SMALL), "loud": (*LISTS, small(loud=True, lse=True)),
    "scale": (*LISTS, small(scale=0.7)), "scale_negative": (*LISTS, small(scale=-0.7, lse=True)), "one_head": (*LISTS, small(q_heads=1)),
    "rope_1": (*LISTS, small(head_dim=17)), "float16": (*LISTS, small(dtype=F16, lse=True)),
    "float64": (*LISTS, small(dtype=F64, lse=True)), "float8": (*LISTS, small(dtype=BF16, kv_dtype=E4M3, lse=True)),
    "int8": (*LISTS, small(kv_dtype=INT8)), "float8_query": ((5, 0, 7), 7, (4, 16), small(dtype=BF16, q_dtype=E4M3, kv_dtype=E4M3)),
    "page_1": ((5, 0, 7), 9, (40, 1), SMALL), "page_3": ((5, 0, 7), 9, (9, 3), small(lse=True)), "one": ((1,), 1, (1, 1), SMALL),
    "no_entries": ((0, 0), 5, (4, 16), small(sinks=F32, lse=True)), "no_topk": ((0, 0), 0, (4, 16), small(sinks=F32, lse=True)),
    "no_tokens": ((), 5, (4, 16), small(lse=True)), "no_pages": ((0, 0), 5, (0, 16), small(lse=True)), "packed": (*LISTS, PACKED, PACKABLE),
    "packed_lse": (*LISTS, {"packed": True, "lengths": True}, packable(lse=True, sinks=F32)),
    "packed_float32": (*LISTS, PACKED, packable(dtype=F32, lse=True)),
    "packed_float64": ((5, 0, 7, 1), 7, (9, 3), PACKED, packable(dtype=F64, head_dim=129)),
    "packed_groups": (*LISTS, PACKED, packable(head_dim=272, v_head_dim=256)), "packed_no_pages": ((0, 0), 5, (0, 16), PACKED, PACKABLE),
}  # fmt: skip

# The head dims of DeepSeek, twice: bfloat16 and packed latents.
LSE = replace(DEEPSEEK, lse=True)
lse = partial(replace, LSE)
GPU_SPARSE: Rows = {
    "plain": ((128, 100, 1), 128, (4, 64), {"whole": True}, deepseek(q_heads=64)),
    "heads_128": ((128, 3), 128, (4, 64), {"whole": True}, lse(q_heads=128)), "heads_16": ((128, 64), 128, (4, 64), DEEPSEEK),
    "heads_80": ((70,), 128, (4, 64), lse(q_heads=80)), "heads_1": ((70, 2), 128, (4, 64), lse(q_heads=1, sinks=BF16)),
    "apart": ((128, 64), 128, (4, 64), deepseek(q_heads=64)), "topk_1": ((1, 0), 1, (4, 64), LSE), "topk_64": ((64, 5), 64, (4, 64), LSE),
    "topk_100": ((100, 5), 100, (4, 64), LSE), "topk_512": ((512, 300, 0, 1), 512, (10, 64), lse(sinks=F32)),
    "empty": ((0, 5, 0), 128, (4, 64), LSE), "sinks": ((100, 5), 128, (4, 64), deepseek(sinks=F32)),
    "sinks_empty": ((0, 5, 0), 128, (4, 64), lse(sinks=F32, q_heads=64)),
    "sinks_bfloat16": ((90, 5), 128, (4, 64), lse(sinks=BF16, q_heads=128)),
    "lengths": ((128, 0, 65, 1), 128, (4, 64), {"lengths": True}, LSE),
    "lengths_odd": ((77, 0, 65, 1), 90, (4, 64), {"lengths": True}, lse(sinks=F32)),
    "twice": ((100, 64), 128, (4, 64), {"twice": True}, LSE), "loud": ((100, 5), 128, (4, 64), lse(loud=True)),
    "scale_negative": ((100, 5), 128, (4, 64), lse(scale=-0.05)), "scale_zero": ((100, 0), 128, (4, 64), lse(scale=0.0)),
    "page_1": ((100, 5), 128, (200, 1), LSE), "page_16": ((100, 5), 128, (12, 16), LSE), "page_128": ((100, 5), 128, (2, 128), LSE),
    "no_topk": ((0, 0), 0, (4, 64), lse(sinks=F32)), "no_tokens": ((), 128, (4, 64), LSE), "no_pages": ((0, 0), 128, (0, 64), LSE),
    # FlashMLA's own tests have a row between pages.
    "gaps": ((100, 5), 128, (4, 64), {"gap": 1}, lse(q_heads=64)),
    "gaps_lengths": ((90, 0, 5), 128, (9, 16), {"gap": 3, "lengths": True}, lse(sinks=F32)),
    "gaps_page_61": ((100, 64), 128, (4, 61), {"gap": 1}, lse(q_heads=128)),
    "gaps_one_page": ((9, 0), 64, (1, 64), {"gap": 2}, LSE),
}  # fmt: skip
SPARSE |= {
    f"deepseek-{name}-{label}": (*row, {"packed": packed})
    for name, packed in (("bfloat16", False), ("packed", True)) for label, row in GPU_SPARSE.items()
}  # fmt: skip

SOME, INTERLEAVED, FUSED, I32_POSITIONS = (3, 0, 8, 5, 5), {"interleaved": True}, {"fused": True}, {"index": torch.int32}
ROTATIONS: Rows = {
    "plain": (SOME, {"f": SMALL}), "interleaved": (SOME, {"f": SMALL, "interleaved": True}),
    "one_head": (SOME, {"f": small(q_heads=1), "index": torch.int32}), "rope_2": (SOME, {"f": small(head_dim=18)}),
    "rope_2_interleaved": (SOME, {"f": small(head_dim=18), "interleaved": True}), "rope_wider": (SOME, {"f": small(v_head_dim=4)}),
    "latent_1": (SOME, {"f": small(head_dim=9, v_head_dim=1), "interleaved": True}),
    "float16": (SOME, {"f": small(dtype=F16), "interleaved": True}), "float64": (SOME, {"f": small(dtype=F64)}),
    "saturated": (SOME, {"f": SMALL, "scales": (0.01, 0.02)}),
    "small": (SOME, {"f": SMALL, "scales": (500.0, 3000.0), "interleaved": True}), "fused": (SOME, {"f": small(dtype=BF16), "fused": True}),
    "one_token": ((0,), {"f": SMALL, "rows": 1}), "no_tokens": ((), {"f": SMALL}),
    # The shape that GPU kernels support.
    "deepseek": (SOME, {"f": DEEPSEEK, "interleaved": True}), "deepseek_half_split": (SOME, {"f": DEEPSEEK, "index": torch.int32}),
    "deepseek_fused": (SOME, {"f": DEEPSEEK, "interleaved": True, "fused": True}), "deepseek_float16": ((7,), {"f": deepseek(dtype=F16)}),
    "deepseek_heads_128": ((8, 1, 4), {"f": deepseek(q_heads=128), "interleaved": True, "fused": True}),
    "deepseek_saturated": (SOME, {"f": DEEPSEEK, "scales": (0.02, 0.01), "interleaved": True}),
    "deepseek_many": (tuple(i * 7 % 400 for i in range(300)), {"f": DEEPSEEK, "rows": 400, "interleaved": True}),
    "deepseek_no_tokens": ((), {"f": DEEPSEEK}), "rope_32": (SOME, {"f": deepseek(head_dim=288, v_head_dim=256)}),
    "tail": (SOME, {"f": deepseek(head_dim=144, v_head_dim=80), "interleaved": True}),
}  # fmt: skip
LATENT_CASES = {
    "mla_attention": _attention(),
    "write_latent": table("write_latent", builders.write_latent, WRITES),
    "sparse_mla_attention": table("sparse_mla_attention", builders.sparse, SPARSE),
    "write_latent_packed": table("write_latent_packed", builders.write_packed, PACKED_WRITES),
    "rope_quantize_latent": table("rope_quantize_latent", builders.rope_quantize, ROTATIONS),
}
