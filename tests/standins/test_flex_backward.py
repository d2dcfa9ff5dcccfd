"""The gradient of `flex` on a CPU: uncompiled, with torch's refusal of a CPU taken away. Not the compiled kernel."""

from dataclasses import replace
from itertools import product

import pytest
import torch
from torch.nn.attention import flex_attention as vendor

import attnops
from attnops.core.kernel import kernels_of
from attnops.core.problem import Extent, Target, altered, pretend
from attnops.core.select import select
from attnops.kernels.torch import flex
from attnops.ops import OPS
from attnops.testing import Features, Source, gradient_call, make_call
from tests.checks import right
from tests.standins import calls

F32, BF16 = torch.float32, torch.bfloat16
SM90 = Target("cuda", 90, assume=())
PLAIN = Features(dtype=F32, head_dim=16, q_heads=4, kv_heads=2)
ALL = replace(PLAIN, causal=True, window=(4, -1), sinks=F32, softcap=2.0)
RULES = {
    "all": ALL,
    "chunk": replace(PLAIN, causal=True, chunk=4, v_head_dim=32, dtype=BF16),
    "mask": replace(PLAIN, mask="additive", sinks=F32),
}
SHAPES = {
    "ragged": calls.ragged,
    "ranges": lambda f: make_call("attention", Source(3), 2, 3, 9, f, kv_start=(1, 0), kv_end=(9, 4), index=torch.int32),
}


@pytest.fixture
def on_cpu(monkeypatch):
    monkeypatch.setattr(vendor, "_validate_device", lambda *given: None)
    with pretend(SM90):
        yield


def kernel(op):
    return kernels_of(op)["flex"]


@pytest.mark.sweep(2)
@pytest.mark.parametrize(("rules", "shape"), [(r, s) for r in RULES for s in SHAPES if (r, s) != ("mask", "ragged")])
def test_gradients(on_cpu, rules, shape):
    call = gradient_call(Source(4), SHAPES[shape](RULES[rules]), lse_grad=True)
    right(kernel(call.op), call)


@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
@pytest.mark.parametrize("made", [calls.dense, calls.ragged])
def test_triton_is_before_it_by_estimate(made, dtype):
    """No GPU has timed its gradient yet."""
    problem = gradient_call(Source(0), made(PLAIN)).problem
    for arch, n, window in product((80, 90, 100), (300, 4096, 32768), ((-1, -1), (1023, -1))):
        given = {name: Extent.of(n) for name in ("tokens", "queries", "context")} | {"target": Target("cuda", arch, assume=("triton",))}
        costs = select(altered(problem, dtype=dtype, kv_dtype=dtype, causal=True, window=window, **given)).costs
        assert costs["triton"].us < costs["flex"].us


@pytest.mark.parametrize("keys", [1, 128, 700])
@pytest.mark.parametrize("queries", [1, 300])
@pytest.mark.parametrize("window", [(-1, -1), (90, -1), (200, 40)])
def test_key_blocks_know_the_query_blocks_that_read_them(queries, keys, window):
    rules = flex.Rules(1.0, window == (90, -1), *window, 0.0, 0)
    start, end = torch.tensor([0, keys // 3]), torch.tensor([keys, keys // 2 + 1])
    blocks = flex.dense_blocks(torch.empty(2, queries, 1, 1), keys, start, end, rules, True)
    found = flex._block_mask(queries, keys, blocks)
    want = vendor.BlockMask.from_kv_blocks(found.kv_num_blocks, found.kv_indices, BLOCK_SIZE=flex.BLOCK, seq_lengths=(queries, keys))
    assert torch.equal(found.q_num_blocks, want.q_num_blocks)
    for at in torch.cartesian_prod(*map(torch.arange, found.q_num_blocks.shape)).tolist():
        count = int(found.q_num_blocks[tuple(at)])
        assert torch.equal(found.q_indices[tuple(at)][:count], want.q_indices[tuple(at)][:count])


@pytest.mark.full
@pytest.mark.parametrize("shape", SHAPES)
def test_traced_by_a_compiler(on_cpu, monkeypatch, shape):
    """As on a GPU, Dynamo and AOTAutograd trace the forward and its backward, with blocks of keys and queries; no kernel is generated."""
    traced = torch.compile(vendor.flex_attention, backend="aot_eager", fullgraph=True)
    seen = []

    def call(*given, block_mask, **options):
        seen.append(block_mask)
        return traced(*given, block_mask=block_mask, **options)

    monkeypatch.setattr(flex, "_call", lambda device: call)
    monkeypatch.setattr(flex, "_on_cpu", lambda x: False)
    monkeypatch.setattr(flex, "_options", lambda *given: {})
    step = gradient_call(Source(4), SHAPES[shape](ALL), lse_grad=True)
    with attnops.use(kernel={step.op: "flex"}):
        right(replace(kernel(step.op), run=lambda record: OPS[step.op](record)), step)
    assert [x.q_indices is not None for x in seen] == [True]
