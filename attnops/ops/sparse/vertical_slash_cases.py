"""The cases of vertical-slash attention and of its index."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from attnops.ops.case_data import BF16, F16, F64, Features as F, Given, Rows, Scene, at
from attnops.ops.sparse.vertical_slash import VerticalSlashIndexes
from attnops.ops.sparse.vertical_slash_reference import vertical_slash_indexes

INDEXES: Rows = {
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
SLASH = F(head_dim=16, lse=True)
HALF = F(dtype=BF16, head_dim=128, q_heads=4, kv_heads=2, lse=True)
"""The shape that GPU kernels of vertical-slash attention support."""
slash, half = partial(replace, SLASH), partial(replace, HALF)
MAIN, NO_PADDING = ((70, 0, 130, 1), (150, 5, 130, 40)), {"padding": (0, 0)}
SLASHES: Rows = {
    **at(
        MAIN,
        {
            "plain": slash(lse=False),
            "lse": SLASH,
            "scale": slash(scale=0.7),
            "loud": slash(loud=True),
            "value_wider": slash(v_head_dim=24),
            "float64": slash(dtype=F64),
            "bfloat16_d128": HALF,
            "bfloat16_d128_plain": half(lse=False),
            "float16_d128": half(dtype=F16),
            "bfloat16_d128_loud": half(loud=True),
            "bfloat16_d128_one_head": half(q_heads=1, kv_heads=1),
        },
    ),
    "many_slashes": ((200,), (333,), SLASH, {"slashes": 30}),
    "one_slash": ((90, 65), (90, 300), SLASH, {"slashes": 1, "verticals": 1}),
    "slack": ((7, 3), (9, 3), SLASH, {"slack": 100}),
    "decode": ((1, 1), (70, 1), SLASH, NO_PADDING),
    "no_requests": ((), (), SLASH, {"slack": 1}),
    "no_queries": ((0, 0), (3, 0), SLASH),
    "nothing": ((), (), SLASH, NO_PADDING),
    "bfloat16_d128_no_padding": ((128, 64), (128, 256), HALF, {"padding": None}),
    "bfloat16_d128_sparse": ((300,), (1500,), HALF, {"verticals": 150, "slashes": 6}),
    "bfloat16_d128_decode": ((1, 1), (70, 1), HALF),
    "bfloat16_d128_no_keys": ((0,), (0,), HALF, {"padding": (3, 0)}),
    "bfloat16_d128_no_requests": ((), (), HALF, {"slack": 1}),
}


def index(scene: Scene, counted: bool = False) -> Given:
    """No request has more queries than keys. counted: each head uses some of its entries only.

    The other entries of a head are columns and diagonals that it must not see.
    """
    source, k_lens, sizes = scene.source, scene.k_lens or (), scene.sizes
    heads, verticals, slashes = sizes["H"], sizes["V"], sizes["S"]

    def distinct(count: int, below: int) -> list[int]:
        """Ascending; below `below` while there are enough."""
        return sorted(source.permutation(max(below, count))[:count])

    def ends(used: int, keys: int) -> list[int]:
        row = [n + 1 for n in distinct(used - 1, keys + 3)][::-1]
        return row + [0] * (slashes - len(row))

    v_counts, s_counts = (
        [1 + source.permutation(n)[0] if counted else n for _ in range(heads)]
        for n in (verticals, slashes)
    )
    # Some are past the end: every request fills a table as long as the longest one.
    vertical = [[distinct(verticals, keys + 2) for _ in range(heads)] for keys in k_lens]
    slash = [[ends(used, keys) for used in s_counts] for keys in k_lens]
    made = {"vertical": source.ints(vertical).reshape(len(k_lens), heads, verticals)}
    made["slash"] = source.ints(slash).reshape(len(k_lens), heads, slashes)
    return made | (
        {"vertical_counts": source.ints(v_counts), "slash_counts": source.ints(s_counts)}
        if counted
        else {}
    )


def seen(scene: Scene, verticals: int = 12, slashes: int = 4) -> Given:
    """An index made by the reference."""
    source, most = scene.source, scene.given["max_seqlen_q"]
    scene.sizes |= {"V": verticals, "S": slashes}
    made = index(scene)
    lengths = source.ints(scene.q_lens or ()), source.ints(scene.k_lens or ())
    found = vertical_slash_indexes(VerticalSlashIndexes(*lengths, **made, max_seqlen_q=most))
    return dict(
        zip(("block_count", "block_offset", "column_count", "column_index"), found, strict=True)
    )
