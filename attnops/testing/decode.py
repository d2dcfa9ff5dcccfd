"""The problem grid of a decode step that norms, rotates, stores and attends."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch

from attnops.testing import builders
from attnops.testing.builders import Angles, Pages
from attnops.testing.case import Case, Features, Rows, table

F16, BF16, F32, F64, I32 = torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int32
SMALL = Features()
LLAMA = Features(dtype=BF16, q_heads=8, kv_heads=2, head_dim=128)
small, llama = partial(replace, SMALL), partial(replace, LLAMA)

MAIN = ((5, 1, 40, 16), 16)
WHOLE, NORMED, BARE = Angles(), Angles(norms=True), Angles("")
FEATURES: Rows = {
    "plain": (BARE, SMALL), "whole": (WHOLE, SMALL), "half": (Angles("half"), SMALL), "norms": (NORMED, SMALL),
    "norms_alone": (Angles("", norms=True), SMALL), "window": (WHOLE, small(window=(3, -1))), "window_self": (WHOLE, small(window=(0, -1))),
    "softcap": (WHOLE, small(softcap=1.5)), "sinks": (WHOLE, small(sinks=F32)), "scale": (WHOLE, small(scale=0.7)),
    "loud": (WHOLE, small(loud=True)), "mha": (WHOLE, small(kv_heads=4)), "group_3": (NORMED, small(q_heads=6)),
    "group_16": (WHOLE, small(q_heads=16, kv_heads=1)), "odd_dim": (Angles("", norms=True), small(head_dim=7)),
    "dim_24": (Angles("half", norms=True), small(head_dim=24)), "float16": (NORMED, small(dtype=F16)),
    "float64": (NORMED, small(dtype=F64)), "bfloat16": (NORMED, small(dtype=BF16)),
    "wide_angles": (Angles(norms=True, wide=F32), small(dtype=BF16)),
    "skipped": (Angles(skipped=(0, 2), slot_dtype=I32), SMALL), "all_skipped": (Angles(skipped=range(4)), SMALL),
    "all": (Angles("half", True, (1,)), small(window=(9, -1), softcap=2.0, sinks=F32, q_heads=6, dtype=BF16)),
    "holes": (WHOLE, SMALL, {"holes": ((2, 0), (2, 1))}), "holes_window": (WHOLE, small(window=(20, -1)), {"holes": ((2, 1),)}),
    "holes_new": (NORMED, SMALL, {"holes": ((0, 0), (1, 0), (2, 2))}), "promised": (WHOLE, SMALL, {"holes": None}),
}  # fmt: skip
SHAPES: Rows = {
    "page_1": ((5, 3, 9), 1), "page_3": ((5, 3, 0, 7), 3), "page_64": ((3, 70), 64),
    "shared": ((9, 13), 4, {"pages": Pages(shared=True)}), "no_table": ((0, 0), 4, {"pages": Pages(wider=0)}),
    "no_pages": ((0, 0), 4, {"pages": Pages(spare=0)}), "no_requests": ((), 4),
}  # fmt: skip
MODELS: Rows = {
    "llama": ((300, 33), 16, WHOLE, LLAMA), "llama_page_64": ((300, 130, 1), 64, WHOLE, LLAMA, {"holes": None}),
    "qwen3": ((200, 3), 16, NORMED, LLAMA), "gpt_oss": ((200, 9), 16, Angles("half"), llama(head_dim=64, sinks=BF16, window=(127, -1))),
    "gemma2": ((90,), 16, WHOLE, llama(head_dim=256, q_heads=4, softcap=50.0, window=(64, -1))),
    "phi3": ((90,), 16, WHOLE, llama(head_dim=96)),
    "llama_float16": ((300,), 128, WHOLE, llama(dtype=F16)),
}  # fmt: skip


def _named(rows: Rows) -> Rows:
    """Angles are given by name."""
    return {n: tuple({"angles": part} if isinstance(part, Angles) else part for part in row) for n, row in rows.items()}


ROWS: Rows = {n: (*MAIN, *row) for n, row in FEATURES.items()} | MODELS
ROWS |= {f"{n}-{name}": (*shape, *FEATURES[name]) for n, shape in SHAPES.items() for name in ("plain", "all")}
DECODE_CASES: tuple[Case, ...] = table("decode_attention", builders.decode, _named(ROWS))
