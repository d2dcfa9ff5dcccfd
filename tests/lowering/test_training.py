"""Compiled training steps: the kernels of both graphs, what is saved between them, checkpoints and
compiled autograd."""

import re
from functools import partial

import pytest
import torch
from torch import nn
from torch._dynamo import compiled_autograd
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import attnops
from tests.adapters.helpers import Calls
from tests.lowering.models import HQ, D, Dense, compiled_code, kernel_calls

ATTENTION = torch.ops.attnops.attention.default
BATCH, TOKENS = 2, 24


class Packed(nn.Module):
    """Dense over documents in one row, with a window, a soft cap and sinks."""

    def __init__(self):
        super().__init__()
        self.qkv, self.sinks = nn.Linear(HQ * D, 3 * HQ * D), nn.Parameter(torch.randn(HQ))

    def forward(self, x):
        q, k, v = self.qkv(x.flatten(0, 1)).view(-1, 3 * HQ, D).split(HQ, 1)
        cu = torch.arange(BATCH + 1, dtype=torch.int32) * TOKENS
        longest = {"max_seqlen_q": TOKENS, "max_seqlen_k": TOKENS}
        out = attnops.varlen_attention(
            q, k, v, cu, cu, **longest, causal=True, window=(7, -1), softcap=5.0, sinks=self.sinks
        )
        return x + out.view(x.shape)


@pytest.fixture(autouse=True)
def inference():
    """Gradients are recorded here."""


def inputs():
    return torch.randn(BATCH, TOKENS, HQ * D, requires_grad=True)


def gradients(model, run, x):
    return torch.autograd.grad(run(x).sin().sum(), [x, *model.parameters()])


KERNELS = {Dense: ("attention", "aten_flash"), Packed: ("varlen_attention", "reference")}


@pytest.mark.sweep(2)
@pytest.mark.parametrize(("make", "dynamic"), [(Dense, False), (Packed, False), (Dense, True)])
def test_both_graphs_name_their_kernels(make, dynamic):
    model, x = make(), inputs()
    want = gradients(model, model, x)
    got, code = compiled_code(
        lambda: gradients(model, torch.compile(model, fullgraph=True, dynamic=dynamic), x)
    )
    op, kernel = KERNELS[make]
    assert kernel_calls(code) == [f"{op}.{kernel}", f"{op}_backward.{kernel}"]
    torch.testing.assert_close(got, want)
    if make is Dense and not dynamic:
        # Nothing that Inductor generates runs between a product and the kernel, which reads slices
        # of it, and the gradient, as they are.
        launches = re.findall(
            r"^ +(?:\w+ = "
            r")?(?:torch\.ops\.attnops\.(\w+)\.|(cpp_fused\w+)\(|(extern_kernels\.\w+)\()",
            code,
            re.M,
        )
        order = ["".join(found) for found in launches]
        assert order.index("extern_kernels.addmm") + 1 == order.index("attention"), order
        before = order[order.index("attention") + 1 : order.index("attention_backward")]
        # After the forward: the residual. Before the backward: the gradient of the loss.
        assert len(before) <= 2 and not any(
            re.search("clone|copy|cat|contiguous|permute", name) for name in before
        ), before


@pytest.mark.parametrize("make", [Dense, Packed])
def test_output_and_lse_are_saved_and_no_mask(make):
    saved = []

    def forward(graph, given):
        results = graph.graph.find_nodes(op="output")[0].args[0]
        saved.extend(tuple(n.meta["val"].shape) for n in results if isinstance(n, torch.fx.Node))
        return graph.forward

    backend = aot_autograd(
        fw_compiler=forward,
        bw_compiler=lambda graph, given: graph.forward,
        partition_fn=min_cut_rematerialization_partition,
    )
    model, x = make(), inputs()
    want = gradients(model, model, x)
    torch.testing.assert_close(
        gradients(model, torch.compile(model, fullgraph=True, backend=backend), x), want
    )
    tokens = (BATCH, TOKENS) if make is Dense else (BATCH * TOKENS,)
    assert saved.count((*tokens, HQ)) == 1 and saved.count((*tokens, HQ, D)) >= 1, saved
    quadratic = [
        shape for shape in saved if shape.count(TOKENS) > 1 or shape.count(BATCH * TOKENS) > 1
    ]
    assert not quadratic, "a mask or the logits"


def kept(ctx, op, *args, **kwargs):
    """Keeps the results of attention, which it finds by the op's name."""
    return CheckpointPolicy.MUST_SAVE if op == ATTENTION else CheckpointPolicy.PREFER_RECOMPUTE


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.full)])
@pytest.mark.parametrize("selective", [False, True])
def test_checkpoints(selective, compiled):
    """Attention runs once more in the backward, unless a policy keeps its results."""
    layers, x = nn.ModuleList(Dense() for _ in range(2)), inputs()
    more = {"context_fn": partial(create_selective_checkpoint_contexts, kept)} if selective else {}

    def run(x):
        for layer in layers:
            x = checkpoint(layer, x, use_reentrant=False, **more)
        return x

    if compiled:
        got, code = compiled_code(lambda: gradients(layers, torch.compile(run, fullgraph=True), x))
        names = [call.partition(".")[0] for call in kernel_calls(code)]
    else:
        with Calls() as calls:
            got = gradients(layers, run, x)
        names = [name.removeprefix("attnops::") for name in calls.names]
    assert (
        names.count("attention") == (2 if selective else 4)
        and names.count("attention_backward") == 2
    ), names
    torch.testing.assert_close(got, gradients(layers, lambda x: layers[1](layers[0](x)), x))


@pytest.mark.full
@pytest.mark.parametrize("compiled", [True, False])
def test_compiled_autograd(compiled):
    """Also of an eager forward: the gradient's op is traced from the tape."""
    model, x = Dense(), inputs()
    want = gradients(model, model, x)
    with compiled_autograd._enable(torch.compile(backend="aot_eager")):
        run = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
        run(x).sin().sum().backward()
    torch.testing.assert_close((x.grad, *(p.grad for p in model.parameters())), want)
