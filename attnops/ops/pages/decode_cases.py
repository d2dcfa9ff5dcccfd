"""The cases of a decode step that norms, rotates, stores and attends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch

from attnops.ops.case_data import (
    BF16,
    F16,
    F32,
    F64,
    I32,
    I64,
    Features as F,
    Given,
    Pages,
    Rows,
    Scene,
    at,
)


class Angles(NamedTuple):
    """The turn of a decode step's query and key, and its rows.

    cos_sin: "whole", "half" (D / 2 wide) or "". wide: their dtype and that of norms, None for the
    query's. norms: are there any?
    skipped: rows without a slot. slots: the slots' dtype.
    """

    cos_sin: str = "whole"
    norms: bool = False
    skipped: Sequence[int] = ()
    slots: torch.dtype = I64
    wide: torch.dtype | None = None


SMALL = F()
LLAMA = F(dtype=BF16, q_heads=8, kv_heads=2, head_dim=128)
small, llama = partial(replace, SMALL), partial(replace, LLAMA)

STEP_MAIN = ((5, 1, 40, 16), 16)
WHOLE, NORMED, BARE = Angles(), Angles(norms=True), Angles("")
STEP_FEATURES: Rows = {
    "plain": (BARE, SMALL),
    **at(
        (WHOLE,),
        {
            "whole": SMALL,
            "window": small(window=(3, -1)),
            "window_self": small(window=(0, -1)),
            "softcap": small(softcap=1.5),
            "sinks": small(sinks=F32),
            "scale": small(scale=0.7),
            "loud": small(loud=True),
            "mha": small(kv_heads=4),
            "group_16": small(q_heads=16, kv_heads=1),
        },
    ),
    **at(
        (NORMED,),
        {
            "norms": SMALL,
            "group_3": small(q_heads=6),
            "float16": small(dtype=F16),
            "float64": small(dtype=F64),
            "bfloat16": small(dtype=BF16),
        },
    ),
    "half": (Angles("half"), SMALL),
    "norms_alone": (Angles("", norms=True), SMALL),
    "odd_dim": (Angles("", norms=True), small(head_dim=7)),
    "dim_24": (Angles("half", norms=True), small(head_dim=24)),
    "wide_angles": (Angles(norms=True, wide=F32), small(dtype=BF16)),
    "skipped": (Angles(skipped=(0, 2), slots=I32), SMALL),
    "all_skipped": (Angles(skipped=range(4)), SMALL),
    "all": (
        Angles("half", True, (1,)),
        small(window=(9, -1), softcap=2.0, sinks=F32, q_heads=6, dtype=BF16),
    ),
    "holes": (WHOLE, SMALL, {"missing": ((2, 0), (2, 1))}),
    "holes_window": (WHOLE, small(window=(20, -1)), {"missing": ((2, 1),)}),
    "holes_new": (NORMED, SMALL, {"missing": ((0, 0), (1, 0), (2, 2))}),
    "promised": (WHOLE, SMALL, {"missing": None}),
}
STEP_SHAPES: Rows = {
    "page_1": ((5, 3, 9), 1),
    "page_3": ((5, 3, 0, 7), 3),
    "page_64": ((3, 70), 64),
    "shared": ((9, 13), 4, {"pages": Pages(shared=True)}),
    "no_table": ((0, 0), 4, {"pages": Pages(wider=0)}),
    "no_pages": ((0, 0), 4, {"pages": Pages(spare=0)}),
    "no_requests": ((), 4),
}
MODELS: Rows = {
    "llama": ((300, 33), 16, WHOLE, LLAMA),
    "llama_page_64": ((300, 130, 1), 64, WHOLE, LLAMA, {"missing": None}),
    "qwen3": ((200, 3), 16, NORMED, LLAMA),
    "gpt_oss": ((200, 9), 16, Angles("half"), llama(head_dim=64, sinks=BF16, window=(127, -1))),
    "gemma2": ((90,), 16, WHOLE, llama(head_dim=256, q_heads=4, softcap=50.0, window=(64, -1))),
    "phi3": ((90,), 16, WHOLE, llama(head_dim=96)),
    "llama_float16": ((300,), 128, WHOLE, llama(dtype=F16)),
}
STEPS: Rows = {n: (*STEP_MAIN, *row) for n, row in STEP_FEATURES.items()} | MODELS
STEPS |= {
    f"{n}-{name}": (*shape, *STEP_FEATURES[name])
    for n, shape in STEP_SHAPES.items()
    for name in ("plain", "all")
}

ROTATED: Rows = at(
    ((3, 8, -1, 1, 6), 4, 3, WHOLE),
    {
        "whole": SMALL,
        "interleaved": {"pages": Pages(interleaved=True)},
        "int32_slots": {"index": I32},
        "mha": small(kv_heads=4),
        "value_dim": small(v_head_dim=24),
        "float16": small(dtype=F16),
        "float64": small(dtype=F64),
    },
) | {
    "norms": ((5, -1, 0), 4, 3, NORMED, SMALL),
    "half": ((5, -1, 0), 4, 3, Angles("half"), SMALL),
    "dim_24": ((5, -1, 0), 4, 3, Angles("half", norms=True), small(head_dim=24)),
    "wide_angles": ((5, -1, 0), 4, 3, Angles(norms=True, wide=F32), small(dtype=BF16)),
    "page_1": ((3, 8, 1), 9, 1, NORMED, SMALL),
    "all_skipped": ((-1, -1), 4, 3, WHOLE, SMALL),
    "no_tokens": ((), 4, 3, WHOLE, SMALL),
    "no_pages": ((-1, -1), 0, 3, WHOLE, SMALL),
    "llama": (tuple(range(40, 5, -1)), 3, 16, WHOLE, LLAMA),
    "gemma3": (tuple(range(20)), 2, 16, NORMED, llama(head_dim=256, q_heads=4, kv_heads=1)),
}
"""Slots of new tokens, pages and their size, and angles."""


def _last_slots(scene: Scene, skipped: Sequence[int]) -> list[int]:
    """The slot of each request's last key, which becomes free; negative for those without one."""
    table, page, slots = scene.given["page_table"], scene.sizes["page"], []
    for b, length in enumerate(scene.k_lens or ()):
        real = length > 0 and b not in skipped
        slot = int(table[b, (length - 1) // page]) * page + (length - 1) % page if real else -1 - b
        slots.append(slot)
        if real:
            scene.free["pages"][slot // page, slot % page] = True
    return slots


def step(
    scene: Scene,
    angles: Angles = Angles(),  # noqa: B008, it is frozen
    missing: Sequence[tuple[int, int]] | None = (),
) -> Given:
    """The slots of the new tokens are free, and so are the query, key and value of rows without
    one.

    missing: (row, column) of the table's entries that are no page. None is the promise that there
    are none.
    """
    source = scene.source
    slots = _last_slots(scene, angles.skipped)
    table, free = scene.given["page_table"], scene.free["pages"]
    for b, column in missing or ():
        free[table[b, column]] = True
        table[b, column] = free.shape[0] + 7 if column % 2 else -1
    given: Given = {"slots": source.ints(slots, angles.slots)} | (
        {"holes": False} if missing is None else {}
    )
    scene.free["tokens"] = given["slots"] < 0
    return given | turns(scene, angles, len(slots))


def turns(scene: Scene, angles: Angles, tokens: int) -> Given:
    """The angles of tokens, and the norms."""
    source, f = scene.source, scene.f
    wide, given = angles.wide or f.dtype, Given()
    if angles.cos_sin:
        dim = f.head_dim // 2 if angles.cos_sin == "half" else f.head_dim
        turn = source.normal(tokens, dim, dtype=F64, spread=3.0)
        given |= {"cos": (1.2 * turn.cos()).to(wide), "sin": (1.2 * turn.sin()).to(wide)}
    if angles.norms:
        norms = {n: source.normal(f.head_dim, dtype=wide) for n in ("q_norm", "k_norm")}
        given |= {**norms, "eps": 0.25}
    return given


def rotated(scene: Scene, angles: Angles = Angles()) -> Given:  # noqa: B008, it is frozen
    """The angles and norms of new tokens, whose query and key are read even without a slot."""
    tokens = scene.given["slots"].shape[0]
    scene.free["value"] = scene.free.pop("tokens")
    return turns(scene, angles, tokens)
