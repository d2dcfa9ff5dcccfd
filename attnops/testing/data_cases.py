"""The problem grid of the ops that move data: KV write, merging, copies, indexes, metadata; and of vertical-slash attention."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import torch

from attnops.testing import builders
from attnops.testing.case import Call, Case, Features as F, Rows, Source, table

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
E4M3, E5M2, INT8, U8 = torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, torch.uint8

MIXED, RAGGED, I32, INTERLEAVED = (7, -1, 0, 11, -1, 5), (3, 8, 1), {"slot_dtype": torch.int32}, {"interleaved": True}
WRITES: Rows = {
    "plain": (MIXED, 4, 3, F()), "page_1": (RAGGED, 9, 1, F(v_head_dim=8)), "page_16": (RAGGED, 2, 16, F(dtype=BF16, head_dim=64), I32),
    "float16": (MIXED, 4, 3, F(dtype=F16), I32), "float64": (MIXED, 4, 3, F(dtype=F64)), "interleaved": (MIXED, 4, 3, F(), INTERLEAVED),
    "all_skipped": ((-1, -1, -1), 4, 3, F()), "first_slot_skipped": ((-1, 5, -2), 4, 3, F()), "last_slot": ((11,), 4, 3, F()),
    "one_page": ((2, 0), 1, 4, F(q_heads=1, kv_heads=1)), "no_tokens": ((), 4, 3, F()), "no_pages": ((-1, -1), 0, 3, F()),
    "float8": (MIXED, 4, 3, F(kv_dtype=E4M3)),
    "float8_bfloat16": (MIXED, 4, 3, F(dtype=BF16, kv_dtype=E4M3, scale_per_head=False), INTERLEAVED),
    "float8_e5m2": (MIXED, 4, 3, F(dtype=F32, kv_dtype=E5M2)), "float8_skipped": ((-1, -1), 4, 3, F(kv_dtype=E4M3)),
    "int8": (MIXED, 4, 3, F(dtype=BF16, kv_dtype=INT8)),
    "int8_float16": (MIXED, 4, 3, F(dtype=F16, kv_dtype=INT8, scale_per_head=False), INTERLEAVED),
    "int8_float64": (MIXED, 4, 3, F(dtype=F64, kv_dtype=INT8)),
    # Head dims of GPU kernels.
    "bfloat16_d128": ((7, -1, 0, 33, -1, 45), 4, 16, F(dtype=BF16, head_dim=128, kv_heads=8, q_heads=8)),
    "bfloat16_d64_interleaved": (MIXED, 4, 3, F(dtype=BF16, head_dim=64), INTERLEAVED),
    "float16_d256": (MIXED, 4, 3, F(dtype=F16, head_dim=256), I32), "bfloat16_d128_skipped": ((-1, -1), 4, 3, F(dtype=BF16, head_dim=128)),
    "bfloat16_d128_no_tokens": ((), 4, 3, F(dtype=BF16, head_dim=128)),
    "bfloat16_d128_no_pages": ((-1,), 0, 3, F(dtype=BF16, head_dim=128)),
    "bfloat16_d128_page_1": (RAGGED, 9, 1, F(dtype=BF16, head_dim=128)),
    "float8_d128": (MIXED, 4, 3, F(dtype=BF16, kv_dtype=E4M3, head_dim=128)),
    "float8_e5m2_d64": (MIXED, 4, 3, F(dtype=F16, kv_dtype=E5M2, head_dim=64), INTERLEAVED),
}  # fmt: skip
MERGES: Rows = {
    "plain": ((5, 4, 16), F32), "some_empty": ((9, 4, 16), F32, 0.4, 0.4), "a_empty": ((3, 2, 8), F32, 1.0),
    "b_empty": ((3, 2, 8), BF16, 0.0, 1.0), "both_empty": ((3, 2, 8), F16, 1.0, 1.0), "float16": ((5, 4, 64), F16, 0.2, 0.2),
    "bfloat16": ((5, 4, 128), BF16, 0.2, 0.2), "float64": ((5, 4, 16), F64, 0.2, 0.2), "one": ((1, 1, 1), F32),
    "no_tokens": ((0, 2, 8), F32), "float32_128": ((33, 8, 128), F32, 0.1, 0.1), "float16_256": ((7, 3, 256), F16, 0.1, 0.1),
    "bfloat16_many": ((300, 32, 128), BF16, 0.1, 0.1), "bfloat16_all_empty": ((3, 2, 64), BF16, 1.0, 1.0),
    "bfloat16_no_tokens": ((0, 2, 64), BF16), "bfloat16_512": ((5, 16, 512), BF16, 0.2),
    "bfloat16_not_stale": ((40, 8, 128), BF16, 0.4, 0.4, {"stale": False}),
    "float32_not_stale": ((9, 4, 16), F32, 0.4, 0.4, {"stale": False}),
}  # fmt: skip
MERGES_OF_MANY: Rows = {
    "plain": ((5, 3, 4, 16), F32), "some_empty": ((9, 4, 2, 16), F32, 0.4), "all_empty": ((3, 2, 2, 8), F32, 1.0),
    "one_part": ((4, 1, 2, 8), F32, 0.3), "float64": ((5, 6, 4, 16), F64, 0.2), "one": ((1, 1, 1, 1), F32),
    "no_tokens": ((0, 3, 2, 8), F32), "bfloat16": ((40, 3, 8, 128), BF16, 0.2), "float16": ((9, 2, 4, 64), F16, 0.2),
    "bfloat16_more_parts_than_tokens": ((3, 37, 4, 128), BF16, 0.3), "bfloat16_one_part": ((6, 1, 4, 64), BF16, 0.4),
    "bfloat16_all_empty": ((3, 2, 2, 64), BF16, 1.0), "bfloat16_many_all_empty": ((2, 9, 2, 64), BF16, 1.0),
    "float16_512": ((20, 5, 8, 512), F16, 0.1), "bfloat16_no_tokens": ((0, 3, 2, 64), BF16),
    "bfloat16_not_stale": ((40, 3, 8, 128), BF16, 0.5, {"stale": False}), "float32_not_stale": ((9, 2, 4, 16), F32, 0.4, {"stale": False}),
}  # fmt: skip

# Slots of 4 pages of 3: moved up, turned about, one to many, some of them skipped.
PAIRS: dict[str, tuple[tuple[int, int], ...]] = {
    "apart": ((0, 7), (3, 8), (1, 11)), "up": tuple((i + 1, i) for i in range(11)), "down": tuple((i, i + 1) for i in range(11)),
    "cycle": tuple((i, (i + 5) % 12) for i in range(12)), "to_many": ((4, 0), (4, 1), (4, 9), (0, 4)),
    "to_itself": ((4, 4), (5, 6), (6, 5)), "skipped": ((-1, 3), (3, -1), (3, 5), (-1, -1), (5, 3), (11, 0)),
    "first_skipped": ((-1, 0), (2, 1)), "all_skipped": ((-1, 3), (3, -1)), "none": (),
}  # fmt: skip
MOVED, LATENTS, I32_SLOTS = PAIRS["skipped"], {"latents": True}, {"index": torch.int32}
COPIES: Rows = {
    **{n: (pairs, 2, 4, 3, F()) for n, pairs in PAIRS.items()}, "one_layer": (MOVED, 1, 4, 3, F(dtype=BF16)),
    "no_layers": (MOVED, 0, 4, 3, F()), "no_pages": (PAIRS["all_skipped"], 2, 0, 3, F()),
    "page_1": (PAIRS["cycle"], 3, 12, 1, F(dtype=F16, v_head_dim=8), I32_SLOTS),
    "page_16": (((0, 17), (17, 0), (30, 31)), 2, 2, 16, F(dtype=BF16, head_dim=64), I32_SLOTS), "float64": (MOVED, 2, 4, 3, F(dtype=F64)),
    "float8": (PAIRS["cycle"], 2, 4, 3, F(kv_dtype=E4M3)), "float8_e5m2": (MOVED, 2, 4, 3, F(kv_dtype=E5M2)),
    "int8": (MOVED, 2, 4, 3, F(kv_dtype=INT8), I32_SLOTS), "latents": (PAIRS["up"], 2, 4, 3, F(dtype=BF16, head_dim=576), LATENTS),
    "latents_packed": (MOVED, 2, 4, 3, F(kv_dtype=U8, head_dim=656), LATENTS),
    "bfloat16_d128": (MOVED, 3, 4, 16, F(dtype=BF16, head_dim=128, kv_heads=8)),
    "many": (tuple((i, (i + 7) % 640) for i in range(640)), 2, 40, 16, F(dtype=BF16, head_dim=64)),
    "odd_dims": (PAIRS["cycle"], 2, 4, 3, F(dtype=BF16, head_dim=80, v_head_dim=24, kv_heads=3)),
}  # fmt: skip

INDEXES: Rows = {
    "one_row": ((5,), (5,), 2, 3, 2), "ragged": ((130, 0, 64, 1), (200, 7, 64, 300), 2, 9, 5), "many": ((300, 257), (900, 257), 3, 40, 12),
    "dense_slashes": ((200,), (200,), 2, 5, 40), "single_entries": ((70, 3), (70, 90), 2, 1, 1), "more_than_keys": ((4,), (6,), 1, 30, 20),
    "slack": ((10, 3), (10, 80), 2, 4, 3, {"slack": 150}), "counted": ((130, 5), (400, 70), 4, 17, 8, {"counted": True}),
    "no_requests": ((), (), 2, 3, 2, {"slack": 3}), "no_queries": ((0, 0), (4, 0), 2, 3, 2),
}  # fmt: skip
SLASH = F(head_dim=16, lse=True)
HALF = F(dtype=BF16, head_dim=128, q_heads=4, kv_heads=2, lse=True)
"""The shape that GPU kernels of vertical-slash attention support."""
MAIN, NO_PADDING = ((70, 0, 130, 1), (150, 5, 130, 40)), {"padding": (0, 0)}
SLASHES: Rows = {
    "plain": (*MAIN, replace(SLASH, lse=False)), "lse": (*MAIN, SLASH), "scale": (*MAIN, replace(SLASH, scale=0.7)),
    "loud": (*MAIN, replace(SLASH, loud=True)), "value_wider": (*MAIN, replace(SLASH, v_head_dim=24)),
    "float64": (*MAIN, replace(SLASH, dtype=F64)), "many_slashes": ((200,), (333,), SLASH, {"slashes": 30}),
    "one_slash": ((90, 65), (90, 300), SLASH, {"slashes": 1, "verticals": 1}), "slack": ((7, 3), (9, 3), SLASH, {"slack": 100}),
    "decode": ((1, 1), (70, 1), SLASH, NO_PADDING), "no_requests": ((), (), SLASH, {"slack": 1}), "no_queries": ((0, 0), (3, 0), SLASH),
    "nothing": ((), (), SLASH, NO_PADDING), "bfloat16_d128": (*MAIN, HALF), "bfloat16_d128_plain": (*MAIN, replace(HALF, lse=False)),
    "float16_d128": (*MAIN, replace(HALF, dtype=F16)), "bfloat16_d128_loud": (*MAIN, replace(HALF, loud=True)),
    "bfloat16_d128_one_head": (*MAIN, replace(HALF, q_heads=1, kv_heads=1)),
    "bfloat16_d128_no_padding": ((128, 64), (128, 256), HALF, {"padding": None}),
    "bfloat16_d128_sparse": ((300,), (1500,), HALF, {"verticals": 150, "slashes": 6}), "bfloat16_d128_decode": ((1, 1), (70, 1), HALF),
    "bfloat16_d128_no_keys": ((0,), (0,), HALF, {"padding": (3, 0)}), "bfloat16_d128_no_requests": ((), (), HALF, {"slack": 1}),
}  # fmt: skip


def _rows(source: Source, lens: Sequence[int], more: int) -> dict[str, Any]:
    return {"cu_seqlens": source.cumulative(lens), "num_tokens": sum(lens) + more}


def _begins(source: Source, rows: Sequence[Sequence[int]]) -> dict[str, Any]:
    """rows: how long each request of a row is."""
    flags = [int(place == 0) for row in rows for length in row for place in range(length)]
    return {"begins": source.ints(flags, torch.bool).reshape(len(rows), len(flags) // len(rows))}


def _slots(source: Source, page: int, dtype: torch.dtype) -> dict[str, Any]:
    positions, rows = source.ints((0, 4, -1, 7, 2, 99, 5), dtype), source.ints((0, 1, 0, -1, 2, 1, 2), dtype)
    table = source.ints((5, 2, -1, 0, 7, 3, 1, -1, 6)).reshape(3, 3)
    return {"positions": positions, "rows": rows, "page_table": table, "page_size": page}


def _indices(source: Source, lens: Sequence[int], page: int, dtype: torch.dtype) -> dict[str, Any]:
    table = source.ints(source.permutation(len(lens) * 5)).reshape(len(lens), 5)
    return {"page_table": table, "seq_lens": source.ints(lens, dtype), "page_size": page}


def _by_token(source: Source, q_lens: Sequence[int], more: int, width: int, causal: bool, **heads: Any) -> dict[str, Any]:
    table = source.ints(n - 1 for n in source.permutation(len(q_lens) * width)).reshape(len(q_lens), width)
    lengths = source.ints(n + 2 * (i % 2) for i, n in enumerate(q_lens))
    tokens = {"cu_seqlens_q": source.cumulative(q_lens), "num_tokens": sum(q_lens) + more}
    return {"page_table": table, "seq_lens": lengths, **tokens, "causal": causal, **heads}


def _named(source: Source, holes: Sequence[int], q_lens: Sequence[int], **more: Any) -> dict[str, Any]:
    page, width = 4, 5
    total = len(q_lens) * width
    ids = [n - 1 if i % width not in holes else (-1, total, -7)[i % 3] for i, n in enumerate(source.permutation(total))]
    lengths = source.ints(n and n + 7 + 3 * (i % 2) for i, n in enumerate(q_lens))
    tables = {"page_table": source.ints(ids).reshape(len(q_lens), width), "seq_lens": lengths, "cu_seqlens_q": source.cumulative(q_lens)}
    return {**tables, "num_pages": total, "page_size": page, **more}


def _grid(op: str, make: Callable[..., dict[str, Any]], *axes: Mapping[str, Any] | Sequence[Any]) -> tuple[Case, ...]:
    """Every point of the axes, which hold the arguments of `make` after the source by label; a dict is arguments by name."""
    labelled = [axis if isinstance(axis, Mapping) else {str(v).removeprefix("torch."): v for v in axis} for axis in axes]
    points = [zip(*point, strict=True) for point in product(*(axis.items() for axis in labelled))]
    rows: Rows = {"-".join(names): values for names, values in points}
    return table(op, lambda source, *values, **more: Call(op, make(source, *values, **more)), rows)


Named = dict[str, dict[str, Any]]
LENGTHS, INTS = {"ragged": (3, 0, 5, 1), "one": (4,), "zeros": (0, 0), "none": ()}, (torch.int32, torch.int64)
BEGINS = {
    "one_row": ((3, 5, 1),), "rows": ((4,), (1, 3)), "one": ((6,),), "each_token": ((1,) * 4,), "as_many_as_keys": ((1, 1, 2),),
    "no_tokens": ((), ()),
}  # fmt: skip
HOLES: dict[str, tuple[int, ...]] = {"none": (), "first": (0,), "second": (1, 4), "most": (0, 1, 2, 3), "all": (0, 1, 2, 3, 4)}
WAYS: Named = {"squeeze": {}, "window": {"squeeze": False, "window_left": 3}, "in_place": {"squeeze": False}}
HEADS: Named = {"rows": {}, "heads_16": {"q_heads": 16}, "heads_128": {"q_heads": 128}, "float8": {"q_heads": 16, "float8": True}}
QUERIES: dict[str, tuple[int, ...]] = {"ragged": (3, 0, 5, 1), "decode": (1, 1, 1), "no_requests": ()}
DATA_CASES = {
    "write_kv": table("write_kv", builders.write, WRITES),
    "merge_state": table("merge_state", builders.merge, MERGES),
    "merge_states": table("merge_states", builders.merge, MERGES_OF_MANY),
    "copy_kv": table("copy_kv", builders.copy, COPIES),
    "vertical_slash_indexes": table("vertical_slash_indexes", builders.slash_indexes, INDEXES),
    "vertical_slash_attention": table("vertical_slash_attention", builders.slash_attention, SLASHES),
    "cu_seqlens": _grid("cu_seqlens", lambda source, lens, dtype: {"lengths": source.ints(lens, dtype)}, LENGTHS, INTS),
    "request_starts": _grid("request_starts", _begins, BEGINS),
    "token_rows": _grid("token_rows", _rows, LENGTHS, (0, 3)),
    "slot_mapping": _grid("slot_mapping", _slots, (1, 3, 16), INTS),
    "kv_indices": _grid("kv_indices", _indices, LENGTHS, (1, 3), INTS),
    "decode_rows": _grid("decode_rows", _by_token, LENGTHS, (0, 3), (3, 0), (True, False), HEADS),
    "named_pages": _grid("named_pages", _named, HOLES, QUERIES, WAYS),
}
