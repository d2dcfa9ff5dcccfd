"""Compiled training steps: the kernels of both graphs, what is saved between them, checkpoints and compiled autograd."""

import re
from functools import partial

import pytest
import torch
from torch import nn
from torch._dynamo import compiled_autograd
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import attnops
from tests.lowering.models import HQ, D, Dense, compiled_code, kernel_calls

ATTENTION = torch.ops.attnops.attention.default
BATCH, TOKENS = 2, 24
PAIR = ["attention.aten_flash", "attention_backward.aten_flash"]


class Packed(nn.Module):
    """Dense over documents in one row, with a window, a soft cap and sinks."""

    def __init__(self):
        super().__init__()
        self.qkv, self.sinks = nn.Linear(HQ * D, 3 * HQ * D), nn.Parameter(torch.randn(HQ))

    def forward(self, x):
        q, k, v = self.qkv(x.flatten(0, 1)).view(-1, 3 * HQ, D).split(HQ, 1)
        cu = torch.arange(BATCH + 1, dtype=torch.int32) * TOKENS
        longest = {"max_seqlen_q": TOKENS, "max_seqlen_k": TOKENS}
        out = attnops.varlen_attention(q, k, v, cu, cu, **longest, causal=True, window=(7, -1), softcap=5.0, sinks=self.sinks)
        return x + out.view(x.shape)


def inputs():
    return torch.randn(BATCH, TOKENS, HQ * D, requires_grad=True)


def gradients(model, run, x):
    return torch.autograd.grad(run(x).sin().sum(), [x, *model.parameters()])


def one_by_one(layers, x, context=None):
    """The layers, each a checkpoint."""
    more = {} if context is None else {"context_fn": context}
    for layer in layers:
        x = checkpoint(layer, x, use_reentrant=False, **more)
    return x


def kept(of, ctx, op, *args, **kwargs):
    return CheckpointPolicy.MUST_SAVE if op == of else CheckpointPolicy.PREFER_RECOMPUTE


KEEP = partial(create_selective_checkpoint_contexts, partial(kept, ATTENTION))
"""Activation checkpointing that keeps the results of attention, which it finds by the op's name."""


class Counted(TorchDispatchMode):
    """Counts the calls of each op of ours."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "attnops":
            self.calls.append(func.overloadpacket._qualified_op_name.partition("::")[2])
        return func(*args, **(kwargs or {}))


@pytest.mark.sweep(2)
@pytest.mark.parametrize("dynamic", [False, True])
def test_both_graphs_name_their_kernels(dynamic):
    model, x = Dense(), inputs()
    want = gradients(model, model, x)
    got, code = compiled_code(lambda: gradients(model, torch.compile(model, fullgraph=True, dynamic=dynamic), x))
    assert kernel_calls(code) == PAIR
    torch.testing.assert_close(got, want)


@pytest.mark.full
def test_packed_documents_with_every_rule():
    model, x = Packed(), inputs()
    want = gradients(model, model, x)
    got, code = compiled_code(lambda: gradients(model, torch.compile(model, fullgraph=True), x))
    assert kernel_calls(code) == ["varlen_attention.reference", "varlen_attention_backward.reference"]
    torch.testing.assert_close(got, want)


def test_no_copies_around_the_kernels():
    """Nothing that Inductor generates runs between a product and the kernel, which reads slices of it, and the gradient, as they are."""
    model, x = Dense(), inputs()
    _, code = compiled_code(lambda: gradients(model, torch.compile(model, fullgraph=True), x))
    launches = re.findall(r"^ +(?:\w+ = )?(?:torch\.ops\.attnops\.(\w+)\.|(cpp_fused\w+)\(|(extern_kernels\.\w+)\()", code, re.M)
    order = ["".join(found) for found in launches]
    assert order.index("extern_kernels.addmm") + 1 == order.index("attention"), order
    before = order[order.index("attention") + 1 : order.index("attention_backward")]
    # After the forward: the residual. Before the backward: the gradient of the loss.
    assert len(before) <= 2 and not any(re.search("clone|copy|cat|contiguous|permute", name) for name in before), before


@pytest.mark.parametrize("make", [Dense, Packed])
def test_output_and_lse_are_saved_and_no_mask(make):
    saved = {}

    def forward(graph, given):
        results = graph.graph.find_nodes(op="output")[0].args[0]
        saved["forward"] = [tuple(n.meta["val"].shape) for n in results if isinstance(n, torch.fx.Node)]
        return graph.forward

    def backward(graph, given):
        return graph.forward

    backend = aot_autograd(fw_compiler=forward, bw_compiler=backward, partition_fn=min_cut_rematerialization_partition)
    model, x = make(), inputs()
    want = gradients(model, model, x)
    torch.testing.assert_close(gradients(model, torch.compile(model, fullgraph=True, backend=backend), x), want)
    tokens = (BATCH, TOKENS) if make is Dense else (BATCH * TOKENS,)
    assert saved["forward"].count((*tokens, HQ)) == 1 and saved["forward"].count((*tokens, HQ, D)) >= 1, saved
    quadratic = [shape for shape in saved["forward"] if shape.count(TOKENS) > 1 or shape.count(BATCH * TOKENS) > 1]
    assert not quadratic, "a mask or the logits"


@pytest.mark.parametrize("selective", [False, True])
def test_checkpoints(selective):
    """Attention runs once more in the backward, unless a policy keeps its results by its name."""
    layers, x = nn.ModuleList(Dense() for _ in range(2)), inputs()
    run, forwards = partial(one_by_one, layers, context=KEEP if selective else None), 2 if selective else 4
    with Counted() as counted:
        gradients(layers, run, x)
    assert counted.calls.count("attention") == forwards and counted.calls.count("attention_backward") == 2
    plain = gradients(layers, lambda x: layers[1](layers[0](x)), x)
    torch.testing.assert_close(gradients(layers, run, x), plain)


@pytest.mark.full
@pytest.mark.parametrize("selective", [False, True])
def test_checkpoints_compiled(selective):
    layers, x = nn.ModuleList(Dense() for _ in range(2)), inputs()
    run, forwards = partial(one_by_one, layers, context=KEEP if selective else None), 2 if selective else 4
    want = gradients(layers, run, x)
    got, code = compiled_code(lambda: gradients(layers, torch.compile(run, fullgraph=True), x))
    calls = kernel_calls(code)
    assert calls.count("attention.aten_flash") == forwards and calls.count("attention_backward.aten_flash") == 2, calls
    torch.testing.assert_close(got, want)


@pytest.mark.full
def test_compiled_autograd():
    model, x = Dense(), inputs()
    want = gradients(model, model, x)
    with compiled_autograd._enable(torch.compile(backend="aot_eager")):
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        compiled(x).sin().sum().backward()
    torch.testing.assert_close((x.grad, *(p.grad for p in model.parameters())), want)
    x.grad = None
    model.zero_grad()
    with compiled_autograd._enable(torch.compile(backend="aot_eager")):
        model(x).sin().sum().backward()  # eager forward: the gradient's op is traced from the tape
    torch.testing.assert_close((x.grad, *(p.grad for p in model.parameters())), want)
