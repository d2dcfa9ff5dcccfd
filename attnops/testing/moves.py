"""Builder and problem grid of `copy_kv`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from attnops.testing.inputs import Call, Features, Source, table

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
E4M3, E5M2, INT8, U8 = torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, torch.uint8


def copy(
    source: Source,
    pairs: Sequence[tuple[int, int]],
    layers: int,
    pages: int,
    page_size: int,
    f: Features,
    index: torch.dtype = torch.int64,
    latents: bool = False,
) -> Call:
    """`copy_kv`. pairs: (source slot, target slot). latents: pages without heads, and no value pages."""
    kv = f.kv_dtype or f.dtype
    shape = (layers, pages, page_size, f.kv_heads)[: 3 if latents else 4]
    arguments: dict[str, Any] = {"k_pages": _stored(source, *shape, f.head_dim, dtype=kv)}
    if not latents:
        arguments["v_pages"] = _stored(source, *shape, f.v_dim, dtype=kv)
    arguments |= {"source": source.ints([a for a, _ in pairs], index), "target": source.ints([b for _, b in pairs], index)}
    return Call("copy_kv", arguments)


def _stored(source: Source, *shape: int, dtype: torch.dtype) -> torch.Tensor:
    if dtype == U8:
        return source.stored(*shape, dtype=INT8).view(U8)
    return source.stored(*shape, dtype=dtype)


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


MIXED = PAIRS["skipped"]
ROWS: dict[str, tuple[Any, ...]] = {
    **{n: (pairs, 2, 4, 3, Features()) for n, pairs in PAIRS.items()},
    "one_layer": (MIXED, 1, 4, 3, Features(dtype=BF16)),
    "no_layers": (MIXED, 0, 4, 3, Features()),
    "no_pages": (PAIRS["all_skipped"], 2, 0, 3, Features()),
    "page_1": (PAIRS["cycle"], 3, 12, 1, Features(dtype=F16, v_head_dim=8), torch.int32),
    "page_16": (((0, 17), (17, 0), (30, 31)), 2, 2, 16, Features(dtype=BF16, head_dim=64), torch.int32),
    "float64": (MIXED, 2, 4, 3, Features(dtype=F64)),
    "float8": (PAIRS["cycle"], 2, 4, 3, Features(kv_dtype=E4M3)),
    "float8_e5m2": (MIXED, 2, 4, 3, Features(kv_dtype=E5M2)),
    "int8": (MIXED, 2, 4, 3, Features(kv_dtype=INT8), torch.int32),
    "latents": (PAIRS["up"], 2, 4, 3, Features(dtype=BF16, head_dim=576), {"latents": True}),
    "latents_packed": (MIXED, 2, 4, 3, Features(kv_dtype=U8, head_dim=656), {"latents": True}),
    "bfloat16_d128": (MIXED, 3, 4, 16, Features(dtype=BF16, head_dim=128, kv_heads=8)),
    "many": (tuple((i, (i + 7) % 640) for i in range(640)), 2, 40, 16, Features(dtype=BF16, head_dim=64)),
    "odd_dims": (PAIRS["cycle"], 2, 4, 3, Features(dtype=BF16, head_dim=80, v_head_dim=24, kv_heads=3)),
}
MOVE_CASES = {"copy_kv": table("copy_kv", copy, ROWS)}
