"""Kernels whose grids hold requests where CUDA takes 65,535: a larger batch in turns, over stand-ins, with a bound of two."""

from dataclasses import replace

import pytest
import torch

from attnops.core.kernel import kernels_of
from attnops.kernels.shared import parts
from attnops.kernels.torch import aten_flash as flash
from attnops.testing import Features, Source, gradient_call, make_call
from tests.checks import right
from tests.standins.vendors import VENDORS

PLAIN = Features(dtype=torch.bfloat16, head_dim=64, q_heads=4, kv_heads=2, lse=True, causal=True)
BIAS, SINKS = replace(PLAIN, causal=False, mask="additive"), replace(PLAIN, sinks=torch.float32)
CALLS = {
    "dense": lambda: make_call("attention", Source(1), 5, 3, 9, PLAIN),
    "packed": lambda: make_call("varlen_attention", Source(1), (3, 0, 1, 4, 2), (5, 4, 0, 4, 3), PLAIN),
    "tight": lambda: make_call("varlen_attention", Source(1), (3, 1, 1, 4, 2), (5, 4, 2, 4, 3), PLAIN, padding=None),
    "bias": lambda: make_call("attention", Source(1), 5, 3, 9, BIAS),
    "one bias": lambda: make_call("attention", Source(1), 5, 3, 9, replace(BIAS, mask_shape="h")),
    "ranges": lambda: make_call("attention", Source(1), 5, 3, 9, SINKS, kv_end=(9, 4, 5, 3, 7), index=torch.int32),
}
TURNS = [
    ("aten_flash", "dense"), ("aten_flash", "packed"), ("aten_flash", "tight"), ("fa4", "dense"), ("flex", "dense"), ("flex", "ranges"),
    ("mem_efficient", "dense"), ("mem_efficient", "bias"), ("mem_efficient", "one bias"),
]  # fmt: skip


@pytest.mark.sweep(3)
@pytest.mark.parametrize(("name", "shape"), TURNS)
def test_a_larger_batch_takes_turns(name, shape, monkeypatch):
    monkeypatch.setattr(parts, "MOST_REQUESTS", 2)
    forward = CALLS[shape]()
    graded = "bias" in shape
    backward = gradient_call(Source(2), forward, mask_grad=graded)
    for call in (forward, backward):
        with VENDORS[name].running() as calls:
            right(kernels_of(call.op)[name], call)
            assert len(calls) == 3, "turns of 2, 2 and 1"


def test_sums_that_32_bits_do_not_index_take_turns():
    """Of the gradient of a query: 512 requests of 128 rows of 256 heads of 128 numbers are the most."""
    call = gradient_call(Source(2), make_call("attention", Source(1), 5, 3, 9, PLAIN)).record
    wide = {n: torch.empty(shape, device="meta") for n, shape in (("query", (5, 65, 256, 128)), ("key", (5, 9, 256, 128)))}
    assert flash._indexed(call._replace(**wide)) == 512
    assert flash._indexed(call) == parts.MOST_REQUESTS
