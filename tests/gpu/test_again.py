"""Eager calls of experts like one before, which go straight to the compiled kernels: numbers, and
weights that change between two calls."""

from importlib import import_module
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from attnops.core.kernel import kernels_of
from attnops.ops.experts.record import EXPERTS, experts

DEVICE = torch.device("cuda", 0)
SHAPE = 64, 512, 256, 768
"""Experts, In, Inner, Out."""


def weight(count: int, rows: int, columns: int, along: bool) -> nn.Parameter:
    shape = (count, columns, rows) if along else (count, rows, columns)
    x = torch.randn(shape, device=DEVICE, dtype=torch.bfloat16) / columns**0.5
    return nn.Parameter(x, requires_grad=False)


def tokens(rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """x, the experts and their weights."""
    x = torch.randn(rows, SHAPE[1], device=DEVICE, dtype=torch.bfloat16)
    chosen = torch.rand(rows, SHAPE[0], device=DEVICE).topk(4)
    return x, chosen.indices, chosen.values.bfloat16()


@pytest.mark.parametrize("along", [False, True], ids=["columns", "rows"])
@pytest.mark.parametrize("rows", [1, 8, 64])
def test_experts_again(rows: int, along: bool) -> None:
    host: Any = import_module("attnops.kernels.triton.launch.experts")
    compiled: Any = import_module("attnops.kernels.shared.launch.compiled")
    record: Any = EXPERTS.call
    torch.manual_seed(0)
    count, columns, inner, outs = SHAPE
    held = weight(count, 2 * inner, columns, along), weight(count, outs, inner, along)
    made: list[Any] = []
    launch = host.launch

    def counted(*args: Any) -> Any:
        made.append(args)
        return launch(*args)

    def check() -> int:
        """A call, which is right; the launches that were worked out."""
        x, index, shares = tokens(rows)
        gate_up, down = (w.transpose(1, 2) if along else w for w in held)
        made.clear()
        got = experts(x, gate_up, down, index, shares, kernel="triton")
        launches = len(made)
        call = record(x, gate_up, down, index, shares, output=torch.empty_like(got))
        kernels_of("experts")["aten"].run(call)
        torch.testing.assert_close(got, call.output, rtol=0, atol=0.1)
        return launches

    EXPERTS.seen.clear()
    fresh = patch.dict(compiled._ENTRIES, clear=True)
    with torch.no_grad(), fresh, patch.object(host, "launch", counted):
        launches = 2 if rows == 1 and not along else 3
        assert [check() for _ in range(4)] == [launches, launches, 0, 0]
        held[0].mul_(0.5)
        assert check() == 0
        held[1].data = weight(count, outs, inner, along).data
        assert check() == 0
        held = weight(count, 2 * inner, columns, along), held[1]
        assert check() == 0
        graph = torch.cuda.CUDAGraph()
        x, index, shares = tokens(rows)
        gate_up, down = (w.transpose(1, 2) if along else w for w in held)
        want = experts(x, gate_up, down, index, shares, kernel="triton")
        with torch.cuda.graph(graph):
            got = experts(x, gate_up, down, index, shares, kernel="triton")
        graph.replay()
        assert torch.equal(got, want)
