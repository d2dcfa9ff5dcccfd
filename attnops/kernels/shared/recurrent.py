"""What kernels of several backends take and cost, of layers that carry a state."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from attnops.core.problem import Problem
from attnops.core.record import changed
from attnops.measured.cost import multiply_us
from attnops.ops.recurrent.kept_reference import RULE_KEEPS, SCAN_KEEPS

CONV_TAKES = frozenset({"bias", "activation"})
KEPT_OF_RULES = frozenset({*RULE_KEEPS.values(), "accepted"})
KEPT_OF_SCANS = frozenset({*SCAN_KEEPS.values(), "accepted"})
KEPT_OF_CONVS = frozenset({"kept_x", "accepted"})
"""Arguments of tokens that may be taken back."""
MOST_ROWS = 128
"""Rows of a tile of the state, at most. A state has one row for each number of a key."""
TILES = {"gated_delta_rule": 1, "mamba2_scan": 2}
"""Tiles that a program holds at most, by chunks."""
CHUNK = 64
"""Tokens that are worked out by matrix products, before the state goes on."""


def chunks_of(p: Problem) -> int:
    """Chunks of the longest request."""
    return -(-max(p.sizes.queries.hint, 1) // CHUNK)


def rule_us(p: Problem) -> float:
    """The bytes of states and tokens, and the products of chunks."""
    tokens, batch = max(p.sizes.tokens.hint, 1), max(p.sizes.batch.hint, 1)
    states = 8.0 * batch * p.q_heads * p.head_dim * p.v_head_dim
    numbers = 2 * p.kv_heads * p.head_dim + 2 * p.q_heads * p.v_head_dim
    width = p.head_dim + p.v_head_dim
    products = p.q_heads * (6.0 * p.head_dim * p.v_head_dim + 4.0 * CHUNK * width)
    return multiply_us(p, states + tokens * numbers * p.dtype.itemsize, tokens * products)


def conv_us(p: Problem) -> float:
    """The tokens, read and written once."""
    tokens = max(p.sizes.tokens.hint, 1)
    return multiply_us(p, 2.0 * tokens * p.in_features * p.dtype.itemsize, 0.0)


def goes_by_chunks(op: str, dtype: torch.dtype, head_dim: int, v_head_dim: int) -> bool:
    """Have chunks of tokens a kernel? Float32 has no matrix units. With heads of other sizes code
    of Triton 3.6 gave wrong numbers on an H200, or read past the end of memory."""
    whole = head_dim % 16 == 0 and v_head_dim % 16 == 0
    return dtype != torch.float32 and whole and head_dim <= TILES[op] * MOST_ROWS


def in_one_piece(run: Callable[[Any], None]) -> Callable[[Any], None]:
    """`run`, whose call has contiguous tensors to write."""

    @functools.wraps(run)
    def either(call: Any) -> None:
        written = {a.name: getattr(call, a.name) for a in call.spec.args if a.written}
        apart = {n: x for n, x in written.items() if x is not None and not x.is_contiguous()}
        copies = {name: x.contiguous() for name, x in apart.items()}
        run(changed(call, **copies) if copies else call)
        for name, x in apart.items():
            x.copy_(copies[name])

    return either
