"""Jagged nested tensors through the modules: each request as it would be alone, gradients and
compiled code included."""

import itertools
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nested import nested_tensor, nested_tensor_from_jagged

from attnops.nn import (
    Attention,
    LatentAttention,
    MultiheadAttention,
    RotaryEmbedding,
    SelfAttention,
)
from tests.modules import close, refused

pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")

E, LENGTHS = 24, (5, 1, 8)
DOUBLE = {"dtype": torch.float64}
SIZES = {"kv_lora_rank": 16, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 5}
LAYERS = {
    "self": lambda: SelfAttention(
        E,
        4,
        2,
        8,
        qk_norm=True,
        rope=RotaryEmbedding(8),
        window=(4, -1),
        softcap=5.0,
        sinks=True,
        **DOUBLE,
    ),
    "latent": lambda: LatentAttention(
        E, 3, rope=RotaryEmbedding(4, interleaved=True), **SIZES, **DOUBLE
    ),
    "multihead": lambda: MultiheadAttention(E, 4, batch_first=True, **DOUBLE),
}


def offsets(lengths=LENGTHS):
    return torch.tensor([0, *itertools.accumulate(lengths)])


def values(*shape, lengths=LENGTHS):
    return torch.randn(sum(lengths), *shape, **DOUBLE, requires_grad=True)


def called(layer, x, **more):
    return (
        layer(x, x, x, need_weights=False)[0]
        if isinstance(layer, nn.MultiheadAttention)
        else layer(x, **more)
    )


def gradients(layer, out, x):
    """Of the input and of all parameters, of a loss that no two numbers of `out` `[T, ...]` enter
    alike."""
    return torch.autograd.grad(
        (out * torch.linspace(-1, 1, out.numel(), **DOUBLE).view_as(out)).sum(),
        [x, *layer.parameters()],
    )


def one_by_one(layer, x, lengths=LENGTHS):
    return torch.cat([called(layer, part[None])[0] for part in x.split(lengths)])


@pytest.mark.parametrize("name", LAYERS)
def test_layers(name):
    layer, x = LAYERS[name](), values(E)
    given = nested_tensor_from_jagged(x, offsets())
    got = called(layer, given)
    assert (
        got.layout == torch.jagged
        and got.offsets() is given.offsets()
        and (given + got).shape == given.shape
    )
    want = one_by_one(layer, x)
    close(got.values(), want)
    close(gradients(layer, got.values(), x), gradients(layer, want, x))


@pytest.mark.parametrize("name", ["self", "latent"])
def test_an_upper_bound_and_a_cached_maximum(name):
    layer, x = LAYERS[name](), values(E)
    want = one_by_one(layer, x)
    close(layer(nested_tensor_from_jagged(x, offsets()), max_seqlen=50).values(), want)
    close(layer(nested_tensor_from_jagged(x, offsets(), min_seqlen=1, max_seqlen=8)).values(), want)


def test_attention_of_one_sequence_to_another():
    core, lengths = Attention(4, 2, head_dim=8, v_head_dim=6), (7, 3, 8)
    given = values(4, 8), values(2, 8, lengths=lengths), values(2, 6, lengths=lengths)
    ends = offsets(), *[offsets(lengths)] * 2
    got = core(*map(nested_tensor_from_jagged, given, ends))
    parts = zip(
        *(x.split(n) for x, n in zip(given, (LENGTHS, lengths, lengths), strict=True)), strict=True
    )
    want = torch.cat([core(*(x[None] for x in part))[0] for part in parts])
    close(got.values(), want)
    close(*(torch.autograd.grad(out.sin().sum(), given) for out in (got.values(), want)))


def test_a_mask_is_that_of_the_packed_call():
    core, q = Attention(2, head_dim=4, causal=False), values(2, 4)
    x, mask = nested_tensor_from_jagged(q, offsets()), torch.rand(sum(LENGTHS), max(LENGTHS)) < 0.7
    ends = offsets().int()
    close(
        core(x, x, x, mask=mask).values(),
        core(q, q, q, mask=mask, cu_seqlens_q=ends, max_seqlen_q=max(LENGTHS)),
    )


@pytest.mark.parametrize(
    "made",
    [
        nested_tensor_from_jagged(torch.zeros(0, E), torch.tensor([0])),
        nested_tensor_from_jagged(torch.zeros(0, E), torch.tensor([0, 0, 0])),
    ],
    ids=["no request", "no token"],
)
def test_nothing(made):
    assert LAYERS["self"]().float()(made).shape == made.shape


class Twice(nn.Module):
    """Two layers and residuals, all of them over jagged tensors."""

    def __init__(self, name):
        super().__init__()
        self.layers = nn.ModuleList(LAYERS[name]() for _ in range(2))

    def forward(self, x, **more):
        for layer in self.layers:
            x = x + called(layer, x, **more)
        return x


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "whole"), [("self", True), ("latent", True), ("self", False), ("multihead", False)]
)
def test_compiled(name, whole):
    """With max_seqlen= one graph serves any lengths. Without it the graph breaks where the longest
    length is read."""
    model, counter = Twice(name), CompileCounterWithBackend("aot_eager")
    compiled, counts = torch.compile(model, backend=counter, fullgraph=whole, dynamic=True), set()
    for lengths in (LENGTHS, (3, 9, 2), (4, 4, 1, 7, 6)) if whole else (LENGTHS,):
        x = values(E, lengths=lengths)
        given = nested_tensor_from_jagged(x, offsets(lengths))
        more = {"max_seqlen": max(lengths)} if whole else {}
        got, want = (run(given, **more).values() for run in (compiled, model))
        close(got, want)
        close(gradients(model, got, x), gradients(model, want, x))
        counts.add(counter.frame_count)
    assert len(counts) == 1, (
        "Dynamo may start a frame with nested tensors anew, but not for other lengths"
    )


ROWS = [torch.randn(n, E) for n in LENGTHS]
JAGGED: Any = nested_tensor(ROWS, layout=torch.jagged)
HOLES = nested_tensor_from_jagged(
    JAGGED.values(), JAGGED.offsets(), lengths=torch.tensor([2, 1, 3])
)
HEADS = nested_tensor_from_jagged(torch.randn(sum(LENGTHS), 3, 8), offsets())


def through(name, *args, **more):
    module = LAYERS[name]().float() if name in LAYERS else Attention(3, head_dim=8)
    return lambda: module(*args, **more)


BAD = [
    (
        "hidden: got a nested tensor of the strided layout, want layout=torch.jagged",
        through("self", nested_tensor(ROWS)),
    ),
    ("hidden: got a jagged tensor with holes", through("self", HOLES)),
    (
        "cu_seqlens: got shape (4,), want None with a nested tensor",
        through("self", JAGGED, cu_seqlens=offsets().int()),
    ),
    (
        "query: got a jagged tensor that is not ragged in dim 1",
        through("core", HEADS.transpose(1, 2), HEADS, HEADS),
    ),
    (
        "key: got a plain tensor, want a nested tensor",
        through("core", HEADS, HEADS.values(), HEADS.values()),
    ),
    (
        "value: got lengths",
        through(
            "core",
            HEADS,
            HEADS,
            nested_tensor_from_jagged(HEADS.values(), torch.tensor([0, 2, 3, 14])),
        ),
    ),
    (
        "key: got 1 requests, want 3",
        through(
            "core", HEADS, *[nested_tensor_from_jagged(HEADS.values(), torch.tensor([0, 14]))] * 2
        ),
    ),
    (
        "cu_seqlens_q: got shape (4,), want None",
        through("core", HEADS, HEADS, HEADS, cu_seqlens_q=offsets().int()),
    ),
    (
        "k_scale: got shape (1,), want None",
        through("core", HEADS, HEADS, HEADS, k_scale=torch.ones(1)),
    ),
    (
        "query, key, value: got [",
        through("multihead", JAGGED, *[nested_tensor(ROWS)] * 2, need_weights=False),
    ),
]


@pytest.mark.parametrize(("text", "call"), BAD)
def test_refused_by_name(text, call):
    refused(call, text)
