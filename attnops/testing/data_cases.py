"""The problem grid of the ops that move data: KV write, merging, metadata."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from typing import Any

import torch

from attnops.testing import builders
from attnops.testing.inputs import Call, Case, Features, Source, table

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
E4M3, E5M2, INT8 = torch.float8_e4m3fn, torch.float8_e5m2, torch.int8


MIXED, RAGGED = (7, -1, 0, 11, -1, 5), (3, 8, 1)
WRITES: dict[str, tuple[Any, ...]] = {
    "plain": (MIXED, 4, 3, Features()),
    "page_1": (RAGGED, 9, 1, Features(v_head_dim=8)),
    "page_16": (RAGGED, 2, 16, Features(dtype=BF16, head_dim=64), {"slot_dtype": torch.int32}),
    "float16": (MIXED, 4, 3, Features(dtype=F16), {"slot_dtype": torch.int32}),
    "float64": (MIXED, 4, 3, Features(dtype=F64)),
    "interleaved": (MIXED, 4, 3, Features(), {"interleaved": True}),
    "all_skipped": ((-1, -1, -1), 4, 3, Features()),
    "first_slot_skipped": ((-1, 5, -2), 4, 3, Features()),
    "last_slot": ((11,), 4, 3, Features()),
    "one_page": ((2, 0), 1, 4, Features(q_heads=1, kv_heads=1)),
    "no_tokens": ((), 4, 3, Features()),
    "no_pages": ((-1, -1), 0, 3, Features()),
    "float8": (MIXED, 4, 3, Features(kv_dtype=E4M3)),
    "float8_bfloat16": (MIXED, 4, 3, Features(dtype=BF16, kv_dtype=E4M3, scale_per_head=False), {"interleaved": True}),
    "float8_e5m2": (MIXED, 4, 3, Features(dtype=F32, kv_dtype=E5M2)),
    "float8_skipped": ((-1, -1), 4, 3, Features(kv_dtype=E4M3)),
    "int8": (MIXED, 4, 3, Features(dtype=BF16, kv_dtype=INT8)),
    "int8_float16": (MIXED, 4, 3, Features(dtype=F16, kv_dtype=INT8, scale_per_head=False), {"interleaved": True}),
    "int8_float64": (MIXED, 4, 3, Features(dtype=F64, kv_dtype=INT8)),
    # Head dims of GPU kernels.
    "bfloat16_d128": ((7, -1, 0, 33, -1, 45), 4, 16, Features(dtype=BF16, head_dim=128, kv_heads=8, q_heads=8)),
    "bfloat16_d64_interleaved": (MIXED, 4, 3, Features(dtype=BF16, head_dim=64), {"interleaved": True}),
    "float16_d256": (MIXED, 4, 3, Features(dtype=F16, head_dim=256), {"slot_dtype": torch.int32}),
    "bfloat16_d128_skipped": ((-1, -1), 4, 3, Features(dtype=BF16, head_dim=128)),
    "bfloat16_d128_no_tokens": ((), 4, 3, Features(dtype=BF16, head_dim=128)),
    "bfloat16_d128_no_pages": ((-1,), 0, 3, Features(dtype=BF16, head_dim=128)),
    "bfloat16_d128_page_1": (RAGGED, 9, 1, Features(dtype=BF16, head_dim=128)),
    "float8_d128": (MIXED, 4, 3, Features(dtype=BF16, kv_dtype=E4M3, head_dim=128)),
    "float8_e5m2_d64": (MIXED, 4, 3, Features(dtype=F16, kv_dtype=E5M2, head_dim=64), {"interleaved": True}),
}
MERGES: dict[str, tuple[Any, ...]] = {
    "plain": (5, 4, 16, F32, 0.0, 0.0), "some_empty": (9, 4, 16, F32, 0.4, 0.4), "a_empty": (3, 2, 8, F32, 1.0, 0.0),
    "b_empty": (3, 2, 8, BF16, 0.0, 1.0), "both_empty": (3, 2, 8, F16, 1.0, 1.0), "float16": (5, 4, 64, F16, 0.2, 0.2),
    "bfloat16": (5, 4, 128, BF16, 0.2, 0.2), "float64": (5, 4, 16, F64, 0.2, 0.2), "one": (1, 1, 1, F32, 0.0, 0.0),
    "no_tokens": (0, 2, 8, F32, 0.0, 0.0), "float32_128": (33, 8, 128, F32, 0.1, 0.1), "float16_256": (7, 3, 256, F16, 0.1, 0.1),
    "bfloat16_many": (300, 32, 128, BF16, 0.1, 0.1), "bfloat16_all_empty": (3, 2, 64, BF16, 1.0, 1.0),
    "bfloat16_no_tokens": (0, 2, 64, BF16, 0.0, 0.0), "bfloat16_512": (5, 16, 512, BF16, 0.2, 0.0),
    "bfloat16_not_stale": (40, 8, 128, BF16, 0.4, 0.4, False), "float32_not_stale": (9, 4, 16, F32, 0.4, 0.4, False),
}  # fmt: skip
MERGES_OF_MANY: dict[str, tuple[Any, ...]] = {
    "plain": (5, 3, 4, 16, F32, 0.0), "some_empty": (9, 4, 2, 16, F32, 0.4), "all_empty": (3, 2, 2, 8, F32, 1.0),
    "one_part": (4, 1, 2, 8, F32, 0.3), "float64": (5, 6, 4, 16, F64, 0.2), "one": (1, 1, 1, 1, F32, 0.0),
    "no_tokens": (0, 3, 2, 8, F32, 0.0), "bfloat16": (40, 3, 8, 128, BF16, 0.2), "float16": (9, 2, 4, 64, F16, 0.2),
    "bfloat16_more_parts_than_tokens": (3, 37, 4, 128, BF16, 0.3), "bfloat16_one_part": (6, 1, 4, 64, BF16, 0.4),
    "bfloat16_all_empty": (3, 2, 2, 64, BF16, 1.0), "bfloat16_many_all_empty": (2, 9, 2, 64, BF16, 1.0),
    "float16_512": (20, 5, 8, 512, F16, 0.1), "bfloat16_no_tokens": (0, 3, 2, 64, BF16, 0.0),
    "bfloat16_not_stale": (40, 3, 8, 128, BF16, 0.5, False), "float32_not_stale": (9, 2, 4, 16, F32, 0.4, False),
}  # fmt: skip


def _metadata() -> dict[str, tuple[Case, ...]]:
    lengths = {"ragged": (3, 0, 5, 1), "one": (4,), "zeros": (0, 0), "none": ()}
    ints = (torch.int32, torch.int64)

    def case(op: str, label: str, make: Callable[[Source], dict[str, Any]]) -> Case:
        return Case(op, label, lambda source: Call(op, make(source)))

    def rows(source: Source, lens: tuple[int, ...], more: int) -> dict[str, Any]:
        return {"cu_seqlens": source.cumulative(lens), "num_tokens": sum(lens) + more}

    def slots(source: Source, page: int, dtype: torch.dtype) -> dict[str, Any]:
        positions, rows = (0, 4, -1, 7, 2, 99, 5), (0, 1, 0, -1, 2, 1, 2)
        table = source.ints((5, 2, -1, 0, 7, 3, 1, -1, 6)).reshape(3, 3)
        return {"positions": source.ints(positions, dtype), "rows": source.ints(rows, dtype), "page_table": table, "page_size": page}

    def indices(source: Source, page: int, lens: tuple[int, ...], dtype: torch.dtype) -> dict[str, Any]:
        table = source.ints(source.permutation(len(lens) * 5)).reshape(len(lens), 5)
        return {"page_table": table, "seq_lens": source.ints(lens, dtype), "page_size": page}

    def by_token(source: Source, q_lens: tuple[int, ...], more: int, width: int, causal: bool, heads: dict[str, Any]) -> dict[str, Any]:
        batch = len(q_lens)
        table = source.ints([n - 1 for n in source.permutation(batch * width)]).reshape(batch, width)
        lengths = source.ints([n + 2 * (i % 2) for i, n in enumerate(q_lens)])
        cu = source.cumulative(q_lens)
        return {"page_table": table, "seq_lens": lengths, "cu_seqlens_q": cu, "num_tokens": sum(q_lens) + more, "causal": causal, **heads}

    def named(source: Source, holes: tuple[int, ...], q_lens: tuple[int, ...], more: dict[str, Any]) -> dict[str, Any]:
        batch, page, width = len(q_lens), 4, 5
        lengths = [n and n + 7 + 3 * (i % 2) for i, n in enumerate(q_lens)]
        ids = [n - 1 for n in source.permutation(batch * width)]
        ids = [ids[i] if i % width not in holes else (-1, batch * width, -7)[i % 3] for i in range(batch * width)]
        table = source.ints(ids).reshape(batch, width)
        tables = {"page_table": table, "seq_lens": source.ints(lengths), "cu_seqlens_q": source.cumulative(q_lens)}
        return {**tables, "num_pages": batch * width, "page_size": page, **more}

    places: dict[str, Any] = {"none": (), "first": (0,), "second": (1, 4), "most": (0, 1, 2, 3), "all": (0, 1, 2, 3, 4)}
    queries: dict[str, Any] = {"ragged": (3, 0, 5, 1), "decode": (1, 1, 1), "no_requests": ()}
    ways: dict[str, Any] = {"squeeze": {}, "window": {"squeeze": False, "window_left": 3}, "in_place": {"squeeze": False}}
    heads = {"rows": {}, "heads_16": {"q_heads": 16}, "heads_128": {"q_heads": 128}, "float8": {"q_heads": 16, "float8": True}}

    def grid(op: str, make: Callable[..., dict[str, Any]], **axes: Sequence[Any] | dict[str, Any]) -> tuple[Case, ...]:
        named = [axis if isinstance(axis, dict) else {str(v).removeprefix("torch."): v for v in axis} for axis in axes.values()]
        points = product(*(axis.items() for axis in named))
        return tuple(
            case(op, "-".join(n for n, _ in point), partial(make, **dict(zip(axes, (v for _, v in point), strict=True))))
            for point in points
        )

    return {
        "cu_seqlens": grid("cu_seqlens", lambda s, lens, dtype: {"lengths": s.ints(lens, dtype)}, lens=lengths, dtype=ints),
        "token_rows": grid("token_rows", rows, lens=lengths, more=(0, 3)),
        "slot_mapping": grid("slot_mapping", slots, page=(1, 3, 16), dtype=ints),
        "kv_indices": grid("kv_indices", indices, lens=lengths, page=(1, 3), dtype=ints),
        "decode_rows": grid("decode_rows", by_token, q_lens=lengths, more=(0, 3), width=(3, 0), causal=(True, False), heads=heads),
        "named_pages": grid("named_pages", named, holes=places, q_lens=queries, more=ways),
    }


DATA_CASES = {
    "write_kv": table("write_kv", builders.write, WRITES),
    "merge_state": table("merge_state", builders.merge, MERGES),
    "merge_states": table("merge_states", builders.merge_states, MERGES_OF_MANY),
    **_metadata(),
}
