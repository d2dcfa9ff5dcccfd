"""Calls of linear layers that are timed, with weights that no cache holds."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attnops.core.arguments import REQUIRED, Arg
from attnops.core.problem import Extent, Extents, Problem, Target, altered
from attnops.ops import OPS
from attnops.testing.calls import Call, filled
from attnops.testing.pool import Pool

COLD_BYTES = 600_000_000
"""Bytes of all copies of a weight together: several times the L2 cache of any GPU."""

WITH: dict[str, Any] = {"norm_eps": 1e-5, "activation": "silu"}
"""The values of arguments that are no tensors, where a kind asks for them."""


def build_linear(kind: Problem, rows: int, pool: Pool) -> Call:
    """A call of `kind`. Resets the pool."""
    pool.reset()

    def make(a: Arg, dims: list[int]) -> Tensor | None:
        if a.written:
            return torch.empty(dims, dtype=kind.dtype, device=pool.device)
        return pool.take(*dims, dtype=kind.dtype) if a.default is REQUIRED or a.name in kind.asks else None

    given = {n: value for n, value in WITH.items() if n in kind.asks}
    sizes = {"T": rows, "In": kind.in_features, "Out": kind.out_features, "activation": "", **given}
    return Call(kind.op, filled(kind.op, sizes, given, make), writes=("output",))


def linear_problem(kind: Problem, rows: int, target: Target) -> Problem:
    """The Problem of the call that `build_linear` makes, on any target."""
    return altered(kind, target=target, sizes=Extents(tokens=Extent.of(rows)))


def with_copies(call: Call, pool: Pool) -> list[Call]:
    """The call, and on a GPU calls with other weights, which make every read of a weight cold when all calls run in turn."""
    names = OPS[call.op].spec.weights
    if not names or pool.device.type != "cuda":
        return [call]
    given = call.tensors()
    count = max(2, -(-COLD_BYTES // sum(given[n].nbytes for n in names)))
    return [call, *(call.with_(**{n: pool.take(*given[n].shape, dtype=given[n].dtype) for n in names}) for _ in range(count - 1))]
