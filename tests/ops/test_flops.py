"""The floating-point operations that torch's counter counts for our ops, beside those that it
counts for torch's own."""

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count

import attnops
from attnops.core import flops
from attnops.core.kernel import _REGISTRY, Kernel, kernels_of, register
from attnops.ops import OPS
from attnops.testing import CASES
from tests.helpers import torch_process


def counted(run) -> int:
    with FlopCounterMode(display=False) as counter:
        run()
    return counter.get_total_flops()


def torchs_attention(batch, heads, queries, keys, dim, v_dim) -> int:
    """What torch counts for its own attention of these sizes."""
    shapes = ((queries, dim), (keys, dim), (keys, v_dim))
    given = [torch.empty(batch, heads, n, d, device="meta") for n, d in shapes]
    return counted(lambda: F.scaled_dot_product_attention(*given))


def torchs_linear(rows, into, out) -> int:
    return counted(lambda: F.linear(torch.empty(rows, into), torch.empty(out, into)))


@pytest.mark.parametrize("name", OPS)
def test_every_op_with_products_counts_them(name):
    """Those of which the plain body has products."""
    op, call = OPS[name], CASES[name][0].call()
    has_products = counted(lambda: op.reference(call.record)) > 0
    assert bool(op.flops) == has_products
    assert (counted(lambda: op(call.record)) > 0) == has_products


def test_attention_and_its_gradient_count_as_torchs():
    """Packed requests as those of a rectangle."""
    q, k, v = (torch.randn(2, n, 4, 16, requires_grad=True) for n in (5, 11, 11))
    forward = torchs_attention(2, 4, 5, 11, 16, 16)
    backward = sdpa_backward_flop_count(*(x.transpose(1, 2).shape for x in (q, q, k, v)))
    assert counted(lambda: attnops.attention(q, k, v).sum().backward()) == forward + backward
    lengths = [torch.tensor([0, n, 2 * n], dtype=torch.int32) for n in (5, 11)]
    rows = [x.detach().flatten(0, 1).requires_grad_() for x in (q, k, v)]
    packed = counted(
        lambda: (
            attnops.varlen_attention(*rows, *lengths, max_seqlen_q=5, max_seqlen_k=11)
            .sum()
            .backward()
        )
    )
    assert packed == forward + backward


def like_attention(query, keys, v_dim) -> int:
    """query: `[T, H, D]`, each of whose tokens sees so many keys."""
    tokens, heads, dim = query.shape
    return torchs_attention(1, heads, tokens, keys, dim, v_dim)


def like_latents(call, keys) -> int:
    return like_attention(torch.cat([call.q_nope, call.q_pe], -1), keys, call.q_nope.shape[2])


def like_experts(call, inner) -> int:
    rows = call.top_k_index.numel()
    products = (call.x.shape[1], 2 * inner), (inner, call.down.shape[1])
    return sum(torchs_linear(rows, into, out) for into, out in products)


def capacity(call, pages) -> int:
    """Keys that a request's row of the page table has room for."""
    return call.page_table.shape[1] * pages.shape[1]


LIKE_TORCH = {
    "varlen_attention": lambda c: like_attention(c.query, c.max_seqlen_k, c.value.shape[2]),
    "paged_attention": lambda c: like_attention(
        c.query, capacity(c, c.k_pages), c.v_pages.shape[3]
    ),
    "decode_attention": lambda c: like_attention(
        c.query, capacity(c, c.k_pages), c.v_pages.shape[3]
    ),
    "mla_attention": lambda c: like_latents(c, capacity(c, c.latent_pages)),
    "sparse_mla_attention": lambda c: like_latents(c, c.indices.shape[1]),
    "vertical_slash_attention": lambda c: like_attention(
        c.query, 64 * c.block_offset.shape[3] + c.column_index.shape[3], c.value.shape[2]
    ),
    "linear": lambda c: torchs_linear(c.x.shape[0], c.x.shape[1], c.weight.shape[0]),
    "experts": lambda c: like_experts(c, c.down.shape[2]),
    "mxfp4_experts": lambda c: like_experts(c, 2 * c.down.shape[2]),
}


@pytest.mark.parametrize("name", LIKE_TORCH)
def test_an_op_counts_as_torchs_ops_of_the_sizes_that_its_shapes_allow(name):
    call = CASES[name][0].call()
    assert counted(lambda: OPS[name](call.record)) == LIKE_TORCH[name](call.record) > 0


def test_formulas_come_with_the_counter_that_is_imported_later():
    code = """
import sys, torch, attnops
assert "torch.utils.flop_counter" not in sys.modules and "triton" not in sys.modules
from torch.utils.flop_counter import FlopCounterMode
q = torch.empty(1, 2, 1, 4)
with FlopCounterMode(display=False) as counter:
    attnops.attention(q, q, q)
print(counter.get_total_flops(), [type(f).__name__ for f in sys.meta_path if getattr(f, "name", "") == "torch.utils.flop_counter"])
"""  # noqa: E501
    assert torch_process(code).split() == [str(2 * 2 * 2 * (4 + 4)), "[]"]


def test_a_kernel_that_is_registered_later_leaves_the_counts():
    q = torch.empty(1, 2, 1, 4)
    before = counted(lambda: attnops.attention(q, q, q))
    kernel = Kernel(
        "later",
        "attention",
        lambda call: None,
        dtypes=(torch.float32,),
        cost_us=lambda problem: 1e9,
    )
    register(kernel)
    try:
        assert counted(lambda: attnops.attention(q, q, q)) == before > 0
    finally:
        _REGISTRY.remove(kernel)


def test_a_formula_is_found_after_the_op_got_another_hash(monkeypatch):
    """torch hashes an op by its overloads. The new hash may lead to the op's old place by chance,
    until the dict grows."""

    class Packet:
        value = 1

        def __hash__(self):
            return self.value

    op, packet = OPS["paged_attention"], Packet()
    counter = ModuleType(flops.COUNTER)
    counter.flop_registry = {packet: "formula"}
    monkeypatch.setitem(sys.modules, flops.COUNTER, counter)
    monkeypatch.setitem(OPS, "paged_attention", SimpleNamespace(flops=op.flops, packet=packet))
    packet.value = 9  # the same place in a dict of eight
    flops._of_op(kernels_of("paged_attention")["reference"])
    counter.flop_registry.update(dict.fromkeys(range(100, 200)))
    assert counter.flop_registry.get(packet) == "formula"
