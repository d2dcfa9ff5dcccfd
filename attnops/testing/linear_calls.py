"""Calls of linear layers that are timed, with weights that no cache holds."""

from __future__ import annotations

from typing import Any

import torch

from attnops.core.problem import Extent, Extents, Problem, Target
from attnops.measured import LinearShape
from attnops.measured.linears import PARTS
from attnops.ops import OPS
from attnops.testing.calls import Call
from attnops.testing.pool import Pool

COLD_BYTES = 600_000_000
"""Bytes of all copies of a weight together: several times the L2 cache of any GPU."""


def build_linear(shape: LinearShape, rows: int, pool: Pool) -> Call:
    """A call of `shape`. Resets the pool."""
    pool.reset()
    dtype, outs = getattr(torch, shape.dtype), shape.out_features // 2 if shape.activation else shape.out_features
    given: dict[str, Any] = {
        "x": pool.take(rows, shape.in_features, dtype=dtype),
        "weight": pool.take(shape.out_features, shape.in_features, dtype=dtype),
        "output": torch.empty(rows, outs, dtype=dtype, device=pool.device),
    }
    given |= {"norm_weight": pool.take(shape.in_features, dtype=dtype), "norm_eps": 1e-5} if shape.norm else {}
    given |= {"activation": "silu"} if shape.activation else {}
    given |= {"residual": pool.take(rows, outs, dtype=dtype)} if shape.residual else {}
    return Call(shape.op, given, writes=("output",))


def linear_problem(shape: LinearShape, rows: int, target: Target) -> Problem:
    """The Problem of the call that `build_linear` makes, on any target."""
    dtype = getattr(torch, shape.dtype)
    asks = {argument for part, argument in PARTS.items() if getattr(shape, part)} | ({"norm_eps"} if shape.norm else set())
    return Problem(
        shape.op, target, dtype, dtype, in_features=shape.in_features, out_features=shape.out_features, asks=frozenset(asks),
        sizes=Extents(tokens=Extent.of(rows)),
    )  # fmt: skip


def with_copies(call: Call, pool: Pool) -> list[Call]:
    """The call, and on a GPU calls with other weights, which make every read of a weight cold when all calls run in turn."""
    names = OPS[call.op].spec.weights
    if not names or pool.device.type != "cuda":
        return [call]
    given = call.tensors()
    count = max(2, -(-COLD_BYTES // sum(given[n].nbytes for n in names)))
    return [call, *(call.with_(**{n: pool.take(*given[n].shape, dtype=given[n].dtype) for n in names}) for _ in range(count - 1))]
