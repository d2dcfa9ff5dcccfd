"""Kernels of torch as on CUDA, through stand-ins of what they wrap or uncompiled: rules, gradients,
turns, choices."""

from dataclasses import replace
from itertools import product

import pytest
import torch
from torch.nn.attention import flex_attention as vendor

import attnops
from attnops.core.kernel import kernels_of
from attnops.core.problem import Extent, Target, altered, pretend
from attnops.core.select import choose, select
from attnops.kernels.shared import parts
from attnops.kernels.torch import aten_flash as flash, flex
from attnops.ops import OPS
from attnops.testing import Features, Source, gradient_call, make_call
from tests.checks import right
from tests.standins.calls import dense, ragged
from tests.standins.vendors import VENDORS

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
SM90 = Target("cuda", 90, assume=())


def check_both_ways(call):
    """The call and its gradient."""
    for one in (call, gradient_call(Source(4), call)):
        with VENDORS["aten_flash"].running():
            right(kernels_of(one.op)["aten_flash"], one)


@pytest.mark.parametrize("window", [(-1, -1), (3, -1), (2, 2), (-1, 1), (0, 0), (40, 40)], ids=str)
@pytest.mark.parametrize("causal", [True, False])
def test_ragged_requests_with_windows(causal, window):
    check_both_ways(
        ragged(Features(dtype=BF16, head_dim=64, q_heads=6, causal=causal, window=window, lse=True))
    )


@pytest.mark.parametrize("padding", [(0, 0), (1, 2)])
def test_one_query_a_request_and_an_idle_one(padding):
    f = Features(dtype=F16, head_dim=64, q_heads=4, kv_heads=2, causal=True, lse=True)
    check_both_ways(
        make_call("varlen_attention", Source(3), (1, 0, 1), (5, 3, 7), f, padding=padding)
    )


@pytest.mark.parametrize("tokens", [(2, 4096), (1, 16384), (8, 1024)], ids=str)
def test_a_backward_on_an_h200_is_not_the_references(tokens):
    """The estimate, too, says that FlashAttention is faster than formulas."""
    batch, length = tokens
    f = Features(dtype=BF16, head_dim=128, q_heads=32, kv_heads=8, causal=True)
    for op, want in (("varlen_attention_backward", "aten_flash"), ("attention_backward", "cudnn")):
        problem = gradient_call(
            Source(0), (ragged if op.startswith("varlen") else dense)(f)
        ).problem
        sizes = {"tokens": batch * length, "batch": batch, "queries": length, "context": length}
        large = altered(
            problem,
            target=SM90,
            sizes_equal=True,
            **{n: Extent.of(size) for n, size in sizes.items()},
        )
        assert choose(large).name == want


def test_a_torch_without_a_new_cudnn_is_refused_by_name(monkeypatch):
    here = Target("cuda", 90)
    for available, version, fine in (
        (False, None, False),
        (True, 90800, False),
        (True, 91002, True),
    ):
        monkeypatch.setattr(
            torch.backends.cudnn, "is_available", lambda available=available: available
        )
        monkeypatch.setattr(torch.backends.cudnn, "version", lambda version=version: version)
        assert [r.field for r in kernels_of("attention")["cudnn"].absences(here)] == (
            [] if fine else ["cudnn"]
        )


@pytest.mark.parametrize("dtype", [F32, torch.float64], ids=str)
def test_a_training_step_with_a_mask(dtype):
    leaves = [torch.randn(2, 6, n, 16, requires_grad=True) for n in (8, 2, 2)]
    leaves.append(torch.randn(1, 8, 6, 6, dtype=dtype, requires_grad=True))
    found = []
    for name in ("mem_efficient", "reference"):
        with (
            VENDORS["mem_efficient"].running(),
            attnops.use(kernel=dict.fromkeys(("attention", "attention_backward"), name)),
        ):
            out = attnops.attention(*leaves[:3], mask=leaves[3], causal=True)
            found.append(torch.autograd.grad(out.sin().sum(), leaves))
    for got, want in zip(*found, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("mask", ["none", "additive"])
def test_kernels_that_a_gpu_has_timed_are_before_it(mask):
    problem = gradient_call(Source(0), make_call("attention", Source(0), 2, 9, 9, HALF)).problem
    for op in ("attention", "attention_backward"):
        asked = altered(
            problem,
            op=op,
            target=Target("cuda", 90, assume=("triton",)),
            mask=mask,
            grad=op != "attention",
        )
        assert select(asked).kernel is not kernels_of(op)["mem_efficient"]
        assert "batch_invariant" in [
            r.field for r in select(asked, "deterministic").refused["mem_efficient"]
        ]


WIDE = Features(dtype=F32, head_dim=16, q_heads=4, kv_heads=2)
ALL = replace(WIDE, causal=True, window=(4, -1), sinks=F32, softcap=2.0)
RULES = {
    "all": ALL,
    "chunk": replace(WIDE, causal=True, chunk=4, v_head_dim=32, dtype=BF16),
    "mask": replace(WIDE, mask="additive", sinks=F32),
}
SHAPES = {
    "ragged": ragged,
    "ranges": lambda f: make_call(
        "attention", Source(3), 2, 3, 9, f, kv_start=(1, 0), kv_end=(9, 4), index=torch.int32
    ),
}


@pytest.mark.sweep(2)
@pytest.mark.parametrize(
    ("rules", "shape"), [(r, s) for r in RULES for s in SHAPES if (r, s) != ("mask", "ragged")]
)
def test_gradients_of_flex(rules, shape):
    call = gradient_call(Source(4), SHAPES[shape](RULES[rules]), lse_grad=True)
    with VENDORS["flex"].running():
        right(kernels_of(call.op)["flex"], call)


@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
@pytest.mark.parametrize("made", [dense, ragged])
def test_triton_is_before_it_by_estimate(made, dtype):
    """No GPU has timed its gradient yet."""
    problem = gradient_call(Source(0), made(WIDE)).problem
    for arch, n, window in product((80, 90, 100), (300, 4096, 32768), ((-1, -1), (1023, -1))):
        given = {name: Extent.of(n) for name in ("tokens", "queries", "context")} | {
            "target": Target("cuda", arch, assume=("triton",))
        }
        costs = select(
            altered(problem, dtype=dtype, kv_dtype=dtype, causal=True, window=window, **given)
        ).costs
        assert costs["triton"].us < costs["flex"].us


@pytest.mark.parametrize("keys", [1, 128, 700])
@pytest.mark.parametrize("queries", [1, 300])
@pytest.mark.parametrize("window", [(-1, -1), (90, -1), (200, 40)])
def test_key_blocks_know_the_query_blocks_that_read_them(queries, keys, window):
    rules = flex.Rules(1.0, window == (90, -1), *window, 0.0, 0)
    start, end = torch.tensor([0, keys // 3]), torch.tensor([keys, keys // 2 + 1])
    blocks = flex.dense_blocks(torch.empty(2, queries, 1, 1), keys, start, end, rules, True)
    found = flex._block_mask(queries, keys, blocks)
    want = vendor.BlockMask.from_kv_blocks(
        found.kv_num_blocks, found.kv_indices, BLOCK_SIZE=flex.BLOCK, seq_lengths=(queries, keys)
    )
    assert torch.equal(found.q_num_blocks, want.q_num_blocks)
    for at in torch.cartesian_prod(*map(torch.arange, found.q_num_blocks.shape)).tolist():
        count = int(found.q_num_blocks[tuple(at)])
        assert torch.equal(found.q_indices[tuple(at)][:count], want.q_indices[tuple(at)][:count])


@pytest.mark.full
@pytest.mark.parametrize("shape", SHAPES)
def test_traced_by_a_compiler(monkeypatch, shape):
    """As on a GPU, Dynamo and AOTAutograd trace the forward and its backward, with blocks of keys
    and queries; no kernel is generated."""
    traced = torch.compile(vendor.flex_attention, backend="aot_eager", fullgraph=True)
    seen = []

    def call(*given, block_mask, **options):
        seen.append(block_mask)
        return traced(*given, block_mask=block_mask, **options)

    monkeypatch.setattr(vendor, "_validate_device", lambda *given: None)
    monkeypatch.setattr(flex, "_call", lambda device: call)
    monkeypatch.setattr(flex, "_on_cpu", lambda x: False)
    monkeypatch.setattr(flex, "_options", lambda *given: {})
    step = gradient_call(Source(4), SHAPES[shape](ALL), lse_grad=True)
    with pretend(SM90), attnops.use(kernel={step.op: "flex"}):
        right(replace(kernels_of(step.op)["flex"], run=lambda record: OPS[step.op](record)), step)
    assert [x.q_indices is not None for x in seen] == [True]


HALF = Features(dtype=BF16, head_dim=64, q_heads=4, kv_heads=2, lse=True, causal=True)
BIAS, SINKS = replace(HALF, causal=False, mask="additive"), replace(HALF, sinks=F32)
CALLS = {
    "dense": lambda: make_call("attention", Source(1), 5, 3, 9, HALF),
    "packed": lambda: make_call(
        "varlen_attention", Source(1), (3, 0, 1, 4, 2), (5, 4, 0, 4, 3), HALF
    ),
    "tight": lambda: make_call(
        "varlen_attention", Source(1), (3, 1, 1, 4, 2), (5, 4, 2, 4, 3), HALF, padding=None
    ),
    "bias": lambda: make_call("attention", Source(1), 5, 3, 9, BIAS),
    "one bias": lambda: make_call("attention", Source(1), 5, 3, 9, replace(BIAS, mask_shape="h")),
    "ranges": lambda: make_call(
        "attention", Source(1), 5, 3, 9, SINKS, kv_end=(9, 4, 5, 3, 7), index=torch.int32
    ),
}
TURNS = [
    ("aten_flash", "dense"),
    ("aten_flash", "packed"),
    ("aten_flash", "tight"),
    ("fa4", "dense"),
    ("flex", "dense"),
    ("flex", "ranges"),
    ("mem_efficient", "dense"),
    ("mem_efficient", "bias"),
    ("mem_efficient", "one bias"),
]


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
    """Of the gradient of a query: 512 requests of 128 rows of 256 heads of 128 numbers are the
    most."""
    call = gradient_call(Source(2), make_call("attention", Source(1), 5, 3, 9, HALF)).record
    wide = {
        n: torch.empty(shape, device="meta")
        for n, shape in (("query", (5, 65, 256, 128)), ("key", (5, 9, 256, 128)))
    }
    assert flash._indexed(call._replace(**wide)) == 512
    assert flash._indexed(call) == parts.MOST_REQUESTS
