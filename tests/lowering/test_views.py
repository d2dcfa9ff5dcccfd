"""What Inductor is known to compile wrongly must not stand in the torch ops that kernels are
lowered to in place."""

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from attnops.core.kernel import all_kernels
from attnops.core.tensors import rows_of
from attnops.testing import CASES

VIEWS = (
    "slice",
    "select",
    "view",
    "alias",
    "as_strided",
    "_unsafe_view",
    "expand",
    "squeeze",
    "unsqueeze",
    "narrow",
)
INLINE = [
    pytest.param(k, id=f"{k.op}.{k.name}") for k in all_kernels() if k.inline and k.core is None
]


def searched_views(function, *args):
    """Names of the nodes that a searchsorted or bucketize of the traced function looks through,
    where they are views."""
    graph = make_fx(function, tracing_mode="fake")(*args).graph
    found = []
    for node in graph.nodes:
        if node.op == "call_function" and any(
            n in str(node.target) for n in ("searchsorted", "bucketize")
        ):
            bounds = node.args[1 if "bucketize" in str(node.target) else 0]
            if bounds.op == "call_function" and str(bounds.target).split(".")[1] in VIEWS:
                found.append(str(bounds))
    return found


def test_a_view_is_seen():
    assert searched_views(
        lambda x, at: torch.searchsorted(x[1:], at), torch.arange(4), torch.arange(3)
    ) == ["slice_1"]


@pytest.mark.parametrize("kernel", INLINE)
def test_nothing_is_searched_in_a_view(kernel):
    """Inductor of torch 2.11 forgets a view's storage offset on CUDA, and rows go to the request
    before."""
    case = next((c for c in CASES[kernel.op] if not kernel.refusals(c.call().problem)), None)
    if case is None:
        pytest.skip(f"{kernel.name} takes no case here")
    call = case.call()
    names = list(call.tensors())

    def run(*tensors):
        given = call.with_(**dict(zip(names, tensors, strict=True)))
        return kernel.run(given.record)

    assert searched_views(run, *call.tensors().values()) == []


def test_nothing_is_searched_where_there_is_nothing():
    """Triton fails to compile a search in an empty tensor."""
    cu = torch.zeros(1, dtype=torch.int32)
    assert "searchsorted" not in make_fx(lambda x: rows_of(x, 3), tracing_mode="fake")(cu).code
    assert rows_of(cu, 3).tolist() == [0, 0, 0]
