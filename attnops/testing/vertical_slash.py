"""Builders and problem grid of vertical-slash attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from attnops.ops import OPS
from attnops.testing import builders
from attnops.testing.inputs import Call, Features, Source, table

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64


def indexes(
    source: Source,
    q_lens: Sequence[int],
    k_lens: Sequence[int],
    heads: int,
    verticals: int,
    slashes: int,
    counted: bool = False,
    slack: int = 0,
) -> Call:
    """`vertical_slash_indexes`. No request has more queries than keys. counted: each head uses some of its entries only.

    The other entries of a head are columns and diagonals that it must not see.
    """
    batch = len(q_lens)
    vertical = torch.zeros(batch, heads, verticals, dtype=torch.int32)
    slash = torch.zeros(batch, heads, slashes, dtype=torch.int32)
    v_counts, s_counts = ([1 + source.permutation(n)[0] if counted else n for _ in range(heads)] for n in (verticals, slashes))
    for b, keys in enumerate(k_lens):
        for h in range(heads):
            # Some are past the end: every request fills a table as long as the longest one.
            vertical[b, h] = _distinct(source, verticals, keys + 2)
            slash[b, h, : s_counts[h]] = torch.cat([_distinct(source, s_counts[h] - 1, keys + 3).flip(0) + 1, torch.zeros(1)])
    arguments: dict[str, Any] = {"q_lens": source.ints(q_lens), "k_lens": source.ints(k_lens)}
    arguments |= {"vertical": vertical.to(source.device), "slash": slash.to(source.device)}
    if counted:
        arguments |= {"vertical_counts": source.ints(v_counts), "slash_counts": source.ints(s_counts)}
    return Call("vertical_slash_indexes", arguments | {"max_seqlen_q": max(q_lens, default=0) + slack})


def _distinct(source: Source, count: int, below: int) -> Tensor:
    """`count` distinct ints, ascending; below `below` while there are enough."""
    return torch.tensor(sorted(source.permutation(max(below, count))[:count]), dtype=torch.int32)


def attention(
    source: Source,
    q_lens: Sequence[int],
    k_lens: Sequence[int],
    f: Features,
    verticals: int = 12,
    slashes: int = 4,
    padding: tuple[int, int] = (2, 3),
    slack: int = 0,
    padded: bool = True,
) -> Call:
    """`vertical_slash_attention` over an index made by the reference."""
    made = indexes(source, q_lens, k_lens, f.q_heads, verticals, slashes, slack=slack)
    found = OPS["vertical_slash_indexes"].reference(made.record)
    packed = builders.varlen(source, q_lens, k_lens, replace(f, lse=False), padding, slack)
    names = ("query", "key", "value", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
    given = {n: packed.arguments[n] for n in names}
    given |= dict(zip(("block_count", "block_offset", "column_count", "column_index"), found, strict=True))
    arguments = builders.attend(source, "vertical_slash_attention", f, {"T": given["query"].shape[0]}, **given)
    return Call("vertical_slash_attention", arguments | ({} if padded else {"padded": False}), packed.free, builders.WRITTEN)


INDEXES: dict[str, tuple[Any, ...]] = {
    "one_row": ((5,), (5,), 2, 3, 2),
    "ragged": ((130, 0, 64, 1), (200, 7, 64, 300), 2, 9, 5),
    "many": ((300, 257), (900, 257), 3, 40, 12),
    "dense_slashes": ((200,), (200,), 2, 5, 40),
    "single_entries": ((70, 3), (70, 90), 2, 1, 1),
    "more_than_keys": ((4,), (6,), 1, 30, 20),
    "slack": ((10, 3), (10, 80), 2, 4, 3, {"slack": 150}),
    "counted": ((130, 5), (400, 70), 4, 17, 8, {"counted": True}),
    "no_requests": ((), (), 2, 3, 2, {"slack": 3}),
    "no_queries": ((0, 0), (4, 0), 2, 3, 2),
}

SMALL = Features(head_dim=16, lse=True)
HALF = Features(dtype=BF16, head_dim=128, q_heads=4, kv_heads=2, lse=True)
"""The shape that GPU kernels support."""

MAIN = ((70, 0, 130, 1), (150, 5, 130, 40))
ATTENTION: dict[str, tuple[Any, ...]] = {
    "plain": (*MAIN, replace(SMALL, lse=False)),
    "lse": (*MAIN, SMALL),
    "scale": (*MAIN, replace(SMALL, scale=0.7)),
    "loud": (*MAIN, replace(SMALL, loud=True)),
    "value_wider": (*MAIN, replace(SMALL, v_head_dim=24)),
    "float64": (*MAIN, replace(SMALL, dtype=F64)),
    "many_slashes": ((200,), (333,), SMALL, {"slashes": 30}),
    "one_slash": ((90, 65), (90, 300), SMALL, {"slashes": 1, "verticals": 1}),
    "slack": ((7, 3), (9, 3), SMALL, {"slack": 100}),
    "decode": ((1, 1), (70, 1), SMALL, {"padding": (0, 0)}),
    "no_requests": ((), (), SMALL, {"slack": 1}),
    "no_queries": ((0, 0), (3, 0), SMALL),
    "nothing": ((), (), SMALL, {"padding": (0, 0)}),
    "bfloat16_d128": (*MAIN, HALF),
    "bfloat16_d128_plain": (*MAIN, replace(HALF, lse=False)),
    "float16_d128": (*MAIN, replace(HALF, dtype=F16)),
    "bfloat16_d128_loud": (*MAIN, replace(HALF, loud=True)),
    "bfloat16_d128_one_head": (*MAIN, replace(HALF, q_heads=1, kv_heads=1)),
    "bfloat16_d128_no_padding": ((128, 64), (128, 256), HALF, {"padding": (0, 0), "padded": False}),
    "bfloat16_d128_sparse": ((300,), (1500,), HALF, {"verticals": 150, "slashes": 6}),
    "bfloat16_d128_decode": ((1, 1), (70, 1), HALF),
    "bfloat16_d128_no_keys": ((0,), (0,), HALF, {"padding": (3, 0)}),
    "bfloat16_d128_no_requests": ((), (), HALF, {"slack": 1}),
}

VERTICAL_SLASH_CASES = {
    "vertical_slash_indexes": table("vertical_slash_indexes", indexes, INDEXES),
    "vertical_slash_attention": table("vertical_slash_attention", attention, ATTENTION),
}
