"""The cases of attention over pages, of writes and copies, and of host plans."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from attnops.ops.attention.cases import FEATURES, on_shapes
from attnops.ops.case_data import (
    BF16,
    E4M3,
    E5M2,
    EDGES,
    F16,
    F64,
    INT8,
    U8,
    Features as F,
    Given,
    Grid,
    Pages,
    Rows,
    Scene,
    at,
    crossed,
)
from attnops.ops.latent.cases import (
    BY_PAGES,
    DEEPSEEK,
    I32_SLOTS,
    NO_TABLE,
    NOTHING,
    SHAPES,
    SLOTS as MAIN,
)
from attnops.ops.pages.decode_cases import ROTATED, STEPS, rotated, step

PAGED = ((1, 4, 0, 2), (6, 4, 0, 21), 16)
PAGED_SHAPES: Rows = SHAPES | {
    "page_3": ((1, 3, 0, 2), (5, 3, 0, 7), 3, {"pages": Pages(interleaved=True)}),
    "page_64": ((2, 1), (3, 70), 64),
    "tight": ((1, 0, 3), (5, 2, 70), 64, {"padding": None}),
    "decode_promised": ((1, 1, 1), (5, 0, 33), 16, {"padding": None}),
}
TEMPERED: Rows = {
    f"{shape}temperature{name}": (*row, replace(f, temperature=True))
    for shape, row in (("", PAGED), ("decode_padded-", PAGED_SHAPES["decode_padded"]))
    for name, f in (
        ("", F(causal=True)),
        ("_all", replace(FEATURES["all_mask"], softcap=30.0, scale=4.0)),
    )
}


INTERLEAVED = {"pages": Pages(interleaved=True)}
HALF = partial(F, dtype=BF16)
WRITES: Rows = (
    at(
        MAIN,
        {
            "plain": F(),
            "float64": F(dtype=F64),
            "interleaved": INTERLEAVED,
            "float8": F(kv_dtype=E4M3),
            "float8_e5m2": F(kv_dtype=E5M2),
            "int8": HALF(kv_dtype=INT8),
            "int8_float64": F(dtype=F64, kv_dtype=INT8),
            "float8_d128": HALF(kv_dtype=E4M3, head_dim=128),
        },
    )
    | at(
        (*MAIN, INTERLEAVED),
        {
            "float8_bfloat16": HALF(kv_dtype=E4M3, scale_per_head=False),
            "int8_float16": F(dtype=F16, kv_dtype=INT8, scale_per_head=False),
            "bfloat16_d64_interleaved": HALF(head_dim=64),
            "float8_e5m2_d64": F(dtype=F16, kv_dtype=E5M2, head_dim=64),
        },
    )
    | at((*MAIN, I32_SLOTS), {"float16": F(dtype=F16), "float16_d256": F(dtype=F16, head_dim=256)})
    | crossed(
        EDGES,
        {"plain": F(v_head_dim=8), "float8": F(kv_dtype=E4M3), "bfloat16_d128": HALF(head_dim=128)},
    )
    | {
        "page_16": ((3, 8, 1), 2, 16, HALF(head_dim=64), I32_SLOTS),
        "one_page": ((2, 0), 1, 4, F(q_heads=1, kv_heads=1)),
        "bfloat16_d128": ((7, -1, 0, 33, -1, 45), 4, 16, HALF(head_dim=128, kv_heads=8, q_heads=8)),
    }
)
# Slots of 4 pages of 3: moved up, turned about, one to many, some of them skipped.
PAIRS: dict[str, tuple[tuple[int, int], ...]] = {
    "apart": ((0, 7), (3, 8), (1, 11)),
    "up": tuple((i + 1, i) for i in range(11)),
    "down": tuple((i, i + 1) for i in range(11)),
    "cycle": tuple((i, (i + 5) % 12) for i in range(12)),
    "to_many": ((4, 0), (4, 1), (4, 9), (0, 4)),
    "to_itself": ((4, 4), (5, 6), (6, 5)),
    "skipped": ((-1, 3), (3, -1), (3, 5), (-1, -1), (5, 3), (11, 0)),
    "first_skipped": ((-1, 0), (2, 1)),
    "all_skipped": ((-1, 3), (3, -1)),
    "none": (),
}
# Three requests with 4 slots each: 3 entries in turn read what they write, and nothing of others.
GROUPS = ((1, 0), (2, 1), (3, 2), (5, 5), (7, 6), (-1, 7), (10, 8), (11, 9), (9, 10))
MOVED, LATENTS, POOL = PAIRS["skipped"], {"latents": True}, (2, 4, 3)
COPIES: Rows = {
    **{n: (pairs, *POOL, F()) for n, pairs in PAIRS.items()},
    "one_layer": (MOVED, 1, 4, 3, F(dtype=BF16)),
    "no_layers": (MOVED, 0, 4, 3, F()),
    "no_pages": (PAIRS["all_skipped"], 2, 0, 3, F()),
    "page_1": (PAIRS["cycle"], 3, 12, 1, F(dtype=F16, v_head_dim=8), I32_SLOTS),
    "page_16": (((0, 17), (17, 0), (30, 31)), 2, 2, 16, F(dtype=BF16, head_dim=64), I32_SLOTS),
    "float64": (MOVED, *POOL, F(dtype=F64)),
    "float8": (PAIRS["cycle"], *POOL, F(kv_dtype=E4M3)),
    "float8_e5m2": (MOVED, *POOL, F(kv_dtype=E5M2)),
    "int8": (MOVED, *POOL, F(kv_dtype=INT8), I32_SLOTS),
    "latents": (PAIRS["up"], *POOL, F(dtype=BF16, head_dim=576), LATENTS),
    "latents_packed": (MOVED, *POOL, F(kv_dtype=U8, head_dim=656), LATENTS),
    "bfloat16_d128": (MOVED, 3, 4, 16, F(dtype=BF16, head_dim=128, kv_heads=8)),
    "many": (tuple((i, (i + 7) % 640) for i in range(640)), 2, 40, 16, F(dtype=BF16, head_dim=64)),
    "groups": (GROUPS, *POOL, F(), {"group": 3}),
    "groups_shorter": (GROUPS[:8], 3, 4, 3, F(dtype=BF16, v_head_dim=8), {"group": 3}),
    "one_group": (PAIRS["cycle"], *POOL, F(), {"group": 99}),
    "odd_dims": (PAIRS["cycle"], *POOL, F(dtype=BF16, head_dim=80, v_head_dim=24, kv_heads=3)),
}


_LLAMA = F(dtype=BF16, head_dim=128, q_heads=8, causal=True)
llama, latent, SOME = partial(replace, _LLAMA), partial(replace, DEEPSEEK), ((1, 4), (6, 40))
STEPS_TO_PLAN: Rows = {
    "decode": ((1, 1, 1), (5, 40, 16), 16),
    "decode_padded": ((1, 0, 1), (5, 3, 33), 64),
    "extend": ((1, 4, 0, 2), (6, 4, 0, 21), 1),
    "no_requests": ((), (), 4),
    "no_table": ((1, 1), (0, 0), 4, NO_TABLE),
    "nothing": ((), (), 4, NOTHING),
}
PLANS: Rows = {n: (*row, _LLAMA) for n, row in STEPS_TO_PLAN.items()} | at(
    (*SOME, 16),
    {
        "window": llama(window=(7, -1)),
        "sinks": llama(sinks=BF16),
        "softcap": llama(softcap=30.0, dtype=F16, head_dim=64),
        "not_causal": llama(causal=False, head_dim=256),
        "unlike_dims": llama(head_dim=192, v_head_dim=128),
    },
)
LATENT_PLANS: Rows = {n: (*row, DEEPSEEK) for n, row in STEPS_TO_PLAN.items()} | {
    "decode_heads_128": ((1, 1), (5, 300), 64, latent(q_heads=128)),
    "not_causal": (*SOME, 64, latent(causal=False, dtype=F16)),
}


def _copied(scene: Scene, pairs: Sequence[tuple[int, int]], latents: bool = False) -> Given:
    """pairs: (source slot, target slot). latents: pages without heads, and no value pages."""
    source, f = scene.source, scene.f
    shape = [scene.sizes[n] for n in ("L", "P", "page")] + ([] if latents else [f.kv_heads])
    dims = {"k_pages": f.head_dim} if latents else {"k_pages": f.head_dim, "v_pages": f.v_dim}
    made: Given = {
        n: source.stored(*shape, dim, dtype=f.kv_dtype or f.dtype) for n, dim in dims.items()
    }
    slots = (source.ints([pair[i] for pair in pairs], scene.index) for i in (0, 1))
    return {"v_pages": None} | made | dict(zip(("source", "target"), slots, strict=True))


def _buffers(words: int, gpu_bytes: int) -> Callable[[torch.device], tuple[Tensor, Tensor]]:
    def made(device: torch.device) -> tuple[Tensor, Tensor]:
        # Enough for any kernel: on a GPU, some bytes for each multiprocessor.
        size = gpu_bytes if device.type == "cuda" else 1 << 21
        return torch.zeros(words, dtype=torch.int64), torch.zeros(
            size, dtype=torch.uint8, device=device
        )

    return made


CASES = {
    "paged_attention": Grid(BY_PAGES, on_shapes(PAGED, PAGED_SHAPES) | TEMPERED),
    "decode_attention": Grid("k_lens page angles pages missing", STEPS, step),
    "rotate_and_write_kv": Grid("slots P page angles index", ROTATED, rotated),
    "write_kv": Grid("slots P page index", WRITES),
    "copy_kv": Grid("pairs L P page index latents", COPIES, _copied),
    "plan_paged_attention": Grid(BY_PAGES, PLANS, _buffers(1 << 15, 1 << 26), of="paged_attention"),
    "plan_mla_attention": Grid(
        BY_PAGES, LATENT_PLANS, _buffers(1 << 17, 1 << 25), of="mla_attention"
    ),
}
